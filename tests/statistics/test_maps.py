"""The streaming measures of attention maps against a materialised fp64 computation."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from torch.utils._python_dispatch import TorchDispatchMode

from quantdiff.attention.layouts import layout
from quantdiff.attention.reference import differential_maps, softmax_maps, sub_norm
from quantdiff.statistics import NonFiniteError, Visible, map_rows
from quantdiff.statistics.maps import MAP_DEFINITIONS, MapStatistics, measure_maps
from tests import reference

DIFFERENTIAL = ("adjacent", "halves", "adjacent_shared", "grouped:2")
SPAN = ("span_mass", "rest_mass", "span_share")


def sites_of(heads, pairs=None):
    kinds = {"softmax": range(heads)}
    if pairs is not None:
        first, second = pairs
        kinds = {
            "branch 1": sorted(set(first)),
            "branch 2": sorted(set(second)),
            "difference": first,
        }
    return {kind: MapStatistics.empty("layer.attention", 3, kind, h) for kind, h in kinds.items()}


def measure(q, k, visible, *, scale=None, lam=None, pairs=None, **options):
    sites = sites_of(q.shape[1], pairs)
    first, second = pairs or (None, None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    measure_maps(q, k, scale, visible, sites, lam=lam, first=first, second=second, **options)
    return sites


def dense(visible, shape):
    """The visibility as a boolean tensor (B, H, N, M)."""
    columns = torch.arange(shape[-1])
    seen = (columns >= visible.start[:, None, :, None]) & (columns < visible.stop[:, None, :, None])
    extra = visible.mask_rows(0, shape[2])
    return (seen if extra is None else seen & extra).expand(shape).contiguous()


def materialise(q, k, visible, *, lam=None, pairs=None, softcap=None, bias=None, sink=None):
    """Of each kind the maps in fp64 and what they see, (B, h, N, M); and the unsure signs, (h,)."""
    logits = reference.logits(q, k, q.shape[-1] ** -0.5)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias(0, q.shape[2]).double()
    seen = dense(visible, logits.shape)
    hidden = logits.masked_fill(~seen, -torch.inf)
    column = torch.full_like(hidden[..., :1], -torch.inf)
    if sink is not None:
        column = sink.double()[None, :, None, None].expand(column.shape)
    weights = torch.cat([hidden, column], -1).softmax(-1)[..., :-1].nan_to_num()
    if pairs is None:
        return {"softmax": (weights, seen)}, None
    first, second = pairs
    lam = torch.as_tensor(lam, dtype=torch.float32).double()
    a, b = weights[:, first], lam * weights[:, second]
    either = seen[:, first] | seen[:, second]
    both = seen[:, first].any(-1, keepdim=True) & seen[:, second].any(-1, keepdim=True)
    seen_by_pairs = either & both
    # Where the two weights agree to rounding, fp32 may find the other sign.
    unsure = seen_by_pairs & ((a - b).abs() <= 3e-4 * torch.maximum(a, b))
    one, two = sorted(set(first)), sorted(set(second))
    return {
        "branch 1": (weights[:, one], seen[:, one]),
        "branch 2": (weights[:, two], seen[:, two]),
        "difference": (a - b, seen_by_pairs),
    }, unsure.sum((0, 2, 3)).numpy()


def rows_of(w, seen, head, zero):
    """Per row of a head that sees a key: (sequence, query, weights seen, weight on the first)."""
    for b in range(len(w)):
        for n in range(w.shape[2]):
            columns = seen[b, head, n].numpy()
            if columns.any():
                x = w[b, head, n].numpy()
                sees_first = bool(columns[zero[b]])
                yield b, n, x[columns], x[zero[b]] if sees_first else 0.0, sees_first


def mean(values):
    return float(np.mean(values)) if len(values) else None


def expected_of(w, seen, kind, zero, spans, span_rows):
    """Every measure of each head by its definition."""
    result = []
    for head in range(w.shape[1]):
        rows = list(rows_of(w, seen, head, zero))
        sinks = [(x, at) for _, _, x, at, sees in rows if not (sees and len(x) == 1)]
        share = [np.abs(x) / np.abs(x).sum() for _, _, x, _, _ in rows]
        rms = np.array([math.sqrt((x**2).sum()) for _, _, x, _, _ in rows])
        counts = np.array([len(x) for _, _, x, _, _ in rows])
        sums = [x.sum() for _, _, x, _, _ in rows]
        taken = [
            (x, y[:, slice(*spans[b])])
            for b, n, x, _, _ in rows
            if spans[b] is not None and n == span_rows[b]
            for y in [np.where(seen[b, head, n : n + 1], w[b, head, n : n + 1], 0.0)]
        ]
        some = bool(rows)
        row = {
            "rows": len(rows),
            "weights": int(counts.sum()),
            "row_sum": mean(sums),
            "row_sum_min": min(sums, default=None),
            "row_sum_max": max(sums, default=None),
            "negative_share": float(sum((x < 0).sum() for _, _, x, _, _ in rows) / counts.sum())
            if some
            else None,
            "negative_mass": mean([-x[x < 0].sum() for _, _, x, _, _ in rows]),
            "sink": mean([at for _, at in sinks]),
            "sink_share": mean([abs(at) / np.abs(x).sum() for x, at in sinks]),
            "sink_rows": len(sinks),
            "entropy": mean([-(p[p > 0] * np.log(p[p > 0])).sum() for p in share]),
            "context_rms_min": float(rms.min()) if some else None,
            "context_rms_median": float(np.median(rms)) if some else None,
            "context_rms_max": float(rms.max()) if some else None,
            "context_rms_scaled": float((rms * np.sqrt(counts)).min()) if some else None,
            "span_rows": len(taken),
            "span_mass": mean([y.sum() for _, y in taken]),
            "rest_mass": mean([x.sum() - y.sum() for x, y in taken]),
            "span_share": mean([np.abs(y).sum() / np.abs(x).sum() for x, y in taken]),
        }
        if kind == "difference":
            row["norm_gain_min"] = float(1 / rms.max()) if some else None
            row["norm_gain_median"] = float(1 / np.median(rms)) if some else None
            row["norm_gain_max"] = float(1 / rms.min()) if some else None
        result.append(row)
    return result


def similarity_of(w, seen):
    """Mean over queries of the mean cosine of two heads' rows, pair by pair."""
    found = []
    for b in range(len(w)):
        for n in range(w.shape[2]):
            x = torch.where(seen[b, :, n], w[b, :, n], 0.0).numpy()
            length = np.linalg.norm(x, axis=1)
            if len(x) < 2 or (seen[b, :, n].sum(-1) < 2).any() or (length == 0).any():
                continue
            cosines = [
                x[i] @ x[j] / (length[i] * length[j]) for i in range(len(x)) for j in range(i)
            ]
            found.append(np.mean(cosines))
    return float(np.mean(found)) if found else None


