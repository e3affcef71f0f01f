"""Recording differential models: branches right, each logit once, in every backend."""

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, DynamicLayer

from quantdiff import RecordingError, record
from quantdiff.attention import (
    DifferentialAttentionV1,
    DifferentialAttentionV2,
    GroupedDifferentialAttention,
    MultiheadAttention,
    layout,
    rotary_table,
)
from tests import reference
from tests.attention import plain
from tests.attention.test_flash import Library
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_ids

BACKENDS = ("eager", "sdpa", "flex_attention")


def batches():
    ids = tiny_ids(3, 14)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    mask[2, 9:] = 0
    return [{"input_ids": ids, "attention_mask": mask}]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("build", "name", "branches"),
    [
        (lambda: tiny_diffllama(num_attention_heads=8, num_key_value_heads=4), "halves",
         [1] * 4 + [2] * 4),
        (lambda: tiny_diff_v2(num_attention_heads=8, num_key_value_heads=2, head_dim=8),
         "adjacent_shared", [1, 2] * 4),
    ],
)  # fmt: skip
def test_transformers_models(build, name, branches, backend, tmp_path):
    model = build()
    expected = reference.Materialised(model).run(batches())
    model.set_attn_implementation(backend)
    with torch.no_grad(), record(model) as recorder:
        for batch in batches():
            model(**batch)
    recorder.profile().save(tmp_path)
    content = json.loads((tmp_path / "profile.json").read_text())
    reference.check_profile(content, expected)
    assert content["model"]["layout"] == name
    for site in content["attention_logits"]["sites"]:
        assert [head["branch"] for head in site["heads"]] == branches
    for item in content["attention_logits"]["top"]:
        assert item["branch"] == branches[item["head"]]


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))

    def forward(self, x, rel_pos, attention_mask, cache=None):
        x = x + self.attention(x, rel_pos, attention_mask, cache)
        return x + self.mlp(x)


class LayerOf:
    """One layer of a transformers cache, as an attention module takes it."""

    def __init__(self, cache, layer):
        self.cache, self.layer = cache, layer

    def update(self, key, value):
        return self.cache.update(key, value, self.layer)


