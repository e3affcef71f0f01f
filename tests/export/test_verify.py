"""What is wrong with a folder is named, and nobody goes on with it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import quantdiff
from quantdiff.errors import UsageError
from quantdiff.export.contents import check_tensors, pickles
from quantdiff.export.sidecar import LOGITS, QUANTIZED_LOGITS, read_sidecar, write_sidecar
from quantdiff.export.verifying import set_aside
from tests.tiny import tiny_diff_v2, tiny_llama


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Two exports of one architecture with other weights; copy them before touching them."""
    from tests.tiny import tiny_tokenizer

    folder = tmp_path_factory.mktemp("good")
    scheme = quantdiff.Scheme("attention_logits", 4)
    for seed in (0, 1):
        quantdiff.export(
            tiny_llama(seed=seed), tiny_tokenizer(), folder / str(seed), format="bnb-nf4",
            schemes=[scheme], check=False, max_shard_size="30KB",
        )  # fmt: skip
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good / "0", tmp_path / "export")


def failures(folder):
    result = quantdiff.verify(folder)
    assert not result.passed
    content = json.loads((folder / "verification.json").read_text())
    assert content["format"] == "quantdiff.verification/1"
    assert content["passed"] is False
    assert [c["detail"] for c in content["checks"] if not c["passed"]] == result.failures
    return "; ".join(result.failures)


def not_loaded(folder, match):
    with pytest.raises(UsageError, match=match):
        quantdiff.load(folder, device="cpu")


def test_a_good_folder_passes(folder):
    result = quantdiff.verify(folder, device="cpu")
    assert result.passed, result.failures
    assert [check.name for check in result.checks] == [
        "pickles", "sidecar", "files", "tensors", "logits", "quantized_logits",
    ]  # fmt: skip
    assert all(check.detail.endswith("to the bit") for check in result.checks[-2:])
    assert json.loads((folder / "verification.json").read_text())["passed"] is True


def test_a_truncated_shard(folder):
    shard = next(iter(sorted(folder.glob("model-*.safetensors"))))
    shard.write_bytes(shard.read_bytes()[:-40])
    told = failures(folder)
    assert f"{shard.name} has" in told
    assert f"{shard.name} is truncated or no safetensors file" in told
    not_loaded(folder, shard.name)


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "quantdiff.safetensors",
                                  "tokenizer.json", "config.json"])  # fmt: skip
def test_a_flipped_bit(folder, name):
    path = folder / name
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert f"{name} has other content than was exported" in failures(folder)
    if name != "tokenizer.json":
        not_loaded(folder, name)


