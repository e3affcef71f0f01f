"""A sweep from Python: what it computes, what it goes on with, what it refuses."""

import json
import shutil

import numpy as np
import pytest
import torch

import quantdiff
from quantdiff import CalibrationTable, Scheme, UsageError
from quantdiff.analysis.evaluation import Stopped, Text, evaluation
from quantdiff.analysis.sweep import SweepResults, sweep
from tests.tiny import save_tiny, tiny_llama, tiny_tokenizer


def without_seconds(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def lines_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def write_questions(folder, **beside):
    folder.mkdir()
    lines = [{"query": f"the {n}", "choices": ["king", "whale"], "gold": 0} for n in "abc"]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line | beside) + "\n" for line in lines))
    return path


def refused(call, *words):
    with pytest.raises(UsageError) as refusal:
        call()
    for word in words:
        assert word in str(refusal.value)


class TestCells:
    def test_each_is_what_the_evaluation_gives(self, small, live, text):
        model, tokenizer, _ = live
        results = small([live], evaluations=("perplexity",), granularities=("tensor", "head"))
        alone = evaluation("perplexity", model, tokenizer, text)
        for row in results.rows:
            schemes = []
            if row["site"]:
                schemes = [Scheme(row["site"], row["bits"], row["range"], row["granularity"])]
            outcome = alone.run(
                lambda schemes=schemes: quantdiff.fake_quantize(model, *schemes), batch_size=1
            )
            metric = next(m for m in outcome.metrics if m.name == row["metric"])
            assert (row["value"], row["stderr"], row["count"]) == (
                metric.value, metric.stderr, metric.count,
            )  # fmt: skip
            for name, array in outcome.items.items():
                np.testing.assert_array_equal(results.items(row["cell"])[name], array)
        assert len(results.rows) == 6

    def test_a_line_has_the_fields_of_the_contract(self, small, live):
        results = small([live], ranges=("dynamic",), granularities=("row",))
        fields = [
            "cell", "model", "scheme", "site", "bits", "range", "granularity", "options", "causal",
            "eval", "metric", "value", "stderr", "count", "data", "seconds", "status",
        ]  # fmt: skip
        reference, _, quantized, _ = results.rows
        assert list(reference) == list(quantized) == fields
        assert (reference["scheme"], reference["bits"], reference["range"]) == ("fp", 16, None)
        assert (quantized["scheme"], quantized["site"]) == ("L4", "attention_logits")
        assert quantized["options"] == {"symmetric": True}
        assert quantized["causal"]
        assert not small([live], granularities=("tensor",)).rows[-1]["causal"]

    def test_sixteen_bits_run_once_for_all_ranges(self, small, live, known):
        results = small([live], granularities=("tensor", "head", "row"))
        assert known.calls == 4
        frame = results.frame()
        assert (frame["bits"] == 16).sum() == 2  # metrics
        assert frame["symmetric"].isna().sum() == 2

    def test_batches_change_nothing(self, small, live, tmp_path):
        one = small([live], evaluations=("perplexity",))
        three = small([live], evaluations=("perplexity",), out=tmp_path / "three", batch_size=3)
        a, b = one.frame(), three.frame()
        assert list(a["cell"]) == list(b["cell"])
        np.testing.assert_allclose(a["value"], b["value"], rtol=1e-5)

    def test_the_reference_is_taken_once_and_only_where_needed(
        self, small, live, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("COUNTED_LOG", str(tmp_path / "log"))
        small([live], bits=(16, 8, 4))
        small([live], bits=(16, 8, 4))
        small([live], bits=(16, 8, 4, 3))
        words = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()]
        assert words == ["prepare", "run", "run", "run", "prepare", "run"]
        assert not list((tmp_path / "out").glob(".reference*"))


