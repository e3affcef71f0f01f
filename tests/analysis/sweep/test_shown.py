"""Tables and figures of a sweep."""

import io
import warnings

import pandas as pd
import pytest
from rich.console import Console

from quantdiff import UsageError
from quantdiff.analysis.published import FIGURE_8
from quantdiff.analysis.style import SINGLE
from quantdiff.analysis.sweep import (
    SweepResults,
    plot_sweep,
    save_sweep_figures,
    sweep_figure_data,
    sweep_report,
)
from quantdiff.analysis.sweep.lines import evaluation_labels, lines, measures, way_label
from tests.analysis.sweep.conftest import row, write_sweep

WAYS = [
    ("dynamic", "tensor", True), ("dynamic", "row", True), ("percentile:99.9", "tensor", True),
    ("percentile:99.9", "tensor", False),
]  # fmt: skip


def made_up(models, ways, metrics=("perplexity",), evaluation="perplexity", widths=(8, 6, 4)):
    """Lines of models that get worse with each bit."""
    rows = []
    for number, model in enumerate(models):
        for place, way in enumerate([None, *ways]):
            for bits in (16,) if way is None else widths:
                for metric in metrics:
                    value = 0.5 - 0.02 * number - (16 - bits) ** 2 * 0.001 * (1 + place)
                    if not metric.startswith("acc"):
                        value = 20 + number + (16 - bits) ** 3 * (1 + place) / 5
                    if metric == "kl":
                        value = 0.0 if bits == 16 else 10.0 ** -(bits - number - place)
                    rows.append(
                        row(f"{evaluation[:4]}-{number}-{place}-{bits}", model, way, bits,
                            eval=evaluation, metric=metric, value=value, stderr=abs(value) / 20)
                    )  # fmt: skip
    return rows


LONG = [f"{'x' * 40}-width-{number}-{'y' * 40}" for number in (1, 2, 3)]


def two_ways(metric="kl"):
    """Perplexity of one way, and a divergence, measured later, of another."""
    return [
        *made_up(["m"], WAYS[:1]),
        *made_up(["m"], [("mse", "tensor", False)], [metric], "divergence"),
    ]


@pytest.fixture
def results(tmp_path):
    """Make results of some lines."""
    return lambda rows: SweepResults.load(write_sweep(tmp_path / "made-up", rows))


