"""What the sections of a comparison share: unique keys, and how values are written."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from quantdiff.analysis.report.content import Shown, Table, Warned
from quantdiff.analysis.text import four_digits, number, two_digits
from quantdiff.export.card import percent

__all__ = ["Keys", "constant", "joined", "numbered", "table", "together", "warned", "words"]

T = TypeVar("T")


class Keys:
    """File names, each issued once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __call__(self, *parts: object) -> str:
        """A key of lower-case letters, digits and hyphens, numbered if it was issued before."""
        key = re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, parts)).lower()).strip("-")[:60]
        key, number_ = key.strip("-"), 1
        result = key
        while result in self._taken:
            number_ += 1
            result = f"{key}-{number_}"
        self._taken.add(result)
        return result


def words(name: str) -> str:
    """A site or activation as people write it."""
    return name.replace("_", " ")


def _signed(value: float) -> str:
    """A difference with three significant digits."""
    return "0" if value == 0 else f"{value:+#.3g}".rstrip(".")


def joined(names: Iterable[str]) -> str:
    """A list in words."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def warned(sentences: Iterable[str]) -> list[Warned]:
    """Sentences as paragraphs that must not be missed."""
    return [Warned(sentence) for sentence in sentences]


def constant(frame: pd.DataFrame, column: str) -> tuple[pd.DataFrame, Any]:
    """Drop a column that holds a single value, and return that value; else the frame and None."""
    if len(frame) and frame[column].nunique(dropna=False) == 1:
        return frame.drop(columns=column), frame[column].iloc[0]
    return frame, None


def numbered(groups: Sequence[T], frame: Callable[[T], pd.DataFrame]) -> pd.DataFrame:
    """The frames of all groups, with the group's number, from 1, as first column `group`."""
    found = []
    for place, group in enumerate(groups, start=1):
        made = frame(group)
        made.insert(0, "group", place)
        found.append(made)
    return together(found)


def together(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate frames, leaving out those without rows."""
    some = [frame for frame in frames if len(frame)]
    return pd.concat(some, ignore_index=True) if some else pd.DataFrame()


# Column -> how its values are written.
_FORMS: dict[str, Shown] = {
    "activation": words,
    **dict.fromkeys(("top1", "top2", "top3", "top10", "top100", "median", "largest"), number),
    "top1_ratio": "{:#.3g}".format,
    "median_ratio": "{:#.3g}".format,
    "share": "{:.0%}".format,
    "count": "{:,}".format,
    "rows": "{:,}".format,
    "difference": _signed,
    "low": _signed,
    "high": _signed,
    "megabytes": "{:,.1f}".format,
    "bits_per_weight": "{:.2f}".format,
    "perplexity": "{:,.3f}".format,
    "source_perplexity": "{:,.3f}".format,
    "kl": four_digits,
    "agreement": percent,
    "moved_median": "{:.1%}".format,
    "moved_largest": "{:.1%}".format,
    "tokens": "{:,}".format,
    "sequence_length": "{:,}".format,
    "parameters": "{:,}".format,
    "fingerprint": lambda mark: str(mark)[:12],
    "excludes_0": lambda yes: "yes" if yes else "no",
}

_HEADS = {
    **{f"top{n}": f"top-{n}" for n in (1, 2, 3, 10, 100)},
    "top1_ratio": "× top-1",
    "median_ratio": "× median",
    "megabytes": "MB",
    "bits_per_weight": "bits per weight",
    "source_perplexity": "of the source",
    "kl": "KL, nats",
    "moved_median": "moved, median",
    "moved_largest": "moved, largest",
    "sequence_length": "window",
    "row_sum": "Σw",
    "negative_mass": "negative mass",
    "sink": "first token",
    "context_rms_min": "RMS, least",
    "context_rms_median": "median",
    "context_rms_max": "most",
    "excludes_0": "excludes 0",
}


def table(
    key: str,
    title: str,
    frame: pd.DataFrame,
    caption: str = "",
    *,
    shown: Mapping[str, Shown] | None = None,
    heads: Mapping[str, str] | None = None,
    published: bool = False,
) -> Table:
    """A table with the formats and headings used throughout a comparison.

    Args:
        key, title, frame, caption, published: of the table.
        shown, heads: for this table only.
    """
    forms, names = dict(_FORMS), dict(_HEADS)
    for name in map(str, frame.columns):
        width = re.fullmatch(r"bits_(\d+)(_stderr)?", name)
        if width:
            forms[name] = two_digits if width[2] else four_digits
            names[name] = "±" if width[2] else f"{width[1]} bits"
        names.setdefault(name, name.replace("_", " "))
    forms |= shown or {}
    names |= heads or {}
    columns = list(map(str, frame.columns))
    return Table(
        key=key, title=title, frame=frame, caption=caption, published=published,
        shown={name: forms[name] for name in columns if name in forms},
        heads={name: names[name] for name in columns},
    )  # fmt: skip
