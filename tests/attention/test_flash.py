"""The flash backend, driven through functions with flash-attn's own signatures and shape rules."""

import importlib.machinery
import logging
import sys
import types

import pytest
import torch

from quantdiff.attention import flash
from quantdiff.errors import UsageError
from tests.attention import plain
from tests.attention.test_modules import FORMS, inputs, mask, randomise


class Library:
    """Stands in for the three packages; keeps the widths of each call.

    The shape rules are those of the packages' sources: version 2 wants equal widths, 3 allows
    others for query heads of up to 64, 4 takes any from 8 to 256.
    """

    def __init__(self, monkeypatch, *versions, major=9):
        self.calls = []
        flash.forget()
        monkeypatch.setattr(flash, "capability", lambda tensor: major)
        for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, None)
        for version in versions:
            if version == 2:
                self.install(monkeypatch, "flash_attn", self.two, self.two_packed)
            elif version == 3:
                self.install(monkeypatch, "flash_attn_interface", self.three, self.three_packed)
            else:
                if sys.modules["flash_attn"] is None:
                    self.install(monkeypatch, "flash_attn")
                self.install(monkeypatch, "flash_attn.cute", self.four, self.four_packed)

    @staticmethod
    def install(monkeypatch, name, dense=None, packed=None):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        if dense is not None:
            module.flash_attn_func, module.flash_attn_varlen_func = dense, packed
        monkeypatch.setitem(sys.modules, name, module)

    def attend(self, q, k, v, scale, causal):
        """(B, N, H, D), the last query at the last key, as flash-attn since 2.1."""
        assert causal
        self.calls.append((q.shape[-1], v.shape[-1]))
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        logits = torch.einsum("bnhd,bmhd->bhnm", q, k) * scale
        rows, keys = logits.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhnm,bmhw->bnhw", weights, v)

    def unpack(self, q, k, v, cu_q, cu_k, scale, causal):
        """(tokens, H, D), sequence behind sequence."""
        outs = []
        for b in range(len(cu_q) - 1):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            outs.append(self.attend(q[None, rows], k[None, keys], v[None, keys], scale, causal)[0])
        return torch.cat(outs)

    def two(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        if q.shape[-1] != v.shape[-1]:
            raise RuntimeError("v must have the head width of q")
        return self.attend(q, k, v, softmax_scale, causal)

    def two_packed(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        if q.shape[-1] != v.shape[-1]:
            raise RuntimeError("v must have the head width of q")
        return self.unpack(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)

    def three(self, q, k, v, softmax_scale=None, causal=False):
        if q.shape[-1] != v.shape[-1] and q.shape[-1] > 64:
            raise RuntimeError("other value widths only for query heads of up to 64")
        return self.attend(q, k, v, softmax_scale, causal)

    def three_packed(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        return self.unpack(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)

    def four(self, q, k, v, softmax_scale=None, causal=False):
        return self.attend(q, k, v, softmax_scale, causal), None

    def four_packed(
        self, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False
    ):
        return self.unpack(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal), None


@pytest.fixture(autouse=True)
def _forget_the_plans():
    yield
    flash.forget()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 8])
@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_reference(monkeypatch, form, version, ratio, padded):
    Library(monkeypatch, version)
    build, reference = FORMS[form]
    module = randomise(build(ratio, backend="flash").double())
    x, kept = inputs(module), mask() if padded else None
    with torch.no_grad():
        found = module(x, plain.table(11, module), kept)
        expected = plain.run(reference, module, x, kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def wide_v1(head_dim):
    from quantdiff.attention import DifferentialAttentionV1

    return DifferentialAttentionV1(4 * head_dim, 0, 2, backend="flash").double()


@pytest.mark.parametrize(
    ("versions", "head_dim", "calls"),
    [
        ((2,), 64, [(64, 64)] * 4),
        ((3,), 64, [(64, 128)] * 2),
        ((3,), 128, [(128, 128)] * 4),
        ((4,), 128, [(128, 256)] * 2),
        ((2, 4), 64, [(64, 128)] * 2),
        ((2, 3), 128, [(128, 128)] * 4),
    ],
)
def test_v1_in_two_calls_or_four_on_hopper(monkeypatch, versions, head_dim, calls):
    library = Library(monkeypatch, *versions)
    module = randomise(wide_v1(head_dim))
    x = inputs(module)
    with torch.no_grad():
        found = module(x, plain.table(11, module))
        expected = plain.run(plain.v1, module, x)
    assert library.calls == calls
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("versions", "major", "widths", "found"),
    [
        # Version 4 runs on Hopper and what came after, there with widths of up to 128.
        ((2, 4), 8, (64, 64), ("flash-attn 2", 1)),
        ((2, 4), 10, (64, 128), ("flash-attn 4", 1)),
        ((2, 4), 10, (128, 256), ("flash-attn 4", 2)),
        ((2, 4), 10, (256, 256), ("flash-attn 2", 1)),
        # Version 3 takes other value widths on Hopper alone.
        ((3,), 8, (64, 128), ("flash-attn 3", 2)),
        ((3,), 9, (64, 128), ("flash-attn 3", 1)),
        ((4,), 8, (64, 64), None),
        ((4,), 9, (64, 64), ("flash-attn 4", 1)),
        ((2,), 9, (12, 12), None),
        # Neither runs on what came before Ampere.
        ((2,), 7, (64, 64), None),
        ((3,), 7, (64, 64), None),
        ((), 9, (64, 64), None),
    ],
)
def test_the_choice_depends_on_the_gpu(monkeypatch, versions, major, widths, found):
    Library(monkeypatch, *versions)
    kernel = flash.find(*widths, major)
    assert found == (kernel and (kernel[0].name, kernel[1]))


def test_a_package_that_does_not_work_is_none(monkeypatch):
    """flash-attn 2.8 ships version 4's folder without what that needs."""
    Library(monkeypatch, 2)
    broken = types.ModuleType("flash_attn.cute")
    monkeypatch.setitem(sys.modules, "flash_attn.cute", broken)
    assert flash.find(64, 64, 9)[0].name == "flash-attn 2"


def test_what_flash_does_not_take_is_refused():
    with pytest.raises(UsageError, match=r"float16 and bfloat16 on a CUDA GPU.*sdpa"):
        wide_v1(64)(torch.zeros(1, 4, 256).double(), plain.table(4, wide_v1(64)))


def test_the_choice_is_logged_once(monkeypatch, caplog):
    Library(monkeypatch, 2)
    module = randomise(wide_v1(64))
    with caplog.at_level(logging.INFO, "quantdiff.attention.flash"), torch.no_grad():
        for _ in range(2):
            module(inputs(module), plain.table(11, module))
    assert caplog.messages == ["flash-attn 2: query width 64, values of 128 in 2 calls"]


def test_a_wrong_width_is_refused_before_the_call(monkeypatch):
    library = Library(monkeypatch, 2)
    with pytest.raises(UsageError, match="query heads of width 12 with values of width 24"):
        wide_v1(12)(torch.zeros(1, 4, 48).double(), plain.table(4, wide_v1(12)))
    q = torch.zeros(1, 2, 4, 128)
    with pytest.raises(UsageError, match="width 128 with values of width 256"):
        flash.call(flash.KERNELS[1], q, q, torch.zeros(1, 2, 4, 256), 1.0, None)
    assert not library.calls


def test_without_the_package_the_remedy_is_named(monkeypatch):
    Library(monkeypatch)
    module = wide_v1(64)
    with pytest.raises(UsageError, match="pip install flash-attn --no-build-isolation"):
        module(inputs(module), plain.table(11, module))


def test_auto_is_sdpa_on_a_cpu(monkeypatch):
    library = Library(monkeypatch, 4)
    module = wide_v1(64)
    module.heads.backend = "auto"
    module(inputs(module), plain.table(11, module))
    assert not library.calls
