"""How models are run in practice, each against a plain single pass."""

import inspect

import numpy as np
import pytest
import torch
from torch._dynamo.exc import Unsupported
from transformers import (
    BitsAndBytesConfig,
    CompileConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from quantdiff import Profile, RecordingError, record
from quantdiff.statistics.storage import to_json
from tests.hooks.test_recorder import CACHE, CONTEXTS, assert_same, padded, profile_of
from tests.reference import Materialised, check_profile
from tests.tiny import SETTINGS, build, save_tiny, tiny_ids, tiny_llama


def mistral(**options):
    return build(MistralForCausalLM, MistralConfig(**SETTINGS | {"sliding_window": 6} | options))


def gemma2():
    settings = SETTINGS | {
        "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 3.0,
    }  # fmt: skip
    return build(Gemma2ForCausalLM, Gemma2Config(**settings))


def nf4_llama(folder):
    """A Llama whose linear modules hold bitsandbytes' codes of 4 bits, by way of a folder."""
    save_tiny(folder, tiny_llama(hidden_size=64, intermediate_size=64))
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                bnb_4bit_compute_dtype=torch.float32)  # fmt: skip
    return LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )


def same_places(a, b):
    for kind in ("attention_logits", "hidden_states"):
        one, other = (getattr(p, kind).top(20) for p in (a, b))
        assert [vars(x) | {"value": 0} for x in one] == [vars(x) | {"value": 0} for x in other]


class TestCaches:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_a_sliding_cache(self, attention):
        model = mistral()
        model.set_attn_implementation(attention)
        ids = tiny_ids(2, 20)
        with torch.no_grad(), record(model) as recorder:
            cache = None
            for first, last in ((0, 9), (9, 10), (10, 11), (11, 16), (16, 20)):
                output = model(input_ids=ids[:, first:last], use_cache=True, **{CACHE: cache})
                cache = output[CACHE]
        with torch.no_grad():
            whole = profile_of(model, {"input_ids": ids})
        assert_same(whole, recorder.profile())
        same_places(whole, recorder.profile())

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_a_static_cache(self, attention):
        model = tiny_llama()
        model.set_attn_implementation(attention)
        ids = tiny_ids(2, 12)
        parameters = inspect.signature(StaticCache.__init__).parameters
        options = {"max_batch_size": 2} if "max_batch_size" in parameters else {}
        cache = StaticCache(config=model.config, max_cache_len=32, **options)
        with torch.no_grad(), record(model) as recorder:
            for first, last in ((0, 7), (7, 8), (8, 12)):
                model(input_ids=ids[:, first:last], use_cache=True, **{CACHE: cache})
        with torch.no_grad():
            whole = profile_of(model, {"input_ids": ids})
        assert_same(whole, recorder.profile())
        same_places(whole, recorder.profile())

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_generation_from_padded_prompts(self, kind):
        model = tiny_llama()
        batch = padded([9, 5], "left")
        with torch.no_grad(), record(model) as recorder:
            tokens = model.generate(
                **batch, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=2,
                cache_implementation=kind if kind == "static" else None,
            )  # fmt: skip
        profile = recorder.profile()
        alone = [tokens[:1, :-1], tokens[1:, 4:-1]]
        with torch.no_grad():
            expected = profile_of(model, *({"input_ids": ids} for ids in alone))
        assert_same(expected, profile)
        same_places(expected, profile)
        assert profile.data["tokens"] == expected.data["tokens"] == 12 + 8


class TestTraining:
    def test_a_step_with_backward(self):
        model = tiny_llama().train()
        batch = {"input_ids": tiny_ids(2, 12)}
        model(**batch).logits.sum().backward()
        plain = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        with record(model) as recorder:
            model(**batch).logits.sum().backward()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, plain[name])
        with torch.no_grad():
            assert_same(profile_of(model.eval(), batch), recorder.profile())

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointed_layers_count_once(self, reentrant):
        model = tiny_llama().train()
        batch = {"input_ids": tiny_ids(2, 12)}
        with torch.no_grad():
            expected = profile_of(model, batch)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with record(model) as recorder:
            model(**batch, use_cache=False).logits.sum().backward()
        assert_same(expected, recorder.profile())
        assert recorder.profile().attention_logits.count == expected.attention_logits.count

    def test_attention_dropout_leaves_the_logits(self):
        model = tiny_llama(attention_dropout=0.5).train()
        for attention in ("eager", "sdpa"):
            model.set_attn_implementation(attention)
            with record(model) as recorder:
                model(input_ids=tiny_ids(2, 12))
            first = recorder.profile().attention_logits.sites[0]
            with torch.no_grad():
                plain = profile_of(tiny_llama(), {"input_ids": tiny_ids(2, 12)})
            assert first.absmax == pytest.approx(plain.attention_logits.sites[0].absmax, rel=1e-4)


