import pytest

from quantdiff import Scheme, UsageError
from quantdiff.analysis.sweep import make_grid
from quantdiff.analysis.sweep.grid import Cell, cells_of


def ways(grid):
    return [(s.range, s.granularity, s.symmetric, s.bits) for s in grid.schemes]


def test_all_combinations_in_order():
    grid = make_grid(bits=(8, 4), ranges=("dynamic", "mse"), granularities=("tensor", "head"))
    assert ways(grid) == [
        (range_, granularity, True, bits)
        for range_ in ("dynamic", "mse") for granularity in ("tensor", "head") for bits in (8, 4)
    ]  # fmt: skip
    assert grid.notes == ()


def test_asymmetric_grids_stand_beside_symmetric_ones():
    grid = make_grid(bits=(4,), symmetric=(True, False))
    assert ways(grid) == [("dynamic", "tensor", True, 4), ("dynamic", "tensor", False, 4)]


def test_sixteen_bits_are_one_scheme():
    grid = make_grid(bits=(16, 8), ranges=("dynamic", "mse"), granularities=("tensor", "head"))
    assert [scheme.bits for scheme in grid.schemes].count(16) == 1
    assert len(grid.schemes) == 5


def test_what_makes_no_sense_is_left_out_with_a_note():
    grid = make_grid(bits=(8, 6, 4), ranges=("dynamic", "mse"), granularities=("tensor", "row"))
    assert {(s.range, s.granularity) for s in grid.schemes} == {
        ("dynamic", "tensor"), ("dynamic", "row"), ("mse", "tensor"),
    }  # fmt: skip
    (note,) = grid.notes
    assert "mse" in note
    assert "row is always dynamic" in note


def test_sites_have_granularities_of_their_own():
    grid = make_grid(bits=(8, 16), sites=("attention_logits", "keys", "weights"))
    assert [(s.site, s.granularity) for s in grid.schemes if s.quantizes] == [
        ("attention_logits", "tensor"), ("keys", "token"), ("weights", "tensor"),
    ]  # fmt: skip
    grid = make_grid(
        bits=(8,), sites=("attention_logits", "keys"), granularities=("head", "group:64"),
        ranges=("dynamic", "mse"),
    )  # fmt: skip
    assert [(s.site, s.range, s.granularity) for s in grid.schemes] == [
        ("attention_logits", "dynamic", "head"), ("attention_logits", "mse", "head"),
        ("keys", "dynamic", "head"), ("keys", "dynamic", "group:64"), ("keys", "mse", "head"),
    ]  # fmt: skip
    assert len(grid.notes) == 3


def test_one_range_under_two_names_is_one_scheme():
    ranges = ("percentile", "percentile:99.9", "percentile:99.90", "percentile:99.99")
    grid = make_grid(bits=(4,), ranges=ranges)
    assert [s.range for s in grid.schemes] == ["percentile:99.9", "percentile:99.99"]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"bits": ()}, ("empty", "bits")),
        ({"ranges": ()}, ("empty", "range")),
        ({"bits": (4,), "ranges": ("mse",), "granularities": ("row",)}, ("empty", "row", "mse")),
        ({"bits": (4, 9)}, ("9",)),
        ({"ranges": ("dynamic", "best")}, ("best", "entropy")),
        ({"ranges": ("dynamic", "percentile:101")}, ("101",)),
        ({"granularities": ("tensor", "group")}, ("group", "head")),
        ({"sites": ("attention_logits", "nowhere")}, ("nowhere", "attention_logits")),
    ],
)
def test_refusals(axes, words):
    with pytest.raises(UsageError) as refusal:
        make_grid(**{"bits": (16, 4)} | axes)
    for word in words:
        assert word in str(refusal.value)


def test_schemes_are_those_that_fake_quantize_takes():
    (scheme,) = make_grid(bits=(4,), ranges=("entropy",), granularities=("head",)).schemes
    assert scheme == Scheme("attention_logits", 4, "entropy", "head")


def test_schemes_together_are_one_cell_whatever_their_order():
    w, a = Scheme("weights", 8, granularity="channel"), Scheme("linear_inputs", 8)
    none = Scheme("keys", 16)
    found = cells_of([w, (w, a), [a, w], (w, none), none, ()])
    assert found == ((w,), (w, a), ())
    cell = Cell("1", "model", "perplexity", (w, a), "data", None)
    assert cell.fields()["scheme"] == "W8A8"
    assert cell.fields()["range"] is None
    assert cell.fields()["options"]["schemes"][1] == {
        "site": "linear_inputs", "bits": 8, "range": "dynamic", "granularity": "tensor",
        "symmetric": True,
    }  # fmt: skip
