"""A profile as an object and on disk."""

import json
import math

import numpy as np
import pytest
import torch

from quantdiff import Profile, UsageError, record
from quantdiff.analysis.frames import figure_data
from quantdiff.statistics import SiteStatistics
from quantdiff.statistics.activations import AttentionLogits
from quantdiff.statistics.storage import to_json
from tests.standins import two_widths
from tests.tiny import tiny_diffllama, tiny_ids, tiny_llama


def made(model, *seeds, detail="full", length=20):
    with torch.no_grad(), record(model, detail=detail) as recorder:
        for seed in seeds:
            model(input_ids=tiny_ids(2, length, seed=seed))
    return recorder.profile(source="random")


@pytest.fixture(scope="module")
def profile():
    return made(tiny_diffllama(), 0, 1)


def equal(a, b):
    return to_json(a) == to_json(b)


class TestOnDisk:
    @pytest.mark.parametrize("detail", ["full", "extremes"])
    def test_loads_back_equal(self, tmp_path, detail):
        profile = made(tiny_diffllama(), 0, detail=detail)
        profile.command = "quantdiff profile x"
        profile.save(tmp_path / "run")
        loaded = Profile.load(tmp_path / "run")
        assert equal(profile, loaded)
        assert loaded.attention_logits.percentile(99.9) == profile.attention_logits.percentile(99.9)
        assert [s.top.coordinates.tolist() for s in loaded.hidden_states.sites] == [
            s.top.coordinates.tolist() for s in profile.hidden_states.sites
        ]
        assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]

    def test_a_loaded_profile_merges_as_the_original(self, tmp_path, profile):
        profile.save(tmp_path)
        other = made(tiny_diffllama(), 2)
        assert equal(Profile.load(tmp_path).merge(other), profile.merge(other))

    def test_follows_the_format(self, tmp_path, profile):
        profile.save(tmp_path)
        content = json.loads((tmp_path / "profile.json").read_text())
        assert content["format"] == "quantdiff.profile/1"
        assert {"name", "family", "layout", "parameters", "dtype", "lambda"} <= set(
            content["model"]
        )
        assert {"source", "tokens", "sequences", "sequence_length"} <= set(content["data"])
        logits, hidden = content["attention_logits"], content["hidden_states"]
        ranks = {"count", "top", "top1", "top2", "top3", "top10", "top100", "median", "sites"}
        assert set(logits) == set(hidden) == ranks
        numbers = {"absmax", "min", "max", "mean", "std", "kurtosis"}
        assert set(logits["sites"][0]) == {"name", "layer", "heads"}
        assert set(logits["sites"][0]["heads"][0]) == numbers | {"head", "branch"}
        assert set(hidden["sites"][0]) == numbers | {"name", "layer"}
        place = {"value", "layer", "sequence"}
        assert set(logits["top"][0]) == place | {"head", "branch", "query", "key"}
        assert set(hidden["top"][0]) == place | {"token", "channel"}
        assert len(logits["top"]) == len(hidden["top"]) == 100

    def test_a_layer_with_two_attentions_of_other_head_counts(self, tmp_path):
        model = two_widths()
        with torch.no_grad(), record(model) as recorder:
            model(torch.randn(2, 9, 16))
        profile = recorder.profile()
        assert [site.groups for site in profile.attention_logits.sites] == [4, 2] * 2
        profile.save(tmp_path)
        loaded = Profile.load(tmp_path)
        assert loaded.attention_logits.branches == profile.attention_logits.branches
        assert loaded.attention_logits.top(100) == profile.attention_logits.top(100)
        assert loaded.to_frame().equals(profile.to_frame())
        assert equal(profile, loaded)

    def test_the_branches_of_a_layer_with_two_attentions(self, tmp_path):
        model = two_widths()
        with torch.no_grad(), record(model, layout="halves") as recorder:
            model(torch.randn(2, 9, 16))
        profile = recorder.profile()
        profile.save(tmp_path)
        for read in (profile, Profile.load(tmp_path)):
            part = read.attention_logits
            assert part.branches["0.wide"] == [1, 1, 2, 2]
            assert part.branches["0.narrow"] == part.branches["1.narrow"] == [1, 2]
            heads = read.to_frame().query("activation == 'attention_logits'")
            assert heads["branch"].tolist() == [1, 1, 2, 2, 1, 2] * 2
            drawn = figure_data(read, "magnitudes").query("activation == 'attention_logits'")
            counts = drawn.groupby("branch")["count"].sum()
            assert counts.to_dict() == {1: part.count // 2, 2: part.count // 2}
            # Coordinates are the same for both attentions; each entry has its own branch.
            expected = [item for site in part.sites for item in part.items(site)]
            assert {item.branch for item in part.items(part.sites[1]) if item.head == 1} == {2}
            assert {item.branch for item in part.items(part.sites[0]) if item.head == 1} == {1}
            expected.sort(key=lambda item: -item.value)
            assert [vars(item) for item in part.top(100)] == [vars(item) for item in expected[:100]]

    def test_missing_broken_and_newer_ones_are_refused(self, tmp_path, profile):
        with pytest.raises(UsageError, match=r"profile\.json is missing"):
            Profile.load(tmp_path)
        profile.save(tmp_path)
        text = (tmp_path / "profile.json").read_text()
        for broken, words in (
            ("{", "no readable profile"),
            ("[]", "no readable profile"),
            (text.replace("quantdiff.profile/1", "other/1"), "its format is 'other/1'"),
            (
                text.replace("quantdiff.profile/1", "quantdiff.profile/2"),
                "newer than this quantdiff",
            ),
        ):
            (tmp_path / "profile.json").write_text(broken)
            with pytest.raises(UsageError, match=words):
                Profile.load(tmp_path)
        (tmp_path / "profile.json").write_text(text)
        tensors = tmp_path / "profile.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-100])
        with pytest.raises(UsageError, match="broken profile"):
            Profile.load(tmp_path)


def test_where_nothing_was_seen_there_is_no_magnitude():
    empty = SiteStatistics.empty("site", 0, 2, full=True, rank=3, coordinates=5)
    logits = AttentionLogits([empty], {"site": [None, None]})
    assert math.isnan(logits.absmax)
    assert math.isnan(logits.percentile(100))


class TestMerge:
    def test_equals_one_recording(self):
        whole = made(tiny_llama(), 0, 1, 2)
        merged = made(tiny_llama(), 0).merge(made(tiny_llama(), 1)).merge(made(tiny_llama(), 2))
        assert merged.data == whole.data
        assert merged.attention_logits.top(100) == whole.attention_logits.top(100)
        assert merged.hidden_states.top(100) == whole.hidden_states.top(100)
        a, b = (x.to_frame().select_dtypes("number").to_numpy(float) for x in (merged, whole))
        assert np.allclose(a, b, rtol=1e-6, equal_nan=True)
        assert merged.attention_logits.median == whole.attention_logits.median

    def test_leaves_both_parts_alone(self, profile):
        other = made(tiny_diffllama(), 3)
        before = to_json(profile), to_json(other)
        profile.merge(other)
        assert (to_json(profile), to_json(other)) == before

    def test_different_things_are_refused(self, profile):
        for other in (made(tiny_llama(), 0), made(tiny_diffllama(), 0, detail="extremes")):
            with pytest.raises(UsageError, match="cannot be merged"):
                profile.merge(other)


class TestToRead:
    def test_repr_and_html_show_the_table(self, profile):
        assert "DiffLlamaForCausalLM" in repr(profile)
        assert "top-100" in repr(profile)
        assert "<table" in profile._repr_html_()

    def test_html_is_escaped(self, profile):
        named = profile.copy()
        named.model["name"] = "<script>alert(1)</script>"
        assert "<script>" not in named._repr_html_()

    def test_top_values_are_plain_numbers(self, profile):
        item = profile.attention_logits.top(1)[0]
        assert type(item.value) is float
        assert item.value == profile.attention_logits.rank(1) == profile.attention_logits.absmax
        assert profile.attention_logits.percentile(100) == item.value

    def test_summary_is_the_papers_table(self, profile):
        summary = profile.summary()
        assert list(summary.columns) == ["top-1", "top-2", "top-3", "top-10", "top-100", "median"]
        assert summary.loc["hidden_states", "top-3"] == profile.hidden_states.rank(3)

    def test_later_passes_do_not_change_a_profile(self):
        model = tiny_llama()
        with torch.no_grad(), record(model) as recorder:
            model(input_ids=tiny_ids())
            early = recorder.profile()
            before = to_json(early)
            model(input_ids=tiny_ids(seed=5))
        assert to_json(early) == before
        assert recorder.profile().data["tokens"] == 2 * early.data["tokens"]
