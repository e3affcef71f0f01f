"""Draw the head layouts from the code and write docs/layouts.md around the drawings.

python scripts/draw_layouts.py --out docs
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from quantdiff.analysis.style import DOUBLE, Page, model_colors, style
from quantdiff.attention import Layout, layout
from quantdiff.files import write_bytes

# Layout, query heads, key-value heads: grouped queries, so that every difference shows.
CASES = (
    ("none", 8, 4),
    ("adjacent", 8, 4),
    ("halves", 8, 4),
    ("adjacent_shared", 8, 2),
    ("grouped:4", 10, 4),
)

TEXT = {
    "none": (
        "Standard attention",
        "Query head i reads key head i // (H/G). Every head is its own output.",
    ),
    "adjacent": (
        "DIFF V1, as its authors implement it",
        "Official V1, Motif-2.6B, Phi-4-mini-flash and timm's `DiffAttention`. Even query heads "
        "are map 1, odd ones map 2; each map has its own key heads, again even and odd, and both "
        "weigh values of twice the width. λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init, one number per "
        "layer; the subtraction is followed by an RMS norm over the 2d channels of each head, "
        "times 1 − λ_init. The official naive file agrees with this only without grouped queries: "
        "it repeats key heads that are interleaved already. Follow the flash file.",
    ),
    "halves": (
        "DIFF V1, as transformers implements it",
        "`DiffLlama`, whose `num_attention_heads` counts all H query heads. Head i is map 1, head "
        "i + H/2 map 2. Keys are repeated over the groups as in Llama; value heads are split into "
        "two halves, with head g of one beside head g of the other. The attention function is "
        "called twice, once for each half of the values, with the same queries and keys: anything "
        "counted there is counted twice. The norm has no weight.",
    ),
    "adjacent_shared": (
        "DIFF V2",
        "Twice the query heads; keys and values of width d, shared by the two heads of a pair; one "
        "attention call. λ = sigmoid(W·x): one number per token and pair. Nothing follows the "
        "subtraction. The pair (i, i + H/2) would have the same shapes but read different key "
        "heads and give different numbers; `Layout.check_pairs` refuses it.",
    ),
    "grouped:4": (
        "Grouped DIFF",
        "Motif-2-12.7B has 40 query heads (eight groups of four signal heads and one noise head) "
        "and 16 key-value heads; two groups are drawn. Signal heads read even key heads, noise "
        "heads odd ones; the noise map is subtracted from each of its four signal maps. λ and the "
        "norm are V1's.",
    ),
}  # fmt: skip


def draw(found: Layout, heads: int, kv_heads: int) -> Any:
    """Key heads at the top, query heads in the middle, the heads that are left at the bottom."""
    with style():
        page = Page(DOUBLE, 2.1)
        axes = page.subplots()
        blue, orange = list(model_colors(["a", "b"]).values())
        kinds = found.branches(heads)
        colors = {None: "0.35", 1: blue, 2: orange}

        def box(x: float, y: float, text: str, color: Any, width: float = 0.72) -> None:
            axes.add_patch(
                Rectangle((x - width / 2, y - 0.16), width, 0.32, facecolor=color, edgecolor="none")
            )
            axes.text(x, y, text, color="white", ha="center", va="center", fontsize=7)

        def line(x0: float, y0: float, x1: float, y1: float, color: Any, **options: Any) -> None:
            axes.plot([x0, x1], [y0 - 0.16, y1 + 0.16], color=color, linewidth=0.9, **options)

        keys_at = [(g + 0.5) * heads / kv_heads - 0.5 for g in range(kv_heads)]
        for head, source in enumerate(found.key_heads(heads, kv_heads)):
            line(keys_at[source], 2, head, 1, colors[kinds[head]], zorder=0)
        readers = {g: {kinds[h] for h, s in enumerate(found.key_heads(heads, kv_heads)) if s == g}
                   for g in range(kv_heads)}  # fmt: skip
        for g, x in enumerate(keys_at):
            read = readers[g]
            box(x, 2, f"k{g}", colors[read.pop()] if len(read) == 1 else "0.35")
        for head in range(heads):
            box(head, 1, f"q{head}", colors[kinds[head]])
        values = found.value_heads(heads, kv_heads)
        if found.differential:
            first, second = found.pairs(heads)
            places = [(i + 0.5) * heads / len(first) - 0.5 for i in range(len(first))]
            for x, a, b in zip(places, first, second, strict=True):
                line(a, 1, x, 0, blue, zorder=0)
                line(b, 1, x, 0, orange, zorder=0, linestyle=(0, (3, 2)))
                box(x, 0, f"q{a} − λ·q{b}", "0.25", 0.98)
                axes.text(x, -0.42, beside(values[a]), ha="center", va="center", fontsize=7)
        else:
            for head in range(heads):
                line(head, 1, head, 0, colors[None], zorder=0)
                box(head, 0, f"q{head}", "0.25")
                axes.text(head, -0.42, beside(values[head]), ha="center", va="center", fontsize=7)
        for y, text in ((2, "keys"), (1, "queries"), (0, "heads left"), (-0.42, "weigh")):
            axes.text(-1.0, y, text, ha="right", va="center", fontsize=7)
        axes.set(xlim=(-2.1, heads - 0.3), ylim=(-0.65, 2.3))
        axes.axis("off")
    return page


def beside(values: tuple[int, ...]) -> str:
    """Value heads written side by side."""
    return "|".join(f"v{g}" for g in values)


def page_text() -> str:
    """The text of docs/layouts.md."""
    lines = [
        "# Head layouts",
        "",
        "Drawn by `scripts/draw_layouts.py` from `quantdiff/attention/layouts.py`. In every layout "
        "the H query and G key-value heads are numbered in the order of their projections; blue is "
        "map 1 (branch 1), orange map 2 (branch 2); what is subtracted is dashed.",
        "",
        "| layout | branch of the heads | key head of each | values of each remaining head |",
        "|---|---|---|---|",
    ]
    for name, heads, kv_heads in CASES:
        found = layout(name)
        left = found.pairs(heads)[0] if found.differential else range(heads)
        values = found.value_heads(heads, kv_heads)
        cells = (
            f"`{name}`",
            " ".join("–" if b is None else str(b) for b in found.branches(heads)),
            " ".join(map(str, found.key_heads(heads, kv_heads))),
            " ".join(beside(values[head]).replace("|", "\\|") for head in left),
        )
        lines.append("| " + " | ".join(cells) + " |")
    for name, heads, kv_heads in CASES:
        title, text = TEXT[name]
        lines += [
            "",
            f"## {title}: `{name}`",
            "",
            f"![{heads} query heads over {kv_heads} key-value heads](figures/{stem(name)}.png)",
            "",
            text,
        ]
    return "\n".join(lines) + "\n"


def stem(name: str) -> str:
    """File name of a layout's figure."""
    return f"layout_{name.replace(':', '_')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    (options.out / "figures").mkdir(parents=True, exist_ok=True)
    for name, heads, kv_heads in CASES:
        page = draw(layout(name), heads, kv_heads)
        write_bytes(options.out / "figures" / f"{stem(name)}.png", page._repr_png_())
    write_bytes(options.out / "layouts.md", page_text().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
