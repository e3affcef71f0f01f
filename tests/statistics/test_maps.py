"""The streaming measures of attention maps against a materialised fp64 computation."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from quantdiff.attention.layouts import layout
from quantdiff.attention.reference import differential_maps, softmax_maps, sub_norm
from quantdiff.statistics import Visible, map_rows
from tests.statistics.plain_maps import (
    DIFFERENTIAL,
    cases,
    check,
    check_case,
    materialise,
    measure,
    random_qk,
)


@given(case=cases())
def test_equals_materialised_maps(case):
    check_case(case)


@given(case=cases(longest=40))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_many_blocks_of_rows(monkeypatch, case):
    monkeypatch.setattr(map_rows, "BLOCK_ELEMENTS", 1 << 9)
    check_case(case)


@pytest.mark.parametrize("name", ["none", "adjacent_shared"])
def test_long_rows_with_outliers(name):
    generator = torch.Generator().manual_seed(3)
    q, k = random_qk(generator, 1, 4, 2, 300, 300, 64, torch.float32, size=2.0)
    pairs = None if name == "none" else layout(name).pairs(4)
    lam = None if name == "none" else torch.rand(1, 2, 300, 1, generator=generator)
    visible = Visible.causal(1, 300, 300)
    maps, unsure = materialise(q, k, visible, lam=lam, pairs=pairs)
    check(measure(q, k, visible, lam=lam, pairs=pairs), maps, unsure)


@pytest.mark.parametrize("name", ["none", "adjacent"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_cap_bias_and_sinks_are_what_softmax_sees(name, with_sink):
    generator = torch.Generator().manual_seed(1)
    q, k = random_qk(generator, 2, 4, 2, 20, 20, 8, torch.float32, size=4.0)
    table = torch.randn(2, 4, 20, 20, generator=generator)
    pairs = None if name == "none" else layout(name).pairs(4)
    # A sink far above all logits takes all but nothing; one far below changes nothing.
    sink = torch.tensor([0.5, 25.0, -70.0, -torch.inf]) if with_sink else None
    options = {
        "lam": None if pairs is None else 0.6,
        "pairs": pairs,
        "softcap": 5.0,
        "bias": lambda i, j: table[:, :, i:j],
        "sink": sink,
    }
    stop = torch.arange(1, 21, dtype=torch.int32).repeat(2, 1)
    visible = Visible((stop - 9).clamp(min=0), stop)
    visible = visible.only(torch.rand(2, 20, generator=generator) < 0.7)
    sites = measure(q, k, visible, **options)
    check(sites, *materialise(q, k, visible, **options))
    if with_sink and pairs is None:
        assert sites["softmax"].most["row_sum"][0] < 1
        assert sites["softmax"].most["row_sum"][1] < 1e-7
        assert sites["softmax"].least["row_sum"][3] == pytest.approx(1, abs=1e-6)


def test_uniform_maps_by_hand():
    # All logits 0 and λ = 1/2: row n holds 1/(2(n + 1)) in every entry it sees.
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)
    sites = measure(
        q, k, Visible.causal(1, 4, 4), lam=0.5, pairs=([0], [1]),
        spans=[(1, 3)], span_rows=torch.tensor([3]),
    )  # fmt: skip
    soft, difference = sites["branch 1"].summary, sites["difference"].summary
    assert (soft["rows"], soft["weights"], soft["sink_rows"], soft["span_rows"]) == (4, 10, 3, 1)
    assert soft["sink"] == soft["sink_share"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert difference["sink"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 6)
    assert difference["sink_share"] == pytest.approx(soft["sink_share"])
    assert soft["entropy"] == pytest.approx(math.log(24) / 4)
    assert difference["entropy"] == pytest.approx(math.log(24) / 4)
    assert (soft["context_rms_min"], soft["context_rms_max"]) == pytest.approx((0.5, 1))
    assert soft["context_rms_scaled"] == pytest.approx(1)
    assert difference["context_rms_scaled"] == pytest.approx(0.5)
    assert "norm_gain_max" not in soft
    assert (difference["norm_gain_min"], difference["norm_gain_max"]) == pytest.approx((2, 4))
    assert (soft["span_mass"], soft["rest_mass"], soft["span_share"]) == pytest.approx([0.5] * 3)
    assert (difference["span_mass"], difference["rest_mass"]) == pytest.approx((0.25, 0.25))
    assert difference["span_share"] == pytest.approx(0.5)
    assert soft["similarity"] is None
    assert difference["negative_share"] == difference["negative_mass"] == 0


@pytest.mark.parametrize("lam", [0.0, 0.2, 0.8])
def test_the_norm_gain_of_uniform_maps_over_8192_keys(lam):
    # What V2's authors hold against V1's norm: a uniform map over n = 8,192 keys averages values of
    # unit RMS to an RMS of 1/√n, less λ of it, and the norm brings that back to 1.
    n = 8192
    assert math.sqrt(n) == pytest.approx(90.5, abs=0.01)
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 2, 4, 8)  # a few rows of a long text, all logits 0
    k = torch.randn(1, 2, n, 8, generator=generator)
    sites = measure(q, k, Visible.everything(1, 4, n), lam=lam, pairs=([0], [1]))
    row = sites["difference"].summary
    for kind in ("branch 1", "branch 2"):
        soft = sites[kind].summary
        for name in ("context_rms_min", "context_rms_max"):
            assert soft[name] == pytest.approx(1 / math.sqrt(n), rel=1e-6)
        assert soft["context_rms_median"] == pytest.approx(1 / math.sqrt(n), rel=5e-3)
        assert soft["context_rms_scaled"] == pytest.approx(1, rel=1e-6)
        assert soft["entropy"] == pytest.approx(math.log(n), rel=1e-6)
    gain = math.sqrt(n) / (1 - lam)
    assert row["norm_gain_min"] == pytest.approx(gain, rel=1e-5)
    assert row["norm_gain_max"] == pytest.approx(gain, rel=1e-5)
    assert row["norm_gain_median"] == pytest.approx(gain, rel=5e-3)
    assert row["context_rms_scaled"] == pytest.approx(1 - lam, rel=1e-5)
    # And so it is for values: the norm's own gain, but for the ε that the official code adds.
    values = torch.randn(n, 2048, generator=generator)
    weights = torch.full((n,), (1 - lam) / n)
    out = weights @ values
    found = (sub_norm(out, None, 0.0).norm() / out.norm()).item()
    assert found == pytest.approx(row["norm_gain_max"], rel=0.05)  # 2,048 draws: ± 1.6 %
    with_eps = (sub_norm(out, None).norm() / out.norm()).item()
    expected = 1 / math.sqrt(row["context_rms_min"] ** 2 + 1e-5)
    assert with_eps == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", DIFFERENTIAL)
def test_equals_the_reference_of_differential_attention(name):
    generator = torch.Generator().manual_seed(2)
    kind, heads = layout(name), 12
    kv_heads = 6 if name == "adjacent_shared" else 4
    q, k = random_qk(generator, 2, heads, kv_heads, 18, 18, 8, torch.float32)
    lam = torch.rand(2, len(kind.pairs(heads)[0]), 18, 1, generator=generator)
    seen = torch.ones(18, 18, dtype=torch.bool).tril().expand(2, heads, 18, 18)
    maps = softmax_maps(q.double(), k.double(), 8**-0.5, seen, kind)
    first, second = kind.pairs(heads)
    one, two = sorted(set(first)), sorted(set(second))
    sites = measure(
        q,
        k[:, kind.key_heads(heads, kv_heads)],
        Visible.causal(2, 18, 18),
        lam=lam,
        pairs=(first, second),
    )
    unsure = np.full(len(first), 1)
    check(
        sites,
        {
            "branch 1": (maps[:, one], seen[:, one]),
            "branch 2": (maps[:, two], seen[:, two]),
            "difference": (differential_maps(maps, lam.double(), kind), seen[:, first]),
        },
        unsure,
    )


def test_a_noise_head_of_many_pairs_is_measured_once():
    generator = torch.Generator().manual_seed(0)
    q, k = random_qk(generator, 1, 6, 2, 12, 12, 8, torch.float32)
    pairs = layout("grouped:2").pairs(6)
    sites = measure(q, k, Visible.causal(1, 12, 12), lam=0.4, pairs=pairs)
    assert sites["branch 1"].heads == sites["difference"].heads == [0, 1, 3, 4]
    assert sites["branch 2"].heads == [2, 5]
    assert sites["branch 2"].counts["rows"].tolist() == [12, 12]


def test_equal_heads_are_alike_and_cancel():
    generator = torch.Generator().manual_seed(0)
    # Whole numbers: their products are exact in whatever order they are added up.
    q = torch.randint(-3, 4, (1, 1, 9, 8), generator=generator).float().expand(1, 2, 9, 8)
    k = torch.randint(-3, 4, (1, 1, 9, 8), generator=generator).float()
    visible = Visible.causal(1, 9, 9)
    assert measure(q, k, visible)["softmax"].similarity == pytest.approx(1, abs=1e-5)
    row = measure(q, k, visible, lam=1.0, pairs=([0], [1]))["difference"].summary
    assert row["context_rms_max"] == row["entropy"] == row["sink_share"] == row["row_sum"] == 0
    assert row["negative_share"] == 0
    assert row["norm_gain_max"] is None
    json.dumps(row, allow_nan=False)


def test_weights_that_underflow_keep_their_signs():
    # Head 1 decays twice as fast as head 0: far keys are below fp32's range in both maps.
    ramp = torch.arange(0, -400, -1.0)
    q = torch.tensor([1.0, 2.0])[None, :, None, None]
    k = ramp[None, None, :, None]
    visible = Visible.everything(1, 1, 400)
    for sink, head in ((None, 1), (torch.tensor([500.0, 500.0]), 0)):
        for pairs, count in ((([0], [1]), head), (([1], [0]), 399)):
            row = measure(q, k, visible, scale=1.0, lam=0.9, pairs=pairs, sink=sink)
            assert row["difference"].summary["negative_share"] == count / 400, pairs


def test_a_sink_that_takes_all_leaves_nothing():
    q, k = torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8)
    row = measure(q, k, Visible.causal(1, 9, 9), sink=torch.tensor([500.0]))["softmax"].summary
    for name in ("row_sum", "entropy", "sink", "sink_share", "context_rms_max"):
        assert row[name] == 0, name
    assert (row["rows"], row["sink_rows"]) == (9, 8)


def test_a_first_token_out_of_sight_counts_with_nothing():
    q, k = torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4)
    stop = torch.arange(1, 7, dtype=torch.int32)[None]
    row = measure(q, k, Visible((stop - 2).clamp(min=0), stop))["softmax"].summary
    # Row 0 sees the first token alone, row 1 sees it and itself, the others do not see it.
    assert (row["sink_rows"], row["sink"]) == (5, pytest.approx(0.1))
    row = measure(q, k, Visible(stop - 1, stop), key_zero=torch.tensor([2]))["softmax"].summary
    assert (row["sink_rows"], row["sink"]) == (5, 0)