def test_what_decides_the_logits_is_checked_on_loading(save):
    folder = save(tiny_diff_v2())
    for name, entry, value in (
        ("tokenizer_config.json", "model_max_length", 64),
        ("generation_config.json", "max_new_tokens", 5),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {entry: value}))
    assert quantdiff.load(folder, device="cpu")[1].model_max_length == 64
    config = (folder / "config.json").read_text()
    settings = json.loads(config)
    settings["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(settings))
    not_loaded(folder, r"what was exported: config\.json has")
    (folder / "config.json").write_text(config)
    with (folder / "modeling_diff_v2.py").open("a") as file:
        file.write("\n")
    not_loaded(folder, r"what was exported: modeling_diff_v2\.py has")


def test_a_sidecar_that_was_edited(folder):
    path = folder / "quantdiff.json"
    content = json.loads(path.read_text())
    content["schemes"][0]["bits"] = 8
    path.write_text(json.dumps(content))
    assert "quantdiff.json was changed or damaged" in failures(folder)
    not_loaded(folder, "was changed or damaged")


def test_a_sidecar_that_is_missing(folder):
    (folder / "quantdiff.safetensors").unlink()
    assert "quantdiff.safetensors is missing, which belongs to quantdiff.json" in failures(folder)


def test_what_cannot_be_judged_here(folder, monkeypatch):
    """A sidecar of a newer version, and files that cannot be read."""
    before = (folder / "quantdiff.json").read_text()
    content = json.loads(before)
    (folder / "quantdiff.json").write_text(json.dumps(content | {"format": "quantdiff.export/2"}))
    with pytest.raises(UsageError, match="format version 2, newer than"):
        quantdiff.verify(folder)
    (folder / "quantdiff.json").write_text(before)
    opened = Path.open
    for name in ("quantdiff.json", "quantdiff.safetensors", "model-00001-of-00003.safetensors",
                 "config.json"):  # fmt: skip

        def refuse(path, *arguments, name=name, **options):
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            told = re.escape(f"{folder / name} cannot be read (Permission denied)")
            with pytest.raises(UsageError, match=told):
                quantdiff.verify(folder)
            with pytest.raises(UsageError, match=told):
                quantdiff.load(folder, device="cpu")
    assert not (folder / "verification.json").exists()


def test_a_sidecar_of_another_model(folder, good):
    for name in ("quantdiff.json", "quantdiff.safetensors"):
        shutil.copyfile(good / "1" / name, folder / name)
    assert "model-00001-of-00003.safetensors has other content" in failures(folder)
    not_loaded(folder, "is not what was exported")


def test_a_file_that_is_missing_or_too_many(folder):
    (folder / "tokenizer_config.json").unlink()
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    told = failures(folder)
    assert "tokenizer_config.json is missing" in told
    assert "and 1 more" in told
    not_loaded(folder, r"model\.safetensors was not exported, but loaders would read it")


@pytest.mark.parametrize("name", ["training_args.bin", "notes", "table.npy"])
def test_a_pickle(folder, name):
    torch.save({"a": 1}, folder / name)
    assert pickles(folder) == [name]
    assert f"{name} is a pickle" in failures(folder)
    not_loaded(folder, f"holds a pickle, {name}")


def test_the_card_may_be_edited(folder):
    (folder / "README.md").write_text("mine")
    (folder / "notes.txt").write_text("mine too")
    quantdiff.load(folder, device="cpu")


def test_other_weights_with_the_right_hashes(folder):
    """What hashes cannot see: the weights are not those that gave the logits."""
    sidecar = read_sidecar(folder)
    name = "model.embed_tokens.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"][name]
    weights = load_file(shard)
    weights[name] *= 1.001
    save_file(weights, shard, metadata={"format": "pt"})
    write_sidecar(folder, sidecar.content, sidecar.schemes, sidecar.table, sidecar.logits)
    told = failures(folder)
    assert "the loader of bnb-nf4 gives logits that differ by" in told
    assert "quantdiff.load gives logits that differ by" in told


def test_tensors(tmp_path):
    bad = {
        "a.weight": torch.tensor([1.0, torch.nan]),
        "b.weight_scale": torch.tensor([1.0, 0.0]),
        "c.weight._scale": torch.tensor([-1.0]),
        "d.SCB": torch.tensor([0.0, 1.0]),
        "e.weight.absmax": torch.tensor([-0.5]),
        "f.weight": torch.tensor([torch.inf], dtype=torch.bfloat16),
        "g.codes": torch.tensor([0], dtype=torch.uint8),
    }
    save_file(bad, tmp_path / "model.safetensors")
    count, wrong = check_tensors(tmp_path)
    assert count == 7
    assert [(line.split()[0], line.split()[-1]) for line in sorted(wrong)] == [
        ("a.weight", "infinity"), ("b.weight_scale", "0"), ("c.weight._scale", "0"),
        ("e.weight.absmax", "0"), ("f.weight", "infinity"),
    ]  # fmt: skip


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A new process that gives what `move` makes of each of the record's logits, (R, V)."""
    program, told = tmp_path / "elsewhere.sh", tmp_path / "told.safetensors"
    program.write_text(f"#!/bin/sh\ncp {told} $4\n")
    program.chmod(0o755)

    def verify(folder, move, **changed):
        sidecar = read_sidecar(folder)
        content = sidecar.content | {
            part: sidecar.content[part] | entries for part, entries in changed.items()
        }
        write_sidecar(folder, content, sidecar.schemes, sidecar.table, sidecar.logits)
        known = {QUANTIZED_LOGITS: sidecar.logits[LOGITS]} | sidecar.logits
        save_file({name: move(name, logits).clone() for name, logits in known.items()}, told)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(program))
            return quantdiff.verify(folder, device="cpu")

    return verify


