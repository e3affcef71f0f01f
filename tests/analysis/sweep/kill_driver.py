"""Kill a sweep ten times, and run it once without; children are forked, for imports take seconds.

python -m tests.analysis.sweep.kill_driver MODEL TEXT FOLDER: results in FOLDER/killed and /whole,
and on stdout a JSON list of what each life found finished, began, and left finished.
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

KILLS = 10


def run(model, text, out):
    grid = make_grid(
        bits=(16, 8, 6, 5, 4, 3), ranges=("dynamic", "absmax"), granularities=("tensor", "head")
    )
    results = sweep(
        [model], grid.schemes, ["counted", "perplexity"], out=out, text=Text(text, 72, 24),
        calibration_tokens=96, device="cpu",
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
    """How many cells are written; both evaluations have two metrics."""
    return path.read_bytes().count(b"\n") // 2 if path.exists() else 0


def words(log, identity):
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [word for owner, word in lines if owner == str(identity)]


def main(model, text, folder):
    counted.register()
    os.environ["COUNTED_SLEEP"] = "0.01"
    log, out = folder / "log", folder / "killed"
    os.environ["COUNTED_LOG"] = str(log)
    torch.set_num_threads(1)  # a team of threads does not survive a fork
    # Nor does the lock of progress bars, which a killed child may hold for ever.
    disable_progress_bar()
    run(model, text, folder / "whole")  # in this process, so that all is imported when it forks
    chance, lives = random.Random(0), []
    results = ResultsFile(out)
    while True:
        before = results.finished()
        identity = child(lambda: run(model, text, out))
        last = len(lives) == KILLS
        ended, status = 0, 0
        if not last:
            # Anywhere: while it opens the model, calibrates, computes or writes.
            enough = len(before) + chance.choice((0, 0, 1, 1, 2))
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
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
