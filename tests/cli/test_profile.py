"""`quantdiff profile` as a user runs it."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from quantdiff import Profile
from quantdiff.analysis.profiling import profile_text
from quantdiff.calibration import TextWindows, text_windows
from tests.cli.conftest import refused
from tests.tiny import save_tiny, tiny_diffllama, tiny_ids, tiny_llama, tiny_tokenizer

TEXT = "the king and the sea and the whale in the winter " * 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, tiny_diffllama())
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def small(model, text, *more):
    """Arguments of a short profile."""
    return ("profile", model, "--data", text, "--tokens", 60, "--seq-len", 30, *more)


def test_writes_what_the_contract_says(run, model, text, tmp_path):
    out = tmp_path / "run"
    code, shown, _ = run("profile", model, "--data", text, "--tokens", 200, "--seq-len", 64,
                         "--out", out)  # fmt: skip
    assert code == 0
    assert {p.name for p in out.iterdir()} == {"profile.json", "profile.safetensors", "figures"}
    assert {p.name for p in (out / "figures").iterdir()} == {
        f"{name}.{kind}"
        for name in ("layers", "heads", "magnitudes")
        for kind in ("png", "svg", "csv")
    }
    profile = Profile.load(out)
    assert profile.data["tokens"] == 200
    assert profile.data["sequence_length"] == 64
    assert profile.data["sequences"] == 4
    assert len(profile.data["fingerprint"]) == 64
    assert profile.model["layout"] == "halves"
    assert "--seq-len 64" in profile.command
    assert "top-100" in shown
    assert str(out) in shown


def test_json_is_the_file(run, model, text, tmp_path):
    arguments = ("profile", model, "--data", text, "--tokens", 100, "--seq-len", 50)
    code, out, err = run(*arguments, "--json", "--out", tmp_path / "a")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "a" / "profile.json").read_text())
    assert err == ""


def test_other_sites(run, model, text, tmp_path):
    out = tmp_path / "run"
    code, shown, _ = run(*small(model, text, "--sites", "keys,values", "--sites", "linear_inputs",
                                "--out", out))  # fmt: skip
    assert code == 0
    profile = Profile.load(out)
    assert list(profile.sites) == ["linear_inputs", "keys", "values"]
    assert profile.hidden_states.sites[0].channels is None
    assert {f"channels.{kind}" for kind in ("png", "svg", "csv")} <= {
        path.name for path in (out / "figures").iterdir()
    }
    for words in ("largest linear inputs, by module", "largest keys, by head", "down_proj"):
        assert words in shown
    code, shown, _ = run(*small(model, text, "--sites", "all", "--json"))
    content = json.loads(shown)
    head = content["values"]["sites"][0]["heads"][0]
    assert {"absmax", "median", "channel_ratio", "token_ratio", "top_channel"} <= set(head)
    assert content["hidden_states"]["sites"][0]["channel_ratio"] > 1
    refused(run(*small(model, text, "--sites", "keys,weights")), "'weights'", "linear_inputs")


def test_batch_size_changes_nothing(run, model, text):
    results = []
    for size in (1, 3):
        _, out, _ = run("profile", model, "--data", text, "--tokens", 300, "--seq-len", 64,
                        "--batch-size", size, "--json")  # fmt: skip
        results.append(json.loads(out))
    a, b = results
    assert a["data"] == b["data"]
    for kind in ("attention_logits", "hidden_states"):
        assert a[kind]["count"] == b[kind]["count"]
        for n in (1, 2, 3, 10, 100):
            assert a[kind][f"top{n}"] == pytest.approx(b[kind][f"top{n}"], rel=1e-5)


class TestRefusals:
    def test_unknown_model(self, run):
        refused(run("profile", "no-such-model"), "no-such-model")

    def test_folder_without_weights(self, run, model, tmp_path):
        (tmp_path / "config.json").write_text((Path(model) / "config.json").read_text())
        refused(run("profile", tmp_path), str(tmp_path))

    def test_pickled_weights(self, run, model, tmp_path):
        (tmp_path / "config.json").write_text((Path(model) / "config.json").read_text())
        torch.save({}, tmp_path / "pytorch_model.bin")
        refused(run("profile", tmp_path), "pytorch_model.bin", "pickle")

    @pytest.mark.parametrize("tokens", [0, -5])
    def test_tokens(self, run, model, text, tokens):
        refused(run("profile", model, "--data", text, "--tokens", tokens), str(tokens))

    def test_seq_len_beyond_the_context(self, run, model, text):
        refused(run("profile", model, "--data", text, "--seq-len", 4096), "4096", "128")

    def test_empty_text(self, run, model, tmp_path):
        (tmp_path / "empty.txt").write_text("")
        refused(run("profile", model, "--data", tmp_path / "empty.txt"), "empty.txt")

    def test_missing_text(self, run, model, tmp_path):
        refused(run("profile", model, "--data", tmp_path / "none.txt"), "none.txt")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
    def test_cuda_without_cuda(self, run, model, text):
        refused(run("profile", model, "--data", text, "--device", "cuda"), "CUDA")

    def test_unknown_attention(self, run, model, text):
        refused(run("profile", model, "--data", text, "--attention", "fast"), "fast", "sdpa")

    def test_another_run_in_the_folder(self, run, model, text, tmp_path):
        arguments = small(model, text, "--out", tmp_path)
        assert run(*arguments)[0] == 0
        (tmp_path / "mine.txt").write_text("mine")
        before = (tmp_path / "profile.json").read_text()
        refused(run(*arguments), str(tmp_path), "--overwrite")
        assert (tmp_path / "profile.json").read_text() == before
        assert run(*arguments, "--overwrite")[0] == 0
        assert (tmp_path / "mine.txt").read_text() == "mine"

    def test_output_that_is_a_file(self, run, model, text, tmp_path):
        (tmp_path / "file").write_text("")
        refused(run("profile", model, "--data", text, "--out", tmp_path / "file"), "file")
        refused(run("profile", model, "--data", text, "--out", tmp_path / "file" / "x"), "file")

    def test_output_that_cannot_be_made(self, run, model, text):
        refused(
            run("profile", model, "--data", text, "--out", "/proc/quantdiff"), "/proc/quantdiff"
        )

    def test_ids_outside_the_vocabulary(self, run, text, tmp_path):
        save_tiny(tmp_path, tiny_llama(vocab_size=200))
        refused(run(*small(tmp_path, text)), "vocabulary of 200")

    def test_nan_in_the_logits(self, run, text, tmp_path):
        model = tiny_llama()
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight[8 * 3] = float("nan")
        save_tiny(tmp_path / "model", model)
        out = tmp_path / "run"
        refused(run(*small(tmp_path / "model", text, "--out", out)), "layer 1, head 3")
        assert not out.exists()
        assert [p.name for p in tmp_path.iterdir()] == ["model"]


def command(*arguments):
    return [sys.executable, "-m", "quantdiff", *map(str, arguments)]


def test_a_full_disk_leaves_nothing_behind(model, text, tmp_path):
    # Files may not grow beyond 4 kB: every write beyond fails as on a full disk.
    profile = shlex.join(command(*small(model, text, "--out", tmp_path / "run")))
    result = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 4; exec {profile}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_saves_what_was_recorded(model, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text(TEXT * 300)
    process = subprocess.Popen(
        command("profile", model, "--data", long, "--tokens", 300_000, "--seq-len", 64,
                "--out", tmp_path / "run"),
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    # A line says that recording has begun.
    deadline = time.monotonic() + 60
    for line in process.stderr:
        if "recording" in line or time.monotonic() > deadline:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    profile = Profile.load(tmp_path / "run")
    assert profile.partial
    assert 0 < profile.data["tokens"] < 300_000
    assert profile.attention_logits.count > 0
    windows = text_windows(long, tiny_tokenizer(), tokens=profile.data["tokens"], seq_len=64)
    assert profile.data["fingerprint"] == windows.fingerprint


@pytest.mark.parametrize(("batch_size", "recorded"), [(1, 3), (2, 4), (3, 3)])
def test_the_fingerprint_is_that_of_what_was_recorded(batch_size, recorded):
    parts = [tiny_ids(1, 8, seed=seed)[0] for seed in range(5)]

    def windows(count):
        return TextWindows("a", parts[:count], 8, 8 * count, has_bos=False)

    told = []
    cut = profile_text(
        tiny_llama(), windows(5), batch_size=batch_size, progress=told.append,
        stop=lambda: sum(told) >= 24,
    )  # fmt: skip
    assert cut.partial
    assert cut.data["fingerprint"] == windows(recorded).fingerprint
    whole = profile_text(tiny_llama(), windows(5), batch_size=batch_size)
    assert whole.data["fingerprint"] == windows(5).fingerprint


def test_help_shows_examples():
    result = subprocess.run(
        command("profile", "--help"), capture_output=True, text=True, check=True
    )
    assert "Examples" in result.stdout
    assert "--seq-len" in result.stdout


def test_maps_and_passages(run, model, text, tmp_path):
    code, shown, _ = run(*small(model, text, "--maps", "--out", tmp_path / "maps"))
    assert code == 0
    assert "attention maps, by layer" in shown
    assert (tmp_path / "maps" / "figures" / "maps.png").exists()
    content = json.loads((tmp_path / "maps" / "profile.json").read_text())
    assert {site["kind"] for site in content["maps"]} == {"branch 1", "branch 2", "difference"}
    assert content["maps"][0]["span_rows"] == 0

    passages = tmp_path / "passages.jsonl"
    rows = [{"text": f"the key is {n} and the sea. the key is", "answer": str(n)} for n in (42, 77)]
    passages.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "spans"
    code, shown, _ = run("profile", model, "--passages", passages, "--seq-len", 60, "--out", out)
    assert code == 0
    assert "span" in shown
    profile = Profile.load(out)
    assert profile.data["source"] == str(passages)
    assert profile.data["sequences"] == 2
    for site in profile.maps:
        s = site.summary
        assert s["span_rows"] == 2 * len(site.heads)
        assert s["span_mass"] + s["rest_mass"] == pytest.approx(s["row_sum"], abs=1e-3)
    refused(run("profile", model, "--passages", tmp_path / "none", "--seq-len", 60), "cannot be")
    both = run("profile", model, "--passages", passages, "--data", text)
    refused(both, "--passages stands in place of --data and --tokens")


def test_a_layout_for_a_model(run, model, text):
    code, shown, _ = run(*small(model, text, "--layout", "none", "--json"))
    assert code == 0
    assert json.loads(shown)["model"]["layout"] == "none"
    refused(run(*small(model, text, "--layout", "pairs")), "unknown head layout 'pairs'")