ANOTHER = {"reference": {"device": "another"}}


def shifted(share):
    """Logits moved by a share of the largest."""
    return lambda _, logits: logits + share * logits.abs().max()


def noisy(size, name=QUANTIZED_LOGITS):
    """Logits with noise of a root mean square; those of other names as they are."""
    return lambda which, logits: logits + (which == name) * size * _noise(logits)


def unrelated(name=QUANTIZED_LOGITS):
    """Logits of the same distribution over the vocabulary, none where it was."""
    return lambda which, logits: logits.flip(1) if which == name else logits


def _noise(logits):
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    return noise / rms(noise)


def rms(values):
    return values.square().mean().sqrt().item()


def spread(logits):
    return rms(logits - logits.mean(1, keepdim=True))


def test_how_close_is_close(save, elsewhere):
    """1e-5 of the largest logit in fp32, 5e-2 in bf16, and nothing on the same machine."""
    precise, short = save(tiny_llama(), "bnb-nf4"), save(tiny_llama(), "bf16", name="short")
    result = elsewhere(precise, shifted(2e-6))
    assert "on the same kind of machine" in result.failures[0]
    assert not result.differs  # which tells of the machine, not of the checkpoint
    assert elsewhere(precise, shifted(2e-5)).differs
    for folder, share in ((precise, 1e-5), (short, 5e-2)):
        result = elsewhere(folder, shifted(0.5 * share), **ANOTHER)
        assert result.passed, result.failures
        assert len(elsewhere(folder, shifted(1.5 * share), **ANOTHER).failures) == 2
    for broken in (shifted(torch.nan), lambda _, logits: logits[:1]):
        assert elsewhere(precise, broken, **ANOTHER).differs


def test_schemes_move_logits_so_far_and_no_farther(save, elsewhere):
    """Twice as far as in the record."""
    folder = save(tiny_llama(), "bnb-nf4", schemes=[quantdiff.Scheme("keys", 4)])
    logits = read_sidecar(folder).logits
    moved = rms(logits[QUANTIZED_LOGITS] - logits[LOGITS])
    assert 0 < 4 * moved < spread(logits[LOGITS])
    assert not elsewhere(folder, noisy(0.1 * moved)).passed
    result = elsewhere(folder, noisy(1.9 * moved), **ANOTHER)
    assert result.passed, result.failures
    assert "which the rounding of activations explains" in result.checks[-1].detail
    for move in (noisy(2.1 * moved), unrelated(), shifted(torch.nan)):
        result = elsewhere(folder, move, **ANOTHER)
        assert result.differs
        assert result.failures[-1].startswith("quantdiff.load gives logits that differ by")
    assert elsewhere(folder, noisy(0.1 * moved, LOGITS), **ANOTHER).differs


def test_schemes_of_so_few_bits_that_they_explain_anything(save, elsewhere):
    """Then nothing is told: neither that it is the checkpoint nor that it is not."""
    folder = save(tiny_llama(), "bnb-nf4", schemes=[quantdiff.Scheme("keys", 4)])
    sidecar = read_sidecar(folder)
    sidecar.logits[QUANTIZED_LOGITS] = 2 * _noise(sidecar.logits[LOGITS])
    write_sidecar(folder, sidecar.content, sidecar.schemes, sidecar.table, sidecar.logits)
    result = elsewhere(folder, unrelated(), **ANOTHER)
    assert not result.passed
    assert not result.differs
    assert "verify it on the kind of machine that exported it" in result.failures[0]
    assert elsewhere(folder, noisy(0.9 * 2), **ANOTHER).passed


