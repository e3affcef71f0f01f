"""Schemes and grids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantdiff import Scheme, UsageError
from quantdiff.analysis.sweep.grid import make_grid
from quantdiff.quantization import Grid, schemes
from quantdiff.quantization.definitions import DEFINITIONS

LOGITS = "attention_logits"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("logits", 8), "unknown site 'logits'; known: attention_logits"),
        ((LOGITS, 0), "bits are 2 to 8, or 16"),
        ((LOGITS, 17), "bits are 2 to 8, or 16"),
        ((LOGITS, True), "bits are 2 to 8, or 16"),
        ((LOGITS, 8, "minmax"), "unknown range 'minmax'; known: dynamic, absmax"),
        ((LOGITS, 8, "percentile:120"), r"a percentile lies in \(0, 100\], not 120"),
        ((LOGITS, 8, "percentile:0"), r"a percentile lies in \(0, 100\], not 0"),
        ((LOGITS, 8, "percentile:nan"), r"a percentile lies in \(0, 100\], not nan"),
        ((LOGITS, 8, "percentile:x"), "'x' is no percentile"),
        ((LOGITS, 8, "percentile:"), "lacks what stands behind the colon"),
        ((LOGITS, 4.0), "bits are 2 to 8, or 16"),
        ((LOGITS, 4, 4), "the range of a scheme is a word, not 4"),
        ((LOGITS, 4, "dynamic", 3), "the granularity of a scheme is a word, not 3"),
        ((LOGITS, 4, "dynamic", "tensor", True, 3), "layers are numbers from 0"),
        ((LOGITS, 4, "dynamic", "tensor", True, "01"), "layers are numbers from 0"),
        ((LOGITS, 8, "mse:3"), "the range mse takes no parameter"),
        ((LOGITS, 8, "absmax", "row"), "granularity row is always dynamic"),
        ((LOGITS, 8, "dynamic", "channel"), "granularity of attention_logits is one of tensor"),
        (("weights", 4, "dynamic", "group"), "a group has a size, as in group:64"),
        (("weights", 4, "dynamic", "group:0"), "a group has a size, as in group:64"),
        (("keys", 4, "dynamic", "token:4"), "the granularity token takes no size"),
        (("weights", 8, "mse"), "calibrations hold no ranges of weights"),
    ],
)
def test_what_does_not_go_is_one_sentence(given, words):
    with pytest.raises(UsageError, match=words) as error:
        Scheme(*given)
    assert "\n" not in str(error.value)


def test_defaults_and_what_follows_from_them():
    scheme = Scheme(LOGITS, 4)
    assert (scheme.range, scheme.granularity, scheme.symmetric) == ("dynamic", "tensor", True)
    assert not scheme.static
    assert not scheme.causal
    assert Scheme(LOGITS, 4, granularity="row").causal
    assert Scheme(LOGITS, 4, "mse").causal
    assert Scheme(LOGITS, 4, "percentile").percentile == 99.9
    assert Scheme(LOGITS, 4, "percentile:99.5").percentile == 99.5
    assert Scheme(LOGITS, 4, "percentile:99.5").observer == "percentile"
    assert not Scheme(LOGITS, 16).quantizes


def test_attention_maps_have_one_grid():
    """It begins at zero whatever is asked for, so that the same thing has one name."""
    one = Scheme("attention_maps", 4)
    assert one == Scheme("attention_maps", 4, symmetric=False) == schemes("P4")[0]
    assert one == Scheme("attention_maps", 4, symmetric=True)
    grid = make_grid(bits=(4, 8), sites=("attention_maps",), symmetric=(True, False))
    assert grid.schemes == (one, Scheme("attention_maps", 8))
    assert "attention maps: integers 0 … 2^b−1" in DEFINITIONS["grid"]


@given(
    values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
)
def test_a_grid_by_its_definition(values, bits, symmetric):
    x = torch.tensor(values)
    grid = Grid.of(x.min(), x.max(), bits, symmetric)
    assert grid.step.dtype == torch.float32
    assert torch.isfinite(grid.step)
    assert grid.step > 0
    out = grid.quantize(x)
    assert torch.isfinite(out).all()
    integers = grid.integers(x)
    assert torch.equal(integers, integers.round())
    top = 2 ** (bits - 1) - 1
    if symmetric:
        assert integers.abs().max() <= top
        assert torch.equal(grid.quantize(-x), -out)
        if (size := x.abs().max()) > 1e-30:
            assert grid.step == (size.double() / top).float()
    else:
        assert integers.min() >= 0
        assert integers.max() <= 2**bits - 1
        assert grid.zero == grid.zero.round()
    assert grid.quantize(torch.zeros(1)) == 0
    # Nothing moves by more than half a step, beyond the rounding of fp32 and of the zero point.
    assert ((out - x).abs() <= grid.step * (0.5 + (not symmetric)) + 1e-6 * x.abs()).all()


def test_half_way_between_two_integers_goes_to_the_even_one():
    x = torch.tensor([0.5, 1.5, 2.5, 6.5, -0.5, -1.5, -2.5])
    grid = Grid.of(torch.tensor(-7.0), torch.tensor(7.0), 4, True)
    assert grid.integers(x).tolist() == grid.quantize(x).tolist() == [0, 2, 2, 6, 0, -2, -2]
    # So do zero points.
    for least, zero in ((-0.5, 0), (-1.5, 2), (-2.5, 2)):
        assert Grid.of(torch.tensor(least), torch.tensor(least + 15), 4, False).zero == zero
    # 14.5 and the zero point 1 make 15, which is on the grid.
    grid = Grid.of(torch.tensor(-1.0), torch.tensor(14.0), 4, False)
    assert grid.clipped(torch.tensor([14.5, 15.5, -1.5])).tolist() == [False, True, True]


def test_zeros_and_nothing_have_a_grid_of_finite_step():
    for symmetric in (True, False):
        grid = Grid.of(torch.zeros(2), torch.zeros(2), 4, symmetric)
        assert grid.step.tolist() == [1, 1]
        assert grid.quantize(torch.zeros(2)).tolist() == [0, 0]
        nothing = Grid.of(torch.tensor(torch.inf), torch.tensor(-torch.inf), 4, symmetric)
        assert nothing.step == 1


def test_half_values_do_not_overflow():
    least, most = torch.tensor(-60000.0).half(), torch.tensor(60000.0).half()
    grid = Grid.of(least, most, 8, False)
    assert grid.step == pytest.approx(120000 / 255, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_range_of_nan_or_infinity_has_none(bad):
    with pytest.raises(ValueError, match="NaN or infinity"):
        Grid.of(torch.tensor(-1.0), torch.tensor(bad), 4, True)


def test_clipped_values_are_those_beyond_the_ends():
    grid = Grid.of(torch.tensor(-7.0), torch.tensor(7.0), 4, True)
    x = torch.tensor([-9.0, -7.6, -7.4, 0.0, 7.4, 7.6])
    assert grid.clipped(x).tolist() == [True, True, False, False, False, True]
