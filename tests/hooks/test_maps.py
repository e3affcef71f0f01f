"""Attention maps and λ of recorded models, on real text with padding, against everything held."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from quantdiff import Profile, RecordingError, UsageError, record
from quantdiff.attention import layout
from quantdiff.calibration.text import text_windows
from tests import reference
from tests.hooks.test_differential import OWN, Small
from tests.standins import DiffAttention, Grouped, MotifAttention, make
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_llama, tiny_tokenizer

SPANS = [(3, 6), None, (0, 2)]


def text(side="left", lengths=(40, 25, 31)):
    """Three passages of real text, padded."""
    windows = text_windows("corpus", tiny_tokenizer(bos=False), tokens=200, seq_len=40).windows
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (window, length) in enumerate(zip(windows, lengths, strict=False)):
        where = slice(-length, None) if side == "left" else slice(length)
        ids[row, where], mask[row, where] = window[:length], 1
    return {"input_ids": ids, "attention_mask": mask}


def check(sites, name, softmax, lam):
    """The measures of one layer.

    Args:
        sites: of the layer, by kind.
        name: of the head layout.
        softmax: of each sequence the maps (H, N, N) in fp64, causal.
        lam: of each sequence λ as (h, N, 1) or a number; unused for standard heads.
    """
    maps = {"softmax": softmax}
    if name != "none":
        first, second = layout(name).pairs(len(softmax[0]))
        maps = {
            "branch 1": [w[sorted(set(first))] for w in softmax],
            "branch 2": [w[sorted(set(second))] for w in softmax],
            "difference": [w[first] - x * w[second] for w, x in zip(softmax, lam, strict=True)],
        }
    assert set(sites) == set(maps)
    for kind, expected in maps.items():
        rows = list(sites[kind].rows())
        assert len(rows) == len(expected[0])
        for g, row in enumerate(rows):
            heads = [w[g] for w in expected]
            sizes = [len(w) for w in heads]
            each = [x[n, : n + 1] for x in heads for n in range(len(x))]  # a row's visible keys
            share = [x.abs() / x.abs().sum() for x in each]
            norms = torch.stack([x.norm() for x in each])
            close = {"rel": 1e-4, "abs": 1e-5}
            assert row["rows"] == sum(sizes)
            assert row["weights"] == sum(n * (n + 1) // 2 for n in sizes)
            sums = torch.stack([x.sum() for x in each])
            assert row["row_sum"] == pytest.approx(sums.mean().item(), **close)
            assert row["row_sum_min"] == pytest.approx(sums.min().item(), **close)
            negative = torch.stack([x.clamp(max=0).abs().sum() for x in each]).mean()
            assert row["negative_mass"] == pytest.approx(negative.item(), **close)
            sinks = torch.stack([x[0] for x in each if len(x) > 1])
            assert row["sink"] == pytest.approx(sinks.mean().item(), **close)
            entropy = torch.stack([-torch.xlogy(p, p).sum() for p in share]).mean()
            assert row["entropy"] == pytest.approx(entropy.item(), **close)
            assert row["context_rms_min"] == pytest.approx(norms.min().item(), **close)
            assert row["context_rms_max"] == pytest.approx(norms.max().item(), **close)
            assert row["context_rms_median"] == pytest.approx(np.median(norms), rel=5e-3)
            scaled = min(x.norm().item() * math.sqrt(len(x)) for x in each)
            assert row["context_rms_scaled"] == pytest.approx(scaled, **close)
            last = [(x[-1], span) for x, span in zip(heads, SPANS, strict=True) if span]
            mass = [x[slice(*span)].sum() for x, span in last]
            assert row["span_mass"] == pytest.approx(torch.stack(mass).mean().item(), **close)
            rest = [x.sum() - y for (x, _), y in zip(last, mass, strict=True)]
            assert row["rest_mass"] == pytest.approx(torch.stack(rest).mean().item(), **close)
        alike = []
        for w in expected:
            for n in range(1, w.shape[1]):
                unit = nn.functional.normalize(w[:, n, : n + 1], dim=-1)
                cosine = unit @ unit.T
                h = len(cosine)
                alike.append((cosine.sum() - cosine.trace()) / (h * (h - 1)))
        assert sites[kind].similarity == pytest.approx(torch.stack(alike).mean().item(), abs=1e-4)


def by_layer(profile):
    found = {}
    for site in profile.maps:
        found.setdefault(site.layer, {})[site.kind] = site
    return found


BUILD = {
    "none": lambda: tiny_llama(num_attention_heads=8, num_key_value_heads=4),
    "halves": lambda: tiny_diffllama(num_attention_heads=8, num_key_value_heads=4),
    "adjacent_shared": lambda: tiny_diff_v2(
        num_attention_heads=8, num_key_value_heads=2, head_dim=8
    ),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("name", BUILD)
def test_transformers_models(name, backend, side, tmp_path):
    model, batch = BUILD[name](), text(side)
    real = batch["attention_mask"].bool()
    expected = reference.Materialised(model).run([batch])
    projected = {}
    for i, layer in enumerate(model.model.layers):
        if name == "adjacent_shared":
            layer.self_attn.lambda_proj.register_forward_hook(
                lambda module, args, output, i=i: projected.__setitem__(i, output)
            )
    model.set_attn_implementation(backend)
    with torch.no_grad(), record(model, maps=True, spans=SPANS) as recorder:
        model(**batch)
    recorder.profile().save(tmp_path)
    profile = Profile.load(tmp_path)
    for layer, sites in by_layer(profile).items():
        softmax = [
            x.double().masked_fill(~seen, -torch.inf).softmax(-1)
            for x, seen in expected.logits[layer]
        ]
        lam = [0.0] * len(softmax)
        if name == "halves":
            lam = [profile.model["lambda"][layer]] * len(softmax)
        if name == "adjacent_shared":
            told = projected[layer].double().sigmoid()
            lam = [told[b, real[b]].T[..., None] for b in range(3)]
        check(sites, name, softmax, lam)
    content = json.loads((tmp_path / "profile.json").read_text())
    assert [site["kind"] for site in content["maps"]] == [site.kind for site in profile.maps]
    assert content["maps"][0]["similarity"] == profile.maps[0].similarity
    assert "maps.sink" in content["definition"]
    if name != "adjacent_shared":
        assert not profile.lambdas
        assert "lambda" not in content
        return
    for site, described in zip(profile.lambdas, content["lambda"], strict=True):
        told = projected[site.layer].double().sigmoid()[real]  # (tokens, h)
        assert site.count.tolist() == [real.sum()] * 4
        for pair in described["pairs"]:
            values = told[:, pair["pair"]]
            assert pair["mean"] == pytest.approx(values.mean().item(), rel=1e-5)
            assert pair["min"] == pytest.approx(values.min().item(), rel=1e-5)
            assert pair["max"] == pytest.approx(values.max().item(), rel=1e-5)
            assert pair["std"] == pytest.approx(values.std(correction=0).item(), rel=1e-4)
            assert pair["median"] == pytest.approx(np.median(values), rel=1e-2)


def projections(module, x, positions):
    """The queries and keys of quantdiff's own modules, by their rotary tables."""
    from tests.attention import plain

    q, k, _ = plain.projected(module, x, positions)
    return torch.stack(q), torch.stack(k)


