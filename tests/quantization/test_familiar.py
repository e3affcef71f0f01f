"""Attention that computes something else than is known is refused, whenever that shows."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from quantdiff import QuantizationError, Scheme, fake_quantize
from quantdiff.quantization import attending
from tests.hooks.test_any_module import NanoGPT, make
from tests.quantization.test_fake_quantize import MODELS, SITE
from tests.standins import IDS
from tests.tiny import tiny_ids

SCHEME = Scheme(SITE, 8, granularity="row")
UNKNOWN = r"the attention of \S+ is not the softmax of"


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def sharpened(monkeypatch):
    """A Llama whose softmax gets other logits than it says, which one key alone cannot tell."""
    real = modeling_llama.eager_attention_forward

    def attend(*args, scaling, **options):
        return real(*args, scaling=3 * scaling, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    model = MODELS["llama"]()
    model.set_attn_implementation("eager")
    return model


def test_it_stays_refused(sharpened):
    with fake_quantize(sharpened, SCHEME):
        for _ in range(3):  # once for each of its layers, and again
            with pytest.raises(QuantizationError, match=UNKNOWN):
                sharpened(input_ids=tiny_ids())


def test_one_token_is_no_proof(sharpened):
    ids = tiny_ids()
    with fake_quantize(sharpened, SCHEME):
        sharpened(input_ids=ids[:, :1])
        with pytest.raises(QuantizationError, match=UNKNOWN):
            sharpened(input_ids=ids)


def test_tokens_that_each_see_themselves_alone_are_no_proof(sharpened):
    """As a mask of any form may have it."""
    ids, least = tiny_ids(2, 6), torch.finfo(torch.float32).min
    seen = torch.eye(6, dtype=torch.bool)
    with fake_quantize(sharpened, SCHEME):
        for more in (False, True):
            if more:  # the last token sees the first one too, with a hole in between
                seen = seen.clone()
                seen[5, 0] = True
            mask = torch.zeros(2, 1, 6, 6).masked_fill(~seen, least)
            if not more:
                sharpened(input_ids=ids, attention_mask=mask)
                continue
            with pytest.raises(QuantizationError, match=UNKNOWN):
                sharpened(input_ids=ids, attention_mask=mask)


def test_what_is_known_is_looked_at_once(monkeypatch):
    """A second pass costs nothing more."""
    looked, real = [], attending.check_familiar

    def look(name, *given):
        looked.append(name)
        return real(name, *given)

    monkeypatch.setattr(attending, "check_familiar", look)
    llama = MODELS["llama"]()
    plain = make(NanoGPT, layers=2, is_causal=True)
    for model, ids in ((llama, tiny_ids()), (plain, IDS % 50)):
        looked.clear()
        with fake_quantize(model, SCHEME):
            for part in (ids[:, :1], ids[:, :1], ids, ids):
                model(part)
        assert len(looked) == 4  # two layers, by one token and by all


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_autocast_rounds_as_it_does(backend):
    """The logits are those of bf16, in which they are multiplied."""
    model = MODELS["llama"]()
    model.set_attn_implementation(backend)
    with torch.autocast("cpu", torch.bfloat16), fake_quantize(model, SCHEME):
        assert model(tiny_ids()).logits.isfinite().all()
