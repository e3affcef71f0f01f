"""The model never notices a recording: before, during, after, and when something fails."""

import copy
import threading

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from quantdiff import record
from tests.hooks.test_recorder import ATTENTION, assert_same, profile_of
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

    def test_a_copy_made_while_recording_is_a_plain_model(self):
        model = tiny_llama()
        expected = model(input_ids=tiny_ids()).logits
        with record(model):
            other = copy.deepcopy(model.config)
        assert type(other) is type(model.config)
        assert torch.equal(model(input_ids=tiny_ids()).logits, expected)

    def test_the_implementation_may_change_while_recording(self):
        model, batch = tiny_llama(), {"input_ids": tiny_ids(2, 12)}
        with record(model) as recorder:
            for attention in ATTENTION:
                model.set_attn_implementation(attention)
                model(**batch)
        assert model.config._attn_implementation == "flex_attention"
        assert_same(recorder.profile(), profile_of(tiny_llama(), batch, batch, batch))