@pytest.mark.parametrize("name", OWN)
def test_our_own_modules(name):
    torch.manual_seed(0)
    model, batch = Small(lambda i: OWN[name](i, "sdpa")).eval(), text()
    real = batch["attention_mask"].bool()
    with torch.no_grad(), record(model, maps=True, spans=SPANS) as recorder:
        model(**batch)
    places = torch.arange(40)
    for layer, sites in by_layer(recorder.profile()).items():
        module = model.blocks[layer].attention
        softmax, lam = [], []
        for x, kept in zip(model.inputs[layer], real, strict=True):
            q, k = projections(module, x, places)
            k = k[layout(name).key_heads(module.query_heads, module.kv_heads)]
            product = (q.double() @ k.double().mT)[:, kept][:, :, kept] * module.head_dim**-0.5
            future = torch.ones(product.shape[1:], dtype=torch.bool).triu(1)
            softmax.append(product.detach().masked_fill(future, -torch.inf).softmax(-1))
            if name == "adjacent_shared":
                told = module.lambda_proj(x[kept]).detach().double().sigmoid()
                lam.append(told.T[..., None])
            else:
                lam.append(0.0 if name == "none" else module.lambda_full().item())
        check(sites, name, softmax, lam)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("adjacent", lambda: make(lambda i: DiffAttention(i, is_causal=True))),
        ("adjacent", lambda: make(MotifAttention, model_type="Motif")),
        ("grouped:2", lambda: make(lambda i: Grouped(i, 2, True), model_type="Motif",
                                   num_noise_heads=2, num_attention_heads=6)),
        ("grouped:2", lambda: make(lambda i: Grouped(i, 2, False), model_type="Motif",
                                   num_noise_heads=2, num_attention_heads=6)),
    ],
)  # fmt: skip
def test_maps_in_calls_of_their_own(name, build):
    model = build()
    ids = text(lengths=(40, 40, 40))["input_ids"] % 300
    with torch.no_grad(), record(model, maps=True, spans=SPANS) as recorder:
        model(ids)
    check_blocks(recorder.profile(), model, name)


