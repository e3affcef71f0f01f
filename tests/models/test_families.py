"""λ of a module is the one that it computes with, to the bit, whatever its parameters' dtype."""

import pytest
import torch

from quantdiff.attention import DifferentialAttentionV1
from quantdiff.models.families import VECTORS, lambda_of
from tests.standins import DiffAttention
from tests.tiny import tiny_diffllama

SEEDS = range(40)
HALF = (torch.bfloat16, torch.float16)


@torch.no_grad()
def own(seed):
    """quantdiff's module, which follows the official code, with vectors as long as trained ones."""
    torch.manual_seed(seed)
    module = DifferentialAttentionV1(128, 2, 4)
    for name in VECTORS:
        getattr(module, name).mul_(4)
    return module


def products(module):
    """(d,) each."""
    return module.lambda_q1 * module.lambda_k1, module.lambda_q2 * module.lambda_k2


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_quantdiff_and_the_official_code(dtype):
    for seed in SEEDS:
        module = own(seed).to(dtype)
        assert lambda_of(module, dtype) == module.lambda_full(dtype).item()


@pytest.mark.parametrize("dtype", HALF)
def test_queries_of_another_dtype(dtype):
    """As under autocast: fp32 parameters, narrow queries."""
    for seed in SEEDS:
        module = own(seed)
        assert lambda_of(module, dtype) == module.lambda_full(dtype).item()


@pytest.mark.parametrize("dtype", HALF)
def test_diffllama_sums_in_fp32(dtype):
    for seed in range(10):
        for layer in tiny_diffllama(seed=seed, head_dim=64).to(dtype).model.layers:
            module = layer.self_attn
            first, second = (
                torch.exp(torch.sum(part, dim=-1, dtype=torch.float32)).to(dtype)
                for part in products(module)
            )
            assert lambda_of(module, dtype) == (first - second + module.lambda_init).item()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_timm_casts_lambda_as_a_whole(dtype, parameters):
    for seed in SEEDS:
        torch.manual_seed(seed)
        module = DiffAttention(2).to(parameters)
        first, second = (part.sum(-1).float().exp() for part in products(module))
        wanted = (first - second + module.lambda_init).type(dtype)
        assert lambda_of(module, dtype) == wanted.item()

        for name in VECTORS:
            delattr(module, name)
        module.lambda_a, module.lambda_b = torch.randn(2).to(parameters)
        wanted = (module.lambda_a.exp() - module.lambda_b.exp() + module.lambda_init).type(dtype)
        assert lambda_of(module, dtype) == wanted.item()