class TestModels:
    def test_one_at_a_time_is_held(self, small, folders, known):
        held = []
        known.on_run = lambda _: held.append(sum(model() is not None for model in known.models))
        results = small(folders)
        assert results.models == folders
        # The second is opened twice, when all is planned and when it is swept.
        assert len(known.models) == 3
        distinct = {id(model()) for model in known.models if model() is not None}
        assert max(held) == 1
        assert len(distinct) <= 1

    def test_live_ones_are_used_as_they_are(self, small, live):
        training = live[0].train()
        before = {name: value.clone() for name, value in training.state_dict().items()}
        small([live], evaluations=("perplexity",))
        assert training.training
        for name, value in training.state_dict().items():
            assert torch.equal(value, before[name])

    def test_one_under_two_names(self, small, live, tmp_path):
        results, other = small([live]), (live[0], live[1], "other")
        # What a result depends on is not the name.
        cells = [row["cell"] for row in small([other], out=tmp_path / "other").rows]
        assert cells == [row["cell"] for row in results.rows]
        refused(lambda: small([other]), "under the name live", "other")
        refused(lambda: small([live, other], out=tmp_path / "both"), "same model", "live", "other")


class TestGoingOn:
    def test_a_finished_sweep_computes_nothing(self, small, live, known, tmp_path):
        small([live])
        before = (tmp_path / "out" / "results.jsonl").read_bytes()
        calls, notes = known.calls, []
        small([live], note=notes.append)
        assert known.calls == calls
        assert (tmp_path / "out" / "results.jsonl").read_bytes() == before
        assert notes == ["2 of 2 cells are finished already"]

    def test_extended_by_bits_evaluations_and_models(self, small, live, known):
        small([live])
        assert known.calls == 2
        results = small([live], bits=(16, 6, 3))
        assert known.calls == 4
        assert set(results.frame()["bits"]) == {16, 6, 4, 3}
        results = small([live], evaluations=("counted", "perplexity"))
        assert known.calls == 4
        assert set(results.frame()["eval"]) == {"counted", "perplexity"}
        results = small([(tiny_llama(seed=1), tiny_tokenizer(), "second")])
        assert known.calls == 6
        assert results.models == ["live", "second"]
        assert results.missing == 0

    def test_one_file_of_questions_is_one_wherever_it_lies(
        self, small, live, tmp_path, monkeypatch
    ):
        here, there = (f"choice:{write_questions(tmp_path / name)}" for name in ("here", "there"))
        results = small([live], evaluations=(here, there))
        assert {row["eval"] for row in results.rows} == {here}
        assert results.missing == 0
        monkeypatch.chdir(tmp_path / "there")
        notes = []
        again = small([live], evaluations=("choice:questions.jsonl",), note=notes.append)
        assert notes == ["2 of 2 cells are finished already"]
        assert again.rows == results.rows
        # What is added under the other name belongs to the same evaluation.
        more = small([live], bits=(16, 3), evaluations=("choice:questions.jsonl",))
        assert {row["eval"] for row in more.rows} == {here}
        (about,) = more.record["models"].values()
        assert list(about["evaluations"]) == [here]
        assert 3 in {row["bits"] for row in more.rows}
        # The last lines of it are others, and so are the cells.
        assert small([live], evaluations=(f"{there}@2",)).rows[-1]["cell"] not in {
            row["cell"] for row in results.rows
        }

    def test_stopped_and_gone_on_with(self, small, live, known, tmp_path):
        whole = small([live], bits=(16, 8, 6, 4), out=tmp_path / "whole")
        known.calls = 0
        with pytest.raises(Stopped):
            small([live], bits=(16, 8, 6, 4), stop=lambda: known.calls == 3)
        partial = SweepResults.load(tmp_path / "out")
        assert partial.missing == 2
        results = small([live], bits=(16, 8, 6, 4))
        assert known.calls == 5
        assert without_seconds(results.rows) == without_seconds(whole.rows)

    def test_a_failing_cell_does_not_stop_the_others(self, small, live, known, tmp_path):
        def fail(call):
            if call == 2:
                raise RuntimeError("no memory\nat all")

        known.on_run = fail
        results = small([live], bits=(16, 8, 4))
        (failed,) = results.failed
        assert failed["bits"] == 8
        assert failed["status"] == "error"
        assert failed["error"] == "RuntimeError: no memory at all"
        assert failed["value"] is failed["metric"] is None
        assert set(results.frame().dropna(subset="value")["bits"]) == {16, 4}
        known.on_run = None
        results = small([live], bits=(16, 8, 4))
        assert known.calls == 4
        assert results.failed == []
        assert len(lines_of(tmp_path / "out")) == 7  # the failure stays in the file

    def test_a_value_that_is_not_finite_is_a_failure(self, small, live, known, monkeypatch):
        from quantdiff.analysis.evaluation import Metric, Outcome

        outcome = Outcome((Metric("size", float("inf"), None, 1),))
        monkeypatch.setattr(known.Counted, "run", lambda self, *_, **__: outcome)
        results = small([live], bits=(4,))
        assert "size is inf" in results.failed[0]["error"]

    def test_an_error_that_is_not_known_is_none(self, small, live, known, monkeypatch):
        from quantdiff.analysis.evaluation import Metric, Outcome

        outcome = Outcome((Metric("size", 1.0, float("nan"), 1),))
        monkeypatch.setattr(known.Counted, "run", lambda self, *_, **__: outcome)
        assert small([live], bits=(4,)).rows[0]["stderr"] is None

    def test_a_model_that_is_gone_fails_its_cells_alone(self, small, folders, known, tmp_path):
        second = tmp_path / "second"
        shutil.copytree(folders[1], second)

        def remove(call):
            if call == 1:
                shutil.rmtree(second)

        known.on_run = remove
        results = small([folders[0], str(second)])
        assert {row["model"] for row in results.failed} == {str(second)}
        assert len(results.failed) == 2
        assert (results.frame()["status"] == "ok").sum() == 4

    def test_overwrite_begins_anew(self, small, live, known, tmp_path):
        small([live])
        (tmp_path / "out" / "mine.txt").write_text("keep")
        results = small([live], bits=(8,), overwrite=True)
        assert [row["bits"] for row in results.rows] == [8, 8]
        assert len(list((tmp_path / "out" / "items").iterdir())) == 1
        assert (tmp_path / "out" / "mine.txt").exists()