def rendered(results, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    for part in sweep_report(results):
        console.print(part)
    return console.file.getvalue()


class TestTable:
    def test_a_line_a_model_where_all_are_quantized_alike(self, results):
        text = rendered(results(made_up(["runs/zoo/plain", "runs/zoo/diff"], WAYS[:1])))
        assert "attention logits, dynamic, tensor" in text
        assert "8 of 8 cells" in text
        lines = [line.split() for line in text.splitlines()]
        assert ["model", "16", "bits", "8", "bits", "6", "bits", "4", "bits"] in lines
        plain = next(line for line in lines if line[:1] == ["plain"])
        assert plain == ["plain", "20.00", "±1.0", "224.8", "±11", "420.0", "±21", "711.2", "±36"]

    def test_ways_under_the_names_of_models(self, results):
        lines = rendered(results(made_up(["plain", "diff"], WAYS)), width=120).splitlines()
        starts = [line.strip().split("  ")[0] for line in lines]
        at = starts.index("plain", 2)
        assert starts[at : at + 6] == [
            "plain", "dynamic, tensor", "dynamic, row", "percentile:99.9, tensor",
            "percentile:99.9, tensor, asymmetric", "diff",
        ]  # fmt: skip

    def test_no_number_is_cut_in_a_narrow_terminal(self, results):
        rows = made_up(["m"], WAYS[:3], ["perplexity", "kl"], widths=(8, 6, 5, 4, 3))
        swept = results(rows)
        wide, narrow = rendered(swept, 200), rendered(swept)
        assert max(map(len, narrow.splitlines())) <= 80
        assert "percentile:99.9, tensor" in wide
        words = [
            sorted(word for word in text.split() if "─" not in word) for text in (wide, narrow)
        ]
        assert words[0] == words[1]

    def test_what_differs_from_table_to_table_stands_in_their_titles(self, results):
        text = rendered(results(two_ways()), width=120)
        assert "attention logits, tensor" in text
        assert "perplexity · dynamic · " in text
        assert "kl · divergence · mse, asymmetric · " in text

    def test_names_that_are_long_and_alike_stay_apart(self, results):
        lines = rendered(results(made_up(LONG, WAYS[:1]))).splitlines()
        (start,) = [n for n, line in enumerate(lines) if line.split()[:1] == ["model"]]
        names = [line.split()[0] for line in lines[start + 2 : start + 5]]
        assert len(set(names)) == len(LONG)
        assert all(number in name for number, name in zip("123", names, strict=True))

    def test_failures_and_what_is_missing(self, results):
        rows = made_up(["m"], WAYS[:2])
        rows[1] |= {"status": "error", "error": "no memory", "metric": None, "value": None,
                    "stderr": None, "count": None}  # fmt: skip
        del rows[4]
        text = rendered(results(rows), width=120)
        assert "1 failed" in text
        assert "no memory" in text
        assert "attention logits, dynamic" in text
        table = [line.split() for line in text.splitlines()]
        assert table[table.index(["m"]) + 1][:4] == ["5", "of", "6", "cells,"]
        assert "failed" in next(line for line in table if line[:1] == ["tensor"])
        assert "–" in next(line for line in table if line[:1] == ["row"])

    def test_a_model_as_it_is(self, results):
        text = rendered(results(made_up(["m"], [])))
        assert "1 of 1 cells" in text
        assert "20.00" in text

    def test_the_published_figure_beneath_accuracies(self, results, tmp_path):
        assert "published" not in rendered(results(made_up(["m"], WAYS[:1])))
        rows = made_up(["m"], WAYS[:1], ["acc", "acc_norm"], "choice:a/b.jsonl")
        text = rendered(SweepResults.load(write_sweep(tmp_path / "choice", rows)))
        assert "2410.05258" in text
        assert "acc · choice:b.jsonl" in text
        for model, values in FIGURE_8.items():
            line = next(line for line in text.splitlines() if model in line)
            assert line.split()[1:] == [f"{value:.3f}" for value in values.values()]


def together(number, range_="dynamic", granularity="token", symmetric=True):
    """A line of weights and inputs at 8 bits."""
    schemes = [
        {"site": "linear_inputs", "bits": 8, "range": range_, "granularity": granularity,
         "symmetric": symmetric},
        {"site": "weights", "bits": 8, "range": "dynamic", "granularity": "group:64",
         "symmetric": True},
    ]  # fmt: skip
    rest = {"site": "linear_inputs+weights", "scheme": "W8g64A8", "options": {"schemes": schemes}}
    return row(f"c{number}", "m", bits=8, value=10.0 + number, **rest)


class TestEvaluationsOnFilesOfOneName:
    ARC, HELLASWAG = (
        f"choice:data/{'questions-' * 3}{name}{'-in-folders' * 3}/test.jsonl"
        for name in ("arc", "hellaswag")
    )

    @pytest.fixture
    def swept(self, results):
        rows = [
            line | {"cell": f"{number}{line['cell']}"}
            for number, name in enumerate([self.ARC, self.HELLASWAG])
            for line in made_up(["m"], WAYS[:2], ["acc"], name)
        ]
        return results(rows)

    def test_have_names_of_their_own(self, swept):
        text = "".join(rendered(swept).split())
        for name in (self.ARC, self.HELLASWAG):
            assert f"acc·{name.replace('data/', '')}·" in text

    @pytest.mark.parametrize("kind", ["bits", "sites", "ranges"])
    def test_have_panels_of_their_own(self, swept, kind):
        axes = [ax for ax in plot_sweep(swept, kind).axes if ax.axison]
        shown = [ax.get_title() if kind != "ranges" else ax.get_ylabel() for ax in axes]
        shown = [told for told in shown if told]  # an axis for a row of panels
        assert len(shown) == len(set(shown)) == 2
        assert ["arc" in told for told in shown] == [True, False]

    def test_are_called_by_the_shortest_ends_that_differ(self):
        names = [
            "perplexity", "choice:q.jsonl", "choice:a/x/q.jsonl", "choice:b/x/q.jsonl",
            "order:a/x/q.jsonl", "order:/q.jsonl@8", "lm-eval:arc", "choice:./q.jsonl",
        ]  # fmt: skip
        assert list(evaluation_labels(names).values()) == [
            "perplexity", "choice:q.jsonl", "choice:a/x/q.jsonl", "choice:b/x/q.jsonl",
            "order:q.jsonl", "order:q.jsonl@8", "lm-eval:arc", "choice:./q.jsonl",
        ]  # fmt: skip


TOGETHER = {
    "W8g64A8": ("dynamic", "token", True),
    "W8g64A8, linear inputs tensor": ("dynamic", "tensor", True),
    "W8g64A8, linear inputs mse tensor asymmetric": ("mse", "tensor", False),
}


class TestSchemesTogether:
    def test_of_one_short_name_are_lines_of_their_own(self, results):
        rows = [row("fp", "m"), *(together(n, *way) for n, way in enumerate(TOGETHER.values()))]
        swept = results(rows)
        (measure,) = measures(swept)
        found = lines(swept, measure)
        assert [way_label(line.way) for line in found] == list(TOGETHER)
        assert [line.points[8]["value"] for line in found] == [10.0, 11.0, 12.0]

    def test_are_drawn_side_by_side(self, results, tmp_path):
        swept = results(
            [row("fp", "m"), *(together(n, *way) for n, way in enumerate(TOGETHER.values()))]
        )
        data = sweep_figure_data(swept, "sites")
        assert data.query("bits == 8")["value"].tolist() == [10.0, 11.0, 12.0]
        assert tmp_path / "sites.csv" in save_sweep_figures(swept, tmp_path)


class TestFigure:
    def test_without_a_value_is_written_empty(self, results, tmp_path):
        """Cells of one layer beside a model as it is that failed."""
        failed = {"status": "error", "error": "no memory", "metric": None, "value": None,
                  "stderr": None, "count": None}  # fmt: skip
        layer = row("l", "m", ("dynamic", "tensor", True), 4)
        layer["options"]["layers"] = [0]
        swept = results([row("fp", "m") | failed, layer])
        assert len(sweep_figure_data(swept)) == 0
        assert tmp_path / "bits.csv" in save_sweep_figures(swept, tmp_path)

    def test_the_paper_s_logits_stand_beside_logits_alone(self, results):
        rows = made_up(["m"], WAYS[:1], ["acc"], "choice:b.jsonl")
        weights = [{**line, "cell": f"w{line['cell']}", "site": "weights"} for line in rows[1:]]
        swept = results([*rows, *weights])
        for site, count in (("attention_logits", len(FIGURE_8)), ("weights", 0)):
            (ax,) = self.axes(plot_sweep(swept, way={"site": site}, published=True))
            assert sum(line.get_linestyle() == "--" for line in ax.lines) == count

    def axes(self, page):
        return [ax for ax in page.axes if ax.axison]

    def labels(self, page):
        return [text.get_text() for text in page.legends[0].get_texts()] if page.legends else []

    def test_bits_are_a_line_a_model(self, results):
        swept = results(made_up(["zoo/plain", "zoo/diff"], WAYS, ["perplexity", "nll"]))
        page = plot_sweep(swept)
        first, second = self.axes(page)
        assert [first.get_ylabel(), second.get_ylabel()] == ["perplexity", "nll"]
        assert [tick.get_text() for tick in first.get_xticklabels()] == ["16", "8", "6", "4"]
        assert len(first.containers) == 2
        assert self.labels(page) == ["plain", "diff"]
        assert "dynamic, tensor" in page.get_suptitle()
        assert len(self.axes(plot_sweep(swept, metric="nll"))) == 1
        page = plot_sweep(swept, way={"range": "percentile:99.9", "symmetric": False})
        assert "percentile:99.9, tensor, asymmetric" in page.get_suptitle()

    def test_a_title_says_what_all_panels_share(self, results):
        swept = results(two_ways())
        page = plot_sweep(swept)
        assert page.get_suptitle().splitlines()[0] == "m · attention logits, tensor"
        assert [ax.get_title() for ax in self.axes(page)] == [
            "perplexity\ndynamic", "divergence\nmse, asymmetric",
        ]  # fmt: skip
        page = plot_sweep(swept, "sites")
        assert page.get_suptitle().splitlines()[0] == "m · site by site, tensor"
        assert self.labels(page) == [
            "attention logits, dynamic", "attention logits, mse, asymmetric",
        ]  # fmt: skip

    def test_a_panel_of_a_model_as_it_is_says_so(self, results):
        page = plot_sweep(results([*made_up(["m"], WAYS[:1]),
                                   row("fp", "m", eval="divergence", metric="kl")]))  # fmt: skip
        assert [ax.get_title() for ax in self.axes(page)] == [
            "perplexity", "divergence\nnot quantized"
        ]  # fmt: skip

    def test_a_panel_names_the_models_that_it_lacks(self, results):
        rows = [*made_up(["m"], WAYS[:1]), row("o", "zoo/other", ("mse", "tensor", True), 4)]
        (ax,) = self.axes(plot_sweep(results(rows)))
        assert len(ax.containers) == 1
        assert " ".join(ax.get_title().split()) == "perplexity without other, not quantized so"

    def test_a_panel_names_models_of_other_sites_too(self, results):
        rows = [*made_up(["m"], WAYS[:1]),
                row("o", "other", ("dynamic", "channel", True), 4, site="weights")]  # fmt: skip
        (ax,) = self.axes(plot_sweep(results(rows), way={"site": "attention_logits"}))
        assert " ".join(ax.get_title().split()) == "perplexity without other, not quantized so"

    def test_names_of_any_length_leave_room_for_the_panels(self, results):
        metrics = ["perplexity", "nll", "kl"]
        far = [f"runs/{letter * 80}/checkpoint-{letter}" for letter in "op"]
        rows = made_up(["m"], WAYS[:1], metrics)
        rows += [row(m[-1] + metric, m, ("mse", "tensor", True), 4, metric=metric)
                 for m in far for metric in metrics]  # fmt: skip
        page = plot_sweep(results(rows))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of a layout that could not be
            page.draw_without_rendering()
        for ax in self.axes(page):
            assert ax.bbox.height / page.dpi > 0.9

    def test_models_of_names_that_are_long_and_alike_are_all_named(self, results):
        page = plot_sweep(results(made_up(LONG, WAYS[:1])))
        labels = self.labels(page)
        assert len(set(labels)) == len(LONG)
        assert all(number in label for number, label in zip("123", labels, strict=True))
        page.draw_without_rendering()
        width = page.legends[0].get_window_extent().width / page.dpi
        assert width < page.get_size_inches()[0] == SINGLE

    def test_models_of_names_that_print_alike_are_all_in_the_legend(self, results):
        assert self.labels(plot_sweep(results(made_up(["a\n", "a\t"], WAYS[:1])))) == ["a�"] * 2

    def test_ranges_are_a_panel_a_granularity(self, results):
        swept = results(made_up(["plain", "diff"], WAYS, ["perplexity", "nll"]))
        page = plot_sweep(swept, "ranges", model="diff")
        tensor, of_row = self.axes(page)
        assert [tensor.get_title(), of_row.get_title()] == ["tensor", "row"]
        assert [len(ax.containers) for ax in (tensor, of_row)] == [3, 1]
        assert tensor.get_ylim() == of_row.get_ylim()
        assert "percentile:99.9, asymmetric" in self.labels(page)
        colors = {text: c.lines[0].get_color() for c, text in zip(
            tensor.containers, ("dynamic", "percentile", "asymmetric"), strict=True)}  # fmt: skip
        assert colors["percentile"] == colors["asymmetric"] != colors["dynamic"]
        assert page.get_suptitle().startswith("diff")

    def test_data_are_what_is_drawn(self, results):
        swept = results(made_up(["plain", "diff"], WAYS))
        data = sweep_figure_data(swept)
        assert list(data.columns) == [
            "evaluation", "metric", "model", "site", "range", "granularity", "symmetric", "newest",
            "schemes", "remedy", "bits", "value", "stderr", "count",
        ]  # fmt: skip
        assert len(data) == 8
        assert len(sweep_figure_data(swept, "ranges", model="diff")) == 16
        line = plot_sweep(swept).axes[0].containers[1].lines[0]
        assert list(line.get_ydata()) == list(data.query("model == 'diff'")["value"])

    def test_bars_are_one_standard_error_to_both_sides(self, results):
        swept = results(made_up(["plain", "diff"], WAYS[:1]))
        data = sweep_figure_data(swept)
        (ax,) = self.axes(plot_sweep(swept))
        for model, drawn in zip(("plain", "diff"), ax.containers, strict=True):
            mine = data[data["model"] == model]
            assert (mine["stderr"] == mine["value"] / 20).all()
            ends = [segment[:, 1].tolist() for segment in drawn.lines[2][0].get_segments()]
            assert ends == [pytest.approx([0.95 * value, 1.05 * value]) for value in mine["value"]]

    def test_published_lines_are_drawn_on_demand(self, results):
        swept = results(made_up(["m"], WAYS[:1], ["acc"], "choice:b.jsonl"))
        assert not self.labels(plot_sweep(swept))
        page = plot_sweep(swept, published=True)
        assert self.labels(page) == [
            "m", "DIFF-3B, HellaSwag, published", "Transformer-3B, HellaSwag, published",
        ]  # fmt: skip
        dashed = [line for line in page.axes[0].lines if line.get_linestyle() == "--"]
        assert [list(line.get_ydata()) for line in dashed] == [
            list(values.values()) for values in FIGURE_8.values()
        ]

    def test_a_divergence_of_zero_has_no_place_on_a_logarithmic_axis(self, results):
        page = plot_sweep(results(made_up(["m"], WAYS[:1], ["kl"], "divergence")))
        (ax,) = self.axes(page)
        assert ax.get_yscale() == "log"
        assert pd.isna(ax.containers[0].lines[0].get_ydata()[0])
        assert ax.get_ylim()[0] > 1e-10

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"kind": "pie"}, ("pie", "ranges")),
            ({"kind": "ranges", "model": "nobody"}, ("nobody", "plain")),
            ({"metric": "acc"}, ("nothing to draw",)),
            ({"way": {"range": "mse"}}, ("nothing to draw",)),
            ({"way": {"colour": "red"}}, ("colour", "granularity")),
        ],
    )
    def test_refusals(self, results, options, words):
        swept = results([line for line in made_up(["plain"], WAYS) if line["site"]])
        with pytest.raises(UsageError) as refusal:
            plot_sweep(swept, **options)
        for word in words:
            assert word in str(refusal.value)

    def test_saved_files(self, results, tmp_path):
        swept = results(made_up(["plain", "diff"], WAYS))
        files = save_sweep_figures(swept, tmp_path / "figures")
        names = ["bits", "ranges-1-plain", "ranges-2-diff"]
        assert [path.name for path in files] == [
            f"{name}.{suffix}" for name in names for suffix in ("png", "svg", "csv")
        ]
        again = save_sweep_figures(swept, tmp_path / "again")
        assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]
        one = SweepResults.load(write_sweep(tmp_path / "one", made_up(["plain"], WAYS[:1])))
        names = {path.name for path in save_sweep_figures(one, tmp_path / "few")}
        assert names == {"bits.png", "bits.svg", "bits.csv"}

    def test_a_figure_a_site(self, results, tmp_path):
        rows = made_up(["m"], WAYS[:1])
        keys = {"site": "keys", "granularity": "token"}
        swept = results(
            rows + [line | keys | {"cell": line["cell"] + "k"} for line in rows if line["site"]]
        )
        files = {path.name for path in save_sweep_figures(swept, tmp_path / "figures")}
        names = ("bits-attention_logits", "bits-keys", "sites")
        assert files == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg", "csv")}
        assert "keys, dynamic, token" in plot_sweep(swept, way={"site": "keys"}).get_suptitle()
        page = plot_sweep(swept, "sites")
        assert self.labels(page) == ["attention logits, tensor", "keys, token"]
        (ax,) = self.axes(plot_sweep(swept, "ranges", way={"site": "keys"}))
        assert ax.get_title() == "token"

    def test_none_of_an_earlier_request_stays(self, results, tmp_path):
        logits = [*made_up(["m"], WAYS), *made_up(["zoo/other"], WAYS[:1], evaluation="other")]
        weights = [
            {**line, "cell": f"w{line['cell']}", "site": "weights", "granularity": "channel"}
            for line in logits[1:4]
        ]
        folder = tmp_path / "figures"
        first = save_sweep_figures(results(logits), folder)
        others = [
            folder / name for name in ("bits-mine.png", "bits.txt", "sites.jpg", "layers.png")
        ]
        for path in others:
            path.write_text("of somebody else")
        both = SweepResults.load(write_sweep(tmp_path / "both", [*logits, *weights]))
        second = save_sweep_figures(both, folder)
        assert {path.name for path in first} - {path.name for path in second} >= {
            "bits.png", "bits.svg", "bits.csv", "ranges-1-m.csv",
        }  # fmt: skip
        assert set(folder.iterdir()) == {*second, *others}
        at_once = save_sweep_figures(both, tmp_path / "at once")
        assert [path.name for path in at_once] == [path.name for path in second]
        assert [path.read_bytes() for path in at_once] == [path.read_bytes() for path in second]

    def test_nothing_is_saved_of_some_layers_alone(self, results, tmp_path):
        layer = row("l", "m", ("dynamic", "tensor", True), 4)
        layer["options"]["layers"] = [0]
        (tmp_path / "bits.png").write_text("of an earlier sweep")
        assert save_sweep_figures(results([layer]), tmp_path) == []
        assert not (tmp_path / "bits.png").exists()
        assert save_sweep_figures(results([layer]), tmp_path / "none") == []
        assert not (tmp_path / "none").exists()

    def test_nothing_is_saved_of_nothing(self, results, tmp_path):
        failed = {"status": "error", "error": "no", "metric": None, "value": None}
        assert save_sweep_figures(results([row("a", "m", **failed)]), tmp_path / "none") == []
