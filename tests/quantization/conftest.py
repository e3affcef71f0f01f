"""What attention modules are given and give, of every layout."""

import importlib

import pytest
import torch

from tests.hooks.test_differential import OWN, Small
from tests.tiny import tiny_diffllama


class Watched:
    """transformers' dispatch as the one attention module of a model asks it.

    Args:
        table: the dispatch.
        calls: of it in a pass; DiffLlama makes two, for the halves of its values.
        caught: gets `args`, queries, keys, values and the mask of the padding, and `out`.
    """

    def __init__(self, table, calls, caught):
        self.table, self.calls, self.caught, self.made = table, calls, caught, []

    def get_interface(self, *given):
        attend = self.table.get_interface(*given)

        def call(module, query, key, value, *args, **options):
            out = attend(module, query, key, value, *args, **options)
            heads = value.shape[1] // self.calls
            self.made.append((value[:, :heads], out[0].transpose(1, 2)))
            if len(self.made) == self.calls:
                values, outs = zip(*self.made, strict=True)
                self.made.clear()
                self.caught["args"] = query, key, torch.cat(values, 1), self.caught["kept"]
                self.caught["out"] = torch.cat(outs, -1)  # (B, H, N, w)
            return out

        return call


@pytest.fixture
def watch(monkeypatch):
    """Of a transformers model of one layer, what its attention is given and gives in each pass."""

    def start(model):
        caught, module = {}, importlib.import_module(type(model).__module__)
        calls = 2 if model.config.model_type == "diffllama" else 1
        watched = Watched(module.ALL_ATTENTION_FUNCTIONS, calls, caught)
        monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", watched)

        def keep(_, args, given):
            every = torch.ones_like(given["input_ids"])
            caught["kept"] = given.get("attention_mask", every)

        model.register_forward_pre_hook(keep, with_kwargs=True)
        return caught

    return start


@pytest.fixture
def module_case(watch):
    """A model of one layer, of a layout, the scale of its logits, and what its attention shows."""

    def make(name):
        if name == "halves":
            model = tiny_diffllama(
                num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4
            )
            return model, model.model.layers[0].self_attn.scaling, watch(model)
        torch.manual_seed(0)
        model, caught = Small(lambda i: OWN[name](i, "sdpa"), layers=1).eval(), {}
        heads = model.blocks[0].attention.heads
        heads.register_forward_hook(lambda m, args, out: caught.update(args=args, out=out))
        return model, heads.scale, caught

    return make
