"""`quantdiff convert` as a user runs it."""

import json
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file

import quantdiff
from tests.cli.test_profile import refused
from tests.models.test_converting import _one_thread, official_state, write  # noqa: F401


@pytest.fixture(scope="module")
def v1(tmp_path_factory):
    return write(tmp_path_factory.mktemp("v1") / "my-v1", official_state("official-v1"))


@pytest.fixture(scope="module")
def v2(tmp_path_factory):
    return write(tmp_path_factory.mktemp("v2") / "my-v2", official_state("official-v2"))


def test_there_and_back(run, v1, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    code, shown, err = run("convert", v1, "--from", "official-v1", "--to", "diffllama",
                           "--out", there)  # fmt: skip
    assert code == 0
    assert "official-v1 to diffllama: 2 layers, 8 query and 4 key-value heads of width 8" in shown
    assert "attention of layers 0, 1 compared: largest difference" in shown
    assert "norm was folded into the output projection; as stored" in shown
    assert shown.endswith(f"written to {there}\n")
    assert err.splitlines()[-2:] == ["writing", "checking"]
    card = (there / "README.md").read_text()
    assert f"quantdiff convert {v1} --from official-v1 --to diffllama --out {there}" in card

    code, shown, _ = run("convert", there, "--to", "official-v1", "--out", back)
    assert code == 0
    assert "folded" not in shown
    before, after = (load_file(folder / "model.safetensors") for folder in (v1, back))
    for name, value in before.items():
        if not name.endswith(("out_proj.weight", "subln.weight")):
            assert torch.equal(after[name], value), name


def test_json(run, v2, tmp_path):
    out = tmp_path / "out"
    code, shown, err = run("convert", v2, "--from", "official-v2", "--to", "diff_v2",
                           "--out", out, "--json")  # fmt: skip
    assert code == 0
    assert err == ""
    found = json.loads(shown)
    assert (found["from"], found["to"], found["out"]) == ("official-v2", "diff_v2", str(out))
    assert (found["layers"], found["query_heads"], found["kv_heads"]) == (2, 8, 2)
    assert found["check"]["layers"] == [0, 1]
    assert found["check"]["difference"] < 1e-13
    assert found["lossy"] == ""
    assert found["versions"]["quantdiff"] == quantdiff.__version__
    model, _ = quantdiff.load(out, device="cpu")
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_refusals(run, v1, v2, tmp_path):
    out = tmp_path / "out"
    to_v1, to_v2 = ("--to", "diffllama", "--out", out), ("--to", "diff_v2", "--out", out)
    refused(run("convert", tmp_path / "none", *to_v1), "none", "no folder")
    refused(run("convert", v1, "--to", "llama", "--out", out), "'llama' is unknown", "diffllama")
    refused(run("convert", v1, "--from", "v1", *to_v1), "'v1' is unknown")
    refused(run("convert", v1, *to_v2), "no conversion from 'official-v1' to 'diff_v2'")
    refused(run("convert", v2, *to_v2), "the same names and shapes", "--from")
    refused(run("convert", v1, *to_v1, "--depth-offset", -1), "depth -1", "DiffLlama")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((v1 / "config.json").read_text())
    torch.save({}, pickled / "model.pt")
    refused(run("convert", pickled, *to_v1), "model.pt", "pickle")
    refused(run("convert", v1, "--to", "diffllama", "--out", v1), "is the source itself")
    refused(run("convert", v1, "--to", "diffllama", "--out", pickled), "--overwrite")
    assert {path.name for path in tmp_path.iterdir()} == {"pickled"}
    assert run("convert", v1, *to_v1)[0] == 0
    assert run("convert", v1, *to_v1, "--overwrite")[0] == 0


@pytest.mark.parametrize("way", [("diffllama",), ("official-v1",)])
def test_a_full_disk_leaves_nothing_behind(run, way, v1, tmp_path):
    source = v1
    if way == ("official-v1",):
        source = tmp_path / "diffllama"
        run("convert", v1, "--to", "diffllama", "--out", source)
    before = sorted(tmp_path.iterdir())
    # Files may not grow beyond 4 kB: every write beyond fails as on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = run("convert", source, "--to", *way, "--out", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    refused(result, "run cannot be written")
    assert sorted(tmp_path.iterdir()) == before


def test_help_shows_examples(run):
    code, shown, _ = run("convert", "--help")
    assert code == 0
    assert "Examples" in shown
    assert "--depth-offset" in shown