def compare(row, exact, kind, unsure):
    """The measures of some rows, to 1e-4."""
    for name, value in exact.items():
        found, rel, tolerance = row[name], 1e-4, 1e-4
        if value is None or found is None:
            assert found is value, name
            continue
        if "median" in name:
            rel = 5e-3
        if name.startswith(("context_rms", "norm_gain")):
            # A difference that cancels is rounded as its two maps are.
            tolerance = 1e-6
            if kind == "difference":
                tolerance = 1e-5 if name.startswith("context") else 1e-5 * value**2
        if name == "negative_share":
            rel, tolerance = 0, unsure / exact["weights"]
        bound = rel * abs(value) + tolerance + 1e-12
        assert abs(found - value) <= bound, (kind, name, found, value)


def check(sites, maps, unsure=None, zero=None, spans=None, span_rows=None):
    for kind, (w, seen) in maps.items():
        site, batch = sites[kind], len(w)
        zeros = [0] * batch if zero is None else zero.tolist()
        at = [-1] * batch if span_rows is None else span_rows.tolist()
        signs = unsure if kind == "difference" else np.zeros(w.shape[1])
        expected = expected_of(w, seen, kind, zeros, spans or [None] * batch, at)
        rows = list(site.rows())
        assert [row.pop("head") for row in rows] == site.heads
        for row, exact, sign in zip(rows, expected, signs, strict=True):
            assert row.keys() == exact.keys()
            compare(row, exact, kind, sign)
        shape = (batch, 1, -1, w.shape[-1])  # the rows of all heads as those of one
        pooled = expected_of(
            w.reshape(shape), seen.reshape(shape), kind, zeros, [None] * batch, [-1] * batch
        )[0]
        pooled = {name: value for name, value in pooled.items() if name not in (*SPAN, "span_rows")}
        compare(site.summary, pooled, kind, sum(signs))
        similarity = similarity_of(w, seen)
        assert (site.similarity is None) == (similarity is None)
        assert site.summary["similarity"] == site.similarity
        if similarity is not None:
            assert site.similarity == pytest.approx(similarity, rel=1e-4, abs=1e-4)