class TestCompiled:
    def test_a_compiled_model_is_refused_before_it_runs(self):
        model = tiny_llama()
        with pytest.raises(RecordingError, match=r"torch\.compile"):
            record(torch.compile(model))
        model.compile()
        with pytest.raises(RecordingError, match=r"torch\.compile"):
            record(model)

    def test_a_compiled_layer_is_refused_too(self):
        model = tiny_llama()
        model.model.layers[1] = torch.compile(model.model.layers[1])
        with pytest.raises(RecordingError, match=r"torch\.compile"):
            record(model)


@pytest.fixture
def _compiling():
    """Tests run eagerly; these compile, for the first time."""
    torch.compiler.reset()
    with torch.no_grad(), torch.compiler.set_stance("default"):
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_compiling")
@pytest.mark.parametrize("context", CONTEXTS)
class TestCompiledBesideIt:
    """`backend="eager"` traces as any other does, and compiles nothing."""

    def check(self, model, context, compiled):
        ids = tiny_ids()
        plain = model(input_ids=ids).logits
        for _ in range(2):
            with CONTEXTS[context](model) as entered:
                with pytest.raises(RecordingError, match=r"LlamaFor.* torch\.compile.*_orig_mod"):
                    compiled(input_ids=ids)
                model(input_ids=ids)
            if context == "record":  # what was refused is not in it
                assert entered.profile().data["tokens"] == ids.numel()
                assert not entered.profile().partial
            assert torch.equal(compiled(input_ids=ids).logits, plain)
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        torch.compile(model, backend=count)(input_ids=ids)
        assert graphs

    def test_before_and_run(self, context):
        model = tiny_llama()
        compiled = torch.compile(model, backend="eager")
        compiled(input_ids=tiny_ids())
        self.check(model, context, compiled)

    def test_within(self, context):
        model = tiny_llama()
        with CONTEXTS[context](model):
            compiled = torch.compile(model, backend="eager")
        self.check(model, context, compiled)

    def test_as_one_graph(self, context):
        """Torch refuses by itself what it may not break a graph for, and says why we do."""
        model, ids = tiny_llama(), tiny_ids()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with CONTEXTS[context](model), pytest.raises(Unsupported, match="runs past quantdiff's"):
            compiled(input_ids=ids)
        assert torch.equal(compiled(input_ids=ids).logits, model(input_ids=ids).logits)

    def test_a_function_that_calls_it(self, context):
        model = tiny_llama()

        def step(input_ids):
            return model(input_ids=input_ids + 0)

        self.check(model, context, torch.compile(step, backend="eager"))

    def test_generation_that_compiles_by_itself(self, context):
        model, ids = tiny_llama(), tiny_ids(1, 6)
        config = CompileConfig(backend="eager", mode=None)
        config._compile_all_devices = True  # as on a GPU
        given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
        with CONTEXTS[context](model) as entered:
            with pytest.raises(RecordingError, match="disable_compile=True"):
                model.generate(ids, compile_config=config, **given)
            model.generate(ids, disable_compile=True, **given)
        if context == "record":
            assert entered.profile().data["sequences"] == 2