class TestOtherThings:
    """What is not what the results in the folder belong to."""

    def test_a_changed_model(self, small, live):
        small([live])
        model, tokenizer, name = live
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1e-3
        refused(lambda: small([live]), name, "weights", "--overwrite")
        changed = (tiny_llama(rope_theta=5e5), tokenizer, name)
        refused(lambda: small([changed]), name, "config")
        refused(lambda: small([(tiny_llama(), tiny_tokenizer(bos=False), name)]), name)
        assert small([(tiny_llama(), tokenizer, name)]).missing == 0

    def test_a_model_that_changes_while_the_sweep_runs(self, small, folders, known, tmp_path):
        second = tmp_path / "second"
        shutil.copytree(folders[0], second)
        known.on_run = lambda _: save_tiny(second, tiny_llama(seed=5))
        results = small([folders[1], str(second)])
        assert {row["model"] for row in results.failed} == {str(second)}
        assert "changed" in results.failed[0]["error"]

    @pytest.mark.parametrize("other", [{"attention": "eager"}, {"dtype": "float64"}])
    def test_another_way_of_computing(self, small, folders, other):
        small(folders[:1])
        ((name, value),) = other.items()
        refused(lambda: small(folders[:1], **other), name, value)

    def test_changed_data(self, small, live, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("the whale and the king " * 20)
        text = Text(str(path), 96, 24)
        small([live], text=text)
        path.write_text("the winter and the sea " * 20)
        refused(lambda: small([live], text=text), "counted", "other data", "--out")

    def test_more_data(self, small, live, text):
        small([live])
        refused(lambda: small([live], text=Text(text.source, 120, 24)), "counted", "more or less")

    def test_other_settings(self, small, live, monkeypatch):
        small([live])
        monkeypatch.setenv("COUNTED_SETTING", "x")
        refused(lambda: small([live]), "counted", "settings")

    def test_other_versions(self, small, live, tmp_path):
        small([live])
        path = tmp_path / "out" / "sweep.json"
        record = json.loads(path.read_text())
        record["versions"]["torch"] = "1.0"
        path.write_text(json.dumps(record))
        refused(lambda: small([live]), "torch", "1.0", torch.__version__)

    def test_nothing_changes_where_something_is_refused(self, small, live, tmp_path):
        small([live])
        before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
        refused(lambda: small([(tiny_llama(seed=3), live[1], live[2])], bits=(2,)), "weights")
        assert before == {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}

    def test_a_folder_of_something_else(self, small, live, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "results.jsonl").write_text("{}\n")
        refused(lambda: small([live]), "results.jsonl", "--out")
        (tmp_path / "file").write_text("x")
        refused(lambda: small([live], out=tmp_path / "file"), "cannot be written")

    def test_a_sweep_that_runs_there(self, small, live, known, tmp_path):
        words = []

        def again(call):
            if call == 1:
                with pytest.raises(UsageError, match="another sweep") as refusal:
                    small([live])
                words.append(str(refusal.value))

        known.on_run = again
        small([live])
        assert len(words) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("models", "schemes", "evaluations", "words"),
        [
            ([], [Scheme("attention_logits", 4)], ["counted"], ("no model",)),
            (["live"], [], ["counted"], ("empty",)),
            (["live"], [Scheme("attention_logits", 4)], [], ("evaluation",)),
            (["live"], [Scheme("attention_logits", 4)], ["guess"], ("guess", "perplexity")),
            (["live", "live"], [Scheme("attention_logits", 4)], ["counted"], ("twice",)),
        ],
    )
    def test_one_sentence_and_no_folder(
        self, live, known, tmp_path, text, models, schemes, evaluations, words
    ):
        out = tmp_path / "some" / "where"
        models = [live for _ in models]
        refused(lambda: sweep(models, schemes, evaluations, out=out, text=text), *words)
        assert not out.parent.exists()

    def test_all_models_are_opened_before_the_first_cell(self, small, folders, known, tmp_path):
        refused(lambda: small([folders[0], str(tmp_path / "none")]), "none")
        assert known.calls == 0

    def test_a_table_that_is_none(self, small, live, tmp_path):
        refused(lambda: small([live], ranges=("mse",), tables=[tmp_path]), "calibration.json")