class Small(nn.Module):
    """A language model around quantdiff's own attention modules."""

    def __init__(self, attention, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.blocks = nn.ModuleList(Block(attention(i)) for i in range(layers))
        self.inputs = {}
        for i, block in enumerate(self.blocks):
            block.attention.register_forward_pre_hook(
                lambda module, args, i=i: self.inputs.__setitem__(i, args[0].detach())
            )

    def forward(self, input_ids, attention_mask=None, checkpointing=False, cache=None):
        x = self.embedding(input_ids) * 3
        first = 0 if cache is None else cache.get_seq_length()
        places = torch.arange(first, first + x.shape[1])
        for i, block in enumerate(self.blocks):
            rel_pos = rotary_table(places, block.attention.head_dim)
            if checkpointing:
                x = checkpoint(block, x, rel_pos, attention_mask, use_reentrant=False)
            else:
                own = None if cache is None else LayerOf(cache, i)
                x = block(x, rel_pos, attention_mask, own)
        return x


OWN = {
    "none": lambda i, b: MultiheadAttention(64, i, 8, 4, backend=b),
    "adjacent": lambda i, b: DifferentialAttentionV1(64, i, 4, 2, backend=b),
    "adjacent_shared": lambda i, b: DifferentialAttentionV2(64, 4, 2, 16, backend=b),
    "grouped:2": lambda i, b: GroupedDifferentialAttention(64, i, 6, 2, 4, 8, backend=b),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex", "flash"])
@pytest.mark.parametrize("name", OWN)
def test_our_own_modules(monkeypatch, name, backend, padded):
    if backend == "flash":
        Library(monkeypatch, 2)
    torch.manual_seed(0)
    model = Small(lambda i: OWN[name](i, backend)).eval()
    ids = tiny_ids(3, 12)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5] = 0
        mask[2, 9:] = 0
    with torch.no_grad():
        before = model(ids, mask)
        with record(model) as recorder:
            during = model(ids, mask)
    assert torch.equal(before, during)
    profile = recorder.profile()
    assert profile.model["layout"] == name
    assert [site.name for site in profile.attention_logits.sites] == [
        "blocks.0.attention", "blocks.1.attention",
    ]  # fmt: skip
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    for i, site in enumerate(profile.attention_logits.sites):
        module = model.blocks[i].attention
        sources = layout(name).key_heads(module.query_heads, module.kv_heads)
        values = [[] for _ in sources]
        for b, x in enumerate(model.inputs[i]):
            real = mask[b].bool()
            seen = causal & real[None, :] & real[:, None]
            q, k, _ = plain.projected(module, x, torch.arange(12))
            for head, source in enumerate(sources):
                product = q[head] @ k[source].T * module.head_dim**-0.5
                values[head].append(product[seen].detach())
        flat = torch.stack([torch.cat(parts) for parts in values])
        exact = reference.statistics(flat, torch.ones_like(flat, dtype=torch.bool))
        assert site.count.tolist() == exact["count"].tolist()
        for mine, theirs in ((site.min, exact["min"]), (site.max, exact["max"])):
            torch.testing.assert_close(
                torch.as_tensor(mine, dtype=torch.float64), torch.as_tensor(theirs),
                rtol=1e-4, atol=1e-5,
            )  # fmt: skip
        assert (abs(site.moments.mean - exact["mean"]) <= 1e-4 * exact["std"]).all()
    kinds = layout(name).branches(len(sources))
    assert all(x.branch == kinds[x.head] for x in profile.attention_logits.top(100))


def test_lambda_of_every_layer():
    """λ as the models themselves compute it; V2's depends on the token."""
    model = tiny_diffllama()
    with torch.no_grad(), record(model) as recorder:
        model(tiny_ids(1, 8))
    expected = []
    for layer in model.model.layers:
        a = layer.self_attn
        first, second = (a.lambda_q1 @ a.lambda_k1).exp(), (a.lambda_q2 @ a.lambda_k2).exp()
        expected.append((first - second + a.lambda_init).item())
    assert recorder.profile().model["lambda"] == pytest.approx(expected, rel=1e-5)
    torch.manual_seed(0)
    own = Small(lambda i: list(OWN.values())[i](i, "sdpa"), layers=3).eval()
    with torch.no_grad(), record(own) as recorder:
        own(tiny_ids(1, 8))
    told = recorder.profile().model["lambda"]
    full = float(own.blocks[1].attention.lambda_full())
    assert told == [None, pytest.approx(full, rel=1e-6), None]
    model = tiny_diff_v2()
    with torch.no_grad(), record(model) as recorder:
        model(tiny_ids(1, 8))
    assert recorder.profile().model["lambda"] is None


def test_a_model_of_several_kinds():
    torch.manual_seed(0)
    kinds = list(OWN.values())
    model = Small(lambda i: kinds[i](i, "sdpa"), layers=4).eval()
    with torch.no_grad(), record(model) as recorder:
        model(tiny_ids(1, 8))
    profile = recorder.profile()
    assert profile.model["layout"] == "mixed"
    kinds = [[None] * 8, [1, 2] * 4, [1, 2] * 4, [1, 1, 2] * 2]
    names = [f"blocks.{layer}.attention" for layer in range(4)]
    assert profile.attention_logits.branches == dict(zip(names, kinds, strict=True))


def test_training_with_checkpointing_counts_once():
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa"))
    ids = tiny_ids(1, 8)
    with record(model) as recorder:
        model(ids, checkpointing=True).sum().backward()
    assert recorder.profile().attention_logits.count == 2 * 8 * 36


def test_a_cache_that_the_pass_does_not_know_is_refused():
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa")).eval()
    cache = DynamicLayer()
    attention = model.blocks[0].attention
    forward = attention.forward
    attention.forward = lambda x, rel_pos, *_: forward(x, rel_pos, None, cache)
    with torch.no_grad():
        model(tiny_ids(1, 6))
        with pytest.raises(RecordingError, match="knows of 6 tokens"), record(model):
            model(tiny_ids(1, 6))


def test_attention_outside_of_the_layers_is_refused():
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa"))
    model.pool = OWN["none"](0, "sdpa")
    with pytest.raises(RecordingError, match=r"pool\S* stands in no list of layers"):
        record(model)


def test_two_lists_of_layers_are_refused():
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa"))
    model.others = nn.ModuleList([Block(OWN["none"](0, "sdpa"))])
    with pytest.raises(RecordingError, match="more than one list of layers"):
        record(model)


def test_a_layer_of_two_layouts_is_refused():
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa"))
    model.blocks[1].second = OWN["none"](0, "sdpa")
    with pytest.raises(RecordingError, match="layer 1 holds attention of several head layouts"):
        record(model)


def test_a_shared_module_is_refused():
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa"))
    model.blocks[1].attention = model.blocks[0].attention
    with pytest.raises(RecordingError, match="stands in several places"):
        record(model)


def test_heads_that_compute_twice_in_one_forward_are_refused():
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa"))
    block = model.blocks[1]
    block.forward = lambda x, *more: x + block.attention(x, *more) + block.attention(2 * x, *more)
    words = r"blocks\.1\.attention is called several times"
    with pytest.raises(RecordingError, match=words), record(model):
        model(tiny_ids())


class Bare(nn.Module):
    """Attention modules themselves are its layers; the mask has a name of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.layers = nn.ModuleList(OWN["adjacent"](i, "sdpa") for i in range(2))

    def forward(self, ids, keep):
        x = self.embedding(ids) * 3
        rel_pos = rotary_table(torch.arange(x.shape[1]), self.layers[0].head_dim)
        for layer in self.layers:
            x = layer(x, rel_pos, keep)
        return x


def test_layers_that_are_attention_modules():
    torch.manual_seed(0)
    model = Bare().eval()
    keep = torch.ones(2, 8, dtype=torch.long)
    keep[1, :3] = 0
    with torch.no_grad(), record(model) as recorder:
        model(tiny_ids(2, 8), keep)
    profile = recorder.profile()
    assert profile.attention_logits.count == 2 * 8 * (36 + 15)
    assert profile.hidden_states.sites[0].count[0] == (8 + 5) * 64


def test_a_cache_that_reaches_the_forward():
    """Prefill and decode with a transformers cache: the statistics of one pass."""
    torch.manual_seed(0)
    model = Small(lambda i: OWN["adjacent"](i, "sdpa")).eval()
    ids = tiny_ids(2, 9)
    with torch.no_grad(), record(model) as recorder:
        model(ids)
    whole = recorder.profile()

    cache = DynamicCache()
    with torch.no_grad(), record(model) as recorder:
        for first, last in ((0, 5), (5, 6), (6, 9)):
            model(ids[:, first:last], cache=cache)
    steps = recorder.profile()
    assert steps.attention_logits.count == whole.attention_logits.count
    for a, b in zip(steps.attention_logits.sites, whole.attention_logits.sites, strict=True):
        torch.testing.assert_close(a.absmax, b.absmax, rtol=1e-4, atol=1e-5)
