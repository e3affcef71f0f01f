"""What must not be taken for one thing: other machines, layers, ways, models and failures."""

import json
import math

import numpy as np
import pytest
import torch

import quantdiff
from quantdiff.analysis.sweep.record import read_record, write_record
from quantdiff.analysis.sweep.results import ResultsFile
from tests.analysis.compare.conftest import (
    answers,
    evaluated,
    line,
    metrics_of,
    recorded,
    windows,
    write_sweep,
)
from tests.tiny import tiny_diffllama, tiny_llama

TOLD = {"evaluations": {"perplexity": evaluated("perplexity")}}
CHOICE = "choice:q.jsonl"


def add(folder, cell, items=None, *, model="m", evaluation="perplexity", bits=4, **rest):
    """One more cell of a sweep; without items it failed."""
    write_record(folder, (known := read_record(folder)) | {"cells": [*known["cells"], cell]})
    if items is None:
        failed = {"status": "error", "error": "no memory", "stderr": None, "count": None}
        rows = [line(cell, model, evaluation, bits, None, **failed | rest)]
    else:
        rows = [
            line(cell, model, evaluation, bits, metric, value=float(value), **rest)
            for metric, value in metrics_of(items).items()
        ]
    ResultsFile(folder).append(rows, items)


def of_layer(number):
    return {"options": {"symmetric": True, "layers": [number]}}