class TestStaticRanges:
    def test_a_sweep_calibrates_by_itself_once(self, small, folders, text, known, tmp_path):
        notes = []
        options = {"ranges": ("dynamic", "mse"), "calibration_tokens": 96, "note": notes.append}
        results = small(folders, **options)
        assert results.failed == []
        tables = sorted((tmp_path / "out" / "calibration").iterdir())
        assert len(tables) == 2
        for folder in tables:
            table = CalibrationTable.load(folder)
            assert table.data["source"] == "corpus:train"
            assert table.data["tokens"] == 96
            assert table.data["sequence_length"] == text.seq_len
        assert [note for note in notes if "too little" in note]
        # It is what a calibration by hand gives.
        model, tokenizer = quantdiff.load(folders[0], device="cpu")
        table = next(t for t in map(CalibrationTable.load, tables) if "plain" in t.model["name"])
        scheme = Scheme("attention_logits", 4, "mse")
        alone = evaluation("perplexity", model, tokenizer, text)
        outcome = alone.run(
            lambda: quantdiff.fake_quantize(model, scheme, table=table), batch_size=1
        )
        results = small(folders, evaluations=("perplexity",), **options)
        frame = results.frame().query("model == @folders[0] and range == 'mse'")
        frame = frame.query("eval == 'perplexity' and metric == 'perplexity'")
        assert frame["value"].item() == outcome.metrics[0].value
        times = [(f / "calibration.json").stat().st_mtime_ns for f in tables]
        small(folders, bits=(16, 4, 3), **options)
        assert times == [(f / "calibration.json").stat().st_mtime_ns for f in tables]

    def test_it_calibrates_the_sites_that_are_asked_for(self, live, text, tmp_path, known):
        out = tmp_path / "out"
        schemes = [Scheme("attention_logits", 4, "absmax"), Scheme("keys", 4, "absmax", "channel")]
        options = {"out": out, "text": text, "calibration_tokens": 96}
        sweep([live], schemes[:1], ["counted"], **options)
        (folder,) = (out / "calibration").iterdir()
        before = CalibrationTable.load(folder)
        assert before.more == {}
        together = (*schemes, Scheme("linear_inputs", 8, "percentile:99.9"))
        results = sweep([live], [*schemes, together], ["counted"], **options)
        assert results.failed == []
        after = CalibrationTable.load(folder)
        assert list(after.more) == ["linear_inputs", "keys"]
        assert all(
            after.range(schemes[0], site.name)[1][0] == before.range(schemes[0], site.name)[1][0]
            for site in before.sites
        )

    def test_a_table_without_a_site_is_refused_at_once(self, live, text, tmp_path, known):
        model, tokenizer, _ = live
        windows = quantdiff.calibration.text_windows("corpus:train", tokenizer, tokens=96,
                                                     seq_len=24)  # fmt: skip
        table = quantdiff.calibrate(model, windows, sites=("keys",))
        schemes = [Scheme("keys", 4, "mse"), Scheme("values", 4, "mse")]
        refused(
            lambda: sweep([live], schemes, ["counted"], out=tmp_path, text=text, tables=[table]),
            "no ranges of values", "--sites values",
        )  # fmt: skip

    def test_another_calibration_is_another_sweep(self, small, live):
        options = {"ranges": ("absmax",), "calibration_tokens": 96}
        small([live], **options)
        small([live])  # dynamic ranges go with any
        options["calibration_tokens"] = 120
        refused(lambda: small([live], **options), "another calibration")

    def test_each_model_finds_its_table(self, small, folders, text, tmp_path):
        twin = str(save_tiny(tmp_path / "twin", tiny_llama(seed=7)))
        tables = []
        for number, name in enumerate([folders[0], twin]):
            model, tokenizer = quantdiff.load(name, device="cpu")
            windows = quantdiff.calibration.text_windows(
                "corpus:train", tokenizer, tokens=96 + 24 * number, seq_len=24
            )
            quantdiff.calibrate(model, windows).save(tmp_path / f"table-{number}")
            tables.append(tmp_path / f"table-{number}")
        results = small([twin, folders[0]], ranges=("absmax",), tables=tables)
        used = {name: results.record["models"][name]["calibration"] for name in results.models}
        assert used[folders[0]]["data"]["tokens"] == 96
        assert used[twin]["data"]["tokens"] == 120
        assert not (tmp_path / "out" / "calibration").exists()
        refused(
            lambda: small([folders[1]], ranges=("absmax",), tables=tables[:1],
                          out=tmp_path / "two"),
            "table-0", "fits none",
        )  # fmt: skip
        refused(lambda: small([folders[0]], tables=tables[:1]), "static")

    def test_a_table_of_a_model_that_was_moved(self, small, live, tmp_path):
        model, tokenizer, _ = live
        table = quantdiff.calibrate(
            model,
            quantdiff.calibration.text_windows("corpus:train", tokenizer, tokens=96, seq_len=24),
        )
        table.model["name"] = "elsewhere"
        notes = []
        results = small([live], ranges=("mse",), tables=[table], note=notes.append)
        assert results.failed == []
        assert "elsewhere" in notes[0]
        other = quantdiff.CalibrationTable(**{
            name: getattr(table, name)
            for name in ("data", "definition", "sites", "branches", "earlier", "versions")
        } | {"model": table.model | {"name": "a third"}})  # fmt: skip
        refused(
            lambda: small([live], ranges=("mse",), tables=[table, other], out=tmp_path / "b"),
            "both fit", "live",
        )  # fmt: skip

    def test_a_calibration_that_fails_fails_static_cells_alone(
        self, small, live, known, monkeypatch
    ):
        tries = []

        def fail(*_, **__):
            tries.append(1)
            raise RuntimeError("no")

        monkeypatch.setattr("quantdiff.analysis.sweep.ranges.calibrate", fail)
        results = small([live], bits=(16, 8, 4), ranges=("dynamic", "mse"))
        assert [row["range"] for row in results.failed] == ["mse", "mse"]
        assert len(tries) == 1
        assert known.calls == 3