def random_qk(generator, batch, heads, groups, rows, keys, width, dtype, size=1.0, outliers=True):
    q = torch.randn(batch, heads, rows, width, generator=generator) * size
    k = torch.randn(batch, groups, keys, width, generator=generator)
    if outliers:  # a channel that a few queries and keys share, as in real models
        q[:, :, ::3, 0] *= 6
        k[:, :, ::5, 0] *= 6
        k[:, :, 0] += 1.5
    return q.to(dtype), k.to(dtype)


@st.composite
def cases(draw, longest=24):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, rows = draw(st.integers(1, 3)), draw(st.integers(1, longest))
    name = draw(st.sampled_from(["none", *DIFFERENTIAL]))
    shapes = [(1, 1), (4, 2), (6, 3), (3, 3)]
    if name != "none":
        shapes = [(6, 6), (6, 3), (12, 4)] if name == "grouped:2" else [(2, 1), (4, 2), (8, 4)]
    heads, groups = draw(st.sampled_from(shapes))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    width = draw(st.sampled_from([3, 8, 16]))
    keys = rows + draw(st.integers(0, 6))
    size = draw(st.sampled_from([0.01, 1.0, 3.0]))
    q, k = random_qk(generator, batch, heads, groups, rows, keys, width, dtype, size)
    visible, zero = Visible.causal(batch, rows, keys), None
    kind = draw(
        st.sampled_from(["causal", "full", "window", "left", "right", "ragged", "mask", "headmask"])
    )
    lengths = torch.randint(1, rows + 1, (batch,), generator=generator)
    if kind == "full":
        visible = Visible.everything(batch, rows, keys)
    elif kind == "window":
        window = draw(st.integers(1, 6))
        visible = Visible((visible.stop - window).clamp(min=0), visible.stop)
    elif kind == "left":
        zero = keys - lengths
        start = zero[:, None].expand(batch, rows).int()
        visible = Visible(start, visible.stop)
    elif kind == "right":
        visible = visible.only(torch.arange(rows) < lengths[:, None])
    elif kind == "ragged":
        visible = Visible(*torch.randint(0, keys + 1, (2, batch, rows), generator=generator).int())
        zero = torch.randint(0, keys, (batch,), generator=generator)
    elif kind in ("mask", "headmask"):
        shape = (draw(st.sampled_from([1, batch])), heads if kind == "headmask" else 1, rows, keys)
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.95]))
        visible = Visible((visible.stop - 20).clamp(min=0), visible.stop)
        if draw(st.booleans()):
            visible = visible.only(torch.rand(batch, rows, generator=generator) < 0.6)
        callback = draw(st.booleans())
        visible.mask = (lambda i, j: mask[:, :, i:j]) if callback else mask
        zero = torch.randint(0, keys, (batch,), generator=generator)
    pairs = lam = None
    if name != "none":
        pairs = layout(name).pairs(heads)
        lam = draw(st.sampled_from([0.0, 0.3, 0.8, 1.4, -0.2, "token"]))
        if lam == "token":
            # At λ = 1 two maps may cancel to their rounding, in which fp32 and fp64 differ.
            lam = torch.rand(batch, len(pairs[0]), rows, 1, generator=generator) * 0.95
    spans, span_rows = [], torch.randint(-1, rows, (batch,), generator=generator)
    for _ in range(batch):
        a, b = sorted(torch.randint(0, keys + 1, (2,), generator=generator).tolist())
        spans.append((a, b) if a < b else None)
    return q, k, visible, {
        "lam": lam, "pairs": pairs, "key_zero": zero, "spans": spans, "span_rows": span_rows,
    }  # fmt: skip


def check_case(case):
    q, k, visible, options = case
    sites = measure(q, k, visible, **options)
    maps, unsure = materialise(q, k, visible, lam=options["lam"], pairs=options["pairs"])
    check(sites, maps, unsure, options["key_zero"], options["spans"], options["span_rows"])


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


def close(sites, others):
    for kind, site in sites.items():
        a, b = site.to_arrays(), others[kind].to_arrays()
        for name in a:
            if name.startswith("context_rms."):
                continue
            assert np.allclose(a[name], b[name], rtol=1e-5, atol=1e-5), (kind, name)
        # A value at the edge of a bin may be rounded into the next.
        medians = [x.context_rms.percentile(50) for x in (site, others[kind])]
        assert np.allclose(*medians, rtol=1e-2, equal_nan=True)