class TestSweeps:
    @pytest.mark.parametrize("entry", ["device", "attention", "torch"])
    def test_made_otherwise_stand_apart(self, tmp_path, entry):
        one = write_sweep(tmp_path / "one", {"a": TOLD}, [("a", "perplexity", 16, windows(0))])
        other = {"b": TOLD if entry == "torch" else TOLD | {entry: "other"}}
        two = write_sweep(tmp_path / "two", other, [("b", "perplexity", 16, windows(1))])
        if entry == "torch":
            record = read_record(two)
            record["versions"]["torch"] = "other"
            write_record(two, record)
        comparison = quantdiff.compare(one, two)
        assert set(comparison.accuracy()["group"]) == {1, 2}
        assert "differences" not in comparison.frames()
        assert any(f"differ in {entry} (other and " in told for told in comparison.warnings)

    @pytest.mark.parametrize("cell", ["same", "another"])
    @pytest.mark.parametrize("again", [True, False])
    def test_a_success_is_shown_and_no_failure_of_another_folder(self, tmp_path, cell, again):
        one = write_sweep(tmp_path / "one", {"m": TOLD}, [("m", "perplexity", 16, windows(0))])
        add(one, "same")
        two = write_sweep(tmp_path / "two", {"m": TOLD}, [])
        add(two, cell, windows(1) if again else None)
        comparison = quantdiff.compare(one, two)
        found = comparison.accuracy().query("bits == 4")
        if again:
            assert found["value"].tolist() == list(metrics_of(windows(1)).values())
            assert comparison.differences()["bits"].tolist() == [4]
        else:
            assert found["status"].tolist() == ["error"]
        assert [told for told in comparison.warnings if "failed" in told] == (
            [] if again else ["m: 1 cell of perplexity failed."]
        )
        assert not any("second time" in told for told in comparison.warnings)

    def test_schemes_together_of_one_short_name_are_several_lines(self, tmp_path):
        folder = write_sweep(tmp_path / "s", {"m": TOLD}, [("m", "perplexity", 16, windows(0))])
        ways = [("dynamic", "token"), ("dynamic", "tensor"), ("mse", "tensor")]
        for number, (range_, granularity) in enumerate(ways, start=1):
            usual = {"site": "weights", "bits": 8, "range": "dynamic", "granularity": "channel",
                     "symmetric": True}  # fmt: skip
            other = {"site": "linear_inputs", "range": range_, "granularity": granularity}
            together = {
                "site": "weights+linear_inputs", "scheme": "W8A8", "range": None,
                "granularity": None, "options": {"schemes": [usual, usual | other]},
            }  # fmt: skip
            add(folder, f"c{number}", windows(number), bits=8, **together)
        comparison = quantdiff.compare(folder)
        labels = ["W8A8", "W8A8, linear inputs tensor", "W8A8, linear inputs mse tensor"]
        (table,) = [t for t in comparison.tables().tables if t.key == "bits-perplexity-nll"]
        assert table.frame["scheme"].tolist() == labels
        values = [metrics_of(windows(number))["nll"] for number in range(4)]
        assert table.frame["bits_8"].tolist() == values[1:]
        found = comparison.differences().set_index("scheme")["difference"]
        assert found[labels].tolist() == pytest.approx([v - values[0] for v in values[1:]])

    @pytest.mark.parametrize("reference", ["none", "failed", "done"])
    def test_cells_of_some_layers_are_told_and_not_drawn(self, tmp_path, reference):
        folder = write_sweep(tmp_path / "s", {"m": TOLD}, [])
        if reference != "none":
            add(folder, "fp", windows(9) if reference == "done" else None, bits=16)
        for number in (0, 1):
            add(folder, f"l{number}", windows(number), **of_layer(number))
        comparison = quantdiff.compare(folder)
        assert comparison.report().figures == []
        tables = [part.key for part in comparison.report().tables if part.key.startswith("bits")]
        assert bool(tables) == (reference != "none")
        assert any("cells of some layers or heads" in told for told in comparison.warnings)

    def test_some_layers_do_not_make_a_figure_of_their_site(self, tmp_path):
        cells = [("m", "perplexity", bits, windows(bits)) for bits in (16, 8)]
        folder = write_sweep(tmp_path / "s", {"m": TOLD}, cells)
        add(folder, "layer", windows(1), site="keys", granularity="token", **of_layer(0))
        keys = [part.key for part in quantdiff.compare(folder).report().figures]
        assert keys == ["figure-perplexity-attention-logits"]

    def test_the_paper_s_logits_stand_beside_logits_alone(self, tmp_path):
        told = {"evaluations": {CHOICE: evaluated(CHOICE)}}
        cells = [("m", CHOICE, bits, answers(bits)) for bits in (16, 4)]
        folder = write_sweep(tmp_path / "s", {"m": told}, cells)
        add(folder, "w", answers(1), evaluation=CHOICE, site="weights", granularity="channel")
        figures = quantdiff.compare(folder, published=True).report().figures
        assert [part.key.removeprefix("figure-choice-q-jsonl-") for part in figures] == [
            "attention-logits", "weights",
        ]  # fmt: skip
        for part, beside in zip(figures, (True, False), strict=True):
            names = [text.get_text() for legend in part.page.legends for text in legend.texts]
            assert any("published" in name for name in names) == beside
            assert ("Dashed" in part.caption) == beside

    def test_all_differences_are_from_one_model(self, tmp_path):
        cells = [
            (name, "perplexity", bits, windows(3 * number + bits))
            for number, name in enumerate("abc")
            for bits in (16, 8, 4)
            if (name, bits) != ("a", 8)
        ]
        comparison = quantdiff.compare(
            write_sweep(tmp_path / "s", dict.fromkeys("abc", TOLD), cells)
        )
        found = comparison.differences().query("baseline != '16 bits'")
        assert set(found["baseline"]) == {"a"}
        assert found["bits"].tolist() == [16, 4, 16, 4]
        assert any("a lacks results of perplexity that b and c have" in told
                   for told in comparison.warnings)  # fmt: skip

    def test_an_evaluation_has_one_number_in_all_frames(self, tmp_path):
        told = {"evaluations": {"noise": evaluated("noise")} | TOLD["evaluations"]}
        cells = [(name, "perplexity", 16, windows(n)) for n, name in enumerate("ab")]
        folder = write_sweep(tmp_path / "s", dict.fromkeys("ab", told), cells)
        for name in "ab":
            add(folder, name, windows(0), model=name, evaluation="noise")
        comparison = quantdiff.compare(folder)
        numbers = comparison.accuracy().groupby("eval")["group"].unique()
        assert numbers.map(list).to_dict() == {"noise": [1], "perplexity": [2]}
        assert set(comparison.differences()["group"]) == {2}
        assert set(comparison.noise()["group"]) == {1}

    @pytest.mark.parametrize("number", [3, 14])
    def test_differences_of_many_models_stay_inside_their_figure(self, tmp_path, number):
        names = [f"m{place}" for place in range(number)]
        cells = [(name, "perplexity", 16, windows(place)) for place, name in enumerate(names)]
        folder = write_sweep(tmp_path / "s", dict.fromkeys(names, TOLD), cells)
        ax = quantdiff.compare(folder).plot("differences").axes[0]
        points = [float(x) for drawn in ax.lines[1:] for x in drawn.get_xdata()]
        low, high = ax.get_xlim()
        assert len(set(points)) == number - 1
        assert low < min(points) <= max(points) < high


