"""The model card of an exported folder: what it is, what it costs, how to load it."""

import math
from collections.abc import Callable
from typing import Any

from quantdiff.export.formats import Format
from quantdiff.export.result import Exported
from quantdiff.quantization import Scheme
from quantdiff.versions import versions

__all__ = ["card", "percent", "scheme_in_words"]


def card(
    exported: Exported, chosen: Format, content: dict[str, Any], name: str, *, brings_code: bool
) -> str:
    """The model card as Markdown.

    Args:
        exported: what was written, not verified yet.
        chosen: the format.
        content: of `quantdiff.json`.
        name: of the folder.
        brings_code: whether the folder holds modelling code that a loader must be allowed to run.
    """
    trust = ", trust_remote_code=True" if brings_code else ""
    code = chosen.snippet.format(folder=name, trust=trust, register=_register(content)).replace(
        "\n\n\n", "\n\n"
    )
    parts = [
        "---\nlibrary_name: transformers\ntags:\n- quantized\n- quantdiff\n---",
        f"# {name}: {exported.model} with {chosen.title}",
        _made(exported, chosen, content),
        _table(exported),
        "## Load it",
        f"It is read by {chosen.readers}.",
        f"```python\n{code}\n```",
    ]
    if exported.schemes:
        schemes = "; ".join(map(scheme_in_words, exported.schemes))
        parts += [
            f"That gives the weights alone. With its activations quantized as they were measured "
            f"({schemes}):",
            f'```python\nimport quantdiff\n\nmodel, tokenizer = quantdiff.load("{name}")\n```',
        ]
        if content["calibration"]:
            calibrated, data = content["calibration"]["model"], content["calibration"]["data"]
            cut = ", cut short" if content["calibration"].get("partial") else ""
            parts.append(
                f"The static ranges are from {data['tokens']:,} tokens of "
                f"{data.get('source') or 'a batch'}{cut}, calibrated on `{calibrated['name']}`."
            )
    parts += [
        "## How it was made",
        *([f"```\n{content['command']}\n```"] if content["command"] else []),
        "`quantdiff verify` compares the folder with what was measured. "
        + ", ".join(
            f"{package} {version}"
            for package, version in (_versions(content) | content["packages"]).items()
        )
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def percent(share: float) -> str:
    """A share with two decimals, or enough not to read 0 % or 100 % unless it is exactly that.

    For example `97.12%`, `99.996%` and `100.00%`.
    """
    rest = 100 * min(share, 1 - share)
    decimals = max(2, -math.floor(math.log10(rest))) if rest > 0 else 2
    return f"{share:.{decimals}%}"


_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("perplexity", "perplexity", "{:,.3f}".format),
    ("kl", "KL from the source, nats per token", "{:#.4g}".format),
    ("agreement", "same top-1 token as the source", percent),
)


def scheme_in_words(scheme: Scheme) -> str:
    """For example `attention logits at 4 bits, dynamic range per tensor, symmetric`."""
    grid = "symmetric" if scheme.symmetric else "asymmetric"
    site = scheme.site.replace("_", " ")
    told = f"{site} at {scheme.bits} bits, {scheme.range} range per {scheme.granularity}, {grid}"
    if scheme.newest:
        told += f", but for the newest {scheme.newest} tokens"
    for what, numbers in (("layer", scheme.layers), ("head", scheme.heads)):
        if numbers is not None:
            told += f", in {what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    return told


def _made(exported: Exported, chosen: Format, content: dict[str, Any]) -> str:
    """The sentence on what was exported from what."""
    how, made = content["export"], "Exported by quantdiff from "
    source = (
        f"`{exported.model}` ({content['model']['family']}, {exported.parameters:,} parameters)"
    )
    if not how["kept"]:
        return f"{made}{source} with {chosen.title}."
    detail = " with double quantization" if how["double_quant"] else ""
    if "group" in how:
        shared = "per row" if how["group"] is None else f"for {how['group']} weights"
        detail = f" with one scale {shared}"
    kept = ", ".join(f"`{name}`" for name in how["kept"])
    return (
        f"{made}{source} as `{exported.format}`{detail}. Linear layers are quantized but for "
        f"{kept}: {how['share']:.0%} of the parameters; all else is {how['dtype']}."
    )


def _table(exported: Exported) -> str:
    bits = 8 * exported.source_bytes / exported.parameters
    rows = [
        ("", f"source, as loaded ({exported.source_dtype})", "this checkpoint"),
        ("---", "---", "---"),
        ("size of the weights", f"{exported.source_bytes / 1e6:,.1f} MB",
         f"{exported.bytes / 1e6:,.1f} MB"),
        ("bits per weight", f"{bits:.2f}", f"{exported.bits_per_weight:.2f}"),
    ]  # fmt: skip
    measured = exported.measured or {}
    source = measured.get("source", {})
    for key, words, told in _ROWS:
        if key in measured:
            before = told(source[key]) if key in source else ""
            rows.append((words, before, told(measured[key])))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if "data" in measured:
        below = ", activations quantized as below" if exported.schemes else ""
        table += f"\n\nMeasured on {measured['data']}{below}."
    return table


def _register(content: dict[str, Any]) -> str:
    if content["model"]["family"] != "diff_v2":
        return ""
    return "\nimport quantdiff.models.diff_v2  # registers the architecture, which quanto needs"


def _versions(content: dict[str, Any]) -> dict[str, str]:
    return {name: content["reference"][name] for name in versions()}