@pytest.mark.parametrize("format_", ["ct-w8a16", "ct-w8a8", "bnb-int8"])
def test_loaders_that_round_activations(save, elsewhere, format_):
    """By half the spread of the logits; those that do not round, by 1e-5."""
    folder = save(tiny_llama(), format_)
    known = read_sidecar(folder).logits[LOGITS]
    rounds = format_ in ("ct-w8a8", "bnb-int8")
    assert elsewhere(folder, noisy(1e-3)).differs
    for name in (LOGITS, QUANTIZED_LOGITS):
        result = elsewhere(folder, noisy(0.4 * spread(known), name), **ANOTHER)
        assert result.passed == rounds, result.failures
        assert elsewhere(folder, noisy(0.6 * spread(known), name), **ANOTHER).differs
        assert elsewhere(folder, unrelated(name), **ANOTHER).differs


def test_another_version_of_a_format_s_package_is_another_machine(save, elsewhere):
    folder = save(tiny_llama(), "bnb-nf4")
    assert "on the same kind of machine" in elsewhere(folder, shifted(2e-6)).failures[0]
    result = elsewhere(folder, shifted(2e-6), packages={"bitsandbytes": "0.1"})
    assert result.passed, result.failures


def test_both_loaders_run_without_schemes_too(save):
    result = quantdiff.verify(save(tiny_llama()), device="cpu")
    assert [check.detail for check in result.checks[-2:]] == [
        f"{what} gives the logits from before it was saved, to the bit"
        for what in ("the loader of bf16", "quantdiff.load")
    ]


def test_what_is_no_export(tmp_path):
    with pytest.raises(UsageError, match="holds no exported checkpoint"):
        quantdiff.verify(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_foreign_code_is_not_run_unasked(tmp_path, save):
    folder = save(tiny_diff_v2())
    with (folder / "modeling_diff_v2.py").open("a") as file:
        file.write("\nraise SystemExit('ran')\n")
    sidecar = read_sidecar(folder)
    write_sidecar(folder, sidecar.content, sidecar.schemes, sidecar.table, sidecar.logits)
    with pytest.raises(UsageError, match="brings its own modelling code"):
        quantdiff.verify(folder)
    result = quantdiff.verify(folder, trust_remote_code=True)
    assert result.failures == ["the loader of bf16 fails: ran"]
    assert not result.differs


def test_a_folder_that_may_not_be_written_is_judged_all_the_same(folder, monkeypatch):
    def refuse(path, content):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("quantdiff.export.verifying.write_json", refuse)
    (folder / "tokenizer.json").unlink()
    result = quantdiff.verify(folder)
    assert result.failures == ["tokenizer.json is missing"]
    assert result.unwritten.endswith("verification.json cannot be written: Permission denied")


def test_a_failed_folder_loses_its_name(folder):
    (folder.parent / "export.failed").mkdir()
    moved = set_aside(folder)
    assert moved == folder.parent / "export.failed-2"
    assert not folder.exists()
    assert (moved / "config.json").is_file()


def test_without_quantdiff(tmp_path, save):
    """Other loaders ignore the sidecar; DIFF V2's code is in the folder.

    Rows are blocks of bitsandbytes and its rearranging is off, or it would give other values on
    some CPUs; see `quantdiff.models.bnb`.
    """
    wanted = {}
    model = tiny_diff_v2(hidden_size=64, intermediate_size=64, head_dim=32)
    for format_ in ("bf16", "bnb-nf4", "ct-w4a16"):
        scheme = quantdiff.Scheme("attention_logits", 3)
        folder = save(model, format_, name=format_, schemes=[scheme])
        sidecar = read_sidecar(folder)
        wanted[format_] = sidecar.logits[LOGITS]
    code = """
import sys
sys.modules["quantdiff"] = None
import numpy, torch, transformers
torch.set_num_threads(1)
folder, ids = sys.argv[1], [int(x) for x in sys.argv[2].split(",")]
for name in ("bf16", "bnb-nf4", "ct-w4a16"):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}/{name}", dtype="auto", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        numpy.save(f"{folder}/{name}.npy", model(torch.tensor([ids])).logits[0, -8:].float())
"""
    ids = ",".join(map(str, sidecar.content["passage"]["ids"]))
    import os

    environ = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path), ids], env=environ,
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    for name, logits in wanted.items():
        assert np.array_equal(np.load(tmp_path / f"{name}.npy"), logits.numpy()), name
