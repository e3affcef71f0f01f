"""Which layers or heads suffer most from quantization, and how best to allocate bits."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from quantdiff.errors import UsageError
from quantdiff.quantization import Scheme

if TYPE_CHECKING:
    import pandas as pd

    from quantdiff.analysis.sweep import SweepResults

__all__ = ["Allocation", "Place", "Sensitivity", "measure_sensitivity", "share_out"]

# The cost of a set of schemes: 0 without quantization, larger for worse.
Cost = Callable[[Sequence[Scheme]], float]
# A layer, or a head as (layer, number in the layer); one measurement has places of one kind only.
Place: TypeAlias = int | tuple[int, int]


@dataclass(frozen=True)
class Sensitivity:
    """The cost of quantizing one layer, or one head, at a time.

    Attributes:
        template: the schemes used together; their bits, layers and heads are varied.
        costs: layer, or (layer, head) -> bits -> cost.
        model: its name, if it has one.
        evaluation, metric: what the costs refer to; a cost is how much worse the metric gets.
    """

    template: tuple[Scheme, ...]
    costs: Mapping[Place, Mapping[int, float]]
    model: str = ""
    evaluation: str = ""
    metric: str = ""

    @classmethod
    def of(
        cls,
        results: "SweepResults",
        *,
        model: str | None = None,
        site: str | None = None,
        each: str | None = None,
        evaluation: str | None = None,
        metric: str | None = None,
    ) -> "Sensitivity":
        """The sensitivity found by a layer-by-layer or head-by-head sweep.

        Args:
            results: of `sweep(…, each="layer")` or `each="head"`.
            model: name of the model; by default the only one.
            site: as in `results.jsonl`, such as `weights` or `keys+values`; default: the only one.
            each: `layer` or `head`; by default whichever there is.
            evaluation, metric: the numbers to take costs from: how much worse they are than those
                of the unquantized model. By default the KL divergence, else the mean negative
                log-likelihood, else the first metric, such as `acc`, for which it is known whether
                more is worse.

        Raises:
            UsageError: there is none or more than one, or one of its cells failed or is missing.
        """
        from quantdiff.analysis.sweep.sensitivities import chosen_sensitivity

        return chosen_sensitivity(results, model, site, each, evaluation, metric)

    @property
    def cost(self) -> str:
        """A description of the cost."""
        if not self.metric:
            return "cost"
        worse = "" if self.metric == "kl" else ", worse by"
        return f"{self.metric}{worse} ({self.evaluation})"

    @property
    def of_heads(self) -> bool:
        """Whether heads were tried rather than layers."""
        return any(isinstance(place, tuple) for place in self.costs)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were tried, which need not be all layers of the model.

        Raises:
            UsageError: heads were tried.
        """
        if self.of_heads:
            raise UsageError("bits are shared out among layers, and these are the costs of heads")
        return tuple(layer for layer in self.costs if isinstance(layer, int))

    @property
    def bits(self) -> list[int]:
        """The widths that were tried in all places, widest first."""
        known = [set(by) for by in self.costs.values()]
        return sorted(set.intersection(*known), reverse=True) if known else []

    def ranking(self, bits: int) -> list[Place]:
        """Places, the most sensitive first; those of equal cost in ascending order."""
        places = sorted(self.costs)  # type: ignore[type-var]
        return sorted(places, key=lambda place: -self.costs[place][bits])

    def correlation(self, other: "Sensitivity", bits: int) -> float:
        """Spearman's rank correlation with the costs of the same places in another measurement.

        Raises:
            UsageError: the layers or heads differ, or there are fewer than two.
        """
        if set(self.costs) != set(other.costs) or len(self.costs) < 2:
            raise UsageError(
                "a rank correlation needs the same layers, or heads, in both, two at least"
            )
        ranks = [
            _ranks([measured.costs[place][bits] for place in self.costs])
            for measured in (self, other)
        ]
        return float(np.corrcoef(np.array(ranks))[0, 1])

    def frame(self) -> "pd.DataFrame":
        """One row per place and width: layer, head (if heads were tried), bits, cost."""
        import pandas as pd

        rows = [
            (*(place if isinstance(place, tuple) else (place,)), b, c)
            for place, by in self.costs.items()
            for b, c in by.items()
        ]
        names = ["layer", "head"] if self.of_heads else ["layer"]
        return pd.DataFrame(rows, columns=[*names, "bits", "cost"])

    def uniform(self, bits: int) -> list[Scheme]:
        """The schemes at the given bits, for all layers that were tried.

        Raises:
            UsageError: heads were tried.
        """
        return [
            dataclasses.replace(scheme, bits=bits, layers=self.layers) for scheme in self.template
        ]


@dataclass(frozen=True)
class Allocation:
    """Bits of each layer that was tried; the others stay as they are and count in no average.

    Attributes:
        template: the schemes used together.
        bits: layer -> bits.
        expected: the sum of the layers' costs.
    """

    template: tuple[Scheme, ...]
    bits: Mapping[int, int]
    expected: float

    @property
    def average(self) -> float:
        """Average bits per layer."""
        return float(np.mean(list(self.bits.values())))

    def schemes(self) -> list[Scheme]:
        """One scheme per site and width, for the layers with that width."""
        found = []
        for width in sorted(set(self.bits.values())):
            layers = tuple(n for n, own in self.bits.items() if own == width)
            found += [
                dataclasses.replace(scheme, bits=width, layers=layers) for scheme in self.template
            ]
        return found


def measure_sensitivity(
    cost: Cost,
    schemes: Scheme | Iterable[Scheme],
    layers: int | Iterable[int],
    bits: Sequence[int],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Sensitivity:
    """Measure the cost of quantizing one layer at a time, at each of the given widths.

    Args:
        cost: measures the cost of schemes, for example the divergence from the unquantized model.
        schemes: one scheme, or several used together; their bits and layers are varied.
        layers: the number of layers, or the numbers of those that hold the sites.
        bits: widths.
        progress: called with the number of measurements done since the last call.
    """
    template = (schemes,) if isinstance(schemes, Scheme) else tuple(schemes)
    costs: dict[Place, dict[int, float]] = {}
    for layer in range(layers) if isinstance(layers, int) else layers:
        for width in bits:
            one = [dataclasses.replace(s, bits=width, layers=(layer,)) for s in template]
            costs.setdefault(layer, {})[width] = cost(one)
            progress(1)
    return Sensitivity(template, costs)


def share_out(sensitivity: Sensitivity, budget: float) -> list[Allocation]:
    """Allocate bits under a budget of average bits, minimizing the sum of the layers' costs.

    Exact for that sum, by dynamic programming over layers and total bits (a greedy search may get
    stuck); that the costs of layers add up is an assumption.

    Args:
        sensitivity: costs of each layer alone.
        budget: maximum average bits of these layers.

    Returns:
        The curve: for each total number of bits, the best allocation, if it is better than all with
        fewer bits; from the most bits down to the best one within the budget, which is last.

    Raises:
        UsageError: a budget below the fewest bits that were measured, or costs of heads.
    """
    costs = {layer: sensitivity.costs[layer] for layer in sensitivity.layers}
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
        Allocation(sensitivity.template, dict(zip(costs, bits, strict=True)), cost)
        for _, cost, bits in reversed(curve[within[-1] :])
    ]


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of their ranks."""
    array = np.asarray(values, np.float64)
    return [float((array < x).sum() + ((array == x).sum() - 1) / 2) for x in array]
