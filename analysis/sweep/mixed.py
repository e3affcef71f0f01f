"""Bits allocated to a model's layers under a budget, compared with the same bits everywhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantdiff.analysis.sensitivity import Allocation, Sensitivity, share_out
from quantdiff.analysis.style import (
    SINGLE,
    Page,
    legend_below,
    model_colors,
    save_page,
    set_title,
    style,
)
from quantdiff.analysis.sweep.grid import distinct, short_name
from quantdiff.analysis.sweep.lines import model_labels
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.ranking import scale_costs
from quantdiff.analysis.sweep.sensitivities import (
    cost_of,
    schemes_of,
    sensitivity_name,
)
from quantdiff.analysis.text import UNKNOWN, four_digits, literal
from quantdiff.errors import UsageError
from quantdiff.files import write_bytes
from quantdiff.quantization.scheme import Scheme

__all__ = ["Plan", "check_budget", "mixed_table", "plan_bits", "plot_plan", "save_plan_figures"]


@dataclass(frozen=True)
class Plan:
    """Bits of each layer under a budget, and the same bits everywhere under the same budget.

    Attributes:
        sensitivity: the costs by which bits were allocated.
        budget: maximum average bits per layer.
        curve: the best allocations from the most bits down to the budget; see `share_out`.
        uniform: the most bits that were tried in all layers and are within the budget.
    """

    sensitivity: Sensitivity
    budget: float
    curve: tuple[Allocation, ...]
    uniform: int

    @property
    def best(self) -> Allocation:
        """The best allocation within the budget."""
        return self.curve[-1]

    @property
    def wanted(self) -> list[tuple[Scheme, ...]]:
        """The schemes to measure: with mixed bits, and with uniform ones."""
        return [tuple(self.best.schemes()), tuple(self.sensitivity.uniform(self.uniform))]

    def measured(self, results: SweepResults) -> list[float | None]:
        """The actual cost of each of `wanted`; None until a sweep has computed it."""
        one = self.sensitivity
        found: list[float | None] = []
        for schemes in self.wanted:
            rows = [
                row
                for row in results.rows
                if (row["model"], row["eval"], row["metric"], row["status"])
                == (one.model, one.evaluation, one.metric, "ok")
                and "remedy" not in row["options"]
                and set(schemes_of(row)) == set(distinct(schemes))
            ]
            found.append(cost_of(results, rows[0]) if rows else None)
        return found

    def told(self, results: SweepResults) -> dict[str, Any]:
        """The plan as JSON values: bits of each layer, expected and measured costs."""
        one = self.sensitivity
        mixed, uniform = self.measured(results)
        return {
            "model": one.model,
            "sites": [scheme.site for scheme in one.template],
            "cost": one.cost,
            "budget": self.budget,
            "average": self.best.average,
            "bits": list(self.best.bits.values()),
            "expected": self.best.expected,
            "measured": mixed,
            "uniform": self.uniform,
            "uniform_measured": uniform,
        }

    def frame(self, results: SweepResults) -> pd.DataFrame:
        """One row per allocation: kind, average bits, expected and measured costs, layers' bits."""
        rows: list[dict[str, Any]] = [
            {"kind": "mixed", "average": one.average, "expected": one.expected, "measured": None}
            | {f"layer {layer}": bits for layer, bits in one.bits.items()}
            for one in self.curve
        ]
        costs = self.sensitivity.costs
        for bits in self.sensitivity.bits:
            expected = sum(by[bits] for by in costs.values())
            rows.append(
                {"kind": "uniform", "average": bits, "expected": expected, "measured": None}
                | {f"layer {layer}": bits for layer in costs}
            )
        mixed, uniform = self.measured(results)
        rows[len(self.curve) - 1]["measured"] = mixed
        for row in rows[len(self.curve) :]:
            if row["average"] == self.uniform:
                row["measured"] = uniform
        return pd.DataFrame(rows).astype({"measured": "float64"})


def check_budget(wanted: Iterable[Iterable[Scheme]], budget: float) -> None:
    """Refuse a budget that no layer could keep, before anything is measured.

    Args:
        wanted: groups of schemes that are used together.
        budget: average bits per layer.

    Raises:
        UsageError: it is below the fewest bits, or schemes used together have different bits.
    """
    fewest: dict[Any, int] = {}
    for schemes in wanted:
        together = [scheme for scheme in schemes if scheme.quantizes]
        if not together:
            continue
        _check_alike(together)
        kind = tuple(replace(scheme, bits=16) for scheme in together)
        fewest[kind] = min(fewest.get(kind, 16), together[0].bits)
    for bits in fewest.values():
        if budget < bits:
            raise UsageError(
                f"a budget of {budget:g} bits is below the fewest that are tried, {bits}: try fewer"
            )