class TestEvaluationsOnFilesOfOneName:
    ARC, HELLASWAG = "choice:data/arc/q.jsonl", "choice:data/hellaswag/q.jsonl"

    @pytest.fixture
    def folder(self, tmp_path):
        told = {"evaluations": {name: evaluated(name, name) for name in (self.ARC, self.HELLASWAG)}}
        cells = [
            (model, name, bits, answers(10 * seed + bits + place))
            for seed, model in enumerate("ab")
            for place, name in enumerate(told["evaluations"])
            for bits in (16, 4)
        ]
        return write_sweep(tmp_path / "s", dict.fromkeys("ab", told), cells)

    def test_are_told_apart(self, folder):
        comparison = quantdiff.compare(folder)
        assert not any("cannot be compared" in told for told in comparison.warnings)
        report = comparison.report()
        for parts in (report.tables, report.figures):
            titles = [part.title for part in parts if "q.jsonl" in part.title]
            assert len(titles) == len(set(titles))
            for name in ("arc", "hellaswag"):
                assert any(f"choice:{name}/q.jsonl" in title for title in titles)
                assert any(f"choice:{name}/q.jsonl, 40" in part.caption for part in parts)

    @pytest.mark.parametrize("kind", ["bits", "differences"])
    def test_are_drawn_one_by_one(self, folder, kind):
        comparison = quantdiff.compare(folder)
        drawn = [
            comparison.plot(kind, evaluation=f"choice:{name}/q.jsonl").axes[0]
            for name in ("arc", "hellaswag")
        ]
        values = [[list(line.get_ydata()) + list(line.get_xdata()) for line in ax.lines]
                  for ax in drawn]  # fmt: skip
        assert values[0] != values[1]
        if kind == "bits":
            assert [ax.get_title() for ax in drawn] == [
                "choice:arc/q.jsonl",
                "choice:hellaswag/q.jsonl",
            ]
        with pytest.raises(quantdiff.UsageError, match=r"choice:arc/q\.jsonl, choice:hellaswag"):
            comparison.plot(kind, evaluation="choice:q.jsonl")

    def test_of_one_content_are_one(self, tmp_path):
        for name, dtype in (("a", "float32"), ("b", "float32"), ("c", "bfloat16")):
            choice = f"choice:{name}/q.jsonl"
            told = {"evaluations": {choice: evaluated(choice)}, "dtype": dtype}
            write_sweep(tmp_path / name, {name: told}, [(name, choice, 16, answers(1))])
        comparison = quantdiff.compare(*(tmp_path / name for name in "abc"))
        (told,) = [one for one in comparison.warnings if "cannot be compared" in one]
        assert told.startswith(
            "Results of choice:q.jsonl of c cannot be compared with those of a, b"
        )
        assert comparison.accuracy()["group"].tolist() == [1, 1, 1, 1, 2, 2]


