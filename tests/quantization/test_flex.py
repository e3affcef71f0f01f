"""The path of GPUs, compiled for the CPU: the numbers of the blocks."""

import shutil

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from quantdiff import Scheme
from quantdiff.hooks.flash import FlashMode
from quantdiff.hooks.logits import Logits
from quantdiff.quantization import flex
from quantdiff.quantization.attention import attend
from quantdiff.quantization.logits import softmax_of
from quantdiff.statistics import Visible
from tests.quantization.test_fake_quantize import SITE, Fixed

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles with g++")

H, G, N, D = 4, 2, 200, 32
SCALE = D**-0.5
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])


def visibles():
    causal = Visible.causal(2, N, N)
    padded = Visible.causal(2, N, N)
    padded.start[1] = 37
    padded.stop[1, :37] = 0
    sliding = Visible.causal(2, N, N)
    sliding.start = (sliding.stop - 50).clamp(min=0)
    return {"causal": causal, "padded": padded, "sliding": sliding,
            "everything": Visible.everything(2, N, N)}  # fmt: skip


def close(found, expected, v):
    """Share of the rows that agree; bf16 weights are rounded before they meet the values."""
    # Another order of sums moves a logit over a rounding boundary now and then.
    gap = (found.float() - expected.float()).abs().amax(-1)
    rounding = 1e-5 if expected.dtype == torch.float32 else 1e-2
    return float((gap <= rounding * v.abs().max()).float().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_of_the_blocks(dtype):
    """One compilation serves every mask, width, grid and range."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((torch.randn(2, h, N, D, generator=generator) * 2).to(dtype) for h in (H, G, G))
    table = Fixed(np.float32([-3, -2, -1, -4]), np.float32([2, 2.5, 3, 1]))
    for visible in visibles().values():
        logits = Logits(q, k, SCALE, visible)
        for scheme in (
            Scheme(SITE, 4), Scheme(SITE, 8, granularity="head"), Scheme(SITE, 3, symmetric=False),
            Scheme(SITE, 5, "absmax", "head"), Scheme(SITE, 2, "absmax", "head", symmetric=False),
        ):  # fmt: skip
            softmax = softmax_of(logits, scheme, table, "here")
            expected = attend(q, k, v, softmax)
            with torch.compiler.set_stance("default"):
                found = flex.attend(q, k, v, softmax)
            assert found.dtype == expected.dtype
            assert close(found, expected, v) > 0.99
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_soft_caps_sinks_and_wide_values():
    """Not compiled: the CPU's flex attention gives no log-sum-exp."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, h, N, D, generator=generator) * 3 for h in (H, G))
    v = torch.randn(1, H, N, 2 * D, generator=generator)
    logits = Logits(q, k, SCALE, Visible.causal(1, N, N), softcap=5.0)
    softmax = softmax_of(logits, Scheme(SITE, 6), None, "here")
    for sinks in (None, SINKS):
        expected = attend(q, k, v, softmax, sinks)
        assert close(flex.attend(q, k, v, softmax, sinks), expected, v) > 0.99


def test_what_it_takes():
    q = torch.randn(1, H, N, D)
    logits = Logits(q, q, SCALE, Visible.causal(1, N, N))
    softmax = softmax_of(logits, Scheme(SITE, 6), None, "here")
    assert not flex.takes(q, q, q, softmax)  # blocks cost a CPU little, a compilation much


@pytest.mark.parametrize(
    ("largest", "may"),
    [(3.0, False), (1e15, False), (1e19, True), (torch.inf, True), (torch.nan, True)],
)
def test_logits_that_may_be_infinite(largest, may):
    """Clamping to a static range would hide them."""
    q = torch.randn(1, H, N, D)
    q[0, 0, 2, 1] = largest
    assert flex.may_overflow(q, q, SCALE) is may


def test_gradients_take_the_blocks():
    """Those of learned sinks too."""
    q = torch.randn(1, H, N, D)
    softmax = softmax_of(
        Logits(q, q, SCALE, Visible.causal(1, N, N)), Scheme(SITE, 6), None, "here"
    )
    with FakeTensorMode():  # a tensor of a GPU, without one
        q = torch.empty(1, H, N, D, device="cuda")
        learned = torch.empty(H, device="cuda", requires_grad=True)
        for sinks in (None, learned.detach()):
            assert flex.takes(q, q, q, softmax, sinks)
        assert not flex.takes(q, q, q, softmax, learned)
        with torch.no_grad():
            assert flex.takes(q, q, q, softmax, learned)


def test_narrow_heads_take_the_blocks():
    """Flex attention takes none below 16 on a GPU."""
    softmax = softmax_of(
        Logits(*[torch.randn(1, H, N, D)] * 2, SCALE, Visible.causal(1, N, N)),
        Scheme(SITE, 6), None, "here",
    )  # fmt: skip
    with FakeTensorMode():  # tensors of a GPU, without one
        wide, least, narrow = (torch.empty(1, H, N, d, device="cuda") for d in (D, 16, 8))
        assert flex.takes(least, least, least, softmax)
        assert not flex.takes(narrow, narrow, wide, softmax)
        assert not flex.takes(wide, wide, narrow, softmax)


class Limits(TorchFunctionMode):
    """What dynamo's limit is where anything is computed."""

    def __init__(self):
        self.seen = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.add(torch._dynamo.config.recompile_limit)
        return function(*args, **kwargs or {})


def test_it_runs_while_flash_attn_is_looked_for_and_for_many_models():
    """A model outside of transformers computes within the mode, which knows no flex attention."""
    q = torch.randn(1, H, N, D)
    softmax = softmax_of(
        Logits(q, q, SCALE, Visible.causal(1, N, N)), Scheme(SITE, 6), None, "here"
    )
    expected, before = attend(q, q, q, softmax), torch._dynamo.config.recompile_limit
    with FlashMode(lambda call: None), Limits() as limits:
        found = flex.attend(q, q, q, softmax)
    assert close(found, expected, q) > 0.99
    assert max(limits.seen) > before == torch._dynamo.config.recompile_limit
