"""Which layers suffer most from quantization, and how bits are best shared out among them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quantdiff.errors import UsageError
from quantdiff.quantization import Scheme

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Allocation", "Sensitivity", "measure_sensitivity", "share_out"]

# What a set of schemes costs: a number, 0 without quantization, larger for worse.
Cost = Callable[[Sequence[Scheme]], float]


@dataclass(frozen=True)
class Sensitivity:
    """What it costs to quantize one layer at a time.

    Attributes:
        scheme: for which; its bits and layers are varied.
        costs: layer -> bits -> cost.
    """

    scheme: Scheme
    costs: Mapping[int, Mapping[int, float]]

    def ranking(self, bits: int) -> list[int]:
        """Layers, the most sensitive first; the lower number first where they cost the same."""
        return sorted(self.costs, key=lambda layer: (-self.costs[layer][bits], layer))

    def correlation(self, other: "Sensitivity", bits: int) -> float:
        """Spearman's rank correlation of the costs of the same layers in another measurement.

        Raises:
            UsageError: other layers, or fewer than two.
        """
        if set(self.costs) != set(other.costs) or len(self.costs) < 2:
            raise UsageError("a rank correlation needs the same layers in both, two at least")
        ranks = [
            _ranks([measured.costs[layer][bits] for layer in sorted(self.costs)])
            for measured in (self, other)
        ]
        return float(np.corrcoef(np.array(ranks))[0, 1])

    def frame(self) -> "pd.DataFrame":
        """One row a layer and width: layer, bits, cost."""
        import pandas as pd

        rows = [(layer, b, c) for layer, by in self.costs.items() for b, c in by.items()]
        return pd.DataFrame(rows, columns=["layer", "bits", "cost"])


@dataclass(frozen=True)
class Allocation:
    """Bits of every layer.

    Attributes:
        scheme: for which.
        bits: layer -> bits.
        expected: the sum of the layers' costs.
    """

    scheme: Scheme
    bits: Mapping[int, int]
    expected: float

    @property
    def average(self) -> float:
        """Bits of the average layer."""
        return float(np.mean(list(self.bits.values())))

    def schemes(self) -> list[Scheme]:
        """One scheme a width, for the layers that have it."""
        return [
            dataclasses.replace(
                self.scheme, bits=b, layers=tuple(n for n, own in self.bits.items() if own == b)
            )
            for b in sorted(set(self.bits.values()))
        ]


def measure_sensitivity(
    cost: Cost,
    scheme: Scheme,
    layers: int,
    bits: Sequence[int],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Sensitivity:
    """Quantize one layer at a time to each of some widths.

    Args:
        cost: measures schemes, for example the divergence from the unquantized model.
        scheme: whose bits and layers are varied.
        layers: how many the model has.
        bits: widths.
        progress: told the number of measurements done since the last call.
    """
    costs: dict[int, dict[int, float]] = {}
    for layer in range(layers):
        for width in bits:
            one = dataclasses.replace(scheme, bits=width, layers=(layer,))
            costs.setdefault(layer, {})[width] = cost([one])
            progress(1)
    return Sensitivity(scheme, costs)


def share_out(sensitivity: Sensitivity, budget: float) -> list[Allocation]:
    """Share bits out under a budget of average bits: the least sum of the layers' costs.

    Exact for that sum, by dynamic programming over layers and total bits (a greedy search may get
    stuck); that the costs of layers add up is what is supposed.

    Args:
        sensitivity: costs of every layer alone.
        budget: bits of the average layer at most.

    Returns:
        The curve: the best allocation of each total number of bits that is better than all with
        fewer, from the most bits down to the best that keeps the budget, which is last.

    Raises:
        UsageError: a budget below the fewest bits that were measured.
    """
    costs = sensitivity.costs
    # Total bits of the layers so far -> (cost, bits of each).
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for by in costs.values():
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for total, (spent, bits) in best.items():
            for width, cost in by.items():
                found = spent + cost, (*bits, width)
                known = further.get(total + width)
                if known is None or found < known:
                    further[total + width] = found
        best = further
    curve: list[tuple[int, float, tuple[int, ...]]] = []
    for total in sorted(best):
        cost, bits = best[total]
        if not curve or cost < curve[-1][1]:
            curve.append((total, cost, bits))
    within = [n for n, (total, _, _) in enumerate(curve) if total <= budget * len(costs) + 1e-9]
    if not within:
        raise UsageError(
            f"a budget of {budget} bits is below the fewest that were measured; measure fewer bits"
        )
    return [
        Allocation(sensitivity.scheme, dict(zip(costs, bits, strict=True)), cost)
        for _, cost, bits in reversed(curve[within[-1] :])
    ]


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0, equal values sharing the mean of their places."""
    array = np.asarray(values, np.float64)
    return [float((array < x).sum() + ((array == x).sum() - 1) / 2) for x in array]