@pytest.mark.parametrize("shape", [(40, 40), (1, 1, 40, 40)])
def test_a_mask_that_the_calls_of_both_maps_are_given(shape):
    model = make(DiffAttention)
    ids = text(lengths=(40, 40, 40))["input_ids"] % 300
    causal = torch.ones(40, 40, dtype=torch.bool).tril().reshape(shape)
    with torch.no_grad(), record(model, maps=True, spans=SPANS) as recorder:
        model(ids, mask=causal)
    check_blocks(recorder.profile(), model, "adjacent")


def check_blocks(profile, model, name):
    for layer, sites in by_layer(profile).items():
        q, k = model.blocks[layer].attn.seen
        k = k[:, layout(name).key_heads(q.shape[1], k.shape[1])]
        product = reference.logits(q, k, q.shape[-1] ** -0.5)
        future = torch.ones(40, 40, dtype=torch.bool).triu(1)
        softmax = list(product.masked_fill(future, -torch.inf).softmax(-1))
        check(sites, name, softmax, [profile.model["lambda"][layer]] * 3)


def test_rows_sum_to_one_less_lambda_and_the_bounds_on_context_rms():
    batch = text()
    for name, build in BUILD.items():
        model = build()
        if name == "adjacent_shared":
            for layer in model.model.layers:  # λ near 1, where V2 may cancel a whole row
                layer.self_attn.lambda_proj.weight.data.mul_(4)
        with torch.no_grad(), record(model, maps=True) as recorder:
            model(**batch)
        profile = recorder.profile()
        for site in profile.maps:
            s = site.summary
            if site.kind != "difference":
                assert s["row_sum_min"] == pytest.approx(1, abs=1e-5)
                assert s["row_sum_max"] == pytest.approx(1, abs=1e-5)
                assert s["context_rms_scaled"] > 1 - 1e-5
                assert s["context_rms_max"] <= 1 + 1e-6
                assert s["negative_mass"] == s["negative_share"] == 0
            elif name == "halves":
                lam = profile.model["lambda"][site.layer]
                assert s["row_sum_min"] == pytest.approx(1 - lam, abs=1e-5)
                assert s["row_sum_max"] == pytest.approx(1 - lam, abs=1e-5)
                assert s["norm_gain_max"] == pytest.approx(1 / s["context_rms_min"])
            else:
                lam = next(x for x in profile.lambdas if x.layer == site.layer)
                assert s["row_sum_min"] == pytest.approx(1 - lam.max.max(), abs=1e-5)
                assert 0 < s["context_rms_min"] <= s["context_rms_max"] < 2**0.5
                assert s["context_rms_scaled"] < 1  # the bound of softmax, broken


def test_recordings_merge_as_one():
    model = BUILD["adjacent_shared"]()
    whole, parts = text(), []
    with torch.no_grad(), record(model, maps=True) as recorder:
        model(**whole)
    for rows in (slice(0, 1), slice(1, 3)):
        with torch.no_grad(), record(model, maps=True) as part:
            model(**{name: value[rows] for name, value in whole.items()})
        parts.append(part.profile())
    merged, whole = parts[0].merge(parts[1]), recorder.profile()
    for ours, theirs in zip(merged.maps_frame().to_dict("records"),
                            whole.maps_frame().to_dict("records"), strict=True):  # fmt: skip
        assert ours == {
            key: pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)
            if isinstance(value, float) else value
            for key, value in theirs.items()
        }  # fmt: skip
    for ours, theirs in zip(merged.lambdas, whole.lambdas, strict=True):
        assert ours.count.tolist() == theirs.count.tolist()
        assert np.allclose(ours.moments.mean, theirs.moments.mean)


