"""How models are run: also where their parameters lie on several devices, or are offloaded."""

import copy

import accelerate
import pytest
import torch
from torch import nn

from quantdiff import calibrate
from quantdiff.analysis.evaluation.forward import Forward, evaluating
from quantdiff.analysis.profiling import profile_text
from quantdiff.calibration.running import forward_options, model_device, places_to_keep
from tests.calibration.test_calibrate import windows
from tests.tiny import tiny_ids, tiny_llama

CPU, META = torch.device("cpu"), torch.device("meta")


def spread():
    """A model with a parameter elsewhere, which its forward does not need."""
    model = tiny_llama()
    model.elsewhere = nn.Parameter(torch.empty(1, device=META))
    return model


def test_the_device_is_never_meta():
    model = nn.Sequential(nn.Linear(2, 2, device=META), nn.Linear(2, 2))
    assert model_device(model) == CPU
    assert model_device(model[0]) == CPU
    assert model_device(nn.Identity()) == CPU


def test_the_options_lie_on_no_device():
    assert forward_options(tiny_llama()) == {"use_cache": False, "logits_to_keep": slice(0, 1)}
    assert forward_options(nn.Identity()) == {}


def test_places():
    one, several = tiny_llama(), spread()
    apart = torch.tensor([2, 3, 7])
    for model in (one, several):
        assert places_to_keep(model, torch.arange(3, 9)) == slice(3, 9)
        assert places_to_keep(model, torch.tensor([4])) == slice(4, 5)
    assert torch.equal(places_to_keep(one, apart), apart)
    assert places_to_keep(several, apart) is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spans", [[(2, 9), (2, 9)], [(0, 2), (11, 14)], [(5, 6), (13, 14)]])
def test_evaluations_get_the_same_logits_of_a_model_on_several_devices(spans, side):
    sequences = [tiny_ids(1, 10)[0], tiny_ids(1, 15, seed=1)[0]]
    found = []
    for model in (tiny_llama(), spread()):
        forward = Forward(model, None)
        forward.padding_side = side
        with evaluating(model):
            wanted = forward(sequences, spans)
        found.append(wanted.logits[wanted.rows, wanted.columns])
    assert len(found[0]) == sum(last - first for first, last in spans)
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        plain = [
            tiny_llama()(input_ids=ids[None]).logits[0, first:last]
            for ids, (first, last) in zip(sequences, spans, strict=True)
        ]
    assert torch.allclose(found[0], torch.cat(plain), rtol=1e-4, atol=1e-5)


def test_a_model_whose_parameters_are_offloaded():
    model = tiny_llama()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=CPU)
    assert all(p.device == META for p in offloaded.parameters())
    one, other = (profile_text(m, windows()) for m in (model, offloaded))
    for kind in ("attention_logits", "hidden_states"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        assert mine.rank(1) == theirs.rank(1)
        assert mine.count == theirs.count
    tables = [calibrate(m, windows()) for m in (model, offloaded)]
    assert [s.max.tolist() for s in tables[0].sites] == [s.max.tolist() for s in tables[1].sites]
