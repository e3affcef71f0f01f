"""`quantdiff export` and `quantdiff verify` as a user runs them."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quantdiff
from quantdiff.errors import UsageError
from quantdiff.export import exporting
from quantdiff.export.formats import find_format
from quantdiff.export.verifying import Check, Verification
from tests.cli.test_profile import refused
from tests.tiny import save_tiny, tiny_diff_v2, tiny_llama, tiny_tokenizer


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("source") / "tiny", tiny_llama())


def test_export_and_verify(run, source, tmp_path):
    out = tmp_path / "out"
    code, shown, err = run("export", source, "--format", "bnb-nf4", "--bits", 4, "--tokens", 256,
                           "--out", out)  # fmt: skip
    assert code == 0, err
    assert "bnb-nf4" in shown
    assert "the source's size is that of the model as loaded (float32)" in " ".join(shown.split())
    assert "with attention logits at 4 bits, dynamic range per tensor, symmetric" in shown
    assert "measured on 256 tokens of corpus in windows of 128" in shown
    reloaded = "quantdiff.load gives the logits from before it was saved, to the bit"
    assert f"quantized_logits: {reloaded}" in shown
    assert shown.endswith(f"written to {out}\n")
    steps = ["quantizing to bnb-nf4", "writing", "measuring", "measuring: 1,024 tokens", "checking"]
    assert err.splitlines() == steps
    assert json.loads((out / "verification.json").read_text())["passed"] is True
    measured = json.loads((out / "quantdiff.json").read_text())["measured"]
    assert measured["kl"] > 0
    assert 0 < measured["agreement"] < 1
    assert f"quantdiff export {source} --format bnb-nf4" in (out / "README.md").read_text()

    code, shown, err = run("verify", out)
    assert code == 0
    assert "ok  files:" in shown
    assert err.splitlines() == [
        "comparing the files with their hashes",
        "loading it in a new process",
    ]
    shard = out / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, shown, err = run("verify", out, "--keep")
    assert code == 1
    assert "FAILED  files: model.safetensors has" in shown
    assert f"\nerror: {out} is not what was exported: model.safetensors has" in err
    assert out.is_dir()
    code, shown, err = run("verify", out, "--json")
    assert code == 1
    assert json.loads(shown)["passed"] is False
    assert err.startswith("error: ")
    assert err.endswith(f"it is now {out}.failed\n")
    assert not out.exists()


def test_a_checkpoint_that_does_not_reload(run, source, tmp_path, monkeypatch):
    def failing(folder, **options):
        return Verification(str(folder), [Check("logits", False, "they differ")])

    monkeypatch.setattr(exporting, "verify", failing)
    code, _, err = run("export", source, "--format", "bf16", "--no-measure", "--out",
                       tmp_path / "out")  # fmt: skip
    assert code == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert err.splitlines()[-1].endswith("they differ")
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_the_perplexity_of_the_card_is_that_of_the_live_model(run, tmp_path, monkeypatch):
    """Under the same quantization, and of what was reloaded."""
    from quantdiff.analysis.evaluation import Text, evaluation

    folder = save_tiny(tmp_path / "v2", tiny_diff_v2())
    monkeypatch.setattr("quantdiff.export.exporting._checked", lambda result, *_: result)
    out = tmp_path / "out"
    code, shown, err = run(
        "export", folder, "--format", "quanto-int4", "--bits", 5, "--granularity", "row",
        "--tokens", 256, "--json", "--out", out,
    )  # fmt: skip
    assert (code, err) == (0, "")
    found = json.loads(shown)
    assert (found["format"], found["folder"]) == ("quanto-int4", str(out))
    assert found["schemes"][0]["granularity"] == "row"
    model, tokenizer = quantdiff.load(out, device="cpu")
    again = evaluation("perplexity", model, tokenizer, Text("corpus", 256)).run(batch_size=1)
    assert again.metrics[0].value == pytest.approx(found["measured"]["perplexity"], rel=1e-9)


def test_a_failed_export_exits_with_1(run, source, tmp_path, monkeypatch):
    from quantdiff.export import exporting
    from quantdiff.export.verifying import Check, Verification

    failed = Verification("x", [Check("logits", False, "they differ")])
    monkeypatch.setattr(exporting, "verify", lambda *_, **__: failed)
    code, _, err = run("export", source, "--format", "bf16", "--no-measure", "--out",
                       tmp_path / "out")  # fmt: skip
    assert code == 1
    assert err.splitlines()[-1].startswith(f"error: {tmp_path / 'out'} was not written")
    assert list(tmp_path.iterdir()) == []


def test_refusals(run, source, tmp_path):
    out = tmp_path / "out"
    to = ("--out", out)
    refused(run("export", source, "--format", "int4", *to), "'int4' is unknown", "bnb-nf4")
    refused(run("export", tmp_path / "none", "--format", "bf16", *to), "does not exist")
    refused(run("export", source, "--format", "bf16", "--range", "absmax", *to), "need --bits")
    refused(run("export", source, "--format", "bf16", "--bits", 9, *to), "bits are 2 to 8")
    refused(run("export", source, "--format", "bf16", "--bits", 4, "--bits", 5, *to), "2 --bits")
    refused(run("export", source, "--format", "bf16", "--bits", "8,four", *to), "not 'four'")
    for option in (("--site", "keys"), ("--granularity", "head"), ("--asymmetric",)):
        refused(run("export", source, "--format", "bf16", *option, *to), option[0], "need --bits")
    refused(
        run("export", source, "--format", "bf16", "--bits", 4, "--range", "mse", *to),
        "mse comes from a calibration",
    )
    refused(run("export", source, "--format", "bf16", "--seq-len", 4096, *to), "--seq-len 4096")
    refused(run("export", source, "--format", "bf16", "--double-quant", "--no-measure", *to),
            "bf16 has no double quantization")  # fmt: skip
    refused(run("export", source, "--format", "bf16", "--max-shard-size", "5 GiB", *to),
            "--max-shard-size takes a size such as 500MB or 5GB, and not '5 GiB'")  # fmt: skip
    refused(run("verify", source), "holds no exported checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_options_that_nothing_would_come_of(run, source, tmp_path, monkeypatch):
    monkeypatch.setitem(quantdiff.export.FORMATS, "calibrated", __name__)
    to = ("--out", tmp_path / "out")

    def asked(*options, format_="bf16"):
        return run("export", source, "--format", format_, *options, *to)

    for widths in ((), ("--bits", 4)):
        refused(asked("--table", tmp_path, *widths), "--table is for static ranges: add --bits")
    for option in ("--calibration-data", "--calibration-tokens"):
        refused(asked(option, 64), f"{option} is for formats that are calibrated", "bf16 is not")
    for option, value in (("--data", "corpus"), ("--tokens", 64), ("--seq-len", 64)):
        refused(asked(option, value, "--no-measure"), f"{option} is for the measurement")
    for option, value in (("--data", "corpus"), ("--tokens", 64)):
        given = asked(option, value, "--no-measure", format_="calibrated")
        refused(given, f"leave out --no-measure, or leave {option} out")
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_another_model(run, source, tmp_path, monkeypatch):
    """One of another architecture is refused; one of another name is told of, also on the card."""
    monkeypatch.setattr("quantdiff.export.exporting._checked", lambda result, *_: result)
    tables = []
    for name, width in (("wide", 64), ("twin", 48)):
        other = save_tiny(tmp_path / name, tiny_llama(intermediate_size=width, seed=1))
        tables.append(tmp_path / f"table-{name}")
        code, _, err = run("calibrate", other, "--tokens", 256, "--out", tables[-1])
        assert code == 0, err
    asked = ("export", source, "--format", "bf16", "--bits", 8, "--range", "absmax", "--no-measure",
             "--out", tmp_path / "out", "--table")  # fmt: skip
    refused(run(*asked, tables[0]), f"calibrated on another model ({tmp_path / 'wide'}: parameters")
    assert not (tmp_path / "out").exists()
    code, _, err = run(*asked, tables[1])
    assert code == 0, err
    twin = tmp_path / "twin"
    told = f"note: {tables[1]} was calibrated on {twin} and is used for {source}"
    assert err.splitlines()[0] == told
    assert f"calibrated on `{twin}`." in (tmp_path / "out" / "README.md").read_text()


def test_the_source_is_not_overwritten(run, exported):
    folder = exported("bf16")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(run("export", folder, "--format", "bnb-nf4", "--out", folder, "--overwrite"),
            f"{folder} is the source itself; choose another --out")  # fmt: skip
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_lists_have_commas(run, source, tmp_path, monkeypatch):
    monkeypatch.setattr("quantdiff.export.exporting._checked", lambda result, *_: result)
    for number, (given, widths) in enumerate((
        (("--site", "keys,values", "--bits", 8), {"keys": 8, "values": 8}),
        (("--site", "keys, values", "--bits", "8,4"), {"keys": 8, "values": 4}),
        (("--site", "keys,values", "--site", "attention_logits", "--bits", "8,8", "--bits", 4),
         {"keys": 8, "values": 8, "attention_logits": 4}),
    )):  # fmt: skip
        code, shown, err = run("export", source, "--format", "bf16", "--no-measure", *given,
                               "--json", "--out", tmp_path / str(number))  # fmt: skip
        assert code == 0, err
        found = {scheme["site"]: scheme["bits"] for scheme in json.loads(shown)["schemes"]}
        assert found == widths


def _seen(model, options):
    raise UsageError(f"windows of {sorted({len(window) for window in options.windows})}")


# As GPTQ is, whose package is not everywhere.
FORMATS = {"calibrated": replace(find_format("bf16"), calibrated=True, quantize=_seen)}


def test_windows_of_a_calibrated_format_fit_the_model(run, source, tmp_path, monkeypatch):
    monkeypatch.setitem(quantdiff.export.FORMATS, "calibrated", __name__)
    asked = ("export", source, "--format", "calibrated", "--calibration-tokens", 512,
             "--out", tmp_path / "out")  # fmt: skip
    refused(run(*asked, "--no-measure"), "windows of [128]")
    refused(run(*asked, "--no-measure", "--seq-len", 64), "windows of [64]")
    refused(run(*asked, "--no-measure", "--seq-len", 256), "--seq-len 256 is beyond")
    refused(run(*asked, "--data", "corpus:train", "--tokens", 256),
            "text that the weights were calibrated on (corpus:train)")  # fmt: skip


def test_it_is_not_measured_on_the_text_of_its_ranges(run, source, tmp_path):
    table = tmp_path / "table"
    code, _, err = run("calibrate", source, "--data", "corpus", "--tokens", 512, "--out", table)
    assert code == 0, err
    refused(
        run("export", source, "--format", "bf16", "--bits", 4, "--range", "absmax",
            "--table", table, "--tokens", 256, "--out", tmp_path / "out"),
        "text that the static ranges were calibrated on (corpus)",
    )  # fmt: skip


@pytest.fixture
def exported(tmp_path):
    def export(format_, **options):
        folder = tmp_path / "out"
        quantdiff.export(tiny_llama(), tiny_tokenizer(), folder, format=format_, check=False,
                         **options)  # fmt: skip
        return folder

    return export


def test_a_package_that_is_missing_says_nothing_of_the_checkpoint(run, exported, monkeypatch):
    folder = exported("ct-w8a8")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    refused(run("verify", folder), "needed to write or load ct-w8a8", "quantdiff[compressed]")
    assert folder.is_dir()


def test_a_checkpoint_of_a_newer_version_keeps_its_name(run, exported):
    folder = exported("bf16")
    content = json.loads((folder / "quantdiff.json").read_text())
    content["format"] = "quantdiff.export/2"
    (folder / "quantdiff.json").write_text(json.dumps(content))
    refused(run("verify", folder), "format version 2, newer than", "upgrade quantdiff")
    assert folder.is_dir()


def test_a_file_that_cannot_be_read_says_nothing_of_the_checkpoint(run, exported, monkeypatch):
    folder = exported("bf16")
    opened = Path.open

    def refuse(path, *arguments, **options):
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    told = f"{folder / 'config.json'} cannot be read (Permission denied)"
    refused(run("verify", folder), told)
    assert folder.is_dir()


def test_a_loader_that_does_not_run_says_nothing_of_the_checkpoint(run, exported, monkeypatch):
    folder = exported("bf16")
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as if memory were short
    code, shown, err = run("verify", folder)
    assert code == 1
    assert "FAILED  logits: the loader of bf16 fails: exit code 1" in shown
    told = f"error: {folder} could not be checked: the loader of bf16 fails: exit code 1"
    assert err.splitlines()[-1] == told
    assert folder.is_dir()


def test_schemes_that_a_command_leaves_out_are_named(run, exported, tmp_path):
    scheme = quantdiff.Scheme("attention_logits", 6, granularity="head")
    folder = exported("bf16", schemes=[scheme, quantdiff.Scheme("keys", 4)])
    note = (
        f"note: {folder} is opened without the schemes that it was exported with (attention_logits "
        "at 6 bits, keys at 4 bits): quantdiff.load gives the model with them\n"
    )
    code, _, err = run("profile", folder, "--tokens", 64, "--json")
    assert (code, err) == (0, note)


def test_a_sweep_names_them_too(run, exported, tmp_path):
    folder = exported("bf16", schemes=[quantdiff.Scheme("attention_logits", 6)])
    code, _, err = run("sweep", folder, "--bits", "16", "--eval", "perplexity", "--tokens", 64,
                       "--out", tmp_path / "sweep", "--json")  # fmt: skip
    assert code == 0, err
    assert err.count("is opened without the schemes that it was exported with") == 1


def test_help_shows_examples(run):
    for command in ("export", "verify"):
        code, shown, _ = run(command, "--help")
        assert code == 0
        assert "Examples" in shown