class TestDtypes:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_autocast_counts_what_was_multiplied(self, attention):
        model = tiny_llama()
        batch = padded([20, 14], "right")
        model.set_attn_implementation(attention)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), record(model) as recorder:
            model(**batch)
        with torch.autocast("cpu", torch.bfloat16):
            expected = Materialised(model).run([batch])
        # Rounding to bf16 between the layers makes the backends differ; the first layer cannot.
        if attention == "eager":
            check_profile(to_json(recorder.profile()), expected)
        first = recorder.profile().attention_logits.sites[0]
        exact, _ = expected.heads(0)
        assert first.absmax == pytest.approx(exact.abs().amax(1).numpy(), rel=1e-4)

    def test_bitsandbytes_weights(self, tmp_path):
        model = nf4_llama(tmp_path)
        batch = padded([30, 17], "right")
        with torch.no_grad(), record(model) as recorder:
            model(**batch)
        check_profile(to_json(recorder.profile()), Materialised(model).run([batch]))


class TestFamilies:
    @pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
    def test_sliding_windows(self, attention):
        model = mistral()
        model.set_attn_implementation(attention)
        batches = [padded([30, 17], "right"), padded([30, 11], "left")]
        with torch.no_grad():
            profile = profile_of(model, *batches)
        check_profile(to_json(profile), Materialised(model).run(batches))

    @pytest.mark.parametrize("attention", ["eager", "flex_attention"])
    def test_soft_caps_are_applied_and_the_uncapped_maximum_is_kept(self, attention):
        model = gemma2()
        model.set_attn_implementation(attention)
        batch = padded([30, 17], "right")
        with torch.no_grad():
            profile = profile_of(model, batch)
        expected = Materialised(model).run([batch])  # before the cap
        content = to_json(profile)
        for site in content["attention_logits"]["sites"]:
            raw, _ = expected.heads(site["layer"])
            capped = 3.0 * torch.tanh(raw / 3.0)
            for head, row in enumerate(site["heads"]):
                exact = float(raw[head].abs().max())
                assert row["uncapped_absmax"] == pytest.approx(exact, rel=1e-4)
                assert row["absmax"] == pytest.approx(float(capped[head].abs().max()), rel=1e-4)
                assert row["std"] == pytest.approx(float(capped[head].std(correction=0)), rel=1e-3)
            assert max(row["absmax"] for row in site["heads"]) <= 3

    def test_the_largest_uncapped_logit_of_several_batches(self, tmp_path):
        """Whichever has it, in one recording or in several, and in a profile that was read back."""
        model = gemma2()
        batches = [padded([30, 17], "right"), padded([21, 30], "right", seed=3)]
        each = []
        for batch in batches:
            plain = Materialised(model).run([batch])  # before the cap
            each.append(torch.stack([plain.heads(i)[0].abs().amax(1) for i in range(2)]))
        first, second = each
        assert (first > second).any()
        assert (second > first).any()
        expected = torch.maximum(first, second).numpy()
        with torch.no_grad():
            alone = [profile_of(model, batch) for batch in batches]
            profiles = [profile_of(model, *batches), profile_of(model, *batches[::-1])]
        profiles += [alone[0].merge(alone[1]), alone[1].merge(alone[0])]
        profiles[0].save(tmp_path)
        profiles.append(Profile.load(tmp_path))
        for profile in profiles:
            found = np.stack([site.uncapped for site in profile.attention_logits.sites])
            assert found == pytest.approx(expected, rel=1e-4)
        assert np.array_equal(found, [s.uncapped for s in profiles[0].attention_logits.sites])

    def test_attention_sinks_are_no_logits(self):
        settings = SETTINGS | {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8,
                               "sliding_window": 6}  # fmt: skip
        model = build(GptOssForCausalLM, GptOssConfig(**settings))
        batch = padded([20, 14], "right")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks += 5
            model.set_attn_implementation("eager")
            profile = profile_of(model, batch)
        check_profile(to_json(profile), Materialised(model).run([batch]))

    @pytest.mark.parametrize("training", [False, True])
    def test_an_eager_function_that_does_something_else_is_refused(self, monkeypatch, training):
        from transformers.models.llama import modeling_llama

        eager = modeling_llama.eager_attention_forward

        def eager_attention_forward(module, query, key, *rest, scaling, **kwargs):
            return eager(module, query, key, *rest, scaling=scaling * 1.5, **kwargs)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
        model = tiny_llama(attention_dropout=0.5).train(training)
        model.set_attn_implementation("eager")
        with pytest.raises(RecordingError, match="other weights"), record(model):
            model(input_ids=tiny_ids(2, 12))
