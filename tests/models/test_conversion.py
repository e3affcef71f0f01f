"""Official weights to transformers models and back: the same outputs."""

import pytest
import torch
from torch import nn

from quantdiff.attention import DifferentialAttentionV1, DifferentialAttentionV2
from quantdiff.errors import UsageError
from quantdiff.models.conversion import convert_state
from tests.attention import plain
from tests.attention.test_modules import randomise
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_ids

RATIOS = (1, 2, 4)
KINDS = {"official-v1": "diffllama", "official-v2": "diff_v2"}


def official(kind, ratio, depth=1):
    """An official module of 64 channels, four differential heads, random weights, fp64."""
    if kind == "official-v1":
        module = DifferentialAttentionV1(64, depth, 4, 4 // ratio, backend="eager")
    else:
        module = DifferentialAttentionV2(64, 4, 4 // ratio, 16, backend="eager")
    return randomise(module).double()


def model(kind, ratio, **options):
    """A tiny transformers model that takes such modules' weights."""
    if kind == "official-v1":
        return tiny_diffllama(
            hidden_size=64, num_attention_heads=8, num_key_value_heads=8 // ratio,
            rms_norm_eps=1e-5, **options,
        )  # fmt: skip
    return tiny_diff_v2(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=4 // ratio, head_dim=16,
        **options,
    )  # fmt: skip


def call(attention, x, module):
    """A transformers attention module on (B, N, C), causal, places from 0."""
    rows = x.shape[1]
    both = [torch.cat([t, t], -1)[None].double() for t in plain.table(rows, module)]
    mask = torch.full((rows, rows), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    return attention(x, position_embeddings=both, attention_mask=mask)[0]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kind", KINDS)
class TestModules:
    def test_the_outputs_are_the_same(self, kind, ratio):
        module = official(kind, ratio)
        if kind == "official-v1":
            # DiffLlama takes λ's exponentials in fp32 whatever its dtype; those of 0 are exact.
            for name in ("lambda_q1", "lambda_q2"):
                getattr(module, name).data.zero_()
        transformer = model(kind, ratio).double()
        transformer.set_attn_implementation("sdpa")  # eager takes its softmax in fp32
        attention = transformer.model.layers[1].self_attn
        attention.load_state_dict(convert_state(module.state_dict(), kind, KINDS[kind]))
        x = torch.randn(2, 9, 64, dtype=torch.float64)
        with torch.no_grad():
            expected = module(x, plain.table(9, module))
            torch.testing.assert_close(call(attention, x, module), expected, rtol=0, atol=1e-10)
        assert expected.std() > 0.1

    def test_back_again(self, kind, ratio):
        module = official(kind, ratio)
        state = module.state_dict()
        there = convert_state(state, kind, KINDS[kind])
        back = convert_state(there, KINDS[kind], kind)
        assert set(back) == set(state)
        folded = {"out_proj.weight", "subln.weight"} if kind == "official-v1" else set()
        for name in set(state) - folded:
            assert torch.equal(back[name], state[name]), name
        again = official(kind, ratio)
        again.load_state_dict(back)
        x = torch.randn(2, 9, 64, dtype=torch.float64)
        with torch.no_grad():
            a, b = (m(x, plain.table(9, m)) for m in (module, again))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        once_more = convert_state(back, kind, KINDS[kind])
        assert all(torch.equal(once_more[name], there[name]) for name in there)


class InPlace(nn.Module):
    """An official module where a decoder layer has its attention."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, hidden_states, position_embeddings, **_):
        cos, sin = position_embeddings
        width = cos.shape[-1] // 2
        return self.module(hidden_states, (cos[..., :width], sin[..., :width])), None


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_models(kind, ratio):
    """A model's weights to the official kind, run by official modules: the same logits."""
    transformer = model(kind, ratio)
    ids = tiny_ids(2, 12)
    with torch.no_grad():
        before = transformer(input_ids=ids).logits
    converted = convert_state(transformer.state_dict(), KINDS[kind], kind)
    unchanged = [name for name in converted if "self_attn" not in name]
    assert len(unchanged) == sum("self_attn" not in name for name in transformer.state_dict())
    for depth, layer in enumerate(transformer.model.layers):
        module = official(kind, ratio, depth).float()
        prefix = f"model.layers.{depth}.self_attn."
        module.load_state_dict(
            {n.removeprefix(prefix): v for n, v in converted.items() if n.startswith(prefix)}
        )
        layer.self_attn = InPlace(module)
    with torch.no_grad():
        after = transformer(input_ids=ids).logits
    assert (after - before).square().mean().sqrt() < 1e-6 * before.std()


def test_what_cannot_be_converted_is_named():
    state = official("official-v1", 2).state_dict()
    with pytest.raises(UsageError, match="no conversion from 'official-v1' to 'diff_v2'"):
        convert_state(state, "official-v1", "diff_v2")
    with pytest.raises(UsageError, match=r"no lambda_proj\.weight"):
        convert_state(state, "official-v2", "diff_v2")
    lacking = {name: value for name, value in state.items() if name != "out_proj.weight"}
    with pytest.raises(UsageError, match=r"out_proj\.weight is missing"):
        convert_state(lacking, "official-v1", "diffllama")
    fewer = {"k_proj.weight": torch.zeros(24, 64), "v_proj.weight": torch.zeros(24, 64)}
    with pytest.raises(UsageError, match="num_kv_heads = 3"):
        convert_state(state | fewer, "official-v1", "diffllama")


@pytest.mark.parametrize("way", [*KINDS.items(), *((b, a) for a, b in KINDS.items())])
def test_every_parameter_is_asked_for(way):
    """A module that lacks one, or has one of another shape, is never converted in silence."""
    source, target = way
    kind = source if source in KINDS else target
    state = official(kind, 2).state_dict()
    if source not in KINDS:
        state = convert_state(state, kind, source)
    for name, value in state.items():
        if name not in ("subln.weight", "lambda_proj.weight", "lambda_q1"):
            less = {key: other for key, other in state.items() if key != name}
            with pytest.raises(UsageError, match=f"{name} is missing"):
                convert_state(less, source, target)
        if name not in ("lambda_proj.weight", "lambda_q1"):
            cut = state | {name: value[..., :-3] if "o" in name[:3] else value[:-3]}
            with pytest.raises(UsageError, match=r"is \(|num_kv_heads"):
                convert_state(cut, source, target)
