"""The model never notices a recording: before, during, after, and when something fails."""

import copy
import pickle
import threading

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers import LlamaConfig
from transformers.modeling_utils import AttentionInterface

from quantdiff import RecordingError, record
from tests.hooks.test_any_module import IDS, NanoGPT, make
from tests.hooks.test_recorder import ATTENTION, CONTEXTS, assert_same, profile_of
from tests.tiny import build, tiny_ids, tiny_llama


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class TestTheModelNeverNotices:
    def state(self, model):
        modules = dict(model.named_modules())
        return (
            {name: id(vars(m).get("config")) for name, m in modules.items()},
            {
                name: (len(m._forward_hooks), len(m._forward_pre_hooks))
                for name, m in modules.items()
            },
            {name: sorted(vars(m)) for name, m in modules.items()},
            dict(AttentionInterface._global_mapping),
            model.config._attn_implementation,
        )

    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
    def test_after_an_exception_in_the_forward(self, kind):
        model = tiny_llama()
        before = self.state(model)

        def fail(*_):
            raise kind("from inside")

        handle = model.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(kind, match="from inside"), record(model) as recorder:
            model(input_ids=tiny_ids())
        handle.remove()
        assert self.state(model) == before
        with record(model) as recorder:
            model(input_ids=tiny_ids())
        assert not recorder.profile().partial

    def test_a_pass_that_failed_marks_the_profile_partial(self):
        model = tiny_llama()
        with record(model) as recorder:
            model(input_ids=tiny_ids())
            handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(input_ids=tiny_ids())
            handle.remove()
        assert recorder.profile().partial

    def test_a_users_own_hooks_stay(self):
        model = tiny_llama()
        calls = []
        model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        profile_of(model, {"input_ids": tiny_ids()})
        model(input_ids=tiny_ids())
        assert len(calls) == 2

    def test_another_model_of_the_same_config_object_is_not_recorded(self):
        model = tiny_llama()
        other = build(type(model), model.config, seed=1)
        assert other.model.layers[0].self_attn.config is model.model.layers[0].self_attn.config
        with record(model) as recorder:
            model(input_ids=tiny_ids(1, 10))
            other(input_ids=tiny_ids(3, 12))
        assert recorder.profile().data["tokens"] == 10
        assert recorder.profile().attention_logits.count == 2 * 4 * 55

    def test_two_models_are_recorded_at_once_in_two_threads(self):
        models = [tiny_llama(seed=i) for i in range(2)]
        batches = [{"input_ids": tiny_ids(2, 20, seed=i)} for i in range(2)]
        expected = [profile_of(m, *[b] * 5) for m, b in zip(models, batches, strict=True)]
        recorders = [record(model) for model in models]

        def run(i):
            with torch.no_grad(), recorders[i]:
                for _ in range(5):
                    models[i](**batches[i])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for recorder, profile in zip(recorders, expected, strict=True):
            assert_same(recorder.profile(), profile)

    def test_a_copy_of_a_modules_config_made_while_recording_is_a_plain_one(self):
        model = tiny_llama()
        expected = model(input_ids=tiny_ids()).logits
        with record(model):
            own = model.model.layers[0].self_attn.config
            assert type(own) is not LlamaConfig  # a stand-in, which says that it is one
            for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
                assert type(other) is LlamaConfig
                assert type(other._attn_implementation) is str
                assert other.to_dict() == model.config.to_dict()
        assert torch.equal(model(input_ids=tiny_ids()).logits, expected)

    def test_the_implementation_may_change_while_recording(self):
        model, batch = tiny_llama(), {"input_ids": tiny_ids(2, 12)}
        with record(model) as recorder:
            for attention in ATTENTION:
                model.set_attn_implementation(attention)
                model(**batch)
        assert model.config._attn_implementation == "flex_attention"
        assert_same(recorder.profile(), profile_of(tiny_llama(), batch, batch, batch))


class Counting(ModelHook):
    """A wrapper of somebody else's, around the forward."""

    def __init__(self):
        self.calls = 0

    def post_forward(self, module, output):
        self.calls += 1
        return output


@pytest.mark.parametrize("context", CONTEXTS)
class TestSomebodyElseWrapsTheForward:
    def changed(self, model, plain):
        return not torch.equal(model(input_ids=tiny_ids()).logits, plain)

    def check(self, model, plain, context):
        """The model is as it was, and a context does its work once more."""
        assert not self.changed(model, plain)
        other = copy.deepcopy(model)
        assert not self.changed(other, plain)
        assert other.forward.__self__ is other
        assert not self.changed(pickle.loads(pickle.dumps(model)), plain)
        with CONTEXTS[context](model) as entered:
            assert self.changed(model, plain) == (context == "fake_quantize")
        if context == "record":
            assert entered.profile().data["tokens"] == tiny_ids().numel()
        assert not self.changed(model, plain)
        assert "forward" not in vars(model)

    def test_from_inside_to_behind(self, context):
        model, hook = tiny_llama(), Counting()
        plain = model(input_ids=tiny_ids()).logits
        with CONTEXTS[context](model) as entered:
            add_hook_to_module(model, hook)
            add_hook_to_module(model.model, hook)
            assert self.changed(model, plain) == (context == "fake_quantize")
        if context == "record":
            assert entered.profile().data["tokens"] == tiny_ids().numel()
        for calls in (4, 6):  # theirs stays, and ours does nothing beneath it
            assert not self.changed(model, plain)
            assert hook.calls == calls
            assert not self.changed(copy.deepcopy(model), plain)
            hook.calls = calls
        with CONTEXTS[context](model):
            assert self.changed(model, plain) == (context == "fake_quantize")
        remove_hook_from_module(model)
        remove_hook_from_module(model.model)
        self.check(model, plain, context)

    def test_from_before_to_inside(self, context):
        model, hook = tiny_llama(), Counting()
        plain = model(input_ids=tiny_ids()).logits
        add_hook_to_module(model, hook)
        with CONTEXTS[context](model):
            assert self.changed(model, plain) == (context == "fake_quantize")
            assert hook.calls == 1
            remove_hook_from_module(model)
        assert vars(model)["forward"] == type(model).forward.__get__(model)
        assert not self.changed(model, plain)
        del model.forward  # accelerate leaves it there, also without us
        self.check(model, plain, context)

    def test_between_two_contexts(self, context):
        model, hook = tiny_llama(), Counting()
        plain = model(input_ids=tiny_ids()).logits
        inner, outer = CONTEXTS["record"](model), CONTEXTS["fake_quantize"](model)
        inner.__enter__()
        add_hook_to_module(model, hook)
        outer.__enter__()
        first, second = (inner, outer) if context == "record" else (outer, inner)
        assert self.changed(model, plain)
        first.__exit__()
        assert self.changed(model, plain) == (second is outer)
        second.__exit__()
        assert not self.changed(model, plain)
        remove_hook_from_module(model)
        self.check(model, plain, context)


def test_a_second_recording_is_seen_through_somebody_elses_wrapper():
    model = make(NanoGPT, is_causal=True)
    with record(model):
        model.forward = torch.no_grad()(model.forward)
        with pytest.raises(RecordingError, match="recorded already"), record(model):
            pass
    with record(model) as recorder:
        model(IDS)
    assert recorder.profile().data["tokens"] == IDS.numel()
