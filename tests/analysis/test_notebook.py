import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.figure import Figure

import quantdiff
from quantdiff import UsageError
from quantdiff.analysis.text import number
from quantdiff.calibration.table import SHOWN
from tests.analysis.report.reading import Read
from tests.tiny import tiny_diffllama, tiny_ids

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def table():
    batches = [{"input_ids": tiny_ids(2, 24, seed=seed)} for seed in range(4)]
    return quantdiff.calibrate(tiny_diffllama(), batches, source="random ids")


class TestProfile:
    def test_html_shows_the_papers_table(self, profiles):
        profile = profiles["diffllama"]
        rows = Read(profile._repr_html_()).rows
        summary = profile.summary()
        assert rows[0] == ["activation", *summary.columns]
        for row, (name, values) in zip(rows[1:], summary.iterrows(), strict=True):
            assert row == [name.replace("_", " "), *map(number, values)]

    def test_names_are_escaped_and_shown(self, renamed):
        read = Read(renamed(HOSTILE)._repr_html_())
        assert not read.named("script")
        assert HOSTILE in "".join(read.text)


class TestCalibration:
    def test_frame_has_the_ranges_of_every_observer(self, table):
        for granularity, rows in (("tensor", 2), ("head", 8)):
            frame = table.to_frame(granularity)
            assert len(frame) == rows * len(SHOWN)
            for _, row in frame.iterrows():
                scheme = SHOWN[row["observer"]]
                asked = quantdiff.Scheme(
                    scheme.site, scheme.bits, scheme.range, granularity=granularity
                )
                head = 0 if pd.isna(row["head"]) else row["head"]
                ends = table.range(asked, row["name"])
                assert (row["least"], row["most"]) == tuple(end[head] for end in ends)
            kinds = [kind for heads in table.branches.values() for kind in heads]
            wanted = kinds * len(SHOWN) if granularity == "head" else []
            assert sorted(frame["branch"].dropna()) == sorted(wanted)

    def test_other_granularities_are_refused(self, table):
        with pytest.raises(UsageError, match="no granularity 'row'"):
            table.to_frame("row")

    def test_html_shows_how_far_the_ranges_reach(self, table):
        read = Read(table._repr_html_())
        frame = table.to_frame()
        assert read.rows[0] == ["layer", *SHOWN]
        for row in read.rows[1:]:
            of_layer = frame[frame["layer"] == int(row[0])].set_index("observer")
            reach = of_layer[["least", "most"]].abs().max(axis=1)
            assert row[1:] == [number(reach[name]) for name in SHOWN]
        assert table.warning()[1:] in "".join(read.text)

    def test_plot_draws_them_here_or_in_a_new_figure(self, table):
        before = dict(mpl.rcParams)
        page = table.plot()
        ax = Figure().subplots()
        assert table.plot(ax=ax) is ax
        for panel in (page.axes[0], ax):
            assert [line.get_label() for line in panel.lines] == list(SHOWN)
            frame = table.to_frame()
            absmax = frame[frame["observer"] == "absmax"]
            reach = absmax[["least", "most"]].abs().max(axis=1)
            assert panel.lines[0].get_ydata().tolist() == reach.tolist()
        assert dict(mpl.rcParams) == before


def test_other_things_are_no_html():
    with pytest.raises(TypeError, match="int is not shown"):
        quantdiff.to_html(1)
