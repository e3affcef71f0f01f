"""The numbers of a comparison against those of the profiles and sweeps that it was made of."""

import math
from collections import Counter

import numpy as np
import pytest

import quantdiff
from quantdiff.analysis.compare.paired import intervals
from quantdiff.analysis.sweep import SweepResults
from quantdiff.analysis.sweep.record import read_record, write_record
from quantdiff.analysis.sweep.results import ResultsFile
from quantdiff.calibration.table import SHOWN, CalibrationTable
from tests.analysis.compare.conftest import (
    answers,
    evaluated,
    line,
    metrics_of,
    recorded,
    windows,
    write_checkpoint,
    write_sweep,
)
from tests.tiny import tiny_llama

ACTIVATIONS = ("attention_logits", "hidden_states")


@pytest.fixture(scope="module")
def compared(trio):
    return quantdiff.compare(*trio)


class TestOutliers:
    def test_are_those_of_the_profiles_in_the_paper_s_order(self, compared, trio):
        frame = compared.outliers()
        assert frame["activation"].tolist() == [ACTIVATIONS[0]] * 3 + [ACTIVATIONS[1]] * 3
        assert frame["model"].tolist() == ["plain", "v1", "v2"] * 2
        for row in frame.itertuples():
            profile = trio[["plain", "v1", "v2"].index(row.model)]
            part, first = (getattr(p, row.activation) for p in (profile, trio[0]))
            largest = [item.value for item in part.top(100)]
            assert [row.top1, row.top2, row.top3, row.top10, row.top100] == [
                largest[n - 1] for n in (1, 2, 3, 10, 100)
            ]
            assert row.median == part.median
            assert row.top1_ratio == largest[0] / first.top(1)[0].value
            assert row.median_ratio == part.median / first.median

    def test_layers_are_those_of_the_profiles(self, compared, trio):
        frame = compared.layers()
        for name, profile in zip(["plain", "v1", "v2"], trio, strict=True):
            mine = frame[frame["model"] == name].drop(columns=["group", "model"])
            expected = quantdiff.analysis.figure_data(profile, "layers")
            assert mine.reset_index(drop=True).equals(expected)

    def test_places_are_counted_one_by_one(self, compared, trio):
        frame = compared.places().set_index(["model", "activation", "place"])
        keys = {
            "layer": lambda x: x.layer, "head": lambda x: (x.layer, x.head),
            "query place": lambda x: x.query, "key place": lambda x: x.key,
            "key token": lambda x: (x.sequence, x.key), "channel": lambda x: x.channel,
            "token place": lambda x: x.token, "token": lambda x: (x.sequence, x.token),
            "channel of a token": lambda x: (x.sequence, x.token, x.channel),
        }  # fmt: skip
        names = {
            "head": "L{0}H{1}", "key token": "{1} of sequence {0}", "token": "{1} of sequence {0}",
            "channel of a token": "{2} at {0}:{1}",
        }  # fmt: skip
        for (model, activation, place), row in frame.iterrows():
            items = getattr(trio[["plain", "v1", "v2"].index(model)], activation).top(100)
            counted = Counter(keys[place](item) for item in items).most_common(3)
            assert row["kept"] == len(items) == 100
            assert row["distinct"] == len({keys[place](item) for item in items})
            assert row["share"] == counted[0][1] / len(items)
            told = [
                names.get(place, "{0}").format(*(at if isinstance(at, tuple) else (at,)))
                for at, _ in counted
            ]
            fullest = zip(told, counted, strict=True)
            assert row["most"] == ", ".join(f"{name} ({count})" for name, (_, count) in fullest)
        assert len(frame) == 3 * 10

    def test_massive_activations_are_one_channel_of_one_token(self):
        model = tiny_llama(num_hidden_layers=4)
        profile = recorded(model, "massive")
        for site in profile.hidden_states.sites:
            site.top.coordinates[:, 1:] = 1, 0, 7
        frame = quantdiff.compare(profile).places().set_index(["activation", "place"])
        row = frame.loc["hidden_states", "channel of a token"]
        assert (row["distinct"], row["share"], row["most"]) == (1, 1.0, "7 at 1:0 (100)")