def test_a_cache_and_decoding_give_the_maps_of_one_pass():
    model = BUILD["halves"]()
    ids = text(lengths=(20, 20))["input_ids"]
    with torch.no_grad(), record(model, maps=True) as recorder:
        model(input_ids=ids)
    whole = recorder.profile()
    with torch.no_grad(), record(model, maps=True) as recorder:
        cache = model(input_ids=ids[:, :12], use_cache=True).past_key_values
        for i in range(12, 20):
            model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
    for ours, theirs in zip(recorder.profile().maps, whole.maps, strict=True):
        a, b = ours.summary, theirs.summary
        assert a["rows"] == b["rows"]
        for key in ("row_sum", "sink", "entropy", "negative_mass", "context_rms_max"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6)


def test_learned_sinks_take_a_share():
    from transformers import GptOssConfig, GptOssForCausalLM

    from tests.tiny import SETTINGS, build

    config = GptOssConfig(
        **{**SETTINGS, "head_dim": 8}, num_local_experts=2, num_experts_per_tok=1,
        sliding_window=128,
    )  # fmt: skip
    model = build(GptOssForCausalLM, config)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(1.0)
    model.set_attn_implementation("eager")
    with torch.no_grad(), record(model, maps=True) as recorder:
        maps = model(input_ids=text()["input_ids"], output_attentions=True).attentions
    for site, weights in zip(recorder.profile().maps, maps, strict=True):
        assert site.summary["row_sum"] == pytest.approx(weights.sum(-1).mean().item(), rel=1e-4)
        assert site.summary["row_sum_max"] < 1


def seen_by(real, window=None):
    """What causal attention with a sliding window, the query among it, sees: (B, N, N) bool."""
    place = torch.arange(real.shape[1])
    seen = (place <= place[:, None]) & real[:, None] & real[..., None]
    return seen if window is None else seen & (place > place[:, None] - window)


def check_eager(site, weights, seen, rel, tolerance):
    """The measures of softmax maps against the weights that the eager model gave.

    Args:
        site: of the layer.
        weights: (B, H, N, N), real queries or not.
        seen: (B, N, N) bool, what a real query may attend; padding is on the left.
        rel: bound of the relative error of a weight.
        tolerance: absolute errors.
    """
    weights = weights.double()
    hidden = ~seen & seen.any(-1, keepdim=True)
    assert (weights.masked_select(hidden[:, None]) == 0).all()  # the model sees what the test says
    zeros = seen.any(1).int().argmax(-1).tolist()  # each sequence's first token
    rows, alike = [[] for _ in site.heads], []
    for b, n in seen.any(-1).nonzero().tolist():
        x = weights[b, :, n, seen[b, n]]  # (H, keys seen)
        first = weights[b, :, n, zeros[b]]
        only = bool(seen[b, n, zeros[b]]) and x.shape[1] == 1
        for head, kept in enumerate(rows):
            kept.append((x[head], None if only else first[head]))
        if x.shape[1] > 1:
            unit = nn.functional.normalize(x, dim=-1)
            cosine = unit @ unit.T
            alike.append((cosine.sum() - cosine.trace()) / (len(x) * (len(x) - 1)))
    found = list(site.rows())
    assert [row["head"] for row in found] == list(range(weights.shape[1]))
    for row, kept in zip(found, rows, strict=True):
        each = [x for x, _ in kept]
        sums, norms = (torch.stack(x) for x in ([x.sum() for x in each], [x.norm() for x in each]))
        sinks = torch.stack([first for _, first in kept if first is not None])
        assert row["rows"] == len(each)
        assert row["weights"] == sum(len(x) for x in each)
        assert row["sink_rows"] == len(sinks)
        close = {"rel": rel, "abs": tolerance}
        for name, value in (
            ("row_sum", sums.mean()),
            ("row_sum_min", sums.min()),
            ("row_sum_max", sums.max()),
            ("sink", sinks.mean()),
            ("context_rms_min", norms.min()),
            ("context_rms_max", norms.max()),
            ("context_rms_scaled", min(x.norm() * math.sqrt(len(x)) for x in each)),
        ):
            assert row[name] == pytest.approx(value.item(), **close), name
        assert row["context_rms_median"] == pytest.approx(np.median(norms), rel=5e-3 + rel)
        shares = [x / x.sum() for x in each]
        entropy = torch.stack([-torch.xlogy(p, p).sum() for p in shares]).mean().item()
        # Where p changes by r·p, −Σ p ln p changes by r·(−Σ p ln p + 1) at most.
        assert row["entropy"] == pytest.approx(entropy, abs=rel * (entropy + 1) + tolerance)
    similarity = torch.stack(alike).mean().item()
    assert site.similarity == pytest.approx(similarity, rel=2 * rel, abs=tolerance)