@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(["none", *DIFFERENTIAL]),
    pads=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    left=st.booleans(),
)
@settings(max_examples=40)
def test_batch_order_and_padding_change_nothing(seed, name, pads, left):
    generator = torch.Generator().manual_seed(seed)
    heads = 6 if name == "grouped:2" else 4
    lengths = [12, 5, 9]
    pairs = None if name == "none" else layout(name).pairs(heads)
    total = max(n + pad for n, pad in zip(lengths, pads, strict=True))
    alone = sites_of(heads, pairs)
    q = torch.full((3, heads, total, 8), torch.nan)
    k = torch.full((3, 2, total, 8), torch.nan)
    lam = torch.full((3, 0 if pairs is None else len(pairs[0]), total, 1), torch.nan)
    begins = [total - n if left else 0 for n in lengths]
    for b, (n, begin) in enumerate(zip(lengths, begins, strict=True)):
        real = slice(begin, begin + n)
        q[b, :, real], k[b, :, real] = (
            x[0] for x in random_qk(generator, 1, heads, 2, n, n, 8, torch.float32)
        )
        lam[b, :, real] = torch.rand(lam[b, :, real].shape, generator=generator)
        single = measure(
            q[b : b + 1, :, real], k[b : b + 1, :, real], Visible.causal(1, n, n),
            pairs=pairs, lam=None if pairs is None else lam[b : b + 1, :, real],
            spans=[(1, 4)], span_rows=torch.tensor([n - 1]),
        )  # fmt: skip
        for kind, site in alone.items():
            site.merge(single[kind])
    start = torch.tensor(begins)
    length = torch.tensor(lengths)
    stop = torch.arange(1, total + 1).expand(3, total)
    real = (stop > start[:, None]) & (stop <= (start + length)[:, None])
    visible = Visible(start[:, None].expand(3, total).int(), stop.int()).only(real)
    order = torch.randperm(3, generator=generator)
    batched = measure(
        q[order], k[order], Visible(visible.start[order], visible.stop[order]), pairs=pairs,
        lam=None if pairs is None else lam[order], key_zero=start[order],
        spans=[(begins[b] + 1, begins[b] + 4) for b in order],
        span_rows=(start + length - 1)[order],
    )  # fmt: skip
    close(batched, alone)
    assert batched[next(iter(batched))].counts["span_rows"].tolist()[0] == 3


@pytest.mark.parametrize("name", ["none", "adjacent"])
def test_two_halves_merge_to_the_whole(name):
    generator = torch.Generator().manual_seed(5)
    q, k = random_qk(generator, 4, 4, 2, 15, 15, 8, torch.float32)
    pairs = None if name == "none" else layout(name).pairs(4)
    lam = None if pairs is None else 0.7
    whole = measure(q, k, Visible.causal(4, 15, 15), lam=lam, pairs=pairs)
    halves = [
        measure(q[i], k[i], Visible.causal(2, 15, 15), lam=lam, pairs=pairs)
        for i in (slice(0, 2), slice(2, 4))
    ]
    for kind, site in halves[0].items():
        site.merge(halves[1][kind])
        for key, array in site.to_arrays().items():
            assert np.allclose(array, whole[kind].to_arrays()[key], rtol=1e-12), key
    again = sites_of(4, pairs)
    for i in (slice(0, 2), slice(2, 4)):  # and so do two calls with the same sites
        first, second = pairs or (None, None)
        measure_maps(
            q[i], k[i], 8**-0.5, Visible.causal(2, 15, 15), again, lam=lam, first=first,
            second=second,
        )  # fmt: skip
    assert [list(s.rows()) for s in again.values()] == [list(s.rows()) for s in halves[0].values()]


def test_other_sites_do_not_merge():
    site = MapStatistics.empty("a", 0, "softmax", [0, 1])
    for other in (
        MapStatistics.empty("b", 0, "softmax", [0, 1]),
        MapStatistics.empty("a", 1, "softmax", [0, 1]),
        MapStatistics.empty("a", 0, "branch 1", [0, 1]),
        MapStatistics.empty("a", 0, "softmax", [0, 2]),
    ):
        with pytest.raises(ValueError, match="cannot be merged"):
            site.merge(other)