class TestDifferential:
    def test_lambda_of_v1_is_the_model_s_and_of_v2_a_distribution(self, compared, trio):
        frame = compared.lambdas()
        mine = frame[frame["model"] == "v1"]
        assert mine["mean"].tolist() == trio[1].model["lambda"]
        assert mine["low"].isna().all()
        for row in frame[frame["model"] == "v2"].itertuples():
            site = trio[2].lambdas[row.layer]
            values = site.histogram.total()
            assert row.mean == pytest.approx(float(np.average(site.moments.mean)), rel=1e-9)
            assert [row.low, row.median, row.high] == [
                values.percentile(percent)[0] for percent in (5, 50, 95)
            ]
        assert "plain" not in set(frame["model"])

    def test_branches_are_the_heads_of_each(self, compared, trio):
        for row in compared.branches().itertuples():
            profile = trio[["plain", "v1", "v2"].index(row.model)]
            heads = profile.to_frame().query("branch == @row.branch")
            assert row.top1 == heads["absmax"].max()
            assert row.count == heads["count"].sum()
            shown = quantdiff.analysis.figure_data(profile, "magnitudes")
            shown = shown[(shown["activation"] == ACTIVATIONS[0]) & (shown["branch"] == row.branch)]
            below = shown["count"].cumsum().searchsorted(shown["count"].sum() / 2)
            assert shown["low"].iloc[below] <= row.median <= shown["high"].iloc[below]

    def test_maps_are_means_over_all_rows(self, compared, trio):
        for row in compared.maps().itertuples():
            heads = trio[["plain", "v1", "v2"].index(row.model)].maps_frame()
            heads = heads[heads["kind"] == row.kind]
            assert row.rows == heads["rows"].sum()
            for name, over in (("row_sum", "rows"), ("negative_mass", "rows"),
                               ("entropy", "rows"), ("sink", "sink_rows")):  # fmt: skip
                expected = np.average(heads[name].astype(float), weights=heads[over].astype(float))
                assert getattr(row, name) == pytest.approx(expected, rel=1e-9)
            assert row.context_rms_min == heads["context_rms_min"].min()
            assert row.context_rms_max == heads["context_rms_max"].max()
            assert row.lower <= row.context_rms_min * (1 + 1e-6)
            assert row.context_rms_max <= row.upper * (1 + 1e-6)
            assert row.context_rms_min <= row.context_rms_median <= row.context_rms_max
            norms = []  # of every row, as the middle of its bin
            for site in trio[["plain", "v1", "v2"].index(row.model)].maps:
                if site.kind == row.kind:
                    bins = site.context_rms.counts.sum((0, 1))
                    norms += np.repeat(site.context_rms.midpoints(), bins).tolist()
                    norms += [0.0] * int(site.context_rms.zeros.sum())
            assert len(norms) == row.rows
            assert row.context_rms_median == pytest.approx(np.median(norms))
        v1 = compared.maps().set_index(["model", "kind"]).loc[("v1", "difference")]
        assert v1["upper"] == math.sqrt(1 + max(trio[1].model["lambda"]) ** 2)