def recorded_eager(model, batch):
    """The profile, and the maps that the same pass gave."""
    model.set_attn_implementation("eager")
    with torch.no_grad(), record(model, maps=True, spans=SPANS) as recorder:
        maps = model(**batch, output_attentions=True, use_cache=False).attentions
    return recorder.profile(), maps


def test_random_sinks_under_a_window_shorter_than_the_text():
    from transformers import GptOssConfig, GptOssForCausalLM

    from tests.tiny import SETTINGS, build

    config = GptOssConfig(
        **{**SETTINGS, "head_dim": 8}, num_local_experts=2, num_experts_per_tok=1,
        sliding_window=5, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model, batch = build(GptOssForCausalLM, config), text()
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        sinks = layer.self_attn.sinks.data
        sinks.copy_(torch.randn(sinks.shape, generator=generator) * 2)
    profile, maps = recorded_eager(model, batch)
    real = batch["attention_mask"].bool()
    for layer, (site, weights) in enumerate(zip(profile.maps, maps, strict=True)):
        check_eager(site, weights, seen_by(real, (5, None)[layer]), 1e-4, 1e-6)
        # Each head's sink takes a share of its own.
        sums = [row["row_sum"] for row in site.rows()]
        assert max(sums) < 0.999
        assert max(sums) - min(sums) > 0.1


def test_a_soft_cap_under_a_window_shorter_than_the_text():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from tests.tiny import SETTINGS, build

    config = Gemma2Config(
        **SETTINGS, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=4, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model, batch = build(Gemma2ForCausalLM, config), text()
    profile, maps = recorded_eager(model, batch)
    real = batch["attention_mask"].bool()
    assert profile.attention_logits.absmax > 1.9  # the cap matters
    for layer, (site, weights) in enumerate(zip(profile.maps, maps, strict=True)):
        check_eager(site, weights, seen_by(real, (5, None)[layer]), 1e-4, 1e-6)


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_maps_where_the_model_multiplies_in_bf16(how):
    model, batch = BUILD["none"](), text()
    if how == "bfloat16":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        profile, maps = recorded_eager(model, batch)
        expected = reference.Materialised(model).run([batch])
    seen = seen_by(batch["attention_mask"].bool())
    unit = 2.0**-9  # largest relative error of rounding to bf16
    for layer, (site, weights) in enumerate(zip(profile.maps, maps, strict=True)):
        # Of the rounded q and k everything is measured as in fp32.
        exact = [
            x.double().masked_fill(~kept, -torch.inf).softmax(-1)
            for x, kept in expected.logits[layer]
        ]
        check({"softmax": site}, "none", exact, [0.0] * 3)
        # The model's own maps begin with the same q and k, but it rounds q·kᵀ and its scaled value,
        # by a unit of the logit each, so that a weight is off by e^(4 units), and then the weight.
        largest = profile.attention_logits.sites[layer].absmax.max()
        rel = math.expm1(4 * unit * largest) + unit
        assert rel < 0.07
        check_eager(site, weights, seen, rel, 1e-6)


def test_without_maps_nothing_of_them_is_kept():
    model = BUILD["none"]()
    with torch.no_grad(), record(model) as recorder:
        model(**text())
    profile = recorder.profile()
    assert profile.maps is None
    with pytest.raises(UsageError, match="maps=True"):
        profile.maps_frame()
    with pytest.raises(UsageError, match="maps=True"):
        record(model, spans=SPANS)
    with pytest.raises(UsageError, match=r"first token, last token \+ 1"):
        record(model, maps=True, spans=[(4, 4)])


def test_lambda_that_is_not_a_number_is_refused():
    model = BUILD["adjacent_shared"]()
    model.model.layers[1].self_attn.lambda_proj.weight.data[:] = float("nan")
    with pytest.raises(RecordingError, match=r"λ of model\.layers\.1\.self_attn"), record(model):
        model(**text())