class TestProfiles:
    def test_channels_that_were_measured_too_change_no_comparison(self):
        some = [recorded(tiny_llama(), "a", sites=("hidden_states",)), recorded(tiny_llama(), "b")]
        comparison = quantdiff.compare(*some)
        assert set(comparison.outliers()["group"]) == {1}
        assert comparison.outliers()["top1_ratio"].tolist() == [1.0] * 4

    @pytest.mark.parametrize("place", [0, 1])
    def test_of_some_layers_stand_apart(self, place):
        model = tiny_llama(num_hidden_layers=3)
        whole = recorded(model, "whole")
        part = recorded(model, "part", layers=[whole.hidden_states.sites[place].name])
        comparison = quantdiff.compare(whole, part)
        assert comparison.outliers().groupby("model")["group"].first().to_dict() == {
            "whole": 1, "part": 2,
        }  # fmt: skip
        assert any("layers (1 alone and all)" in told for told in comparison.warnings)

    @pytest.mark.parametrize("sign", [-1, 1])
    def test_the_bound_of_a_difference_holds_for_every_sign_of_lambda(self, sign):
        model = tiny_diffllama()
        for layer in model.model.layers:
            with torch.no_grad():
                for name in ("q1", "k1", "q2", "k2"):
                    of_map = int(name[1]) == (1 if sign > 0 else 2)
                    getattr(layer.self_attn, f"lambda_{name}").fill_(0.4 * of_map)
        profile = recorded(model, "m")
        known = profile.model["lambda"]
        assert all(sign * lam > 1 for lam in known)
        row = quantdiff.compare(profile).maps().set_index("kind").loc["difference"]
        expected = [math.hypot(1, lam) if sign > 0 else 1 + abs(lam) for lam in known]
        assert row["upper"] == pytest.approx(max(expected), rel=1e-12)
        assert row["context_rms_max"] <= row["upper"]
        (norm,) = [ax for ax in quantdiff.compare(profile).plot("maps").axes
                   if "RMS" in ax.get_ylabel()]  # fmt: skip
        assert max(drawn.get_ydata()[0] for drawn in norm.lines[1:]) == row["upper"]

    def test_layers_without_attention_do_not_hide_the_bound(self):
        profile = recorded(tiny_diffllama(), "hybrid")
        for site in profile.maps:
            site.layer += 1
        profile.model["lambda"] = [None, *profile.model["lambda"]]
        row = quantdiff.compare(profile).maps().set_index("kind").loc["difference"]
        assert row["upper"] == pytest.approx(math.hypot(1, max(profile.model["lambda"][1:])))
        profile.model["lambda"] = None
        assert np.isnan(
            quantdiff.compare(profile).maps().set_index("kind").loc["difference", "upper"]
        )


class TestNames:
    def test_a_profile_and_a_sweep_that_differ_are_told(self, tmp_path, trio):
        folder = write_sweep(tmp_path / "s", {"zoo/plain": TOLD | {"parameters": 7}}, [])
        (told,) = [w for w in quantdiff.compare(trio[0], folder).warnings if "another model" in w]
        assert f"parameters {trio[0].model['parameters']} and 7" in told
        assert "family" not in told

    def test_two_profiles_and_a_sweep_of_one_name_lack_nothing(self, tmp_path):
        some = [recorded(tiny_llama(seed=seed), "m") for seed in (0, 1)]
        same = {entry: some[0].model[entry] for entry in ("family", "parameters")}
        cells = [("m", "perplexity", 16, windows(0))]
        comparison = quantdiff.compare(
            *some, write_sweep(tmp_path / "s", {"m": TOLD | same}, cells)
        )
        assert comparison.names == ["m (run 1)", "m (run 2)", "m"]
        assert not any("There is no" in told for told in comparison.warnings)


def test_runs_two_levels_down_are_found(tmp_path, trio):
    trio[0].save(tmp_path / "demo/profiles/plain")
    cells = [("zoo/v1", "perplexity", 16, windows(0))]
    folder = write_sweep(tmp_path / "demo/sweep", {"zoo/v1": TOLD}, cells)
    (folder / "calibrations/inside").mkdir(parents=True)
    (folder / "calibrations/inside/profile.json").write_text(json.dumps({}))  # a run's own
    comparison = quantdiff.compare(tmp_path / "demo")
    assert comparison.names == ["plain", "v1"]
    assert not any("Left out" in told for told in comparison.warnings)
