"""Training the zoo: killed at any moment and started again, it gives the same weights."""

import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

import quantdiff

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
DATA = ROOT / "calibration" / "corpus" / "train_excerpt.jsonl.xz"
KINDS = ("transformer", "diff-v1", "diff-v2")

pytestmark = pytest.mark.xdist_group("train_zoo")  # one process trains for all of them


@pytest.fixture(scope="module")
def recipe():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        import zoo_recipe

        yield zoo_recipe


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a training on some documents of the shipped excerpt, others held out."""
    folder = tmp_path_factory.mktemp("text")
    with lzma.open(DATA, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    texts = {"--data": lines[::3], "--held-out": lines[1::30]}
    for option, some in texts.items():
        with lzma.open(folder / f"{option}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(some)
    files = [word for option in texts for word in (option, str(folder / f"{option}.jsonl.xz"))]

    def start(out, *options, processes=1):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [
            sys.executable, *(torchrun if processes > 1 else []), str(SCRIPTS / "train_zoo.py"),
            "--size", "tiny", "--out", str(out), "--dtype", "float32", "--every", "0", *files,
            *options,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    start.held_out = folder / "--held-out.jsonl.xz"
    return start


def finish(run):
    out, error = run.communicate(timeout=600)
    assert run.returncode == 0, error.decode()
    return out.decode()


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory):
    out = tmp_path_factory.mktemp("zoo")
    told = finish(start(out))
    return out, told


def test_all_three_are_trained_and_told(recipe, start, unbroken):
    out, told = unbroken
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / KINDS[0] / "model")
    held_out = recipe.Stream(start.held_out, tokenizer, 64)
    sizes = []
    for kind in KINDS:
        training = json.loads((out / kind / "training.json").read_text())
        sizes.append(training["parameters"])
        records = [json.loads(x) for x in (out / kind / "log.jsonl").read_text().splitlines()]
        losses = [r["loss"] for r in records if "loss" in r]
        assert losses[-1] < losses[0]
        assert training["held_out_loss"] == pytest.approx(records[-1]["held_out"], abs=0.05)
        assert kind in told
        model, tokenizer = quantdiff.load(out / kind / "model", device="cpu")
        assert training["held_out_loss"] == pytest.approx(loss_of(model, held_out), abs=1e-6)
        assert tokenizer.decode(tokenizer("The whale rose.").input_ids) == "The whale rose."
        assert model.config.tie_word_embeddings
    assert max(sizes) / min(sizes) < 1.01
    assert (out / "curves.png").stat().st_size > 10_000


def loss_of(model, stream):
    """Nats a token, window by window, of the model that was saved."""
    windows = torch.from_numpy(stream.tokens[: stream.windows * 64].astype("int64")).view(-1, 64)
    losses = []
    with torch.no_grad():
        for row in windows:
            logits = model(input_ids=row[None]).logits[0, :-1].double()
            losses.append(-logits.log_softmax(-1)[range(63), row[1:]].mean())
    return float(torch.stack(losses).mean())


def kill(run, folder, delay):
    """Kill a training, with its processes, after a step of its own; whether it still ran."""
    state = folder / "diff-v2" / "state.pt"
    before = state.stat().st_mtime_ns if state.exists() else 0
    while run.poll() is None and not (state.exists() and state.stat().st_mtime_ns > before):
        time.sleep(0.005)
    time.sleep(delay)
    # torchrun gives each of its processes a session of its own.
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    if run.poll() is not None:
        return False
    for process in (run.pid, *map(int, children)):
        os.kill(process, signal.SIGKILL)
    run.wait()
    while any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.01)
    return True


def same_weights(one, other):
    models = [load_file(out / "diff-v2" / "model" / "model.safetensors") for out in (one, other)]
    states = [
        torch.load(out / "diff-v2" / "state.pt", weights_only=True)["model"] for out in (one, other)
    ]
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in (models, states)
    )


def test_killed_at_any_moment(start, unbroken, tmp_path):
    out, _ = unbroken
    dice = random.Random(0)
    kills = 0
    while kills < 3 and kill(start(tmp_path, "--kinds", "diff-v2"), tmp_path, dice.random() * 0.1):
        kills += 1
    assert kills
    finish(start(tmp_path, "--kinds", "diff-v2"))
    assert same_weights(tmp_path, out)


def test_two_processes_killed(start, unbroken, tmp_path):
    """As the shipped models are trained; their gradients are means of two halves of a batch."""
    options = {"processes": 2}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(start(whole, "--kinds", "diff-v2", **options))
    assert kill(start(broken, "--kinds", "diff-v2", **options), broken, 0.05)
    steps = [
        torch.load(out / "diff-v2" / "state.pt", weights_only=True)["step"]
        for out in (broken, whole)
    ]
    assert 0 < steps[0] < steps[1]
    finish(start(broken, "--kinds", "diff-v2", **options))
    assert same_weights(broken, whole)
    logs = [(out / "diff-v2" / "log.jsonl").read_text() for out in (whole, unbroken[0])]
    losses = [[json.loads(x).get("loss") for x in log.splitlines()] for log in logs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)  # of the whole batch


def test_what_had_ended_keeps_its_date(start, unbroken, tmp_path):
    shutil.copytree(unbroken[0] / "diff-v2", tmp_path / "diff-v2")
    path = tmp_path / "diff-v2" / "training.json"
    path.write_text(path.read_text().replace('"finished": "', '"finished": "once, '))
    shown = finish(start(tmp_path, "--kinds", "diff-v2"))
    assert "diff-v2" in shown
    assert '"finished": "once, ' in path.read_text()


def test_another_recipe_does_not_go_on(start, unbroken):
    out, _ = unbroken
    run = start(out, "--kinds", "transformer", "--seed", "7")
    _, error = run.communicate(timeout=600)
    assert run.returncode == 1
    assert b"another recipe" in error


@pytest.mark.parametrize("size", ["tiny", "small", "base", "medium"])
def test_parameter_counts_agree(recipe, size):
    with torch.device("meta"):
        counts = [recipe.build(k, recipe.SIZES[size]).num_parameters() for k in recipe.KINDS]
    assert max(counts) / min(counts) < 1.01


def test_the_order_of_the_text(recipe):
    stream = recipe.Stream(DATA, recipe.train_tokenizer(DATA), 64)
    size = 16
    steps = stream.windows // size + 2
    batches = [stream.batch(step, size, seed=0) for step in range(steps)]
    assert torch.equal(stream.batch(3, size, seed=0), batches[3])
    assert not torch.equal(stream.batch(3, size, seed=1), batches[3])
    rows = torch.cat(batches)[: stream.windows]
    assert len({tuple(row.tolist()) for row in rows}) > 0.99 * stream.windows


def test_bigram_loss(recipe):
    tokens = torch.randint(0, 4, (5000,), generator=torch.Generator().manual_seed(0)).numpy()
    loss = recipe.bigram_loss(tokens, tokens[None], prior=1e-3)
    joint = torch.zeros(4, 4, dtype=torch.float64)
    for a, b in pairwise(tokens.tolist()):
        joint[a, b] += 1
    chance = joint / joint.sum(1, keepdim=True)
    exact = -(joint * chance.log()).sum() / joint.sum()
    assert loss == pytest.approx(float(exact), rel=1e-3)
