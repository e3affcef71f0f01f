"""The section on differential models: λ, branches, maps, and noise around the subtraction."""

from collections.abc import Sequence

import pandas as pd

from quantdiff.analysis.compare.alike import Group
from quantdiff.analysis.compare.differential import branches, is_differential, lambdas, maps, noise
from quantdiff.analysis.compare.differential_figures import lambda_page, maps_page, noise_page
from quantdiff.analysis.compare.measured import Measured, data_of
from quantdiff.analysis.compare.outlier_figures import Colors
from quantdiff.analysis.compare.outliers import curves
from quantdiff.analysis.compare.parts import Keys, constant, joined, table, warned
from quantdiff.analysis.compare.recorded import Recorded, about
from quantdiff.analysis.report.content import Figure, Part, Section, Shown

__all__ = ["differential_section"]

_MAPS = (
    "w are the weights of one query over the keys that it sees, of differential heads softmax 1 − "
    "λ·softmax 2; means over rows of all layers and heads. Negative mass is Σ|w| over w < 0, first "
    "token the mean weight on it. Context RMS ‖w‖₂ is the RMS of the output for values of unit "
    "RMS: from 1/√n to 1 for softmax over n keys, from 0 on where a learned sink takes a share of "
    "the weights; for a difference at most √(1 + λ²) where λ ≥ 0, which is √2 for λ in [0, 1], and "
    "1 + |λ| where λ < 0"
)
_NOISE = (
    "Signal to quantization noise of each layer's own rounding, given the queries and keys that it "
    "meets, in dB, mean over layers, where keys are not quantized too; branches 1 and 2 are the "
    "maps before the subtraction. Cancellation is the difference's noise over that of independent "
    "errors of its maps: below 1 the subtraction cancels errors. Hidden: of the layers' outputs, "
    "all that came before included"
)


def differential_section(
    some: Sequence[Group[Recorded]],
    noises: Sequence[Measured],
    colors: Colors,
    keys: Keys,
    *,
    drawn: bool,
) -> Section | None:
    """λ, branches and maps of profiles, and the noise of sweeps.

    Args:
        some: groups of profiles that can be compared.
        noises: evaluations of quantization noise.
        colors: of the models.
        keys: gives the parts' keys.
        drawn: whether to include figures.

    Returns:
        None where there is nothing to show.
    """
    parts: list[Part] = []
    for group in some:
        parts += _lambdas(group, colors, keys, drawn)
        parts += _maps(group, colors, keys, drawn)
    for measured in noises:
        parts += _noises(measured, colors, keys, drawn)
    differential = [one for group in some for one in group.members if is_differential(one)]
    if not parts:
        return None
    without = [one.label for one in differential if not one.profile.maps]
    if without:
        told = f"The attention maps of {joined(without)} were not measured"
        parts[:0] = warned([f"{told}: quantdiff profile --maps measures them."])
    title = "Differential attention" if differential else "Attention maps"
    return Section("differential", title, tuple(parts))


def _lambdas(group: Group[Recorded], colors: Colors, keys: Keys, drawn: bool) -> list[Part]:
    parts: list[Part] = []
    depth = lambdas(group)
    if drawn and len(depth):
        caption = (
            f"{about(group)} λ is one number per layer in V1, and one per token and pair of heads "
            "in V2, whose mean is drawn with a band that holds 90 % of it."
        )
        description = "λ against the layer, one line per model."
        page = lambda_page(depth, colors)
        parts.append(Figure(keys("lambda"), "λ by depth", page, depth, caption, description))
    both = branches(group)
    if len(both):
        caption = f"{about(group)} Magnitudes of the attention logits of the two softmax maps."
        parts.append(table(keys("branches"), "Branch 1 beside branch 2", both, caption))
    return parts


def _maps(group: Group[Recorded], colors: Colors, keys: Keys, drawn: bool) -> list[Part]:
    frame = maps(group)
    if not len(frame):
        return []
    told = f"{about(group)} {_MAPS}."
    words = ("model", "kind", "module", "rows")
    shown = {name: _three for name in frame.columns if name not in words}
    parts: list[Part] = [table(keys("maps"), "Attention maps", frame, told, shown=shown)]
    if drawn:
        data = curves(group, "maps")
        longest = int(group.members[0].profile.data["sequence_length"])
        page = maps_page(data, longest, frame, colors)
        caption = f"{told} The band spans least to most, dotted lines are bounds."
        description = "Weight on the first token, negative mass and context RMS by layer."
        title = "Attention maps by depth"
        parts.append(Figure(keys("maps-by-layer"), title, page, data, caption, description))
    return parts


def _noises(measured: Measured, colors: Colors, keys: Keys, drawn: bool) -> list[Part]:
    frame = noise(measured)
    maps_seen = [n for n in ("snr_softmax", "snr_difference", "snr_branch_1") if n in frame]
    if not len(frame):
        return []
    told = f"{data_of(measured)} {_NOISE}."
    plain, scheme = constant(frame, "scheme")
    caption = told if scheme is None else f"{told} All in one way: {scheme}."
    heads = {name: name.removeprefix("snr_").replace("_", " ") for name in frame.columns}
    shown: dict[str, Shown] = {"cancellation": _three}
    shown |= {name: "{:.1f}".format for name in frame.columns if name.startswith("snr_")}
    title = "Error before and after the subtraction"
    parts: list[Part] = [*warned(measured.warnings)]
    parts.append(table(keys("noise"), title, plain, caption, shown=shown, heads=heads))
    if drawn and maps_seen:
        seen: pd.DataFrame = frame[frame[maps_seen].notna().any(axis=1)]
        first = seen[seen["scheme"] == seen["scheme"].iloc[0]].reset_index(drop=True)
        description = "Signal to noise of the maps against bits, one line per model and map."
        page = noise_page(first, colors)
        parts.append(Figure(keys("noise-by-bits"), title, page, first, told, description))
    return parts


def _three(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if abs(value) >= 1e-3 else f"{value:.2g}"
