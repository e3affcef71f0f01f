"""The figures of a sweep as files, without any left over from earlier requests."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from quantdiff.analysis.style import save_page
from quantdiff.analysis.sweep.figure import plot_sweep
from quantdiff.analysis.sweep.lines import NO_WAY, lines, measures
from quantdiff.analysis.sweep.loaded import SweepResults
from quantdiff.analysis.sweep.panels import sweep_figure_data
from quantdiff.analysis.text import slug
from quantdiff.files import write_bytes
from quantdiff.quantization.scheme import SITES

__all__ = ["remove_others", "save_sweep_figures"]

# Names of all files that `save_sweep_figures` may write, without suffixes.
_MODEL, _SITE = r"(-\d+-[\w.-]+)?", f"(-({'|'.join(SITES)}))?"
_NAMES = f"bits{_SITE}|sites{_MODEL}|ranges{_MODEL}{_SITE}"


def save_sweep_figures(
    results: SweepResults, folder: str | Path, *, published: bool = False
) -> list[Path]:
    """Write the figures of a sweep as PNG and SVG, and their numbers as CSV.

    There is "bits" for every site, "sites" for a model with several sites, and "ranges" for a model
    and site quantized in several ways; file names include model and site if there are several.
    Files with such names that an earlier call left in the folder are removed.

    Returns:
        The files; none if no cell has succeeded, or only cells of single layers or heads.
    """
    folder = Path(folder)
    every = [line for measure in measures(results) for line in lines(results, measure)]
    # Schemes used together have one point each, which "sites" shows side by side.
    seen = dict.fromkeys(line.way[0] for line in every)
    sites = [site for site in seen if site is not None and site in SITES]
    figures: list[tuple[str, dict[str, Any]]] = []
    if every and not sites:
        figures.append(("bits", {"kind": "bits"}))
    for site in sites:
        name = f"bits-{site}" if len(sites) > 1 else "bits"
        figures.append((name, {"kind": "bits", "way": {"site": site}}))
    for number, model in enumerate(results.models, start=1):
        mine = {line.way for line in every if line.model == model and line.way != NO_WAY}
        told = f"-{number}-{slug(model)}" if len(results.models) > 1 else ""
        if len({(way.site, way.schemes) for way in mine}) > 1:
            figures.append((f"sites{told}", {"kind": "sites", "model": model}))
        for site in sites:
            if len([way for way in mine if way[0] == site]) > 1:
                name = f"ranges{told}-{site}" if len(sites) > 1 else f"ranges{told}"
                figures.append((name, {"kind": "ranges", "model": model, "way": {"site": site}}))
    if figures:
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, which in figures:
        also = published and which["kind"] == "bits"
        written += save_page(plot_sweep(results, **which, published=also), folder / name)
        written.append(folder / f"{name}.csv")
        table = sweep_figure_data(results, **which).to_csv(index=False, lineterminator="\n")
        write_bytes(written[-1], table.encode())
    remove_others(folder, _NAMES, written)
    return written


def remove_others(folder: Path, names: str, written: Collection[Path]) -> None:
    """Remove figures that an earlier request left in a folder, as they would look current.

    Args:
        folder: where the figures are; need not exist.
        names: regular expression for their names without suffixes.
        written: the files that are current.
    """
    pattern = re.compile(f"({names})\\.(png|svg|csv)", re.ASCII)
    for path in folder.glob("*"):
        if pattern.fullmatch(path.name) and path not in written:
            path.unlink()
