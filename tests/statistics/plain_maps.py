"""Attention maps materialised in fp64, what is expected of them, and cases drawn at random."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from quantdiff.attention.layouts import layout
from quantdiff.statistics import Visible
from quantdiff.statistics.maps import MapStatistics, measure_maps
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
