"""Products in true fp32 leave the settings of the process as they were."""

import pytest
import torch

from quantdiff.statistics.precision import exact_product, true_fp32

PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def state():
    return [products.fp32_precision for products in PRODUCTS]


@pytest.fixture(autouse=True)
def _as_before():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    for products in PRODUCTS:
        products.fp32_precision = "none"


def older_tf32():
    torch.set_float32_matmul_precision("high")


def older_bf16():
    torch.set_float32_matmul_precision("medium")


def older_for_cuda():
    torch.backends.cuda.matmul.allow_tf32 = True


def newer_for_cuda():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def newer_for_all():
    torch.backends.fp32_precision = "tf32"


WAYS = [older_tf32, older_bf16, older_for_cuda, newer_for_cuda, newer_for_all]


@pytest.mark.parametrize("allow", WAYS)
def test_nothing_is_rounded_inside_and_nothing_has_changed_afterwards(allow):
    allow()
    before = state()
    assert {"tf32", "bf16"} & set(before)
    with true_fp32():
        assert not {"tf32", "bf16"} & set(state())
    assert state() == before
    with pytest.raises(ZeroDivisionError), true_fp32():
        raise ZeroDivisionError
    assert state() == before
    a, b = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    assert torch.allclose(exact_product(a, b).double(), a.double() @ b.double().mT, atol=1e-5)
    assert state() == before


def test_what_was_inherited_is_inherited_still():
    newer_for_all()
    with true_fp32():
        pass
    torch.backends.fp32_precision = "ieee"
    assert state() == ["ieee", "ieee"]


def test_older_settings_can_be_read_afterwards():
    older_tf32()
    with true_fp32():
        pass
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32
