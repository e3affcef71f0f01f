"""Migration and rotation leave the function as it is, and outliers smaller."""

import pytest
import torch

from quantdiff import QuantizationError, Scheme, UsageError, fake_quantize, record
from quantdiff.quantization.remedies import orthogonal, rotated, smoothed
from tests.quantization.test_fake_quantize import MODELS, batch

FACTOR = 40.0


def with_outliers(name, factor=FACTOR):
    """A model whose norms blow one channel up, and whose residual stream has a large one."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= factor
            layer.post_attention_layernorm.weight[5] *= factor
            for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                p.weight[:, 3] /= factor
            for p in (layer.mlp.gate_proj, layer.mlp.up_proj):
                p.weight[:, 5] /= factor
            layer.mlp.down_proj.weight[7] *= factor
    return model


def contexts(model):
    return {"smoothed": lambda: smoothed(model, [batch()]), "rotated": lambda: rotated(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("remedy", ["smoothed", "rotated"])
@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays(name, remedy, tied, dtype):
    # Beside outliers of 40 times a plain DiffLlama is itself 6e-5 off in fp32.
    model = with_outliers(name, FACTOR if dtype == torch.float64 else 4.0)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for module in model.modules():  # norms that are not all ones
            if hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
                noise = torch.rand(module.weight.shape, generator=generator)
                module.weight.mul_(0.5 + noise)
    model.to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    head = model.lm_head.weight
    real = batch()["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**batch()).logits[real]
        with contexts(model)[remedy]():
            found = model(**batch()).logits[real]
            changed = [
                n for n, p in model.named_parameters() if not torch.equal(p, before.get(n, p))
            ]
    # Norms compute in fp32 in either case.
    assert (found - plain).abs().max() < 1e-5 * (1 + plain.abs().max())
    assert any("q_proj" in n for n in changed)
    assert any("down_proj" in n for n in changed)
    assert model.lm_head.weight is head
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]), n


def test_a_rotation_spreads_the_residual_stream_and_leaves_the_logits():
    model = with_outliers("llama")
    profiles = []
    with torch.no_grad():
        for context in (lambda: fake_quantize(model), lambda: rotated(model)):
            with context(), record(model) as recorder:
                model(**batch())
            profiles.append(recorder.profile())
    before, after = (p.hidden_states.top(1)[0].value for p in profiles)
    assert after < 0.6 * before
    a, b = (p.attention_logits.top(1)[0].value for p in profiles)
    assert a == pytest.approx(b, rel=1e-4)


def test_migration_helps_quantized_inputs():
    model = with_outliers("llama")
    schemes = [
        Scheme("linear_inputs", 6, granularity="token"), Scheme("weights", 6, granularity="channel")
    ]  # fmt: skip
    errors = []
    with torch.no_grad():
        plain = model(**batch()).logits
        for context in (lambda: fake_quantize(model), lambda: smoothed(model, [batch()])):
            with context(), fake_quantize(model, *schemes):
                errors.append(float((model(**batch()).logits - plain).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def inputs_of(model, modules, batches):
    """Largest magnitudes of what comes into some modules from real tokens, (batches, in) each."""
    caught, found = {}, {m: [] for m in modules}
    handles = [
        m.register_forward_pre_hook(lambda m, args: caught.update({m: args[0]})) for m in modules
    ]
    with torch.no_grad():
        for one in batches:
            model(**one)
            real = one["attention_mask"].bool()
            for m in modules:
                found[m].append(caught[m][real].abs().amax(0))
    for handle in handles:
        handle.remove()
    return {m: torch.stack(rows) for m, rows in found.items()}


def migrated(model):
    """The modules that read each input that is divided by s: two norms' outputs, and a product."""
    for layer in model.model.layers:
        own = ("q_proj", "k_proj", "v_proj", "lambda_proj")
        heads = [getattr(layer.self_attn, name, None) for name in own]
        yield [reader for reader in heads if reader is not None]
        yield [layer.mlp.gate_proj, layer.mlp.up_proj]
        yield [layer.mlp.down_proj]


def largest_columns(group):
    """max|W_j| over some modules."""
    return torch.stack([reader.weight.detach().abs().amax(0) for reader in group]).amax(0)


def norms(model):
    return [
        norm.weight.detach().clone()
        for layer in model.model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]


def with_large_tokens(name):
    """Of which 1 has a large tenth channel, and 2 a very large fifth."""
    model = MODELS[name]().double()
    model.model.embed_tokens.weight.data[1, 9] *= 10
    model.model.embed_tokens.weight.data[2, 4] = 30.0
    return model


def texts():
    """Two batches, of which only the second has the token 1."""
    first, second = batch(), batch()
    second["input_ids"][:, -2:] = 1
    return [first, second]


