"""One layer at a time, and bits shared out."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantdiff import Scheme, UsageError, fake_quantize
from quantdiff.analysis.sensitivity import Sensitivity, measure_sensitivity, share_out
from tests.quantization.test_fake_quantize import MODELS, batch

SCHEME = Scheme("weights", 8, granularity="channel")


def with_an_outlier():
    """The same function, with a channel that stretches the ranges of one layer's weights."""
    model = MODELS["llama"]()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.up_proj.weight[0] /= 300
        mlp.down_proj.weight[:, 0] *= 300
    return model


def cost_of(model):
    given = batch()
    real = given["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**given).logits[real].double().log_softmax(-1)

    def cost(schemes):
        with torch.no_grad(), fake_quantize(model, *schemes):
            found = model(**given).logits[real].double().log_softmax(-1)
        return float((plain.exp() * (plain - found)).sum(-1).mean())

    return cost


def test_the_layer_with_outliers_is_first():
    model = with_an_outlier()
    done = []
    found = measure_sensitivity(cost_of(model), SCHEME, 2, (8, 4, 2), progress=done.append)
    assert sum(done) == 6
    assert found.ranking(4) == [1, 0]
    for by in found.costs.values():
        assert by[8] < by[4] < by[2]
    assert found.correlation(found, 4) == pytest.approx(1)
    assert list(found.frame().columns) == ["layer", "bits", "cost"]
    assert len(found.frame()) == 6
    alone = measure_sensitivity(cost_of(model), SCHEME, [1], (8, 4, 2))
    assert alone.costs == {1: found.costs[1]}


def test_mixed_bits_beat_uniform_ones_at_the_same_budget():
    model = MODELS["llama"]()
    with torch.no_grad():  # a layer that adds little
        for module in (model.model.layers[1].mlp.down_proj, model.model.layers[1].self_attn.o_proj):
            module.weight *= 0.1
    cost = cost_of(model)
    found = measure_sensitivity(cost, SCHEME, 2, (8, 6, 5, 4, 3, 2))
    best = share_out(found, 4)[-1]
    assert best.average <= 4
    assert best.bits[0] > best.bits[1]
    assert cost(best.schemes()) < cost([Scheme("weights", 4, granularity="channel")])


COSTS = st.lists(
    st.lists(st.floats(0, 100), min_size=3, max_size=3).map(sorted), min_size=1, max_size=4
)


@given(costs=COSTS, budget=st.floats(2, 8))
def test_the_budget_is_kept_and_the_way_goes_down(costs, budget):
    widths = (8, 4, 2)
    found = Sensitivity(
        (SCHEME,), {n: dict(zip(widths, by, strict=True)) for n, by in enumerate(costs)}
    )
    way = share_out(found, budget)
    assert way[-1].average <= budget + 1e-9
    assert all(a.average > b.average for a, b in itertools.pairwise(way))
    assert all(a.expected < b.expected for a, b in itertools.pairwise(way))
    assert all(x.average > budget for x in way[:-1])
    every = {
        bits: sum(costs[n][widths.index(b)] for n, b in enumerate(bits))
        for bits in itertools.product(widths, repeat=len(costs))
    }
    for x in way:
        bits = tuple(x.bits.values())
        assert x.expected == pytest.approx(every[bits])
        # None costs less with as few bits.
        least = min(cost for other, cost in every.items() if sum(other) <= sum(bits))
        assert x.expected == pytest.approx(least)
        layers = [n for scheme in x.schemes() for n in scheme.layers]
        assert sorted(layers) == list(range(len(costs)))
    affordable = [cost for bits, cost in every.items() if sum(bits) <= budget * len(costs) + 1e-9]
    assert way[-1].expected == pytest.approx(min(affordable))


def test_schemes_are_for_the_layers_that_were_tried_alone():
    found = Sensitivity((SCHEME,), {n: {8: 0.0, 4: 1.0} for n in (0, 2)})
    (mixed,) = share_out(found, 8)[-1].schemes()
    assert (mixed.bits, mixed.layers) == (8, (0, 2))
    (uniform,) = found.uniform(4)
    assert (uniform.bits, uniform.layers) == (4, (0, 2))
    of_heads = Sensitivity((SCHEME,), {(0, 1): {4: 1.0}})
    with pytest.raises(UsageError, match="costs of heads"):
        of_heads.uniform(4)


def test_ranks_share_their_places():
    def measured(*costs):
        return Sensitivity((SCHEME,), {n: {4: c} for n, c in enumerate(costs)})

    assert measured(1, 2, 3, 4).correlation(measured(4, 3, 2, 1), 4) == pytest.approx(-1)
    a, b = [0, 1.5, 1.5, 3], [1, 0, 2, 3]
    expected = np.corrcoef(a, b)[0, 1]
    assert measured(1, 5, 5, 9).correlation(measured(2, 1, 3, 4), 4) == pytest.approx(expected)


def test_bad_input():
    found = Sensitivity((SCHEME,), {0: {8: 0.0, 4: 1.0}})
    with pytest.raises(UsageError, match="a budget of 3 bits is below the fewest"):
        share_out(found, 3)
    with pytest.raises(UsageError, match="needs the same layers"):
        found.correlation(found, 4)
