"""What study_zoo.py found, as tables and a figure for docs/zoo.md."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from zoo_recipe import KINDS

from quantdiff.analysis.style import DOUBLE, Page, legend_below, model_colors, save_page, style

__all__ = ["at_loss", "draw", "tables"]

Told = dict[str, Any]
PLAIN = KINDS[0]
# What a model's path holds besides its loss -> its name.
OUTLIERS = {"logit": "top-1 logit", "hidden": "top-1 hidden"}

AT_THE_END = (
    "Each differential model against the Transformer of the same variant and seed. `times` is the "
    "ratio of the largest magnitudes: the geometric mean over seeds and, in parentheses, the least "
    "and the greatest. `loss` is the difference of the losses, and `cost` the difference of what "
    "4 bits add to them, differential minus Transformer."
)
AT_EQUAL_LOSS = (
    "The same at equal loss: both models at the last point of their training where they had the "
    "loss that the worse one ended with, on 16 held-out windows, with the fp32 weights of the "
    "training; interpolated between two looks. The better model was still on its way then, at a "
    "higher learning rate, which moves outliers too: `rate` is the ratio of the rates."
)


def tables(models: Sequence[Told]) -> str:
    """Every model, and each differential one beside its Transformer."""
    parts = (
        _table(models), AT_THE_END, _paired(models, _last, "loss"),
        AT_EQUAL_LOSS, _paired(models, _equal, "at the loss of"),
    )  # fmt: skip
    return "\n\n".join(parts)


def _table(models: Sequence[Told]) -> str:
    heads = ["variant", "seed", "model", "loss", "bigram", "top-1 logit", "median", "top-1 hidden",
             "6 bits", "4 bits", "3 bits", "2 bits"]  # fmt: skip
    rows = []
    for m in models:
        logits, hidden, losses = m["attention_logits"], m["hidden_states"], m["losses"]
        cells = [m["variant"], str(m["recipe"]["seed"]), m["kind"]]
        cells += [f"{losses['16']:.3f}", f"{m['bigram_loss']:.3f}"]
        cells += [f"{x:.2f}" for x in (logits["top1"], logits["median"], hidden["top1"])]
        cells += [f"{losses[f'tensor {bits}']:.3f}" for bits in (6, 4, 3, 2)]
        rows.append(cells)
    return _markdown(heads, rows)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def _pairs(models: Sequence[Told]) -> Iterator[tuple[str, str, list[tuple[Told, Told]]]]:
    """(variant, kind, pairs of Transformer and differential model, one per seed)."""
    groups: dict[tuple[str, str], list[tuple[Told, Told]]] = {}
    plain = {_recipe(m): m for m in models if m["kind"] == PLAIN}
    for m in models:
        recipe = _recipe(m)
        if m["kind"] != PLAIN and recipe in plain:
            groups.setdefault((m["variant"], m["kind"]), []).append((plain[recipe], m))
    for (name, kind), pairs in groups.items():
        yield name, kind, pairs


def _recipe(m: Told) -> str:
    return json.dumps(m["recipe"], sort_keys=True)


def _last(plain: Told, other: Told) -> tuple[float, dict[str, float], float]:
    """Difference of losses, ratios of outliers, difference of what 4 bits cost."""
    first, second = plain["losses"], other["losses"]
    times = {
        "logit": other["attention_logits"]["top1"] / plain["attention_logits"]["top1"],
        "hidden": other["hidden_states"]["top1"] / plain["hidden_states"]["top1"],
    }
    cost = second["tensor 4"] - second["16"] - (first["tensor 4"] - first["16"])
    return second["16"] - first["16"], times, cost


def _equal(plain: Told, other: Told) -> tuple[float, dict[str, float], None]:
    """A loss that both reached, and ratios of outliers at it."""
    loss = max(m["path"][-1]["loss"] for m in (plain, other))
    here, there = (at_loss(m["path"], loss) for m in (plain, other))
    return loss, {name: there[name] / here[name] for name in here}, None


def at_loss(path: Sequence[dict[str, float]], loss: float) -> dict[str, float]:
    """A model's outliers when it last fell to a loss.

    Args:
        path: looks in the order of training, each with `loss` and `OUTLIERS`.
        loss: between the path's last loss and its first.

    Returns:
        Each outlier and the learning rate, interpolated between the two looks, linearly in the
        loss and geometrically in the value.

    Raises:
        ValueError: the path ends above the loss, or begins below it.
    """
    if path[-1]["loss"] > loss or path[0]["loss"] < loss:
        raise ValueError(f"the path goes from {path[0]['loss']} to {path[-1]['loss']}, not {loss}")
    above = max(i for i, look in enumerate(path) if look["loss"] >= loss)
    a, b = path[above], path[min(above + 1, len(path) - 1)]
    share = 0.0 if a["loss"] == b["loss"] else (a["loss"] - loss) / (a["loss"] - b["loss"])
    return {name: a[name] ** (1 - share) * b[name] ** share for name in (*OUTLIERS, "rate")}


def _paired(models: Sequence[Told], compare: Callable[..., Any], head: str) -> str:
    rows = []
    for variant, kind, pairs in _pairs(models):
        found = [compare(*pair) for pair in pairs]
        losses, costs = [f[0] for f in found], [f[2] for f in found if f[2] is not None]
        sign = "+" if costs else ""
        cells = [variant, kind, str(len(pairs)), _mean(losses, f"{sign}.3f")]
        cells += [_times([f[1][name] for f in found]) for name in OUTLIERS]
        last = _mean(costs, "+.3f") if costs else _times([f[1]["rate"] for f in found])
        rows.append([*cells, last])
    heads = ["variant", "model", "seeds", head, *(f"{word}, times" for word in OUTLIERS.values())]
    return _markdown([*heads, "cost" if compare is _last else "rate, times"], rows)


def _mean(values: Sequence[float], form: str) -> str:
    mean = f"{sum(values) / len(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}}, {max(values):{form}})"


def _times(values: Sequence[float]) -> str:
    mean = f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f}, {max(values):.2f})"


def draw(models: Sequence[Told], stem: Path) -> None:
    """The largest magnitudes while each model trained, against its loss at the time."""
    colors = model_colors(KINDS)
    with style():
        page = Page(DOUBLE, 2.6)
        panels = page.subplots(1, 2)
        for axes, (name, word) in zip(panels, OUTLIERS.items(), strict=True):
            for m in models:
                x, y = ([look[key] for look in m["path"]] for key in ("loss", name))
                color = colors[m["kind"]]
                axes.plot(x, y, color=color, alpha=0.45, linewidth=0.7)
                axes.plot(x[-1:], y[-1:], ".", color=color, markersize=5)
            axes.set(xlabel="held-out loss (nats per token)", ylabel=word, yscale="log")
            axes.invert_xaxis()
        present = dict.fromkeys(m["kind"] for m in models)
        legend_below(page, [(k, Line2D([], [], color=colors[k])) for k in KINDS if k in present])
    save_page(page, stem)
