import io
import subprocess
import sys
import warnings

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import quantdiff
from quantdiff.analysis import figure_data, model_colors, plot, save_figures
from quantdiff.errors import UsageError

KINDS = ("layers", "heads", "magnitudes")
HARD_NAMES = [
    "$x_1^{2}$",
    r"a\$b_c",
    "<b>&amp;",
    "[red]x",
    "한국어 모델",
    "a\nb\udc80",
    "x",
    "long/" * 99,
]


def titles(figure: Figure) -> str:
    return figure.get_suptitle()


def read(path):
    return pd.read_csv(path, dtype={"branch": "Int64"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "diffllama"])
class TestEveryFigure:
    def test_axes_have_labels_and_the_title_names_model_and_tokens(self, profiles, model, kind):
        profile = profiles[model]
        figure = plot(profile, kind)
        assert profile.model["name"] in titles(figure)
        assert "48 tokens" in titles(figure)
        panels = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
        assert len(panels) == (1 if kind == "heads" else 2)
        for ax in panels:
            assert ax.get_xlabel()
            assert ax.get_ylabel()

    def test_no_text_is_cut_off_and_none_is_below_7_points(self, profiles, model, kind):
        figure = plot(profiles[model], kind)
        figure.draw_without_rendering()
        page, hidden = figure.bbox, undrawn(figure)
        for text in figure.findobj(Text):
            if not text.get_visible() or not text.get_text().strip() or text in hidden:
                continue
            box = text.get_window_extent()
            assert box.x0 >= page.x0 - 1, text
            assert box.y0 >= page.y0 - 1, text
            assert box.x1 <= page.x1 + 1, text
            assert box.y1 <= page.y1 + 1, text
            # Exponents are drawn smaller by the mathematics in the tick's text, not by its size.
            assert text.get_size() >= 7, text

    def test_settings_of_the_user_stay(self, profiles, model, kind, monkeypatch):
        monkeypatch.setitem(mpl.rcParams, "font.size", 23.0)
        before = dict(mpl.rcParams)
        figure = plot(profiles[model], kind)
        figure.savefig(io.BytesIO(), format="png")
        assert dict(mpl.rcParams) == before

    def test_pyplot_knows_nothing_of_it(self, profiles, model, kind):
        import matplotlib.pyplot as plt

        before = plt.get_fignums()
        plot(profiles[model], kind)
        assert plt.get_fignums() == before

    def test_draws_into_axes_that_are_given(self, profiles, model, kind):
        ax = Figure().subplots()
        assert plot(profiles[model], kind, ax=ax) is ax
        assert "attention logit" in ax.get_ylabel() + ax.get_xlabel() or kind == "heads"
        assert profiles[model].model["name"] in ax.get_title()


def undrawn(figure: Figure) -> set[Text]:
    """Labels of ticks beyond the limits: matplotlib keeps them but does not draw them."""
    labels = set()
    for axis in [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]:
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low <= tick.get_loc() <= high:
                labels |= {tick.label1, tick.label2}
    return labels


class TestLayers:
    def test_data_are_the_profile_s_numbers(self, profiles):
        profile = profiles["llama"]
        data = figure_data(profile, "layers")
        for activation in ("attention_logits", "hidden_states"):
            part = getattr(profile, activation)
            mine = data[data["activation"] == activation]
            assert mine["layer"].tolist() == [0, 1, 2]
            assert mine["absmax"].tolist() == [float(site.absmax.max()) for site in part.sites]
        assert data["branch"].isna().all()

    def test_branches_are_two_lines_of_one_colour(self, profiles):
        profile = profiles["diffllama"]
        ax = plot(profile, "layers", ax=Figure().subplots())
        first, second = ax.get_lines()
        assert first.get_color() == second.get_color()
        assert first.get_linestyle() != second.get_linestyle()
        for line, heads in ((first, slice(0, 2)), (second, slice(2, 4))):
            expected = [site.absmax[heads].max() for site in profile.attention_logits.sites]
            assert line.get_ydata() == pytest.approx(expected, rel=0)
        words = [text.get_text() for text in ax.get_legend().get_texts()]
        assert words == ["branch 1", "branch 2"]

    def test_legend_lies_above_the_data(self, profiles):
        figure = plot(profiles["diffllama"], "layers", activation="attention_logits")
        figure.draw_without_rendering()
        (ax,) = figure.axes
        top = max(line.get_ydata().max() for line in ax.get_lines())
        assert ax.get_legend().get_window_extent().y0 > ax.transData.transform((0, top))[1]

    @pytest.mark.parametrize(("factor", "scale"), [(1, "linear"), (1000, "log")])
    def test_more_than_two_decades_take_a_logarithmic_axis(self, profiles, factor, scale):
        profile = profiles["llama"].copy()
        profile.hidden_states.sites[2].max *= factor
        (ax,) = plot(profile, "layers", activation="hidden_states").axes
        assert ax.get_yscale() == scale
        assert "hidden state" in ax.get_ylabel()


