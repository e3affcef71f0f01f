"""The compiled rounding gives what the grids give, to the bit."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantdiff.quantization import Grid, Scheme, fake_quantize, native
from quantdiff.quantization.grid import NoGridError, RowGrids
from tests.conftest import needs
from tests.tiny import tiny_ids, tiny_llama

pytestmark = needs(native.available(), "needs the compiled rounding")


def test_it_was_built():
    """Else plain torch serves, here and in all other tests."""
    assert native.available()


def test_what_is_rounded_may_be_changed_in_place():
    """As by a block that adds to its input in place, or by a hook behind ours."""
    model = tiny_llama()
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda module, args: (args[0].mul_(2.0), *args[1:]))
    with fake_quantize(model, Scheme("hidden_states", 8)):
        model(tiny_ids()).logits.sum().backward()
    assert model.model.layers[0].mlp.down_proj.weight.grad.abs().max() > 0


def rounded(x, start, stop, grid, **options):
    out = x.clone()
    ends = (torch.tensor(end, dtype=torch.int32) for end in (start, stop))
    return out, native.round_rows(out, *ends, grid, **options)


def block(seed, heads, rows, keys, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, rows, keys, generator=generator) * size
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0.0
    start = torch.randint(0, keys, (rows,), generator=generator).tolist()
    stop = [min(keys, s + int(torch.randint(0, keys + 1, (), generator=generator))) for s in start]
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for row, (first, last) in enumerate(zip(start, stop, strict=True)):
        seen[row, first:last] = True
    return x, start, stop, seen


SIZES = st.sampled_from([1e-42, 1e-38, 1e-4, 1.0, 300.0, 1e30])


@given(
    seed=st.integers(0, 10**6), heads=st.integers(1, 4), rows=st.integers(1, 9),
    keys=st.integers(1, 70), bits=st.integers(2, 8), symmetric=st.booleans(), size=SIZES,
    threads=st.sampled_from([1, 2, 3]),
)  # fmt: skip
@settings(max_examples=150)
def test_a_grid_of_each_row(seed, heads, rows, keys, bits, symmetric, size, threads):
    x, start, stop, seen = block(seed, heads, rows, keys, size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, clipped = rounded(x, start, stop, RowGrids(bits, symmetric), clips=False)
    finally:
        torch.set_num_threads(before)
    least = x.masked_fill(~seen, torch.inf).amin(-1, keepdim=True)
    most = x.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    grid = Grid.of(least, most, bits, symmetric)
    expected = grid.quantize(x).masked_fill(~seen, -torch.inf)
    assert torch.equal(out, expected)
    assert np.array_equal(clipped, (grid.clipped(x) & seen).sum((1, 2)))


@given(
    seed=st.integers(0, 10**6), heads=st.integers(1, 4), rows=st.integers(1, 9),
    keys=st.integers(1, 70), bits=st.integers(2, 8), symmetric=st.booleans(), size=SIZES,
    reach=st.floats(0.05, 2.0),
)  # fmt: skip
@settings(max_examples=150)
def test_a_grid_of_each_head(seed, heads, rows, keys, bits, symmetric, size, reach):
    x, start, stop, seen = block(seed, heads, rows, keys, size)
    most = x.amax((1, 2), keepdim=True) * reach
    grid = Grid.of(-most.abs(), most.abs(), bits, symmetric)
    out, clipped = rounded(x, start, stop, grid, clips=True)
    assert torch.equal(out, grid.quantize(x).masked_fill(~seen, -torch.inf))
    assert np.array_equal(clipped, (grid.clipped(x) & seen).sum((1, 2)))


def test_half_way_between_two_integers_goes_to_the_even_one():
    row = torch.tensor([[[7.0, 0.5, 1.5, 2.5, 6.5, -0.5, -1.5, -2.5]]])
    even = [7, 0, 2, 2, 6, 0, -2, -2]
    of_head = Grid.of(torch.full((1, 1, 1), -7.0), torch.full((1, 1, 1), 7.0), 4, True)
    for grid, clips in ((of_head, True), (of_head, False), (RowGrids(4, True), False)):
        out, clipped = rounded(row, [0], [8], grid, clips=clips)
        assert out.flatten().tolist() == even
        assert clipped.tolist() == [0]
    # With a zero point too, of 2, 2 and 0.
    for row, even in (
        ([-2.5, 12.5, 0.5, 1.5], [-2, 12, 0, 2]),
        ([-1.5, 13.5, 0.5, 2.5], [-2, 13, 0, 2]),
        ([-0.5, 14.5, 0.5, 2.5], [0, 14, 0, 2]),
    ):
        out, _ = rounded(torch.tensor([[row]]), [0], [4], RowGrids(4, False), clips=False)
        assert out.flatten().tolist() == even


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
def test_a_row_without_a_finite_range(bad, symmetric):
    x, start, stop, _ = block(0, 2, 3, 9, 1.0)
    start, stop = [0, 0, 0], [9, 9, 4]
    x[1, 2, 6] = bad  # not visible
    rounded(x, start, stop, RowGrids(4, symmetric), clips=False)
    x[1, 1, 6] = bad
    with pytest.raises(NoGridError, match="NaN or infinity"):
        rounded(x, start, stop, RowGrids(4, symmetric), clips=False)


FEWER = """
import torch
from quantdiff.quantization import native
from quantdiff.quantization.grid import RowGrids

torch.manual_seed(0)
x, outs = torch.randn(3, 8, 20), []
stop = torch.arange(8, 16, dtype=torch.int32)
for threads in (1, 2):
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads
    outs.append(x.clone())
    native.round_rows(outs[-1], torch.zeros_like(stop), stop, RowGrids(3, True), clips=False)
assert torch.equal(*outs)
"""


def test_fewer_threads_than_were_asked_for():
    """OpenMP may start as many as it likes; no row is left unrounded and unmasked."""
    limited = os.environ | {"OMP_THREAD_LIMIT": "1"}
    subprocess.run([sys.executable, "-c", FEWER], env=limited, check=True)
