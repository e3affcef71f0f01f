"""The section on outliers: tables and figures of every profile."""

from collections.abc import Sequence

import pandas as pd

from quantdiff.analysis.compare.alike import Group
from quantdiff.analysis.compare.outlier_figures import Colors, heads_page, lines_page
from quantdiff.analysis.compare.outliers import curves, outliers, places
from quantdiff.analysis.compare.parts import Keys, joined, table, warned, words
from quantdiff.analysis.compare.recorded import Recorded, about, warnings_of
from quantdiff.analysis.frames import ACTIVATIONS
from quantdiff.analysis.published import MODELS, SOURCE, UNSAID, table_5_frame
from quantdiff.analysis.report.content import Figure, Part, Section, Table
from quantdiff.analysis.text import number

__all__ = ["outlier_section"]

_COUNTED = (
    "Magnitudes; top-N is the N-th largest. Extremes are exact in fp32, medians right to 0.5 %."
)
_PLACES = {
    "attention_logits": "A key token is a place of one sequence; L3H5 is head 5 of layer 3.",
    "hidden_states": (
        "A token is a place of one sequence, written as sequence:place. Massive activations are "
        "few channels of few tokens, which stay in the residual stream from layer to layer."
    ),
}


def outlier_section(
    some: Sequence[Group[Recorded]], colors: Colors, keys: Keys, *, drawn: bool
) -> Section:
    """Outlier tables, figures and places of profiles, group by group.

    Args:
        some: groups of profiles that can be compared.
        colors: of the models.
        keys: gives the parts' keys.
        drawn: whether to include figures.
    """
    parts: list[Part] = []
    if not some:
        parts += warned(["No profile was given: quantdiff profile MODEL --out DIR records one."])
    parts += warned(warnings_of(list(some)))
    parts += [_outliers(group, keys) for group in some]
    if some:
        caption = f"{SOURCE}. {MODELS}. {UNSAID}"
        title = "Largest activations, as the paper prints them"
        shown = {"median": "{:.1f}".format}
        parts.append(
            table(keys("table-5"), title, table_5_frame(), caption, shown=shown, published=True)
        )
    for group in some:
        parts += _figures(group, colors, keys) if drawn else []
        parts += _places(group, keys)
    return Section("outliers", "Outliers", tuple(parts))


def _outliers(group: Group[Recorded], keys: Keys) -> Table:
    frame = outliers(group)
    caption = f"{about(group)} {_COUNTED}"
    if len(group.members) > 1:
        caption += f" × top-1 and × median are ratios to {group.members[0].label}."
    else:
        frame = frame.drop(columns=["top1_ratio", "median_ratio"])
    return table(keys("outliers"), "Largest activations and median", frame, caption)


def _figures(group: Group[Recorded], colors: Colors, keys: Keys) -> list[Figure]:
    found, told = [], about(group)
    layers = curves(group, "layers")
    if layers["absmax"].gt(0).any():
        caption = f"{told} The largest magnitude of each layer, by branch of differential heads."
        found.append(
            Figure(
                keys("layers"), "Largest activations by layer", lines_page(group, "layers", colors),
                layers, caption, _peaks(layers),
            )
        )  # fmt: skip
    heads = curves(group, "heads")
    if heads["absmax"].gt(0).any():
        caption = (
            f"{told} The largest attention logit of each layer and head; one colour scale for all "
            "models."
        )
        title = "Largest attention logit by layer and head"
        found.append(
            Figure(keys("heads"), title, heads_page(group, colors), heads, caption, _peaks(heads))
        )
    magnitudes = curves(group, "magnitudes")
    if len(magnitudes) and magnitudes["count"].gt(0).any():
        page = lines_page(group, "magnitudes", colors)
        caption = (
            f"{told} Share of values per octave, on logarithmic axes; curves end at the largest "
            "magnitude."
        )
        found.append(
            Figure(
                keys("magnitudes"), "Distribution of the magnitudes", page, magnitudes, caption,
                "Distributions of magnitudes, a curve a model and branch.",
            )
        )  # fmt: skip
    return found


def _peaks(data: pd.DataFrame) -> str:
    """Where each model's largest attention logit is, in words."""
    data = data.dropna(subset="absmax")
    if "activation" in data:
        data = data[data["activation"] == "attention_logits"]
    if not len(data):
        return "One line per model."
    tops = data.loc[data.groupby("model", sort=False)["absmax"].idxmax()]
    found = zip(tops["model"], tops["absmax"], tops["layer"], strict=True)
    told = [f"{model} {number(float(value))} in layer {layer}" for model, value, layer in found]
    return f"The largest attention logit: {joined(told)}."


def _places(group: Group[Recorded], keys: Keys) -> list[Table]:
    frame = places(group)
    found = []
    for activation in ACTIVATIONS:
        mine = frame[frame["activation"] == activation] if len(frame) else frame
        if not len(mine):
            continue
        most = int(mine["kept"].max())
        caption = (
            f"{about(group)} In how many different places the {most} largest magnitudes lie, the "
            "share of them in the fullest, and the fullest ones with their counts; all count from "
            f"0. {_PLACES[activation]}"
        )
        title = f"Where the largest {words(activation)} sit"
        found.append(
            table(
                keys("places", activation), title,
                mine.drop(columns="activation").reset_index(drop=True), caption,
            )
        )  # fmt: skip
    return found