def _check_alike(schemes: Sequence[Scheme]) -> None:
    if len({scheme.bits for scheme in schemes}) > 1:
        raise UsageError(
            f"{short_name(tuple(schemes))} has sites of other bits each, which cannot be shared "
            "out: give all the same, as in W4A4"
        )


def plan_bits(sensitivity: Sensitivity, budget: float) -> Plan:
    """Allocate bits to the layers under a budget of average bits.

    Raises:
        UsageError: a budget below the fewest bits that were measured, or below those that were
            measured in all layers; costs of heads; or different bits in schemes used together.
    """
    _check_alike(sensitivity.template)
    curve = tuple(share_out(sensitivity, budget))
    uniform = [bits for bits in sensitivity.bits if bits <= budget]
    if not uniform:
        raise UsageError(
            f"no bits within a budget of {budget:g} were measured in all layers, so that mixed "
            "bits have no uniform ones beside them: measure all layers at the same bits"
        )
    return Plan(sensitivity, budget, curve, max(uniform))


def mixed_table(plan: Plan, results: SweepResults) -> RenderableType:
    """A table of mixed and uniform bits under a budget: expected and measured costs."""
    one = plan.sensitivity
    name = literal(model_labels([one.model])[one.model])
    title = f"{name} · {sensitivity_name(one)} · at most {plan.budget:g} bits on average"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for word in ("", "average bits", "expected", literal(one.cost)):
        table.add_column(word, justify="right" if word else "left")
    expected = plan.best.expected, sum(by[plan.uniform] for by in one.costs.values())
    averages = plan.best.average, plan.uniform
    for kind, bits, sum_, real in zip(
        ("mixed", "uniform"), averages, expected, plan.measured(results), strict=True
    ):
        told = UNKNOWN if real is None else four_digits(real)
        table.add_row(kind, f"{bits:.3g}", four_digits(sum_), told)
    widths = {bits: [n for n, own in plan.best.bits.items() if own == bits] for bits in one.bits}
    told = "; ".join(
        f"{bits} bits: {', '.join(map(str, layers))}" for bits, layers in widths.items() if layers
    )
    return Group(Text(title, style="bold"), table, Text(f"layers with {told}\n", style="dim"))


def plot_plan(plan: Plan, results: SweepResults) -> Any:
    """Draw expected and measured costs against average bits, mixed and uniform.

    Returns:
        A matplotlib Figure, outside pyplot.
    """
    frame, one = plan.frame(results), plan.sensitivity
    colors = model_colors(["mixed", "uniform"])
    with style():
        page = Page(SINGLE, 2.4)
        ax = page.subplots()
        entries = []
        for kind, line in (("mixed", "-"), ("uniform", "")):
            own = frame[frame["kind"] == kind]
            (handle,) = ax.plot(
                own["average"], own["expected"], color=colors[kind], linestyle=line, marker="o"
            )
            entries.append((f"{kind}, sum of the layers' costs", handle))
            own = own.dropna(subset="measured")
            if len(own):
                (handle,) = ax.plot(
                    own["average"], own["measured"], color=colors[kind], linestyle="", marker="*",
                    markersize=8,
                )  # fmt: skip
                entries.append((f"{kind}, measured", handle))
        scale_costs(ax, [*frame["expected"], *frame["measured"].dropna()])
        ax.set_xlabel("bits of the average layer")
        ax.set_ylabel(literal(one.cost), parse_math=False)
        name = literal(model_labels([one.model])[one.model])
        set_title(page, name, sensitivity_name(one).removesuffix(", layer by layer"))
        legend_below(page, entries)
        return page


def save_plan_figures(
    plans: Sequence[Plan], results: SweepResults, folder: str | Path
) -> list[Path]:
    """Write the figures of some plans as PNG and SVG, and their numbers as CSV.

    Returns:
        The files: `mixed.png` and so on, numbered where there are several plans.
    """
    folder = Path(folder)
    if plans:
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, plan in enumerate(plans, start=1):
        stem = folder / (f"mixed-{number}" if len(plans) > 1 else "mixed")
        written += [*save_page(plot_plan(plan, results), stem), stem.with_name(f"{stem.name}.csv")]
        table = plan.frame(results).to_csv(index=False, lineterminator="\n")
        write_bytes(written[-1], table.encode())
    return written