class TestFactors:
    """s_j = max|X_j|^α / max|W_j|^(1−α), over all batches and all modules that read the input."""

    @pytest.mark.parametrize("name", MODELS)
    def test_most_of_it_to_the_weights(self, name):
        model, work = with_large_tokens(name), texts()
        groups = list(migrated(model))
        seen = inputs_of(model, [group[0] for group in groups], work)
        expected = [
            seen[group[0]].amax(0) ** 0.8 / largest_columns(group) ** 0.2 for group in groups
        ]
        first, second = seen[groups[0][0]]
        assert second[9] > 2 * first[9]  # the first batch alone would give another factor
        before, ups = norms(model), [layer.mlp.up_proj for layer in model.model.layers]
        wide = [up.weight.detach().clone() for up in ups]
        with smoothed(model, work, 0.8):
            after, narrow = norms(model), [up.weight.detach().clone() for up in ups]
        behind_norms = [s for i, s in enumerate(expected) if i % 3 < 2]
        for old, new, s in zip(before, after, behind_norms, strict=True):
            assert torch.allclose(old / new, s, rtol=1e-5)
        for i, (old, new) in enumerate(zip(wide, narrow, strict=True)):
            _, columns, rows = expected[3 * i : 3 * i + 3]
            assert torch.allclose(old / new, rows[:, None] / columns, rtol=1e-5)

    @pytest.mark.parametrize("name", MODELS)
    def test_all_of_it_to_either_side(self, name):
        model, work = with_large_tokens(name), texts()
        groups, one = list(migrated(model)), torch.ones((), dtype=torch.float64)
        with smoothed(model, work, 1):
            for most in inputs_of(model, [group[0] for group in groups], work).values():
                assert torch.allclose(most.amax(0), one, rtol=1e-5)
        with smoothed(model, work, 0):
            for group in groups:
                if len(group) != 2:  # the rows of up_proj are divided by what down_proj gets
                    assert torch.allclose(largest_columns(group), one, rtol=1e-5)

    def test_padding_counts_for_nothing(self):
        """What stands in it is larger in one channel than all real tokens."""
        model, text = with_large_tokens("llama"), batch()
        kept = text["attention_mask"].bool()
        text["input_ids"][~kept] = 2
        alone = [
            {"input_ids": ids[real][None]}
            for ids, real in zip(text["input_ids"], kept, strict=True)
        ]
        found = []
        for work in ([text], alone):
            with smoothed(model, work):
                found.append(norms(model))
        for together, apart in zip(*found, strict=True):
            assert torch.allclose(together, apart, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 6, 9, 64, 96, 576])
def test_orthogonal(width):
    q = orthogonal(width)
    assert torch.allclose(q @ q.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    # No channel keeps more than its share, up to the cosine transform's factor.
    assert q.abs().max() <= (2 / width) ** 0.5 + 1e-12
    assert not torch.equal(q, orthogonal(width, seed=1)) or width == 1


def test_bad_input():
    model = MODELS["llama"]()
    with pytest.raises(UsageError, match=r"alpha lies in \[0, 1\], not 2"), smoothed(model, [], 2):
        pass
    with pytest.raises(UsageError, match="migration needs a batch"), smoothed(model, []):
        pass
    ready = batch() | {"attention_mask": torch.zeros(2, 1, 20, 20)}
    refused = pytest.raises(QuantizationError, match="its padding cannot be told; give the 2-D")
    with refused, smoothed(model, [ready]):
        pass
    model.model.layers[0].mlp.extra = torch.nn.Linear(4, 4)
    with (
        pytest.raises(QuantizationError, match=r"not built like Llama.*mlp\.extra"),
        rotated(model),
    ):
        pass


def test_a_model_that_computes_something_else_is_refused():
    model = with_outliers("llama")
    layer = model.model.layers[0]
    real = layer.mlp.forward
    layer.mlp.forward = lambda x: real(x + x[..., :1].abs())
    refused = pytest.raises(QuantizationError, match="computes something else")
    before = layer.mlp.up_proj.weight.detach().clone()
    with torch.no_grad(), refused, rotated(model):
        pass
    assert torch.equal(layer.mlp.up_proj.weight, before)


@pytest.mark.parametrize("remedy", ["smoothed", "rotated"])
def test_a_remedy_goes_before_quantization(remedy):
    model = MODELS["llama"]()
    with (
        fake_quantize(model, Scheme("weights", 4)),
        pytest.raises(QuantizationError, match="before fake_quantize's"),
        contexts(model)[remedy](),
    ):
        pass
    with torch.no_grad(), contexts(model)[remedy](), fake_quantize(model, Scheme("weights", 4)):
        model(**batch())
