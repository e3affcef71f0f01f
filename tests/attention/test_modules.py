"""The attention modules, in every backend that runs on a CPU, against loops over heads."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from quantdiff.attention import (
    DifferentialAttentionV1,
    DifferentialAttentionV2,
    GroupedDifferentialAttention,
    MultiheadAttention,
    backends,
)
from quantdiff.errors import UsageError
from quantdiff.hooks.flash import FlashMode
from tests.attention import plain

BACKENDS = ("eager", "sdpa", "flex")
RATIOS = (1, 2, 4, 8)


def randomise(module, seed=0):
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in module.named_parameters():
            wide = 0.5 if "lambda" in name else 1.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * wide + ("subln" in name))
    return module


def standard(ratio, **options):
    return MultiheadAttention(64, 0, 8, 8 // ratio, **options)


def v1(ratio, **options):
    return DifferentialAttentionV1(128, 2, 8, 8 // ratio, **options)


def v2(ratio, **options):
    return DifferentialAttentionV2(48, 8, 8 // ratio, 8, **options)


def grouped(ratio, **options):
    return GroupedDifferentialAttention(48, 1, 24, 8, 16 // ratio, 8, **options)


FORMS = {
    "standard": (standard, plain.standard),
    "v1": (v1, plain.v1),
    "v2": (v2, plain.v2),
    "grouped": (grouped, plain.grouped),
}


def inputs(module, batch=3, length=11, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, module.embed_dim, generator=generator, dtype=dtype)


def mask(batch=3, length=11):
    """The first whole, the second padded on the left, the third on the right."""
    attention_mask = torch.ones(batch, length, dtype=torch.long)
    attention_mask[1, :4] = 0
    attention_mask[2, 8:] = 0
    return attention_mask


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("form", FORMS)
class TestAgainstLoops:
    @pytest.mark.parametrize("rotary", ["interleaved", "half"])
    def test_fp64(self, form, ratio, backend, rotary):
        build, reference = FORMS[form]
        module = randomise(build(ratio, backend=backend, rotary=rotary).double())
        x = inputs(module)
        with torch.no_grad():
            found = module(x, plain.table(11, module))
            expected = plain.run(reference, module, x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert expected.std() > 0.1

    def test_fp32(self, form, ratio, backend):
        build, reference = FORMS[form]
        module = randomise(build(ratio, backend=backend))
        x = inputs(module, dtype=torch.float32)
        with torch.no_grad():
            found = module(x, plain.table(11, module))
            expected = plain.run(reference, module.double(), x.double())
        assert (found - expected).abs().max() < 1e-5

    def test_padding_on_either_side(self, form, ratio, backend):
        build, reference = FORMS[form]
        module = randomise(build(ratio, backend=backend).double())
        x = inputs(module)
        with torch.no_grad():
            found = module(x, plain.table(11, module), mask())
            expected = plain.run(reference, module, x, mask())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)

    def test_cache(self, form, ratio, backend):
        """Prefill, a chunk, then token by token: the same as one pass, padding included."""
        build, _ = FORMS[form]
        module = randomise(build(ratio, backend=backend).double())
        x, kept = inputs(module), mask()
        kept[2] = 1
        cos, sin = plain.table(11, module)
        with torch.no_grad():
            whole = module(x, (cos, sin), kept)
            cache, parts, begin = DynamicLayer(), [], 0
            for end in (5, 9, 10, 11):
                rel_pos = cos[begin:end], sin[begin:end]
                parts.append(module(x[:, begin:end], rel_pos, kept[:, :end], cache))
                begin = end
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form, backend, ratio):
    build, reference = FORMS[form]
    module = randomise(build(ratio, backend=backend).double())
    x = inputs(module).requires_grad_()
    weight = inputs(module, seed=5)
    sought = [x, *module.parameters()]
    found = torch.autograd.grad((module(x, plain.table(11, module), mask()) * weight).sum(), sought)
    expected = torch.autograd.grad((plain.run(reference, module, x, mask()) * weight).sum(), sought)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_flex_on_a_cpu_refuses_a_backward_pass():
    module = v1(1, backend="flex")
    with pytest.raises(UsageError, match="no backward pass on a CPU"):
        module(inputs(module, dtype=torch.float32), plain.table(11, module))


def test_flex_runs_while_flash_attn_is_looked_for():
    """As in a recording; the mode knows no flex attention."""
    module = randomise(v2(2, backend="flex"))
    x = inputs(module, dtype=torch.float32)
    with torch.no_grad():
        expected = module(x, plain.table(11, module))
        with FlashMode(lambda call: None):
            found = module(x, plain.table(11, module))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("dtype", "rows", "repeated"),
    [(torch.float32, 8, True), (torch.bfloat16, 5, True), (torch.bfloat16, 8, False)],
)
def test_groups_on_a_gpu_take_a_fused_kernel(monkeypatch, dtype, rows, repeated):
    """With a mask, or in fp32, torch has none that knows groups."""
    calls = []

    def spy(query, key, value, *, enable_gqa, **_):
        calls.append((key.shape[1], value.shape[1], enable_gqa))
        return torch.empty_like(query)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    # Such tensors cannot be indexed.
    monkeypatch.setattr(backends, "visible", lambda *_: torch.ones(rows, 8, dtype=torch.bool))
    with FakeTensorMode():  # tensors of a GPU, without one
        query = torch.empty(1, 6, rows, 16, dtype=dtype, device="cuda")
        key = torch.empty(1, 2, 8, 16, dtype=dtype, device="cuda")
        backends.attend(query, key, key, scale=0.25, kept=None, backend="sdpa")
    assert calls == [(6, 6, False) if repeated else (2, 2, True)]


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_official_naive_v1_is_another_model_under_gqa(ratio):
    """It repeats key heads that are interleaved already; without GQA there is nothing to repeat."""
    module = randomise(v1(ratio, backend="sdpa").double())
    x = inputs(module)
    with torch.no_grad():
        found = module(x, plain.table(11, module))
        flash, naive = (plain.run(f, module, x) for f in (plain.v1, plain.naive_v1))
    torch.testing.assert_close(found, flash, rtol=0, atol=1e-10)
    difference = float((found - naive).abs().max())
    assert difference < 1e-10 if ratio == 1 else difference > 0.1 * float(flash.std())


def test_v2_split_into_halves_gives_other_numbers():
    module = randomise(v2(2, backend="sdpa").double())
    x = inputs(module)
    with torch.no_grad():
        found = module(x, plain.table(11, module))
        wrong = plain.run(lambda *a: plain.v2(*a, first=range(8), second=range(8, 16)), module, x)
    assert (found - wrong).abs().max() > 0.1 * found.std()


@pytest.mark.parametrize("form", FORMS)
def test_backends_agree_in_bf16(form):
    build, reference = FORMS[form]
    module = randomise(build(2)).bfloat16()
    x = inputs(module, dtype=torch.bfloat16)
    outs = {}
    for backend in BACKENDS:
        module.heads.backend = backend
        with torch.no_grad():
            outs[backend] = module(x, plain.table(11, module)).double()
    exact = plain.run(reference, module.double(), x.double())
    for out in outs.values():
        assert (out - exact).pow(2).mean().sqrt() < 0.03 * exact.std()


# Names and shapes of the official code, for 64 channels, 4 heads and 2 key-value heads.
OFFICIAL = {
    "standard": {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "out_proj": (64, 64)},
    "v1": {
        "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "out_proj": (64, 64),
        "lambda_q1": (8,), "lambda_k1": (8,), "lambda_q2": (8,), "lambda_k2": (8,), "subln": (16,),
    },
    "v2": {
        "q_proj": (128, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64),
        "lambda_proj": (4, 64),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", OFFICIAL)
class TestOfficialStateDicts:
    def build(self, form):
        return {
            "standard": lambda: MultiheadAttention(64, 0, 4, 2),
            "v1": lambda: DifferentialAttentionV1(64, 0, 4, 2),
            "v2": lambda: DifferentialAttentionV2(64, 4, 2, 16),
        }[form]()

    def state(self, form):
        return {
            name if name.startswith("lambda_") and name != "lambda_proj" else f"{name}.weight":
            torch.randn(shape)
            for name, shape in OFFICIAL[form].items()
        }  # fmt: skip

    def test_loads_strictly(self, form):
        module, state = self.build(form), self.state(form)
        module.load_state_dict(state, strict=True)
        assert all(torch.equal(module.state_dict()[name], state[name]) for name in state)

    def test_loads_loosely(self, form):
        module, state = self.build(form), self.state(form)
        name = next(iter(state))
        told = module.load_state_dict({name: state[name], "gate": torch.zeros(1)}, strict=False)
        assert told.unexpected_keys == ["gate"]
        assert set(told.missing_keys) == set(state) - {name}
        assert torch.equal(module.state_dict()[name], state[name])
        torch.nn.Sequential(module).load_state_dict({f"0.{name}": state[name]}, strict=False)

    def test_what_is_missing_is_named(self, form):
        state = self.state(form)
        name = list(state)[-1]
        del state[name]
        with pytest.raises(UsageError, match=f"lacks {name}"):
            self.build(form).load_state_dict(state)

    def test_what_is_too_much_is_named(self, form):
        state = self.state(form) | {"gate.weight": torch.zeros(1)}
        with pytest.raises(UsageError, match=r"gate\.weight"):
            self.build(form).load_state_dict(state)

    def test_other_head_counts_are_named(self, form):
        state = self.state(form)
        state["k_proj.weight"] = torch.zeros(64, 64)
        with pytest.raises(UsageError, match=r"k_proj\.weight is \(64, 64\)"):
            self.build(form).load_state_dict(state)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DifferentialAttentionV1(64, 0, 3), "embed_dim = 64"),
        (lambda: DifferentialAttentionV1(64, 0, 4, 3), "num_kv_heads = 3 does not"),
        (lambda: DifferentialAttentionV2(64, 4, 3, 16), "num_kv_heads = 3"),
        (lambda: DifferentialAttentionV2(64, 3, 2, 16), "num_kv_heads = 2 does not"),
        (lambda: MultiheadAttention(64, 0, 4, 3), "num_kv_heads = 3"),
        (lambda: MultiheadAttention(64, 0, 4, 0), "num_kv_heads is 1 or more"),
        (lambda: MultiheadAttention(64, 0, 0), "embed_dim = 64"),
        (lambda: MultiheadAttention(12, 0, 4), "head_dim is even"),
        (lambda: MultiheadAttention(64, 0, 4, backend="fast"), "unknown attention backend 'fast'"),
        (lambda: MultiheadAttention(64, 0, 4, rotary="x"), "rotary is one of"),
        (lambda: GroupedDifferentialAttention(64, 0, 10, 4, 4, 16), "num_noise_heads = 4"),
        (lambda: GroupedDifferentialAttention(64, 0, 10, 2, 3, 16), "num_kv_heads = 3"),
        (lambda: GroupedDifferentialAttention(64, 0, 10, 0, 4, 16), "num_noise_heads = 0"),
    ],
)
def test_counts_that_do_not_fit_are_named(build, words):
    with pytest.raises(UsageError, match=words):
        build()


def test_a_mask_of_another_length_is_refused():
    module = v1(1)
    with pytest.raises(UsageError, match=r"attention_mask is \(3, 7\)"):
        module(inputs(module, dtype=torch.float32), plain.table(11, module), torch.ones(3, 7))


def test_an_input_of_another_shape_is_refused():
    module = v1(1)
    for x in (torch.zeros(11, 128), torch.zeros(3, 11, 64)):
        with pytest.raises(UsageError, match=r"sequences, tokens, 128 channels"):
            module(x, plain.table(11, module))


def test_a_rotary_table_of_another_length_is_refused():
    module = v1(1)
    with pytest.raises(UsageError, match="rel_pos"):
        module(inputs(module, dtype=torch.float32), plain.table(10, module))
