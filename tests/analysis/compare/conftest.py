"""Runs to compare: recorded profiles, and sweeps and checkpoints written as the commands do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import quantdiff
from quantdiff.analysis.sweep.record import write_record
from quantdiff.analysis.sweep.results import ResultsFile
from quantdiff.export.sidecar import VERIFICATION, write_sidecar
from quantdiff.export.verifying import Check, Verification
from quantdiff.files import write_json
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_ids, tiny_llama

MARK = "a" * 64  # fingerprint of the data of all that can be compared


def recorded(model: torch.nn.Module, name: str, **options: Any) -> quantdiff.Profile:
    with torch.no_grad(), quantdiff.record(model, **{"maps": True} | options) as recorder:
        model(input_ids=tiny_ids(2, 24))
    profile = recorder.profile(source="random ids")
    profile.model["name"] = name
    profile.data["fingerprint"] = MARK
    return profile


@pytest.fixture(scope="session")
def trio() -> list[quantdiff.Profile]:
    """A standard model and both kinds of differential ones, on the same data."""
    return [
        recorded(tiny_llama(), "zoo/plain"),
        recorded(tiny_diffllama(), "zoo/v1"),
        recorded(tiny_diff_v2(), "zoo/v2"),
    ]


def windows(seed: int, worse: float = 0.0, number: int = 8) -> dict[str, Any]:
    """Items of a perplexity over windows, of which the last is shorter."""
    generator = np.random.default_rng(seed)
    tokens = np.array([31] * (number - 1) + [12])
    return {"nll": tokens * generator.normal(3 + worse, 0.3, number), "tokens": tokens}


def answers(seed: int, right: float = 0.5) -> dict[str, Any]:
    """Items of 40 questions."""
    generator = np.random.default_rng(seed)
    return {
        "log_likelihoods": generator.normal(size=(40, 4)),
        "gold": generator.integers(0, 4, 40),
        "correct": generator.random(40) < right,
        "correct_norm": generator.random(40) < right,
    }


def metrics_of(items: dict[str, Any]) -> dict[str, float]:
    """Metrics as the evaluations take them."""
    if "correct" in items:
        return {"acc": items["correct"].mean(), "acc_norm": items["correct_norm"].mean()}
    nll = items["nll"].sum() / items["tokens"].sum()
    return {"perplexity": float(np.exp(nll)), "nll": float(nll)}


def evaluated(name: str, data: str = MARK, **settings: Any) -> dict[str, Any]:
    """What sweep.json says of an evaluation."""
    known = {"questions": 40}
    if name == "perplexity":
        known = {"tokens": 229, "windows": 8, "seq_len": 32}
    source = "corpus" if name == "perplexity" else name.partition(":")[2]
    return {"source": source, "data": data, "settings": {"version": 1} | known | settings}


def line(cell: str, model: str, evaluation: str, bits: int, metric: str, **rest: Any) -> Any:
    """A line of results.jsonl."""
    quantized = bits < 16
    return {
        "cell": cell, "model": model, "scheme": f"L{bits}" if quantized else "fp",
        "site": "attention_logits" if quantized else None, "bits": bits,
        "range": "dynamic" if quantized else None, "granularity": "tensor" if quantized else None,
        "options": {"symmetric": True} if quantized else {}, "causal": not quantized,
        "eval": evaluation, "metric": metric, "value": None, "stderr": 0.1, "count": 40,
        "data": MARK, "seconds": 1.0, "status": "ok",
    } | rest  # fmt: skip


def write_sweep(
    folder: Path,
    models: dict[str, dict[str, Any]],
    cells: list[tuple[str, str, int, dict[str, Any]]],
    *,
    keep_items: bool = True,
) -> Path:
    """A sweep as `quantdiff sweep` writes it.

    Args:
        folder: of the sweep.
        models: name -> evaluations, and what else sweep.json says of it.
        cells: model, evaluation, bits, items.
        keep_items: whether the items are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        name: {"fingerprint": name, "family": "llama", "parameters": 1000, "dtype": "float32",
               "device": "cpu", "attention": "sdpa", "calibration": None} | told
        for name, told in models.items()
    }  # fmt: skip
    # As real ones: cells of other folders are others.
    ids = [f"{folder.name}-{number}" for number in range(len(cells))]
    write_record(folder, {
        "format": "quantdiff.sweep/1", "models": about, "cells": ids, "asked": ids,
        "versions": {"quantdiff": "0.1.0", "torch": "2.13.0"},
        "commands": [f"quantdiff sweep --out {folder.name}"],
    })  # fmt: skip
    file = ResultsFile(folder)
    for cell, (model, evaluation, bits, items) in zip(ids, cells, strict=True):
        lines = [
            line(cell, model, evaluation, bits, metric, value=float(value))
            for metric, value in metrics_of(items).items()
        ]
        file.append(lines, items if keep_items else None)
    return folder


@pytest.fixture
def swept(tmp_path: Path, trio: list[quantdiff.Profile]) -> Path:
    """A sweep of the trio: perplexity and questions at 16, 8 and 4 bits."""
    names, choice = [profile.model["name"] for profile in trio], "choice:some/questions.jsonl"
    told = {"evaluations": {"perplexity": evaluated("perplexity"), choice: evaluated(choice)}}
    cells = []
    for number, name in enumerate(names):
        for bits in (16, 8, 4):
            cells.append((name, "perplexity", bits, windows(number, (16 - bits) / 20)))
            cells.append((name, choice, bits, answers(10 * number + bits, 0.3 + bits / 40)))
    models = {
        name: told | {entry: profile.model[entry] for entry in ("family", "parameters")}
        for name, profile in zip(names, trio, strict=True)
    }
    return write_sweep(tmp_path / "swept", models, cells)


def write_checkpoint(
    folder: Path, *, name: str = "zoo/plain", passed: bool | None = True, data: str = MARK
) -> Path:
    """An exported folder as far as a comparison reads it, with the sidecar's own writer."""
    folder.mkdir(parents=True)
    content = {
        "export": {"format": "bnb-nf4", "dtype": "bfloat16"},
        "model": {"name": name, "parameters": 2000},
        "definitions": {"grid": "symmetric"},
        "passage": {"ids": [1, 2]},
        "reference": {"device": "cpu", "quantdiff": "0.1.0"},
        "size": {"bytes": 1_250_000, "bits_per_weight": 4.5},
        "measured": {
            "data": "48 tokens of corpus in windows of 24", "fingerprint": data,
            "tokens": 48, "sequence_length": 24, "source": {"perplexity": 20.5},
            "perplexity": 21.25, "kl": 0.0125, "agreement": 0.875,
        },
        "packages": {"bitsandbytes": "0.50.2"},
        "command": "quantdiff export zoo/plain",
    }  # fmt: skip
    schemes = [quantdiff.Scheme("attention_logits", 6)]
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    write_sidecar(folder, content, schemes, None, {"logits": torch.zeros(1, 3)})
    if passed is not None:
        check = Check("files", passed, "all there" if passed else "weights are missing")
        write_json(folder / VERIFICATION, Verification(str(folder), [check]).to_json())
    return folder
