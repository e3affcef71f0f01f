"""A report with parts of every kind, and names that mean harm."""

import numpy as np
import pandas as pd

from quantdiff.analysis.report import Figure, Prose, Report, Section, Table, Warned
from quantdiff.analysis.style import DOUBLE, SINGLE, Page, heat_map, model_colors, style
from quantdiff.analysis.text import number

HOSTILE = (
    "<script>alert(1)</script>",
    '../../etc/"pass\'word"',
    "한국어-모델-1.3B",
    "</td></table><img src=x onerror=alert(2)>",
    "100% of $x_1$ & y\\z | `a` [b](http://x.invalid) *c* {d}~^#",
)
MODELS = ("baseline-135m", "diff-v1-135m", "diff-v2-135m", *HOSTILE)

_FORMATS = {f"top-{n}": number for n in (1, 2, 3, 10, 100)} | {"median": number}


def sample_report() -> Report:
    """Six sections, seven tables, six figures; the same each time."""
    return Report(
        title="Outliers of baseline-135m and seven other models",
        sections=(
            Section("models", "Models and data", (_prose(), _models())),
            Section("outliers", "Outliers", (_warned(), _outliers(), _published(), *_curves())),
            Section("accuracy", "Accuracy against bits", (_accuracy(), _against_bits())),
            Section("wide", "Every layer at once", (_wide(), _heads(), _heads_of_one())),
            Section("long", "The largest values", (_long(), _sizes())),
            Section("names", f"Names such as {HOSTILE[0]}", (_named(), _gaps())),
        ),
        command=f"quantdiff compare runs/a 'runs/{HOSTILE[1]}' --out {HOSTILE[0]}",
        versions={"quantdiff": "0.1.0", "torch": "2.13.0", "transformers": "5.17.1"},
    )


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def _prose() -> Prose:
    return Prose(
        "Attention logits are what softmax sees before masking: q·kᵀ·scaling in fp32, only "
        "positions that may be attended, both branches of a differential head. Hidden states are "
        "the residual stream after each decoder layer. Top-N is the N-th largest magnitude. All "
        "models read the same text, whose fingerprint stands beside each."
    )


def _warned() -> Warned:
    return Warned(
        f"{HOSTILE[2]} was recorded on other text (wikitext.txt, 65,536 tokens) and cannot be "
        "compared with the other models; it stands in tables of its own."
    )


def _models() -> Table:
    rows = [
        {"model": name, "layout": "none" if place % 2 else "grouped", "parameters": 134_515_008,
         "tokens": 400_000 + place, "λ": None if place % 2 else 0.2 + place / 10,
         "fingerprint": f"{place:02d}7ac3e5a1b8f", "partial": place == 3}
        for place, name in enumerate(MODELS)
    ]  # fmt: skip
    return Table(
        "models", "What was compared", pd.DataFrame(rows),
        "Each model with its head layout and the text that it read.",
        shown={"parameters": "{:,}".format, "tokens": "{:,}".format, "λ": "{:.2f}".format},
    )  # fmt: skip


def _outliers() -> Table:
    random = _random()
    rows = []
    for activation in ("attention logits", "hidden states"):
        for name in MODELS[:4]:
            values = np.sort(random.lognormal(4, 1.5, 6))[::-1]
            row = dict(zip(_FORMATS, values, strict=True))
            rows.append({"model": name, "activation": activation, **row, "ratio": values[0] / 300})
    rows[1]["median"] = None
    rows[2]["ratio"] = -0.125
    return Table(
        "outliers", "Largest activations", pd.DataFrame(rows),
        "Over 400,000 tokens of corpus, fingerprint 007ac3e5a1b8f, windows of 2,048. The ratio is "
        "to the first model’s top-1.",
        shown={**_FORMATS, "ratio": "{:.3f}×".format}, heads={"ratio": "ratio to the first"},
    )  # fmt: skip


def _published() -> Table:
    frame = pd.DataFrame({
        "model": ["Transformer", "DIFF"],
        "activation": ["attention logits"] * 2,
        **{name: [318.0 / place, 38.8 / place] for place, name in enumerate(_FORMATS, start=1)},
    })  # fmt: skip
    return Table(
        "outliers-published", "Largest activations, as published", frame,
        "A paper on differential attention, Table 5. It does not say on which data it measured.",
        shown=_FORMATS, published=True,
    )  # fmt: skip