class TestTheCalibrationText:
    def refused(self, call, source):
        refused(call, "calibrated on", source, "--data")

    def test_the_training_text_of_a_sweep_of_its_own(self, small, live):
        text = Text("corpus:train", 96, 24)
        self.refused(lambda: small([live], ranges=("mse",), text=text), "corpus:train")
        small([live], text=text)  # dynamic ranges were calibrated on nothing

    def test_a_table_on_the_held_out_text(self, small, live, text, tmp_path):
        model, tokenizer, _ = live
        windows = quantdiff.calibration.text_windows(text.source, tokenizer, tokens=48, seq_len=12)
        table = quantdiff.calibrate(model, windows)
        options = {"ranges": ("mse",), "tables": [table]}
        self.refused(lambda: small([live], **options), text.source)
        # A copy, and more of the text in other windows.
        copy = tmp_path / "copy.txt"
        shutil.copy(text.source, copy)
        options["text"] = Text(str(copy), 96, 32)
        self.refused(lambda: small([live], **options), str(copy))
        options["text"] = Text("corpus", 96, 32)
        merged = table.merge(quantdiff.calibrate(
            model,
            quantdiff.calibration.text_windows("corpus", tokenizer, tokens=48, seq_len=24),
        ))  # fmt: skip
        self.refused(lambda: small([live], **options | {"tables": [merged]}), "corpus")
        assert small([live], **options).failed == []

    def test_questions_are_known_by_their_file(self, small, live, tmp_path):
        model, tokenizer, _ = live
        path = write_questions(tmp_path / "asked", text="the king " * 30)
        windows = quantdiff.calibration.text_windows(path, tokenizer, tokens=48, seq_len=24)
        table = quantdiff.calibrate(model, windows)
        options = {"ranges": ("mse",), "tables": [table], "evaluations": (f"choice:{path}@2",)}
        self.refused(lambda: small([live], **options), str(path))

    def test_questions_in_a_folder_with_an_at_sign(self, small, live, tmp_path):
        model, tokenizer, _ = live
        path = write_questions(tmp_path / "a@b", text="the king " * 30)
        windows = quantdiff.calibration.text_windows(path, tokenizer, tokens=48, seq_len=24)
        table = quantdiff.calibrate(model, windows)
        options = {"ranges": ("mse",), "tables": [table], "evaluations": (f"choice:{path}@2",)}
        self.refused(lambda: small([live], **options), str(path))
        (told,) = small([live], evaluations=(f"choice:{path}@2",)).record["models"].values()
        assert told["evaluations"][f"choice:{path}@2"]["source"] == str(path)