@given(case=cases())
@settings(max_examples=20)
def test_arrays_hold_everything(case):
    q, k, visible, options = case
    for site in measure(q, k, visible, **options).values():
        arrays = load(save(site.to_arrays()))
        again = MapStatistics.from_arrays(site.name, site.layer, site.kind, site.heads, arrays)
        assert list(again.rows()) == list(site.rows())
        assert again.summary == site.summary
        for name, array in again.to_arrays().items():
            assert (array == site.to_arrays()[name]).all()
            assert array.dtype == arrays[name].dtype
        assert (again.context_rms.counts == site.context_rms.counts).all()
        assert again.context_rms.first == site.context_rms.first
        again.merge(site)
        assert (again.counts["rows"] == 2 * site.counts["rows"]).all()
        with pytest.raises(ValueError, match="arrays of"):
            MapStatistics.from_arrays("a", 0, site.kind, [*site.heads, 99], arrays)


def test_what_holds_nothing_says_so():
    site = MapStatistics.empty("a", 0, "difference", [0, 2])
    rows = [*site.rows(), site.summary]
    assert all(row["rows"] == 0 for row in rows)
    assert all(rows[0][name] is None for name in ("row_sum", "sink", "norm_gain_max", *SPAN))
    assert len(json.loads(json.dumps(rows, allow_nan=False))) == 3
    visible = Visible.causal(1, 5, 5).only(torch.zeros(1, 5, dtype=torch.bool))
    found = measure(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), visible)["softmax"]
    assert found.summary == MapStatistics.empty("a", 0, "softmax", [0, 1]).summary


def test_every_measure_is_defined():
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    row = measure(q, k, Visible.causal(1, 5, 5), lam=0.1, pairs=([0], [1]))["difference"].summary
    endings = ("_min", "_median", "_max")
    named = {next((n.removesuffix(e) for e in endings if n.endswith(e)), n) for n in row}
    assert named == MAP_DEFINITIONS.keys() - {"map"}


@given(seed=st.integers(0, 2**31), size=st.sampled_from([0.0, 0.1, 1.0, 20.0]))
@settings(max_examples=30)
def test_bounds_of_the_context(seed, size):
    generator = torch.Generator().manual_seed(seed)
    q, k = random_qk(generator, 1, 8, 4, 70, 70, 16, torch.float32, size, outliers=False)
    visible = Visible.causal(1, 70, 70)
    soft = measure(q, k, visible)["softmax"]
    assert (soft.least["context_rms_scaled"] >= 1 - 1e-6).all()
    assert (soft.most["context_rms"] <= 1 + 1e-6).all()
    assert np.allclose([soft.least["row_sum"], soft.most["row_sum"]], 1, atol=2e-6)
    lam = torch.rand(1, 4, 70, 1, generator=generator) * 0.998 + 0.001
    pairs = layout("adjacent_shared").pairs(8)
    difference = measure(q, k, visible, lam=lam, pairs=pairs)["difference"]
    assert (difference.least["context_rms"] > 0).all()
    assert (difference.most["context_rms"] < math.sqrt(2)).all()
    assert (difference.least["context_rms_scaled"] < 1).all()  # row 0 holds 1 − λ alone


@given(lam=st.floats(0, 2), seed=st.integers(0, 2**31))
@settings(max_examples=20)
def test_rows_of_a_difference_sum_to_one_minus_lambda(lam, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = random_qk(generator, 2, 4, 2, 40, 40, 8, torch.float32)
    site = measure(q, k, Visible.causal(2, 40, 40), lam=lam, pairs=([0, 2], [1, 3]))["difference"]
    for value in (site.least["row_sum"], site.most["row_sum"], site.summary["row_sum"]):
        assert np.allclose(value, 1 - lam, atol=1e-5)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.precisions = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                # A view that repeats its elements takes no memory.
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.precisions.add(torch.backends.mkldnn.matmul.fp32_precision)
        return result


@pytest.mark.parametrize("name", ["none", "adjacent"])
def test_no_tensor_of_n_by_n(name):
    pairs = None if name == "none" else ([0], [1])
    lam = None if pairs is None else 0.5
    generator = torch.Generator().manual_seed(0)

    def largest(n):
        q, k = random_qk(generator, 1, 2, 2, n, n, 16, torch.float32)
        with Largest() as seen:
            measure(q, k, Visible.causal(1, n, n), lam=lam, pairs=pairs)
        return seen.elements

    assert largest(1024) < 1024 * 1024
    assert largest(4096) <= map_rows.BLOCK_ELEMENTS < 4096 * 4096 / 16


def test_products_are_true_fp32():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with Largest() as seen:
            measure(torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), Visible.causal(1, 8, 8))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen.precisions == {"ieee"}


