"""The report of a comparison: what it holds, what it says is missing, and its figures."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure as Drawn
from matplotlib.text import Text

import quantdiff
from quantdiff.analysis.published import FIGURE_8
from quantdiff.analysis.report import Figure, Table, Warned, read_table, write_report
from quantdiff.analysis.report.cells import columns
from quantdiff.analysis.sweep.record import read_record, write_record
from quantdiff.analysis.sweep.results import ResultsFile
from tests.analysis.compare.conftest import (
    answers,
    evaluated,
    line,
    recorded,
    windows,
    write_checkpoint,
    write_sweep,
)
from tests.analysis.test_figures import undrawn
from tests.tiny import tiny_llama

HOSTILE = ["<script>alert(1)</script>", "../up/'quoted\" & so", "한국어 모델", "$x_1$ _y [red]"]


@pytest.fixture(scope="module")
def compared(trio):
    return quantdiff.compare(*trio)


def parts(report, kind):
    return [p for s in report.sections for p in s.parts if isinstance(p, kind)]


def by_key(comparison):
    return {part.key: part for part in comparison.tables().tables}


def written(part):
    """A table as people read it: heading -> the texts of its column."""
    return {column.heading: column.cells for column in columns(part)}


def with_figures(comparison):
    return {part.key: part for part in parts(comparison.report(), (Table, Figure))}


class TestReport:
    def test_holds_every_part(self, trio, swept, tmp_path):
        comparison = quantdiff.compare(*trio, swept, write_checkpoint(tmp_path / "nf4"))
        sections = comparison.report().sections
        assert [section.key for section in sections] == [
            "overview", "outliers", "accuracy", "differential", "checkpoints", "provenance",
        ]  # fmt: skip
        keys = [part.key for part in parts(comparison.report(), (Table, Figure))]
        tables = [part.key for part in comparison.tables().tables]
        assert tables == [part.key for part in comparison.report().tables]
        assert len(set(keys)) == len(keys)
        assert {
            "outliers", "table-5", "layers", "heads", "magnitudes", "places-hidden-states",
            "bits-perplexity-nll", "bits-choice-questions-jsonl-acc", "figure-8",
            "figure-perplexity-attention-logits", "differences-models-perplexity",
            "differences-widths-perplexity", "figure-differences-perplexity", "lambda", "branches",
            "maps", "maps-by-layer", "checkpoints", "runs", "commands", "definitions",
        } <= set(keys)  # fmt: skip
        assert comparison.warnings == []

    def test_captions_name_data_tokens_and_dtype(self, trio, swept):
        found = with_figures(quantdiff.compare(*trio, swept))
        for key in ("outliers", "layers", "heads", "places-attention-logits", "lambda", "maps"):
            for word in ("48 tokens", "random ids", "aaaaaaaaaaaa", "float32"):
                assert word in found[key].caption, key
        for key in ("bits-perplexity-nll", "differences-models-perplexity"):
            for word in ("229 tokens", "corpus", "aaaaaaaaaaaa", "float32"):
                assert word in found[key].caption, key

    def test_captions_say_over_what_errors_are_and_by_what_intervals(self, swept, tmp_path):
        found = with_figures(quantdiff.compare(swept))
        errors = found["bits-perplexity-nll"].caption
        assert "one standard error over the windows. n = 40 tokens in 8 windows." in errors
        assert "one standard error. n = 40." in found["bits-choice-questions-jsonl-acc"].caption
        student, bootstrap = "Over {} {} 95 % intervals are Student's t", "paired bootstrap, 10,000"
        for kind in ("differences-models", "differences-widths", "figure-differences"):
            few = found[f"{kind}-perplexity"].caption
            assert student.format(8, "windows") in few
            assert "bootstrap" not in few
            assert "not said" not in few
            many = found[f"{kind}-choice-questions-jsonl"].caption
            assert f"Over 40 questions 95 % intervals are percentiles of a {bootstrap}" in many
            assert "Student" not in many
        told = {"evaluations": {"perplexity": evaluated("perplexity", windows=4)}}
        cells = [("m", "perplexity", bits, windows(bits, number=4)) for bits in (16, 8)]
        found = by_key(quantdiff.compare(write_sweep(tmp_path / "s", {"m": told}, cells)))
        caption = found["differences-widths-perplexity"].caption
        assert student.format(4, "windows") in caption
        assert "Below 6 windows it is not said" in caption

    def test_of_needles_errors_are_over_texts(self, tmp_path):
        settings = {"lengths": [512, 1024], "samples": 10}
        told = {"evaluations": {"needles": evaluated("needles", **settings)}}
        cells = [("m", "needles", bits, answers(bits)) for bits in (16, 8)]
        found = by_key(quantdiff.compare(write_sweep(tmp_path / "s", {"m": told}, cells)))
        caption = found["bits-needles-acc"].caption
        assert "one standard error over the texts. n = 40 questions about 20 texts." in caption

    def test_bits_are_those_of_the_results(self, swept):
        comparison = quantdiff.compare(swept)
        frame = by_key(comparison)["bits-perplexity-nll"].frame
        values = comparison.accuracy().set_index(["model", "metric", "bits"])["value"]
        assert frame["model"].tolist() == ["plain", "v1", "v2"]
        for row in frame.itertuples():
            for bits in (16, 8, 4):
                assert getattr(row, f"bits_{bits}") == values[row.model, "nll", bits]
                assert getattr(row, f"bits_{bits}_stderr") == 0.1

    def test_differences_are_written_with_their_signs_and_what_they_exclude(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        tokens, nll = np.full(6, 10), np.arange(40.0, 46.0)
        # A token: −2 ± 0.2 and 0.5 ± 2. Of six the standard errors are 0.2·√(6/5)/√6 = 0.08944 and
        # 0.8944, and Student's t, beyond which 2.5 % lie, is 2.5706: ± 0.2299 and ± 2.299.
        swing = np.array([1, -1] * 3)
        items = {"a": nll, "b": nll - 20 + 2 * swing, "c": nll + 5 + 20 * swing}
        cells = [(m, "perplexity", 16, {"nll": x, "tokens": tokens}) for m, x in items.items()]
        folder = write_sweep(tmp_path / "s", dict.fromkeys(items, told), cells)
        found = by_key(quantdiff.compare(folder))["differences-models-perplexity"]
        assert written(found) == {
            "scheme": ["not quantized"] * 2, "bits": ["16", "16"], "model": ["b", "c"],
            "difference": ["-2.00", "+0.500"], "95 % from": ["-2.23", "-1.80"],
            "to": ["-1.77", "+2.80"], "excludes 0": ["yes", "no"],
        }  # fmt: skip

    def test_maps_are_written_under_their_headings(self, compared, trio):
        found = written(by_key(compared)["maps"])
        whose = list(zip(found["model"], found["kind"], strict=True))
        assert len(whose) == 1 + 3 + 3
        for place, (model, kind) in enumerate(whose):
            heads = trio[["plain", "v1", "v2"].index(model)].maps_frame()
            heads = heads[heads["kind"] == kind]
            least, most = heads["context_rms_min"].min(), heads["context_rms_max"].max()
            assert found["RMS, least"][place] == f"{least:.3f}"
            assert found["most"][place] == f"{most:.3f}"
            assert least < float(found["median"][place]) < most
            for heading, name, over in (
                ("Σw", "row_sum", "rows"), ("first token", "sink", "sink_rows"),
                ("entropy", "entropy", "rows"),
            ):  # fmt: skip
                mean = np.average(heads[name].astype(float), weights=heads[over].astype(float))
                assert found[heading][place] == f"{mean:.3f}"

    def test_published_numbers_stand_apart(self, trio, swept):
        found = by_key(quantdiff.compare(*trio, swept))
        assert [key for key, part in found.items() if getattr(part, "published", False)] == [
            "table-5", "figure-8",
        ]  # fmt: skip
        assert "2410.05258" in found["table-5"].caption
        assert written(found["table-5"]) == {
            "model": ["Transformer", "DIFF", "Transformer", "DIFF"],
            "activation": [*["attention logits"] * 2, *["hidden states"] * 2],
            "top-1": ["318.0", "38.8", "3608.6", "1688.2"],
            "top-2": ["308.2", "38.8", "3607.4", "1672.5"],
            "top-3": ["304.9", "37.3", "3603.6", "1672.1"],
            "top-10": ["284.7", "32.0", "3552.1", "1624.3"],
            "top-100": ["251.5", "27.4", "2448.2", "740.9"],
            "median": ["5.4", "3.3", "0.6", "1.2"],
        }
        assert written(found["figure-8"]) == {
            "model": ["DIFF-3B", "Transformer-3B"],
            "16 bits": ["0.662", "0.634"], "8 bits": ["0.663", "0.627"],
            "6 bits": ["0.660", "0.589"], "4 bits": ["0.588", "0.339"],
        }  # fmt: skip

    def test_published_lines_are_drawn_on_request(self, swept):
        for published in (False, True):
            comparison = quantdiff.compare(swept, published=published)
            page = comparison.plot("bits", evaluation="choice:questions.jsonl")
            dashed = [line for line in page.axes[0].lines if line.get_linestyle() == "--"]
            assert len(dashed) == published * len(FIGURE_8)

    def test_provenance_has_every_run(self, trio, swept, tmp_path):
        trio[0].command = "quantdiff profile zoo/plain"
        frame = quantdiff.compare(trio[0], swept).provenance()
        trio[0].command = None
        assert frame["kind"].tolist() == ["profile", *["sweep"] * 6]
        assert frame["command"].tolist() == [
            "quantdiff profile zoo/plain", *["quantdiff sweep --out swept"] * 6,
        ]  # fmt: skip
        assert set(frame["fingerprint"]) == {"a" * 64}
        assert frame["tokens"].tolist()[:2] == [48, 229]
        assert frame["name"].tolist()[:2] == ["zoo/plain", "zoo/plain"]
        assert "attention logits, dynamic, tensor: 8, 4 bits" in frame["scheme"].iloc[1]
        assert "torch" in frame["versions"].iloc[0]

    def test_provenance_says_what_ranges_and_remedies_saw(self, tmp_path):
        def seen(mark):
            data = {"source": "corpus:train", "tokens": 4096, "fingerprint": mark * 64}
            return {"fingerprint": "x", "data": data}

        names = ("perplexity", "divergence", "noise")
        told = {"evaluations": {name: evaluated(name) for name in names}, "device": "cuda",
                "attention": "eager", "calibration": seen("1"), "remedies": seen("2")}  # fmt: skip
        folder = write_sweep(tmp_path / "s", {"m": told}, [])
        plain = {"symmetric": True}
        options = [plain | {"calibration": "x"}, plain | {"remedy": "smooth:0.5"},
                   plain | {"remedy": "rotate"}]  # fmt: skip
        write_record(folder, read_record(folder) | {"cells": list("abc")})
        rows = [line(cell, "m", name, 8, "snr", value=2.0, options=of_cell)
                for cell, name, of_cell in zip("abc", names, options, strict=True)]  # fmt: skip
        ResultsFile(folder).append(rows)
        comparison = quantdiff.compare(folder)
        frame = comparison.provenance()
        assert (frame["device"].iloc[0], frame["attention"].iloc[0]) == ("cuda", "eager")
        assert frame["calibrated_on"].fillna("nothing").tolist() == [
            f"static ranges on 4,096 tokens of corpus:train ({'1' * 12})",
            f"remedies on 4,096 tokens of corpus:train ({'2' * 12})",
            "nothing",  # a rotation does not read
        ]
        columns = {"device", "attention", "calibrated_on"}
        assert columns <= set(by_key(comparison)["runs"].frame)

    def test_definitions_of_a_sweep_are_told(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        folder = write_sweep(tmp_path / "s", {"m": told}, [("m", "perplexity", 16, windows(0))])
        assert by_key(quantdiff.compare(folder))["definitions"].frame["measure"].tolist() == [
            "perplexity"
        ]  # of an earlier version
        write_record(folder, read_record(folder) | {"definitions": {"grid": "symmetric"}})
        frame = by_key(quantdiff.compare(folder))["definitions"].frame
        assert ["sweep: grid", "symmetric", "m"] in frame.to_numpy().tolist()

    def test_written_files_read_back(self, trio, tmp_path):
        comparison = quantdiff.compare(trio[0])
        written = comparison.save(tmp_path / "report")
        assert written[0] == tmp_path / "report" / "report.html"
        assert all(path.is_file() for path in written)
        back = read_table(tmp_path / "report" / "tables" / "outliers.csv")
        expected = comparison.outliers()[back.columns]
        pd.testing.assert_frame_equal(back, expected, check_dtype=False)

    def test_a_notebook_shows_it(self, swept):
        comparison = quantdiff.compare(swept)
        assert "3 models" not in repr(comparison)
        assert repr(comparison) == "Comparison of 1 sweep: plain, v1, v2"
        assert "<table" in comparison._repr_html_()


class TestIncomparable:
    @pytest.mark.parametrize(
        ("change", "word"),
        [
            (lambda p: p.data.update(fingerprint="b" * 64), "data"),
            (lambda p: p.data.update(tokens=99), "tokens (99 and 48)"),
            (lambda p: p.data.update(sequence_length=7), "sequence length (7 and 24)"),
            (lambda p: p.model.update(dtype="bfloat16"), "dtype (bfloat16 and float32)"),
            (lambda p: p.definition.update(hidden_states="x"), "definitions"),
            (lambda p: setattr(p, "partial", True), "completeness (partial and whole)"),
        ],
    )
    def test_profiles_stand_in_tables_of_their_own(self, trio, change, word):
        other = trio[1].copy()
        change(other)
        comparison = quantdiff.compare(trio[0], other, trio[2])
        (told,) = [w for w in comparison.warnings if "cannot be compared" in w]
        assert told.startswith("Profiles of v1 cannot be compared with those of plain, v2")
        assert word in told
        found = by_key(comparison)
        assert found["outliers"].frame["model"].unique().tolist() == ["plain", "v2"]
        assert found["outliers-2"].frame["model"].unique().tolist() == ["v1"]
        assert comparison.outliers()["group"].tolist() == [1] * 4 + [2] * 2
        # A ratio to a model that it cannot be compared with would be no ratio.
        assert comparison.outliers().query("group == 2")["top1_ratio"].tolist() == [1, 1]

    def test_an_evaluation_with_other_windows_stands_alone(self, tmp_path):
        for name, length in (("a", 32), ("b", 64)):
            told = {"evaluations": {"perplexity": evaluated("perplexity", seq_len=length)}}
            write_sweep(tmp_path / name, {name: told}, [(name, "perplexity", 16, windows(1))])
        comparison = quantdiff.compare(tmp_path / "a", tmp_path / "b")
        assert any("seq_len (64 and 32)" in warning for warning in comparison.warnings)
        assert {"bits-perplexity-nll", "bits-perplexity-nll-2"} <= set(by_key(comparison))

    def test_data_without_a_fingerprint_are_told(self, trio):
        some = [profile.copy() for profile in trio[:2]]
        for profile in some:
            del profile.data["fingerprint"]
        (told,) = quantdiff.compare(*some).warnings[:1]
        assert "no fingerprint" in told


class TestMissing:
    def test_no_sweep_and_no_profile(self, trio, swept):
        assert any("No sweep" in w for w in quantdiff.compare(trio[0]).warnings)
        comparison = quantdiff.compare(swept)
        assert any("No profile" in w for w in comparison.warnings)
        assert "outliers" not in by_key(comparison)

    def test_extremes_only(self, trio):
        profile = recorded(tiny_llama(), "extremes", detail="extremes", top_k=5, maps=False)
        comparison = quantdiff.compare(profile)
        assert any("extremes only" in w for w in comparison.warnings)
        assert "magnitudes" not in with_figures(comparison)
        found = by_key(comparison)
        row = found["outliers"].frame.iloc[0]
        assert np.isnan(row["median"])
        assert np.isnan(row["top10"])
        assert row["top1"] == profile.attention_logits.top(1)[0].value

    def test_no_hidden_states(self, trio):
        profile = trio[0].copy()
        profile.hidden_states.sites = []
        comparison = quantdiff.compare(profile, trio[1])
        assert any("plain: no hidden states" in w for w in comparison.warnings)
        frame = comparison.outliers().set_index(["activation", "model"])
        assert frame.loc[("hidden_states", "plain")].drop("group").isna().all()
        assert frame.loc[("hidden_states", "v1"), "top1"] == trio[1].hidden_states.absmax
        assert np.isnan(frame.loc[("hidden_states", "v1"), "top1_ratio"])
        for page in (comparison.plot("layers"), comparison.plot("magnitudes")):
            page.draw_without_rendering()

    def test_partial(self, trio):
        profile = trio[0].copy()
        profile.partial = True
        comparison = quantdiff.compare(profile)
        assert any("plain is partial" in w for w in comparison.warnings)
        assert "partial" in by_key(comparison)["outliers"].caption

    def test_maps_that_were_not_measured(self, trio):
        profile = trio[1].copy()
        profile.maps = None
        assert any("--maps" in w for w in quantdiff.compare(profile).warnings)

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("profile.json", {"format": "quantdiff.profile/9"}, ("version 9", "upgrade")),
            ("profile.json", {"format": "quantdiff.profile/1"}, ("broken profile",)),
            ("sweep.json", {"format": "quantdiff.sweep/9"}, ("version 9", "upgrade")),
            ("sweep.json", {"format": "quantdiff.sweep/1"}, ("is broken", "cells")),
            ("sweep.json", {"format": "quantdiff.sweep/1", "cells": [], "models": {"m": {}}},
             ("is broken", "fingerprint")),
            ("calibration.json", {"format": "quantdiff.calibration/9"}, ("version 9",)),
            ("quantdiff.json", {"format": "quantdiff.export/9"}, ("version 9",)),
            ("quantdiff.json", {"format": "something"}, ("no exported checkpoint",)),
            ("profile.json", None, ("no readable profile",)),
        ],
    )  # fmt: skip
    def test_what_cannot_be_read_is_told_and_the_rest_goes_on(
        self, trio, tmp_path, name, content, words
    ):
        folder = tmp_path / "other"
        folder.mkdir()
        (folder / name).write_text("{" if content is None else json.dumps(content))
        comparison = quantdiff.compare(folder, trio[0])
        (told,) = [p.text for p in comparison.tables().sections[0].parts if isinstance(p, Warned)]
        for word in ("Left out", *words):
            assert word in told
        assert comparison.names == ["plain"]
        with pytest.raises(quantdiff.UsageError, match="nothing to compare"):
            quantdiff.compare(folder)

    def test_a_truncated_line_in_the_middle_and_one_without_its_entries(self, tmp_path, trio):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        folder = write_sweep(tmp_path / "s", {"m": told}, [("m", "perplexity", 16, windows(1))])
        rows = (folder / "results.jsonl").read_text().splitlines()
        for broken in (rows[0][:30], json.dumps({"cell": "s-0", "status": "ok", "metric": "x"})):
            (folder / "results.jsonl").write_text("\n".join([broken, *rows]) + "\n")
            comparison = quantdiff.compare(folder, trio[0])
            assert any("Left out" in warning for warning in comparison.warnings)

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"options": {"symmetric": True, "remedy": "awq"}}, "remedy 'awq'"),
            ({"site": "embeddings"}, "site 'embeddings'"),
            ({"bits": 1}, "not 1"),
            ({"site": "keys+embeddings",
              "options": {"schemes": [{"site": "keys", "bits": 4}, {"site": "rope", "bits": 4}]}},
             "site 'rope'"),
        ],
    )  # fmt: skip
    def test_a_sweep_of_a_later_version_is_told_and_the_rest_goes_on(
        self, tmp_path, trio, change, word
    ):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        folder = write_sweep(tmp_path / "later", {"m": told}, [("m", "perplexity", 4, windows(1))])
        rows = [json.loads(row) for row in (folder / "results.jsonl").read_text().splitlines()]
        (folder / "results.jsonl").write_text(
            "".join(json.dumps(row | change) + "\n" for row in rows)
        )
        comparison = quantdiff.compare(folder, trio[0])
        (warning,) = [
            p.text for p in comparison.report().sections[0].parts if isinstance(p, Warned)
        ]
        assert warning.startswith(f"Left out: {folder} holds a sweep that this version cannot read")
        assert word in warning
        assert comparison.names == ["plain"]

    def test_an_unfinished_sweep_is_told(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        cells = [("m", "perplexity", bits, windows(bits)) for bits in (16, 8, 4)]
        folder = write_sweep(tmp_path / "s", {"m": told}, cells)
        rows = (folder / "results.jsonl").read_text().splitlines()
        (folder / "results.jsonl").write_text("\n".join(rows[:2]) + "\n")
        comparison = quantdiff.compare(folder, published=True)
        assert any("2 of 3 cells are missing" in warning for warning in comparison.warnings)
        assert any("No accuracy was measured" in warning for warning in comparison.warnings)

    def test_a_model_that_was_only_profiled_or_only_swept(self, trio, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        models = {"zoo/v1": told, "other": told}
        cells = [(name, "perplexity", 16, windows(1)) for name in models]
        folder = write_sweep(tmp_path / "s", models, cells)
        warnings = quantdiff.compare(trio[0], trio[1], folder).warnings
        assert "There is no profile of other." in warnings
        assert "There is no sweep of plain." in warnings

    def test_failed_cells_are_told(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        cells = [("m", "perplexity", bits, windows(bits)) for bits in (16, 8)]
        folder = write_sweep(tmp_path / "s", {"m": told}, cells)
        path = folder / "results.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[2] |= {"status": "error", "error": "no memory", "metric": None, "value": None,
                    "stderr": None, "count": None}  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
        comparison = quantdiff.compare(folder)
        assert any("1 cell of perplexity failed" in warning for warning in comparison.warnings)
        assert "1 cells failed" in comparison.provenance()["state"].iloc[0]
        frame = by_key(comparison)["bits-perplexity-nll"].frame
        assert np.isnan(frame["bits_8"].iloc[0])

    def test_nothing_at_all(self, tmp_path):
        for place, word in ((tmp_path, "holds nothing"), (tmp_path / "none", "does not exist")):
            with pytest.raises(quantdiff.UsageError, match=word):
                quantdiff.compare(place)
        with pytest.raises(quantdiff.UsageError, match="dict is no run"):
            quantdiff.compare({})

    def test_runs_below_a_folder_are_found(self, trio, tmp_path):
        for name, profile in zip(("1", "2"), trio, strict=False):
            profile.save(tmp_path / name)
        (tmp_path / "3").mkdir()
        assert quantdiff.compare(tmp_path).names == ["plain", "v1"]


class TestHostileNames:
    @pytest.fixture
    def hostile(self, trio):
        some = []
        for name in HOSTILE:
            profile = trio[1].copy()
            profile.model["name"] = name
            some.append(profile)
        return quantdiff.compare(*some)

    def test_are_shown_as_they_are(self, hostile):
        assert hostile.names == HOSTILE

    def test_are_harmless_on_the_page(self, hostile, tmp_path):
        page, *files = write_report(hostile.tables(), tmp_path)
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "한국어 모델" in text
        assert all(tmp_path in path.parents for path in files)
        names = read_table(tmp_path / "tables" / "outliers.csv")["model"]
        assert names.unique().tolist() == HOSTILE

    def test_of_sweeps_and_checkpoints_are_harmless_too(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        cells = [(name, "perplexity", bits, windows(bits)) for name in HOSTILE for bits in (16, 8)]
        runs = [write_sweep(tmp_path / "s", dict.fromkeys(HOSTILE, told), cells)]
        runs += [write_checkpoint(tmp_path / str(n), name=name) for n, name in enumerate(HOSTILE)]
        comparison = quantdiff.compare(*runs)
        assert comparison.names == HOSTILE
        assert comparison.checkpoints()["model"].tolist() == HOSTILE
        page, *files = write_report(comparison.tables(), tmp_path / "report")
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert all(tmp_path / "report" in path.parents for path in files)
        for key in ("bits-perplexity-nll", "checkpoints"):
            names = read_table(tmp_path / "report" / "tables" / f"{key}.csv")["model"]
            assert names.tolist() == HOSTILE
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")
            drawn = comparison.plot("bits")
            drawn.draw_without_rendering()
        assert [text.get_text() for text in drawn.legends[0].get_texts()] == HOSTILE

    def test_long_and_alike_stay_apart_in_legends_and_over_panels(self, trio):
        some = []
        for number in (1, 2):
            profile = trio[1].copy()
            profile.model["name"] = f"{'x' * 40}-{number}-{'y' * 40}"
            some.append(profile)
        comparison = quantdiff.compare(*some)
        legend = comparison.plot("layers").legends[0].get_texts()[:2]
        titles = [ax.title for ax in comparison.plot("heads").axes[:2]]
        for shown in (legend, titles):
            assert len({text.get_text() for text in shown}) == 2
            assert all(f"-{n}-" in t.get_text() for n, t in enumerate(shown, start=1))

    def test_are_no_mathematics_in_figures(self, hostile):
        # Of a machine without a Korean font, which draws boxes.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")
            page = hostile.plot("layers")
            page.draw_without_rendering()
        shown = [text.get_text() for text in page.legends[0].get_texts()]
        assert shown[: len(HOSTILE)] == HOSTILE


class TestFigures:
    def pages(self, comparison):
        return {figure.key: figure.page for figure in comparison.report().figures}

    @pytest.mark.parametrize(("number", "long"), [(1, True), (2, False), (3, True)])
    def test_no_text_is_cut_off_and_none_is_below_7_points(self, trio, number, long):
        some = [profile.copy() for profile in trio[:number]]
        if long:
            for profile in some:
                profile.model["name"] = f"{'long-name-' * 12}{profile.model['name'][-2:]}"
        for key, figure in self.pages(quantdiff.compare(*some)).items():
            figure.draw_without_rendering()
            page, hidden = figure.bbox, undrawn(figure)
            for text in figure.findobj(Text):
                if not text.get_visible() or not text.get_text().strip() or text in hidden:
                    continue
                box = text.get_window_extent()
                for ours, bound in ((page.x0, box.x0), (page.y0, box.y0)):
                    assert bound >= ours - 1, (key, text)
                for ours, bound in ((page.x1, box.x1), (page.y1, box.y1)):
                    assert bound <= ours + 1, (key, text)
                assert text.get_size() >= 7, (key, text)

    def test_heat_maps_share_one_scale(self, trio, compared):
        meshes = [
            mesh for ax in compared.plot("heads").axes for mesh in ax.collections
            if ax.get_label() != "<colorbar>"
        ]  # fmt: skip
        largest = max(profile.attention_logits.absmax for profile in trio)
        assert [mesh.get_clim() for mesh in meshes] == [(0, largest)] * 3

    def test_lines_have_their_models_colours_and_numbers(self, compared, trio):
        ax = compared.plot("layers").axes[0]
        drawn = {(line.get_color(), line.get_linestyle()): line.get_ydata() for line in ax.lines}
        heads = trio[0].attention_logits.sites
        expected = [float(site.absmax.max()) for site in heads]
        assert drawn[compared.colors["plain"], "-"].tolist() == expected
        assert len(drawn) == 5  # two branches of two models, and one without

    def test_draw_into_axes_that_are_given(self, compared, swept):
        for kind in ("layers", "magnitudes", "lambda"):
            ax = Drawn().subplots()
            assert compared.plot(kind, ax=ax) is ax
            assert ax.get_ylabel()
        ax = Drawn().subplots()
        assert quantdiff.compare(swept).plot("bits", ax=ax) is ax
        assert len(ax.containers) == 3
        ax = Drawn().subplots()
        compared.plot("layers", activation="hidden_states", ax=ax)
        assert "hidden state" in ax.get_ylabel()

    def test_differences_are_drawn_with_their_intervals(self, swept):
        comparison = quantdiff.compare(swept)
        frame = comparison.differences().query("metric == 'nll' and baseline == 'plain'")
        ax = comparison.plot("differences", evaluation="perplexity").axes[0]
        frame = frame.sort_values("bits", ascending=False)
        for lines, (_, mine) in zip(ax.collections, frame.groupby("model"), strict=True):
            ends = np.array([segment[:, 1] for segment in lines.get_segments()])
            assert ends.tolist() == mine[["low", "high"]].to_numpy().tolist()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"kind": "pie"}, ("pie", "layers, heads")),
            ({"kind": "bits"}, ("no sweep",)),
            ({"kind": "layers", "group": 2}, ("group 2", "are 1")),
            ({"kind": "heads", "ax": object()}, ("heads", "ax")),
            ({"kind": "bits", "evaluation": "x"}, ("'x'", "none")),
        ],
    )
    def test_refusals(self, compared, options, words):
        with pytest.raises(quantdiff.UsageError) as refusal:
            compared.plot(**options)
        for word in words:
            assert word in str(refusal.value)