class TestResults:
    def test_load_is_what_the_sweep_returned(self, small, live, tmp_path):
        results = small([live])
        loaded = SweepResults.load(tmp_path / "out")
        assert loaded.rows == results.rows
        assert loaded.record == results.record
        assert repr(loaded) == repr(results)

    def test_frame_in_the_order_of_the_grid(self, small, live, tmp_path):
        results = small([live], bits=(4, 16, 8))
        path = tmp_path / "out" / "results.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("".join(f"{line}\n" for line in reversed(lines)))
        frame = SweepResults.load(tmp_path / "out").frame()
        assert list(dict.fromkeys(frame["bits"])) == list(dict.fromkeys(results.frame()["bits"]))
        assert frame["bits"].dtype == "Int64"
        assert frame["value"].dtype == "float64"

    def test_html_shows_every_metric(self, small, live):
        html = small([live], evaluations=("perplexity",))._repr_html_()
        assert "perplexity" in html
        assert html.count("<table") == 2


def test_definitions_are_recorded_and_decide_no_cell(small, live, tmp_path):
    first = small([live])
    assert {"attention_logits", "grid", "range"} <= first.record["definitions"].keys()
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    del record["definitions"]
    (tmp_path / "out" / "sweep.json").write_text(json.dumps(record))
    again = small([live])
    assert again.record == first.record
    assert again.rows == first.rows