class TestHeads:
    def test_data_are_the_profile_s_numbers(self, profiles):
        profile = profiles["diffllama"]
        data = figure_data(profile, "heads")
        sites = profile.attention_logits.sites
        assert data["absmax"].tolist() == np.concatenate([site.absmax for site in sites]).tolist()
        assert data["head"].tolist() == [0, 1, 2, 3] * 2
        assert data["branch"].tolist() == [1, 1, 2, 2] * 2

    def test_cells_are_layer_by_head_from_zero_on(self, profiles):
        profile = profiles["llama"]
        (mesh,) = plot(profile, "heads").axes[0].collections
        cells = np.asarray(mesh.get_array()).reshape(4, 3)
        assert cells[:, 1].tolist() == profile.attention_logits.sites[1].absmax.tolist()
        assert mesh.get_clim() == (0, profile.attention_logits.absmax)

    def test_heads_of_a_branch_stand_together_whatever_the_layout(self, profiles):
        profile = profiles["diffllama"].copy()
        for name in profile.attention_logits.branches:
            profile.attention_logits.branches[name] = [1, 2, 1, 2]
        figure = plot(profile, "heads")
        figure.draw_without_rendering()
        heads = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert heads == ["0", "2", "1", "3"]

    def test_branches_are_not_named_where_layers_have_other_ones(self, profiles):
        profile = profiles["diffllama"].copy()
        second = profile.attention_logits.sites[1].name
        profile.attention_logits.branches[second] = [1, 2, 1, 2]
        figure = plot(profile, "heads")
        figure.draw_without_rendering()
        heads = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert heads == ["0", "1", "2", "3"]
        assert [text.get_text() for text in figure.axes[0].texts] == ["branches differ\nby layer"]

    def test_a_layer_with_fewer_heads_leaves_its_cells_empty(self, profiles):
        profile = profiles["llama"].copy()
        site = profile.attention_logits.sites[1]
        site.count, site.min, site.max = site.count[:2], site.min[:2], site.max[:2]
        site.moments = site.histogram = None
        (mesh,) = plot(profile, "heads").axes[0].collections
        assert np.ma.getmaskarray(mesh.get_array()).reshape(4, 3)[:, 1].tolist() == [0, 0, 1, 1]

    def test_hidden_states_have_none(self, profiles):
        with pytest.raises(UsageError, match="kind='layers'"):
            plot(profiles["llama"], "heads", activation="hidden_states")


class TestMagnitudes:
    @pytest.mark.parametrize("model", ["llama", "diffllama"])
    def test_every_value_is_counted_once(self, profiles, model):
        profile = profiles[model]
        data = figure_data(profile, "magnitudes")
        for activation in ("attention_logits", "hidden_states"):
            mine = data[data["activation"] == activation]
            assert mine["count"].sum() == getattr(profile, activation).count
            shares = mine.groupby("branch", dropna=False)["share"].sum()
            assert shares.to_numpy() == pytest.approx(1)

    def test_bins_hold_what_lies_between_their_edges(self, profiles):
        profile = profiles["llama"].copy()
        values = np.array([[0, 0, 1, -1.2, 1.25, 1.99, 2, -100, 0.03]], np.float32)
        for site in profile.hidden_states.sites:
            site.histogram = type(site.histogram).of(values)
        data = figure_data(profile, "magnitudes")
        data = data[(data["activation"] == "hidden_states") & (data["count"] > 0)]
        zeros, *bins = data[["low", "high", "count"]].itertuples(index=False, name=None)
        assert zeros == (0, 0, 6)
        assert bins == [
            (0.02734375, 0.03125, 3), (1, 1.25, 6), (1.25, 1.5, 3), (1.75, 2, 3), (2, 2.5, 3),
            (96, 112, 3),
        ]  # fmt: skip
        density = data["share_per_octave"].tolist()
        assert density[2] == pytest.approx(6 / 27 / np.log2(1.25))

    def test_median_and_top_1_are_marked(self, profiles):
        part = profiles["llama"].hidden_states
        (ax,) = plot(profiles["llama"], "magnitudes", activation="hidden_states").axes
        marks = [line.get_xdata()[0] for line in ax.get_lines()]
        assert marks == [part.median, part.absmax]
        assert [text.get_text().split()[0] for text in ax.texts] == ["median", "top-1"]

    def test_zeros_are_told(self, profiles):
        profile = profiles["llama"].copy()
        for site in profile.hidden_states.sites:
            site.histogram.zeros = site.histogram.zeros + site.histogram.count * 3
        profile.hidden_states._histogram = None
        (ax,) = plot(profile, "magnitudes", activation="hidden_states").axes
        assert "zero" in ax.get_xlabel()
        assert ax.get_xlim()[0] > 0

    def test_extremes_only_is_refused_with_the_remedy(self, profiles):
        with pytest.raises(UsageError, match="detail='full'"):
            plot(profiles["extremes"], "magnitudes")


