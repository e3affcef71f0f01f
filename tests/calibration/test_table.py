"""The calibration table: ranges, merging, disk, convergence, refusals."""

import json

import numpy as np
import pytest
import torch

from quantdiff import CalibrationTable, UsageError, calibrate, record
from quantdiff.calibration.observers import OBSERVERS
from quantdiff.quantization import Scheme
from tests.standins import two_widths
from tests.tiny import tiny_diffllama, tiny_ids, tiny_llama

NAME = "model.layers.1.self_attn"
EVERY = [
    Scheme("attention_logits", bits, name, granularity, symmetric)
    for bits in (4, 8)
    for name in (*OBSERVERS, "percentile:90")
    for granularity in ("tensor", "head")
    for symmetric in (True, False)
]


def batches(*seeds, length=24):
    return [{"input_ids": tiny_ids(1, length, seed=seed)} for seed in seeds]


def recorded(model, *seeds, detail="full"):
    with torch.no_grad(), record(model, detail=detail) as recorder:
        for batch in batches(*seeds):
            model(**batch)
    return recorder.profile(source="random")


def ranges(table):
    return [
        end.tolist() for scheme in EVERY for site in table.sites
        for end in table.range(scheme, site.name)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    return calibrate(tiny_diffllama(), batches(0, 1, 2, 3, 4, 5, 6, 7), source="random")


class TestRanges:
    @pytest.mark.parametrize("scheme", EVERY, ids=str)
    def test_every_scheme_has_one_range_a_head(self, table, scheme):
        for site in table.sites:
            for end in table.range(scheme, site.name):
                assert end.shape == (4,)
                assert end.dtype == np.float32
                assert np.isfinite(end).all()
                assert scheme.granularity == "head" or len(set(end.tolist())) == 1

    def test_head_and_tensor_are_exact_for_absmax(self, table):
        site = table.sites[1]
        least, most = table.range(Scheme("attention_logits", 8, "absmax", "head"), NAME)
        assert (least == site.min).all()
        assert (most == site.max).all()
        least, most = table.range(Scheme("attention_logits", 8, "absmax"), NAME)
        assert (least == site.min.min()).all()
        assert (most == site.max.max()).all()

    def test_what_is_given_is_the_callers_own(self, table):
        for granularity in ("tensor", "head"):
            scheme = Scheme("attention_logits", 8, "absmax", granularity)
            least, most = table.range(scheme, NAME)
            before = least.tolist(), most.tolist()
            least[:], most[:] = 0, 0
            assert tuple(end.tolist() for end in table.range(scheme, NAME)) == before

    def test_percentile_takes_any_parameter(self, table):
        ends = [
            table.range(Scheme("attention_logits", 8, f"percentile:{p}"), NAME)[1][0]
            for p in (50, 99, 99.99)
        ]
        assert ends == sorted(ends)
        assert ends[0] < ends[-1]

    def test_a_profile_in_full_detail_gives_the_same_table(self, table):
        other = CalibrationTable.from_profile(recorded(tiny_diffllama(), *range(8)))
        assert ranges(other) == ranges(table)
        assert other.branches == table.branches
        assert table.branches == {
            f"model.layers.{layer}.self_attn": [1, 1, 2, 2] for layer in range(2)
        }


def test_the_frame_of_a_layer_with_two_attentions_of_other_head_counts():
    model = two_widths()
    with torch.no_grad(), record(model) as recorder:
        model(torch.randn(2, 9, 16))
    table = CalibrationTable.from_profile(recorder.profile())
    heads = table.to_frame("head").query("observer == 'absmax'")
    assert heads["head"].tolist() == [0, 1, 2, 3, 0, 1] * 2
    most = np.concatenate([site.max for site in table.sites])
    assert heads["most"].to_numpy(np.float32).tolist() == most.tolist()


def test_the_branches_of_a_layer_with_two_attentions_of_other_head_counts(tmp_path):
    model = two_widths()
    with torch.no_grad(), record(model, layout="halves") as recorder:
        model(torch.randn(2, 9, 16))
    table = CalibrationTable.from_profile(recorder.profile())
    table.save(tmp_path)
    for read in (table, CalibrationTable.load(tmp_path)):
        assert read.branches["0.narrow"] == [1, 2]
        heads = read.to_frame("head").query("observer == 'absmax'")
        assert heads["branch"].tolist() == [1, 1, 2, 2, 1, 2] * 2


class TestMerge:
    def test_two_parts_equal_the_whole(self, table):
        a = calibrate(tiny_diffllama(), batches(0, 1, 2, 3), source="random")
        b = calibrate(tiny_diffllama(), batches(4, 5, 6, 7), source="random")
        for merged in (a.merge(b), b.merge(a)):
            assert ranges(merged) == ranges(table)
            for name in ("tokens", "sequences", "sequence_length", "source"):
                assert merged.data[name] == table.data[name]
        merged = a.merge(b)
        assert merged.data["earlier_tokens"] == a.data["earlier_tokens"] + b.data["earlier_tokens"]
        assert merged.data["parts"] == [a.data, b.data]
        assert len(merged.data["fingerprint"]) == 64
        # The first parts of both are the first part of the merged one.
        firsts = calibrate(tiny_diffllama(), batches(0, 1, 2, 4, 5, 6))
        for ours, theirs in zip(merged.earlier, firsts.sites, strict=True):
            assert (ours.max == theirs.max).all()
            assert (ours.histogram.count == theirs.histogram.count).all()

    def test_leaves_both_parts_alone(self, table):
        other = calibrate(tiny_diffllama(), batches(9))
        before = ranges(table), ranges(other)
        table.merge(other)
        table._ranges.clear()
        assert (ranges(table), ranges(other)) == before

    def test_a_part_without_a_first_part_counts_as_later_data(self, table):
        other = calibrate(tiny_diffllama(), batches(9))
        assert other.earlier is None
        merged = table.merge(other)
        assert merged.data["earlier_tokens"] == table.data["earlier_tokens"]
        assert (merged.earlier[0].max == table.earlier[0].max).all()

    def test_of_three_is_the_same_in_any_grouping(self):
        a, b, c = (calibrate(tiny_llama(), batches(seed, seed + 5)) for seed in range(3))
        left, right = a.merge(b).merge(c), a.merge(b.merge(c))
        assert left.same_as(right)
        assert left.data["parts"] == [a.data, b.data, c.data]

    def test_different_models_are_refused(self, table):
        for model in (tiny_llama(), tiny_diffllama(num_hidden_layers=3)):
            with pytest.raises(UsageError, match="cannot be merged"):
                table.merge(calibrate(model, batches(0)))


class TestOnDisk:
    def test_loads_back_equal(self, table, tmp_path):
        table.save(tmp_path / "run")
        loaded = CalibrationTable.load(tmp_path / "run")
        assert loaded.same_as(table)
        assert ranges(loaded) == ranges(table)
        assert loaded.moved(EVERY[0]) == table.moved(EVERY[0])
        assert {p.name for p in (tmp_path / "run").iterdir()} == {
            "calibration.json", "calibration.safetensors",
        }  # fmt: skip

    def test_without_a_first_part_too(self, tmp_path):
        table = calibrate(tiny_llama(), batches(0))
        table.save(tmp_path)
        loaded = CalibrationTable.load(tmp_path)
        assert loaded.earlier is None
        assert loaded.same_as(table)

    def test_a_loaded_table_merges_as_the_original(self, table, tmp_path):
        table.save(tmp_path)
        other = calibrate(tiny_diffllama(), batches(20, 21))
        assert CalibrationTable.load(tmp_path).merge(other).same_as(table.merge(other))

    def test_one_count_makes_a_difference(self, table, tmp_path):
        table.save(tmp_path)
        loaded = CalibrationTable.load(tmp_path)
        loaded.sites[0].histogram.zeros[0] += 1
        assert not loaded.same_as(table)

    def test_follows_the_format(self, table, tmp_path):
        table.save(tmp_path)
        content = json.loads((tmp_path / "calibration.json").read_text())
        assert content["format"] == "quantdiff.calibration/1"
        assert set(content["model"]) == {"name", "family", "layout", "parameters", "dtype"}
        assert {"source", "tokens", "sequences", "sequence_length", "fingerprint",
                "earlier_tokens"} == set(content["data"])  # fmt: skip
        assert "q·kᵀ" in content["definition"]["attention_logits"]
        site = content["attention_logits"]["sites"][1]
        assert (site["name"], site["layer"]) == (NAME, 1)
        assert set(site["heads"][0]) == {"head", "branch", "count", "min", "max"}
        assert set(content["convergence"]["absmax"]) == {"largest", "median"}

    def test_missing_broken_and_newer_ones_are_refused(self, table, tmp_path):
        with pytest.raises(UsageError, match=r"calibration\.json is missing"):
            CalibrationTable.load(tmp_path)
        table.save(tmp_path)
        path = tmp_path / "calibration.json"
        text = path.read_text()
        for broken, words in (
            ("{", "no readable calibration"),
            (text.replace("quantdiff.calibration/1", "quantdiff.profile/1"), "its format is"),
            (text.replace("quantdiff.calibration/1", "quantdiff.calibration/2"), "newer"),
            (text.replace('"sites"', '"places"'), "broken calibration"),
        ):
            path.write_text(broken)
            with pytest.raises(UsageError, match=words):
                CalibrationTable.load(tmp_path)
        path.write_text(text)
        tensors = tmp_path / "calibration.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-100])
        with pytest.raises(UsageError, match="broken calibration"):
            CalibrationTable.load(tmp_path)


class TestConvergence:
    def test_of_the_same_text_again_nothing_moves(self):
        table = calibrate(tiny_llama(), batches(0, 0, 0, 0))
        assert table.data["earlier_tokens"] == 72
        for scheme in EVERY:
            if "percentile" not in scheme.range:  # interpolated between ranks
                assert table.moved(scheme).largest <= 2e-6
        assert table.warning() is None

    def test_says_what_moved_most(self, table):
        scheme = Scheme("attention_logits", 8, "absmax", "head")
        moved = table.moved(scheme)
        changes = {
            (site.name, head): 1 - first.absmax[head] / site.absmax[head]
            for site, first in zip(table.sites, table.earlier, strict=True)
            for head in range(4)
        }
        assert moved.largest == pytest.approx(max(changes.values()))
        assert moved.median == pytest.approx(np.median(list(changes.values())))
        assert changes[moved.site, moved.head] == max(changes.values())
        assert table.moved(Scheme("attention_logits", 8, "absmax")).head is None

    def test_warns_of_too_little_data(self):
        warning = calibrate(tiny_llama(), batches(0, 1, length=4)).warning()
        assert "the calibration data were too little" in warning
        assert "layer" in warning
        assert "in one batch" in calibrate(tiny_llama(), batches(0)).warning()

    def test_says_that_it_was_cut_short(self):
        stopped = calibrate(tiny_llama(), batches(*range(8)), stop=lambda: True)
        assert stopped.earlier is None
        assert "cut short" in stopped.warning()
        assert "one batch" not in stopped.warning()

    def test_is_unknown_for_one_batch(self):
        table = calibrate(tiny_llama(), batches(0))
        assert table.moved(EVERY[0]) is None
        assert table.convergence() == {}


class TestRefusals:
    def test_a_dynamic_scheme(self, table):
        with pytest.raises(UsageError, match="dynamic scheme needs no calibration"):
            table.range(Scheme("attention_logits", 8), NAME)

    def test_16_bits(self, table):
        with pytest.raises(UsageError, match="16 bits are not quantized"):
            table.range(Scheme("attention_logits", 16, "mse"), NAME)

    def test_a_site_that_it_lacks(self, table):
        with pytest.raises(UsageError, match=r"has nothing for model\.layers\.7\.self_attn"):
            table.range(Scheme("attention_logits", 8, "mse"), "model.layers.7.self_attn")

    def test_an_observer_that_it_lacks(self, table, monkeypatch):
        monkeypatch.delitem(OBSERVERS, "mse")
        with pytest.raises(UsageError, match="unknown observer 'mse'"):
            table.range(Scheme("attention_logits", 3, "mse"), NAME)

    def test_a_percentile_of_120(self):
        with pytest.raises(UsageError, match="120"):
            Scheme("attention_logits", 8, "percentile:120")

    def test_extremes_alone(self):
        with pytest.raises(UsageError, match="full detail"):
            CalibrationTable.from_profile(recorded(tiny_llama(), 0, detail="extremes"))

    def test_the_first_part_of_another_model(self):
        first = recorded(tiny_llama(num_hidden_layers=1), 0)
        with pytest.raises(UsageError, match="other attention sites"):
            CalibrationTable.from_profile(recorded(tiny_llama(), 0, 1), first)

    def test_a_table_of_another_model(self, table):
        right = {f"model.layers.{i}.self_attn": (i, 4) for i in range(2)}
        table.check_model(right)
        for wrong, words in (
            (right | {NAME: (1, 8)}, f"{NAME} has 4 query heads there, 8 here"),
            (right | {NAME: (5, 4)}, f"{NAME} is layer 1 there, 5 here"),
            (right | {"model.layers.2.self_attn": (2, 4)}, r"nothing for model\.layers\.2"),
            ({NAME: (1, 4)}, r"has a site model\.layers\.0\.self_attn"),
        ):
            with pytest.raises(UsageError, match=words) as refused:
                table.check_model(wrong)
            assert "DiffLlamaForCausalLM" in str(refused.value)

    def test_attention_that_a_model_does_not_tell_before_it_runs(self, table, monkeypatch):
        first, second = (f"model.layers.{i}.self_attn" for i in range(2))
        table.check_model({first: (0, 4)}, {first, second})
        monkeypatch.setattr(table.sites[1], "name", f"{second} (cross-attention)")
        table.check_model({first: (0, 4)}, {first, second})
        with pytest.raises(UsageError, match=r"has a site model\.layers\.1\S+ \(cross-attention\)"):
            table.check_model({first: (0, 4)}, {first})
