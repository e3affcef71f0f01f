"""An evaluation that is quick, that writes down when it runs, and that can be made to fail."""

import contextlib
import os
import sys
import time
import weakref

import numpy as np
import torch

from quantdiff.analysis.evaluation import EVALUATIONS, Metric, Outcome, Stopped
from quantdiff.calibration import text_windows

COSTS = {"perplexity": 1, "acc": -1}
NAME = "quantdiff.analysis.evaluation.counted"

# In one process: what `run` calls first, told how many times it was called before; the models that
# evaluations were made for.
on_run = None
calls = 0
models: list[weakref.ref] = []


def register():
    """Make `counted` known as an evaluation; returns what takes it away."""
    EVALUATIONS["counted"] = "counted"
    sys.modules[NAME] = sys.modules[__name__]

    def unregister():
        global on_run, calls
        del EVALUATIONS["counted"], sys.modules[NAME]
        on_run, calls = None, 0
        models.clear()

    return unregister


def note(word):
    """Add a word to the log that the environment names, with this process's id."""
    if "COUNTED_LOG" in os.environ:
        with open(os.environ["COUNTED_LOG"], "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()} {word}\n")


class Counted:
    unit = "tokens"

    def __init__(self, name, model, windows):
        self.name, self.model, self.windows = name, model, windows
        self.data, self.total = windows.fingerprint, windows.tokens
        self.settings = {"version": 1, "pair": (1, os.environ.get("COUNTED_SETTING", ""))}

    def prepare(self, folder, *, batch_size, progress=None, stop=None):
        note("prepare")
        (folder / "reference").write_bytes(b"x" * 100)
        self.folder = folder

    def run(self, context=contextlib.nullcontext, *, batch_size, progress=None, stop=None):
        global calls  # noqa: PLW0603
        note("run")
        calls += 1
        if on_run is not None:
            on_run(calls)
        assert (self.folder / "reference").exists()
        sums = []
        with torch.no_grad(), context():
            for batch in self.windows.batches(batch_size, pad_token_id=0):
                logits = self.model(**batch).logits
                for row, kept in zip(logits, batch["attention_mask"], strict=True):
                    sums.append(float(row[kept == 1].double().abs().mean()))
                time.sleep(float(os.environ.get("COUNTED_SLEEP", "0")))
                if progress is not None:
                    progress(int(batch["attention_mask"].sum()))
                if stop is not None and stop():
                    raise Stopped
        sums = np.array(sums)
        error = float(sums.std() / len(sums) ** 0.5)
        return Outcome(
            (Metric("perplexity", float(sums.mean()), error, len(sums)),
             Metric("largest", float(sums.max()), None, len(sums))),
            {"size": sums},
        )  # fmt: skip


def build(name, argument, model, tokenizer, text):
    models.append(weakref.ref(model))
    windows = text_windows(text.source, tokenizer, tokens=text.tokens, seq_len=text.seq_len or 32)
    return Counted(name, model, windows)
