"""Kill a sweep some times, and run it once without; children are forked, for imports take seconds.

python -m tests.analysis.sweep.kill_driver KIND TEXT FOLDER MODEL…: results in FOLDER/killed and
/whole, and on stdout a JSON list of what each life found finished, began, and left finished. KIND
is `ranges`, two evaluations of one model, or `sites`, six sites of each model.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.sweep import make_grid, sweep
from quantdiff.analysis.sweep.results import ResultsFile
from tests.analysis.sweep import counted

KILLS = {"ranges": 10, "sites": 3}
GRIDS = {
    "ranges": {
        "bits": (16, 8, 6, 5, 4, 3), "ranges": ("dynamic", "absmax"),
        "granularities": ("tensor", "head"),
    },
    "sites": {
        "bits": (8, 6, 4),
        "sites": ("weights", "linear_inputs", "keys", "values", "attention_maps", "hidden_states"),
    },
}  # fmt: skip
# Cells that a life finishes before it is killed, by chance.
STEPS = {"ranges": (0, 0, 1, 1, 2), "sites": (10, 16)}
TOKENS = {"ranges": 72, "sites": 24}
EVALUATIONS = {"ranges": ("counted", "divergence"), "sites": ("counted",)}


def run(kind, models, text, out):
    results = sweep(
        models, make_grid(**GRIDS[kind]).schemes, EVALUATIONS[kind], out=out,
        text=Text(text, TOKENS[kind], 24), calibration_tokens=96, device="cpu",
    )  # fmt: skip
    assert results.failed == []


def child(work):
    """Do some work in a process of its own; its id."""
    identity = os.fork()
    if identity:
        return identity
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def cells(path):
    """How many cells are written, as far as whole lines tell."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return len({json.loads(line)["cell"] for line in whole})


def words(log, identity):
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [word for owner, word in lines if owner == str(identity)]


def main(kind, text, folder, models):
    counted.register()
    os.environ["COUNTED_SLEEP"] = "0.01"
    log, out = folder / "log", folder / "killed"
    os.environ["COUNTED_LOG"] = str(log)
    torch.set_num_threads(1)  # a team of threads does not survive a fork
    # Nor does the lock of progress bars, which a killed child may hold for ever.
    disable_progress_bar()
    run(
        kind, models, text, folder / "whole"
    )  # in this process, so that all is imported when it forks
    chance, lives = random.Random(0), []
    results = ResultsFile(out)
    while True:
        before = results.finished()
        identity = child(lambda: run(kind, models, text, out))
        last = len(lives) == KILLS[kind]
        ended, status = 0, 0
        if not last:
            # Anywhere: while it opens the model, calibrates, computes or writes.
            enough = len(before) + chance.choice(STEPS[kind])
            while not ended and cells(results.path) < enough:
                time.sleep(0.005)
                ended, status = os.waitpid(identity, os.WNOHANG)
            time.sleep(chance.uniform(0, 0.05 if enough > len(before) else 0.3))
            os.kill(identity, signal.SIGKILL)
        if not ended:
            status = os.waitpid(identity, 0)[1]
        lives.append({
            "killed": os.WIFSIGNALED(status), "finished": sorted(before),
            "left": sorted(results.finished()), "words": words(log, identity),
        })  # fmt: skip
        if last:
            assert status == 0
            break
    print(json.dumps(lives))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