class TestDifferences:
    def test_are_those_of_the_items(self, swept):
        comparison = quantdiff.compare(swept)
        results = SweepResults.load(swept)
        cells = {
            (row["model"].removeprefix("zoo/"), row["eval"].partition(":")[0], row["bits"]):
            results.items(row["cell"])
            for row in results.rows
        }  # fmt: skip
        frame = comparison.differences()
        names = {"acc": "correct", "acc_norm": "correct_norm", "nll": "nll"}
        for row in frame.itertuples():
            kind = row.evaluation.partition(":")[0]
            model = cells[row.model, kind, row.bits]
            baseline = (row.model, kind, 16) if row.baseline == "16 bits" else (
                row.baseline, kind, row.bits)  # fmt: skip
            of, less = (items[names[row.metric]].astype(float)
                        for items in (model, cells[baseline]))  # fmt: skip
            weights = model.get("tokens", np.ones(len(of))).astype(float)
            expected = (of - less).sum() / weights.sum()
            assert row.difference == pytest.approx(expected, abs=1e-12)
            ends = intervals((of - less)[:, None], weights)[:, 0]  # of this pair alone
            assert [row.low, row.high] == pytest.approx(ends.tolist(), abs=1e-12)
            assert row.low <= row.high
            assert row.excludes_0 == (row.low > 0 or row.high < 0)
            assert row.n == len(of)
            assert row.unit == ("windows" if kind == "perplexity" else "questions")
        between = frame[frame["baseline"] != "16 bits"]
        assert set(between["baseline"]) == {"plain"}
        # Two models, three widths; one metric of the one evaluation and two of the other.
        assert len(between) == 2 * 3 * 3
        assert len(frame) - len(between) == 3 * 2 * 3

    def test_are_those_of_the_results(self, swept):
        comparison = quantdiff.compare(swept)
        values = comparison.accuracy().set_index(["model", "metric", "bits"])["value"]
        for row in comparison.differences().itertuples():
            other = (row.model, row.metric, 16) if row.baseline == "16 bits" else (
                row.baseline, row.metric, row.bits)  # fmt: skip
            expected = values[row.model, row.metric, row.bits] - values[other]
            assert row.difference == pytest.approx(expected, abs=1e-9)

    def test_of_too_few_windows_it_is_not_said_that_they_exclude_0(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        for number, said in ((1, False), (5, False), (6, True)):
            cells = [
                ("m", "perplexity", bits, windows(1, worse=(16 - bits) * 5, number=number))
                for bits in (16, 8)
            ]
            folder = write_sweep(tmp_path / str(number), {"m": told}, cells)
            (row,) = quantdiff.compare(folder).differences().itertuples()
            assert (row.n, row.unit) == (number, "windows")
            assert np.isnan(row.low) if number == 1 else row.low > 0
            assert row.excludes_0 is (True if said else None)

    def test_other_questions_are_never_paired(self, tmp_path):
        for number, name in enumerate(("a", "b")):
            told = {"evaluations": {"choice:q.jsonl": evaluated("choice:q.jsonl", data=name * 64)}}
            cells = [(name, "choice:q.jsonl", 16, answers(number))]
            write_sweep(tmp_path / name, {name: told}, cells)
        comparison = quantdiff.compare(tmp_path / "a", tmp_path / "b")
        assert "differences" not in comparison.frames()
        assert comparison.accuracy()["group"].tolist() == [1, 1, 2, 2]
        (told,) = [w for w in comparison.warnings if "cannot be compared" in w]
        for word in ("choice:q.jsonl", "b", "a", "data", "bbbbbbbbbbbb", "aaaaaaaaaaaa"):
            assert word in told

    def test_models_of_two_sweeps_are_paired(self, tmp_path):
        items = {name: answers(number) for number, name in enumerate(("a", "b"))}
        for name, of_one in items.items():
            told = {"evaluations": {f"choice:{name}/q.jsonl": evaluated("choice:q.jsonl")}}
            cells = [(name, f"choice:{name}/q.jsonl", 16, of_one)]
            write_sweep(tmp_path / name, {name: told}, cells)
        (acc, _) = quantdiff.compare(tmp_path / "b", tmp_path / "a").differences().itertuples()
        assert (acc.model, acc.baseline) == ("a", "b")
        expected = items["a"]["correct"].mean() - items["b"]["correct"].mean()
        assert acc.difference == pytest.approx(expected)

    def test_items_that_are_gone_or_another_s_are_told(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        cells = [(name, "perplexity", 16, windows(0)) for name in ("a", "b")]
        gone = write_sweep(tmp_path / "gone", dict.fromkeys("ab", told), cells, keep_items=False)
        comparison = quantdiff.compare(gone)
        assert "differences" not in comparison.frames()
        assert any("no items" in warning for warning in comparison.warnings)
        cells[1] = ("b", "perplexity", 16, {"nll": np.ones(3), "tokens": np.array([4, 4, 4])})
        other = write_sweep(tmp_path / "other", dict.fromkeys("ab", told), cells)
        comparison = quantdiff.compare(other)
        assert "differences" not in comparison.frames()
        assert any("not those of the same windows" in warning for warning in comparison.warnings)


class TestSweepsTogether:
    def test_a_model_measured_twice_is_told_and_shown_once(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        for number, name in enumerate(("first", "second")):
            cells = [("m", "perplexity", bits, windows(number)) for bits in (16, 8)]
            write_sweep(tmp_path / name, {"m": told}, cells)
        comparison = quantdiff.compare(tmp_path / "first", tmp_path / "second")
        frame = comparison.accuracy()
        assert set(frame["cell"]) == {"first-0", "first-1"}
        (warning,) = [w for w in comparison.warnings if "second time" in w]
        assert "second" in warning
        assert metrics_of(windows(0))["nll"] in frame["value"].tolist()

    def test_a_file_that_one_sweep_names_in_two_ways_is_shown_once(self, tmp_path):
        names = "choice:q.jsonl", "choice:/some/q.jsonl"
        told = {"evaluations": {name: evaluated("choice:q.jsonl") for name in names}}
        cells = [("m", name, bits, answers(bits)) for name in names for bits in (16, 8)]
        comparison = quantdiff.compare(write_sweep(tmp_path / "s", {"m": told}, cells))
        frame = comparison.accuracy()
        assert sorted(zip(frame["cell"], frame["metric"], strict=True)) == [
            (cell, metric) for cell in ("s-0", "s-1") for metric in ("acc", "acc_norm")
        ]
        assert not any("second time" in warning for warning in comparison.warnings)

    def test_a_copy_of_the_weights_under_another_name_is_a_model_too(self, tmp_path):
        told = {"fingerprint": "same", "evaluations": {"perplexity": evaluated("perplexity")}}
        for number, name in enumerate("ab"):  # of the very same cells
            cells = [(name, "perplexity", bits, windows(bits)) for bits in (16, 8)]
            write_sweep(tmp_path / str(number) / "sweep", {name: told}, cells)
        comparison = quantdiff.compare(tmp_path / "0", tmp_path / "1")
        values = comparison.accuracy().query("metric == 'nll'").groupby("model")["value"]
        assert values.apply(list).to_dict() == {
            name: [metrics_of(windows(bits))["nll"] for bits in (16, 8)] for name in "ab"
        }
        between = comparison.differences().query("baseline == 'a'")
        assert between["model"].tolist() == ["b", "b"]
        assert between["difference"].tolist() == [0, 0]

    def test_widths_of_two_sweeps_are_one_line(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        for name, bits in (("one", 16), ("two", 6)):
            write_sweep(tmp_path / name, {"m": told}, [("m", "perplexity", bits, windows(bits))])
        comparison = quantdiff.compare(tmp_path / "one", tmp_path / "two")
        (row,) = comparison.differences().itertuples()
        assert (row.bits, row.baseline) == (6, "16 bits")
        assert not any("second time" in warning for warning in comparison.warnings)

    def test_one_name_for_other_weights_is_two_models(self, tmp_path, trio):
        for name in ("one", "two"):
            told = {"fingerprint": name, "evaluations": {"perplexity": evaluated("perplexity")}}
            write_sweep(tmp_path / name, {"m": told}, [("m", "perplexity", 16, windows(1))])
        comparison = quantdiff.compare(tmp_path / "one", tmp_path / "two")
        assert comparison.names == ["m (one)", "m (two)"]
        assert len(set(comparison.colors.values())) == 2

    def test_ranges_of_other_calibrations_do_not_stand_in_one_line(self, tmp_path):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        for name, bits in (("one", 8), ("two", 4)):
            folder = write_sweep(tmp_path / name, {"m": told}, [])
            options = {"symmetric": True, "calibration": name}
            static = {"range": "mse", "options": options, "value": 20.0}
            write_record(folder, read_record(folder) | {"cells": [name]})
            rows = [line(name, "m", "perplexity", bits, "perplexity", **static)]
            ResultsFile(folder).append(rows)
        comparison = quantdiff.compare(tmp_path / "one", tmp_path / "two")
        assert comparison.accuracy()["bits"].tolist() == [8]
        assert any("second time" in warning for warning in comparison.warnings)

    @pytest.mark.parametrize(
        ("remedy", "texts", "bits"),
        [
            ("gptq", ("a", "b"), [8]),
            ("gptq", ("a", "a"), [8, 4]),
            ("rotate", ("a", "b"), [8, 4]),  # it sees none
            ("rotate", ("a", None), [8, 4]),
        ],
    )
    def test_remedies_of_other_texts_do_not_stand_in_one_line(self, tmp_path, remedy, texts, bits):
        told = {"evaluations": {"perplexity": evaluated("perplexity")}}
        for name, text, width in zip(("one", "two"), texts, (8, 4), strict=True):
            seen = text and {"fingerprint": text, "data": {"fingerprint": text}}
            folder = write_sweep(tmp_path / name, {"m": told | {"remedies": seen}}, [])
            options = {"symmetric": True, "remedy": remedy}
            write_record(folder, read_record(folder) | {"cells": [name]})
            rows = [line(name, "m", "perplexity", width, "perplexity", value=20.0, options=options)]
            ResultsFile(folder).append(rows)
        comparison = quantdiff.compare(tmp_path / "one", tmp_path / "two")
        assert comparison.accuracy()["bits"].tolist() == bits
        assert any("second time" in told for told in comparison.warnings) == (len(bits) == 1)

    def test_all_texts_that_something_was_calibrated_on_are_told(self, tmp_path):
        def write(name, model, calibrated, **way):
            entry, text = calibrated
            about = {entry: {"fingerprint": text, "data": {"fingerprint": text}}}
            told = {"evaluations": {"perplexity": evaluated("perplexity")}} | about
            folder = write_sweep(tmp_path / name, {model: told}, [])
            write_record(folder, read_record(folder) | {"cells": [name]})
            rows = [line(name, model, "perplexity", 8, "perplexity", value=20.0, **way)]
            ResultsFile(folder).append(rows)
            return folder

        static = {"options": {"symmetric": True, "calibration": "c"}}
        smooth = {"options": {"symmetric": True, "remedy": "smooth:0.5"}}
        comparison = quantdiff.compare(
            write("1", "m", ("calibration", "one"), range="mse", **static),
            write("2", "m", ("calibration", "two"), range="absmax", **static),
            write("3", "m", ("remedies", "one"), **smooth),
            write("4", "n", ("remedies", "two"), **smooth),
        )
        assert {told for told in comparison.warnings if "calibrated" in told} == {
            "Static ranges were calibrated on different texts: m on one and two.",
            "Remedies were calibrated on different texts: m on one, n on two.",
        }

    def test_models_that_generate_otherwise_are_compared(self, tmp_path):
        name = "lm-eval:task"
        models = {
            model: {"evaluations": {name: evaluated(name, generation=model)}} for model in "ab"
        }
        cells = [(model, name, 16, answers(number)) for number, model in enumerate("ab")]
        comparison = quantdiff.compare(write_sweep(tmp_path / "s", models, cells))
        assert set(comparison.accuracy()["group"]) == {1}


class TestNames:
    def test_a_model_of_a_profile_and_a_sweep_is_one(self, trio, swept):
        comparison = quantdiff.compare(*trio, swept)
        assert comparison.names == ["plain", "v1", "v2"]

    def test_colours_follow_the_order_of_first_mention(self, trio, swept):
        alone = quantdiff.compare(trio[1], swept)
        assert alone.names == ["v1", "plain", "v2"]
        page = alone.plot("bits", evaluation="perplexity")
        drawn = {
            text.get_text(): handle.lines[0].get_color()
            for text, handle in zip(
                page.legends[0].get_texts(), page.axes[0].containers, strict=True
            )
        }
        assert drawn == {name: alone.colors[name] for name in ("v1", "plain", "v2")}

    def test_two_profiles_of_one_name_are_told_apart_by_their_folders(self, trio, tmp_path):
        for place in ("a/run", "b/run", "c"):
            trio[0].save(tmp_path / place)
        found = quantdiff.compare(*(tmp_path / place for place in ("a/run", "b/run", "c")), trio[0])
        ends = [str(tmp_path / "a/run"), str(tmp_path / "b/run"), "c", "run 4"]
        assert found.names == [f"plain ({end})" for end in ends]

    def test_names_that_look_alike_on_one_line_are_numbered(self, trio):
        some = [trio[0].copy(), trio[0].copy()]
        for profile, name in zip(some, ("a\n", "a\r"), strict=True):
            profile.model["name"] = name
        assert quantdiff.compare(*some).names == ["a�", "a� #2"]

    def test_same_folder_or_profile_is_read_once(self, trio, tmp_path):
        trio[0].save(tmp_path / "a")
        assert len(quantdiff.compare(tmp_path / "a", tmp_path / "a/../a").runs) == 1
        assert len(quantdiff.compare(trio[0], trio[0]).runs) == 1


class TestCheckpoints:
    def test_are_as_the_sidecar_says(self, tmp_path):
        good = write_checkpoint(tmp_path / "good")
        bad = write_checkpoint(tmp_path / "bad", passed=False)
        unseen = write_checkpoint(tmp_path / "unseen", passed=None, data="b" * 64)
        comparison = quantdiff.compare(good, bad, unseen)
        frame = comparison.checkpoints()
        assert frame["group"].tolist() == [1, 1, 2]
        assert frame["verification"].tolist() == [
            "passed", "failed: weights are missing", "not verified",
        ]  # fmt: skip
        row = frame.iloc[0]
        assert (row["model"], row["format"], row["megabytes"]) == ("plain", "bnb-nf4", 1.25)
        measured = ["bits_per_weight", "perplexity", "source_perplexity", "kl", "agreement"]
        assert row[measured].tolist() == [4.5, 21.25, 20.5, 0.0125, 0.875]
        assert "attention logits at 6 bits" in row["schemes"]
        warnings = comparison.warnings
        assert any("weights are missing" in warning for warning in warnings)
        assert any("Losses" in w and "cannot be compared" in w for w in warnings)
        assert comparison.provenance()["command"].tolist() == ["quantdiff export zoo/plain"] * 3
        row = comparison.provenance().iloc[0]
        assert row["scheme"] == "attention logits at 6 bits, dynamic range per tensor, symmetric"
        assert (row["tokens"], row["sequence_length"], row["device"]) == (48, 24, "cpu")

    def test_a_damaged_sidecar_is_left_out(self, tmp_path, trio):
        folder = write_checkpoint(tmp_path / "damaged")
        content = (folder / "quantdiff.json").read_text()
        (folder / "quantdiff.json").write_text(content.replace("bnb-nf4", "bnb-int8"))
        comparison = quantdiff.compare(trio[0], folder)
        assert "checkpoints" not in comparison.frames()
        assert any("damaged" in warning for warning in comparison.warnings)


def test_calibrations_are_the_table_s_ranges(trio):
    earlier = trio[0].copy()
    earlier.data["tokens"] //= 2
    table = CalibrationTable.from_profile(trio[0], earlier)
    frame = quantdiff.compare(table).calibrations().set_index("observer")
    assert list(frame.index) == list(SHOWN)
    for observer, scheme in SHOWN.items():
        ranges = [np.abs(table.range(scheme, site.name)).max() for site in table.sites]
        assert frame.loc[observer, "largest"] == pytest.approx(max(ranges))
        assert frame.loc[observer, "median"] == pytest.approx(np.median(ranges))
        assert frame.loc[observer, "moved_largest"] == table.convergence()[observer]["largest"]