def test_autocast_rounds_nothing():
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    plain = measure(q, k, Visible.causal(1, 8, 8))["softmax"]
    with torch.autocast("cpu", torch.bfloat16):
        cast = measure(q, k, Visible.causal(1, 8, 8))["softmax"]
    assert list(cast.rows()) == list(plain.rows())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_logits_are_refused_and_nothing_is_added(bad):
    q, k = torch.randn(2, 4, 30, 8).abs(), torch.randn(2, 2, 30, 8).abs()
    q[1, 2, 7, 3] = bad
    for pairs in (None, ([0, 2], [1, 3])):
        sites = sites_of(4, pairs)
        first, second = pairs or (None, None)
        with pytest.raises(NonFiniteError) as caught:
            measure_maps(
                q, k, 1.0, Visible.causal(2, 30, 30), sites, lam=None if pairs is None else 0.5,
                first=first, second=second,
            )  # fmt: skip
        assert caught.value.group == 2
        assert all(site.counts["rows"].sum() == 0 for site in sites.values())
        assert all(site.context_rms.count.sum() == 0 for site in sites.values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_lambda_and_sinks_are_refused(bad):
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    visible = Visible.causal(1, 9, 9)
    lam = torch.full((1, 2, 9, 1), 0.5)
    lam[0, 1, 4] = bad
    with pytest.raises(NonFiniteError) as caught:
        measure(q, k, visible, lam=lam, pairs=([0, 2], [1, 3]))
    assert caught.value.group == 2
    with pytest.raises(NonFiniteError) as caught:
        measure(q, k, visible, sink=torch.tensor([0.0, bad, 0.0, 0.0]))
    assert caught.value.group == 1


def test_what_nobody_may_attend_is_never_seen():
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    lam = torch.full((1, 1, 20, 1), 0.5)
    visible = Visible(torch.zeros(1, 20, dtype=torch.int32), torch.full((1, 20), 15).int())
    visible = visible.only(torch.arange(20)[None] >= 3)
    mask = torch.rand(1, 1, 20, 20) < 0.8
    mask[..., 0], mask[..., 4] = True, False
    visible.mask = mask
    options = {"lam": lam, "pairs": ([0], [1])}
    before = measure(q, k, visible, **options)
    k[:, :, 15:], k[:, :, 4], q[:, :, :3], lam[:, :, :3] = (
        torch.nan,
        torch.inf,
        torch.inf,
        torch.nan,
    )
    after = measure(q, k, visible, **options)
    for kind, site in before.items():
        assert list(after[kind].rows()) == list(site.rows())
        assert (site.counts["rows"] == 17).all()


def test_arguments_that_do_not_belong_together_are_refused():
    q, k = torch.zeros(1, 4, 3, 4), torch.zeros(1, 2, 3, 4)
    visible = Visible.causal(1, 3, 3)
    pairs = ([0, 2], [1, 3])
    with pytest.raises(ValueError, match="5 query heads do not divide into 2 key heads"):
        measure(torch.zeros(1, 5, 3, 4), k, visible)
    with pytest.raises(ValueError, match="given together, first and second"):
        measure(q, k, visible, lam=0.5)
    with pytest.raises(ValueError, match="given together, first and second"):
        measure(q, k, visible, pairs=pairs)
    with pytest.raises(ValueError, match=r"λ of shape \(3, 3, 1\) does not broadcast"):
        measure(q, k, visible, lam=torch.zeros(3, 3, 1), pairs=pairs)
    with pytest.raises(ValueError, match="not among the 4 query heads"):
        measure(q, k, visible, lam=0.5, pairs=([0], [4]))
    with pytest.raises(ValueError, match="sites of maps and heads"):
        measure_maps(q, k, 1.0, visible, sites_of(2))
    with pytest.raises(ValueError, match="sites of maps and heads"):
        measure_maps(q, k, 1.0, visible, sites_of(4, pairs))
    with pytest.raises(ValueError, match="spans and span_rows"):
        measure(q, k, visible, spans=[(0, 1)])
    with pytest.raises(ValueError, match="one entry a sequence, 1"):
        measure(q, k, visible, key_zero=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"\(2, 4\) is no span of 3 keys"):
        measure(q, k, visible, spans=[(2, 4)], span_rows=torch.tensor([2]))