class TestRequests:
    def test_unknown_kind_is_refused_with_the_list(self, profiles):
        with pytest.raises(UsageError, match="layers, heads, magnitudes"):
            plot(profiles["llama"], "pie")

    def test_unknown_activation_is_refused_with_the_list(self, profiles):
        with pytest.raises(UsageError, match="attention_logits, hidden_states"):
            plot(profiles["llama"], activation="weights")

    @pytest.mark.parametrize("name", HARD_NAMES)
    def test_names_are_literal(self, renamed, name):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")
            figure = plot(renamed(name), "heads")
            figure.savefig(io.BytesIO(), format="svg")
            assert figure._suptitle.get_window_extent().width <= figure.bbox.width
        assert not figure._suptitle.get_parse_math()
        if len(name) < 40 and name.isprintable():
            assert titles(figure).startswith(f"{name} · ")

    def test_partial_is_told(self, renamed):
        profile = renamed("x")
        profile.partial = True
        assert titles(plot(profile)).endswith("partial")

    def test_looks_the_same_whatever_the_settings_when_it_is_drawn(self, profiles, monkeypatch):
        expected = plot(profiles["llama"])._repr_png_()
        figure = plot(profiles["llama"])
        for name, value in (("xtick.labelsize", 20), ("savefig.dpi", 50), ("font.family", "serif")):
            monkeypatch.setitem(mpl.rcParams, name, value)
        assert figure._repr_png_() == expected

    def test_a_notebook_shows_the_figure(self, profiles):
        assert profiles["llama"].plot()._repr_png_().startswith(b"\x89PNG")


class TestSave:
    def test_writes_each_figure_and_its_numbers(self, profiles, tmp_path):
        written = save_figures(profiles["diffllama"], tmp_path / "new" / "folder")
        names = [f"{kind}.{suffix}" for kind in KINDS for suffix in ("png", "svg", "csv")]
        assert [path.name for path in written] == names
        assert sorted(path.name for path in (tmp_path / "new/folder").iterdir()) == sorted(names)
        for kind in KINDS:
            table = read(tmp_path / "new/folder" / f"{kind}.csv")
            expected = figure_data(profiles["diffllama"], kind)
            pd.testing.assert_frame_equal(table, expected, rtol=1e-14, check_dtype=False)

    def test_same_profile_same_bytes(self, profiles, tmp_path, monkeypatch):
        first = save_figures(profiles["llama"], tmp_path / "1")
        monkeypatch.setitem(mpl.rcParams, "svg.hashsalt", None)
        monkeypatch.setitem(mpl.rcParams, "font.family", ["serif"])
        second = save_figures(profiles["llama"], str(tmp_path / "2"))
        for one, other in zip(first, second, strict=True):
            assert one.read_bytes() == other.read_bytes(), one.name

    def test_only_extremes_have_no_magnitudes(self, profiles, tmp_path):
        written = {path.stem for path in save_figures(profiles["extremes"], tmp_path)}
        assert written == {"layers", "heads"}


class TestColors:
    def test_a_model_keeps_its_colour_when_others_follow(self):
        few, many = model_colors(["a", "b"]), model_colors(["a", "b", "a", *map(str, range(20))])
        assert len(set(many.values())) == 22
        assert {name: many[name] for name in few} == few


def test_importing_is_quick_and_changes_no_settings():
    code = (
        "import sys, quantdiff.analysis as a\n"
        "assert not {'matplotlib', 'seaborn', 'torch'} & set(sys.modules)\n"
        "import matplotlib; before = dict(matplotlib.rcParams)\n"
        "a.plot; a.save_figures; a.model_colors\n"
        "assert dict(matplotlib.rcParams) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_profile_plots_itself(profiles):
    assert isinstance(profiles["llama"].plot("heads"), Figure)
    assert quantdiff.plot is plot