def _accuracy() -> Table:
    random = _random()
    rows = [
        {"model": name, "bits": bits, "accuracy": value, "difference": value - 0.6, "low": -0.04,
         "high": 0.05, "n": 2_000 + place}
        for place, (name, value) in enumerate(zip(MODELS[:3] * 4, random.random(12), strict=True))
        for bits in [(16, 8, 6, 4)[place // 3]]
    ]  # fmt: skip
    shown = dict.fromkeys(("accuracy", "difference", "low", "high"), "{:.3f}".format)
    return Table(
        "accuracy", "Accuracy by width", pd.DataFrame(rows),
        "Paired bootstrap intervals, 95 %, over the same questions; ± 1 standard error.",
        shown=shown | {"n": "{:,}".format},
    )  # fmt: skip


def _wide() -> Table:
    values = pd.DataFrame(
        _random().lognormal(3, 1, (8, 30)), columns=[f"layer {layer}" for layer in range(30)]
    )
    values.insert(0, "model", MODELS)
    return Table(
        "wide", "Largest attention logit of every layer", values,
        "One row per model, one column per layer.",
        shown={f"layer {layer}": number for layer in range(30)},
    )  # fmt: skip


def _long() -> Table:
    random = _random()
    frame = pd.DataFrame({
        "rank": range(1, 101),
        "value": np.sort(random.lognormal(4, 1, 100))[::-1],
        "token": random.choice(["<s>", "the", " whale", "\n", "한", "|", "&amp;"], 100),
        "channel": random.integers(0, 576, 100),
    })  # fmt: skip
    return Table(
        "largest", "The hundred largest hidden states", frame, "Of baseline-135m.",
        shown={"value": number},
    )  # fmt: skip


def _named() -> Table:
    frame = pd.DataFrame({
        "path": [f"runs/{name}/results.jsonl" for name in HOSTILE],
        "said": ["CUDA out of memory while the logits of a layer were made, at a batch of 32"] * 5,
        "bytes": pd.array([12, None, 3, 40_000, 5], dtype="Int64"),
    })  # fmt: skip
    return Table("named", f"Runs of {HOSTILE[3]}", frame, f"As said in {HOSTILE[4]}.")


def _gaps() -> Table:
    frame = pd.DataFrame({"n": [], "x": pd.Series([], dtype="str")})
    return Table("gaps", "Nothing failed", frame)


def _colors() -> dict[str, tuple[float, float, float]]:
    return model_colors(MODELS)


def _curves() -> tuple[Figure, Figure]:
    layers = np.arange(30)
    figures = []
    for seed, kind in enumerate(("attention logit", "hidden state")):
        random = np.random.default_rng(seed)
        rows = []
        with style():
            page = Page(DOUBLE, 2.4)
            ax = page.subplots()
            for name in MODELS[:4]:
                values = 20 + random.lognormal(3, 0.6, 30)
                ax.plot(layers, values, marker="o", color=_colors()[name], label=name)
                rows += [
                    {"model": name, "layer": at, "largest": v}
                    for at, v in zip(layers, values, strict=True)
                ]
            ax.set_xlabel("layer")
            ax.set_ylabel(f"largest |{kind}|")
            page.legend(loc="outside lower center", ncols=4)
        figures.append(
            Figure(
                f"layers-{kind.replace(' ', '-')}", f"Largest {kind} by layer", page,
                pd.DataFrame(rows), "Over 400,000 tokens of corpus.",
                f"Four lines over 30 layers; {MODELS[0]} lies highest in the middle layers.",
            )
        )  # fmt: skip
    return figures[0], figures[1]


def _against_bits() -> Figure:
    bits, values = [16, 8, 6, 4], [0.66, 0.65, 0.61, 0.4]
    with style():
        page = Page(SINGLE, 2.3)
        ax = page.subplots()
        ax.errorbar(range(4), values, yerr=0.02, marker="o", color=_colors()[MODELS[0]])
        ax.set_xticks(range(4), bits)
        ax.set_xlabel("bits")
        ax.set_ylabel("accuracy")
    frame = pd.DataFrame({"bits": bits, "accuracy": values})
    return Figure("bits", "Accuracy against bits", page, frame, "Bars are ± 1 standard error.")


def _heads() -> Figure:
    random = _random()
    values = random.lognormal(3, 1, (4, 32, 24))
    with style():
        page = Page(DOUBLE, 6)
        for ax, name, table in zip(page.subplots(2, 2).flat, MODELS, values, strict=False):
            ax.pcolormesh(table, cmap=heat_map(), vmin=0, vmax=values.max(), linewidth=0.1)
            ax.set_title(name, parse_math=False)
            ax.set_xlabel("layer")
            ax.set_ylabel("head")
    model, head, layer = (axis.ravel() for axis in np.indices(values.shape))
    frame = pd.DataFrame({
        "model": np.array(MODELS)[model], "layer": layer, "head": head, "absmax": values.ravel()
    })  # fmt: skip
    return Figure(
        "heads", "Largest attention logit by layer and head", page, frame,
        "All models share one scale.", "Four heat maps, darkest where a logit is largest.",
    )  # fmt: skip


def _heads_of_one() -> Figure:
    with style():
        page = Page(SINGLE, 3)
        page.subplots().pcolormesh(_random().random((32, 24)), cmap=heat_map())
    return Figure(
        "heads-one", f"Heads of {HOSTILE[0]}", page, pd.DataFrame({"x": [1.5]}),
        description=f"{HOSTILE[3]} as heat map",
    )  # fmt: skip


def _sizes() -> Figure:
    values = _random().lognormal(0, 1, 2_000)
    with style():
        page = Page(SINGLE, 2.3)
        ax = page.subplots()
        ax.hist(values, bins=60, color=_colors()[MODELS[1]])
        ax.set_xlabel("|hidden state|")
    return Figure("sizes", "Magnitudes", page, pd.DataFrame({"value": values}), "All layers.")
