"""The pages of docs/bits.md: which models go where, on which windows, and what is drawn of them."""

import importlib
import json
import lzma
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.sweep import SweepResults, make_grid
from quantdiff.calibration import text_windows
from quantdiff.models import load
from quantdiff.models.zoo import shipped
from quantdiff.quantization import Scheme, schemes
from tests.tiny import save_tiny, tiny_diffllama, tiny_llama

ROOT = Path(__file__).parent.parent
PAGES = ("bits.md", "bits_zoo.md")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, of fewer widths on less text, with pages of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("measure_bits")
    monkeypatch.setattr(importlib.import_module("bits_page"), "DOCS", tmp_path)
    (tmp_path / "figures").mkdir()
    for page in PAGES:
        shutil.copy(ROOT / "docs" / page, tmp_path)
    questions = tmp_path / "questions.jsonl"
    lines = [{"query": f"the {n}", "choices": ["king", "whale"], "gold": 0} for n in "abcd"]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = {
        "logits": {"schemes": make_grid(bits=(16, 4), granularities=("tensor", "row")).schemes},
        "questions": {
            "schemes": make_grid(bits=(16, 4)).schemes, "evaluation": f"choice:{questions}",
        },
        "sites": {"schemes": make_grid(bits=(16, 4), sites=("keys", "weights")).schemes},
    }  # fmt: skip
    for part, entries in few.items():
        schemes = entries["schemes"]
        changed = replace(script.PARTS[part], **entries | {"schemes": lambda _, of=schemes: of})
        monkeypatch.setitem(script.PARTS, part, changed)
    for name, source in (("TEXT", "corpus"), ("OTHER", "corpus"), ("SEARCH", "corpus:train")):
        monkeypatch.setattr(script, name, Text(source, tokens=96, seq_len=96))
    monkeypatch.setattr(script, "WIDTHS", (6, 4))
    monkeypatch.setattr(script, "SEARCHED", ("weights",))
    return script


@pytest.fixture
def main(script, tmp_path, monkeypatch):
    """Run the script; gives both pages."""

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["measure_bits.py", *map(str, arguments)])
        script.main()
        return [(tmp_path / page).read_text() for page in PAGES]

    return main


@pytest.fixture
def models(tmp_path):
    """Two models, the context of one shorter than the windows."""
    short = tiny_llama(max_position_embeddings=48)
    return [str(save_tiny(tmp_path / "differential", tiny_diffllama())),
            str(save_tiny(tmp_path / "plain", short))]  # fmt: skip


def between(page, part):
    return page.split(f"<!-- {part}: measured")[1].split(f"<!-- end of {part} -->")[0]


def test_every_model_is_drawn_on_windows_that_fit_all(main, models, tmp_path):
    page, zoo = main(*models, "--parts", "logits", "sites", "questions")
    assert zoo == (ROOT / "docs" / "bits_zoo.md").read_text()
    for part in ("logits", "sites"):
        told = between(page, part)
        assert "96 tokens of `corpus` in windows of 48." in told
        assert "windows of 96" not in told
        figures = [line for line in told.splitlines() if line.startswith("![")]
        for model, figure in zip(models, figures, strict=True):
            assert f"| {model} | " in told
            name = f"bits_{part}_{Path(model).name}"
            assert figure.endswith(f": {model}](figures/{name}.png)")
            assert (tmp_path / "figures" / f"{name}.svg").exists()
    assert "](figures/bits_questions.png)" in between(page, "questions")
    of_all = (tmp_path / "figures" / "bits_questions.svg").read_text()
    for line in ("differential", "plain", "DIFF-3B, HellaSwag, published"):
        assert f"<!-- {line} -->" in of_all
    assert len(list((tmp_path / "figures").glob("*.png"))) == 5
    results = SweepResults.load(tmp_path / "bits" / "logits")
    assert results.missing == 0
    assert results.failed == []
    # As the pages say, also where there is a GPU.
    for told in results.record["models"].values():
        assert (told["dtype"], told["device"]) == ("float32", "cpu")


@pytest.mark.parametrize("several", [False, True])
def test_schemes_are_rows_with_their_remedies(main, script, models, several, monkeypatch):
    few = replace(
        script.PARTS["remedies"], remedies=("none", "rotate"),
        schemes=lambda page: [
            *script.remedied(page), schemes("W4g8A16"), schemes("KV4"), schemes("W8A8+KV4"),
        ],
    )  # fmt: skip
    monkeypatch.setitem(script.PARTS, "remedies", few)
    chosen = models if several else models[:1]
    page, _ = main(*chosen, "--parts", "remedies")
    told = between(page, "remedies")
    tables = [block.splitlines() for block in told.split("\n\n") if block.startswith("|")]
    assert len(tables) == (3 if several else 1)
    head, _, *rows = tables[0]
    names = [cell.strip() for cell in head.strip("|").split("|")]
    assert names[:2] == ["quantized", "remedy"]
    if several:
        assert names[2:] == models
    else:
        assert names[2].startswith("KL from the unquantized model")
    results = SweepResults.load(script.Page.of(chosen).results / "remedies")
    kl = [row for row in results.rows if row["metric"] == "kl" and row["model"] == models[0]]
    wanted = [(row["scheme"], row["options"].get("remedy", ""), row["value"]) for row in kl]
    shown = []
    for row in rows:
        scheme, remedy, value, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        name = scheme.partition(":")[0].partition(",")[0].replace("nothing", "fp")
        shown.append((name, remedy, pytest.approx(float(value.split()[0]), rel=0.02)))
    assert sorted(wanted) == sorted(shown, key=lambda row: (*row[:2], row[2].expected))


def test_one_model_keeps_its_windows_and_the_names_of_its_figures(main, models, tmp_path):
    page, _ = main(models[0], "--parts", "logits")
    assert "in windows of 96." in between(page, "logits")
    assert "](figures/bits_logits.png)" in between(page, "logits")
    # The tables are written again without the model.
    shutil.rmtree(models[0])
    assert main(models[0], "--tables-only")[0] == page


def test_layers_are_ranked_twice_and_bits_shared_out(main, models):
    page, _ = main(models[1], "--parts", "layers")
    told = between(page, "layers")
    (row,) = (line for line in told.splitlines() if line.startswith(f"| {models[1]} |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "weights"
    assert -1 <= float(cells[2]) <= 1
    assert float(cells[3]) <= 4
    assert all(float(cells[place]) > 0 for place in (4, 5, 7))
    assert "Searched: 96 tokens of `corpus:train` in windows of 48." in told
    assert "Unseen: 96 tokens of `corpus` in windows of 48." in told
    assert "](figures/bits_layers_plain_weights.png)" in told


def test_the_zoo_has_a_page_of_its_own_with_the_published_figure(main, tmp_path):
    page, zoo = main("zoo:transformer", "--parts", "questions")
    assert page == (ROOT / "docs" / "bits.md").read_text()
    told = between(zoo, "questions")
    for words in ("| zoo:transformer |", "4 questions of", "| DIFF-3B | 0.662 |", "2410.05258"):
        assert words in told
    assert "](figures/bits_zoo_questions.png)" in told
    drawn = (tmp_path / "figures" / "bits_zoo_questions.svg").read_text()
    assert "Transformer-3B, HellaSwag, published" in drawn
    assert (tmp_path / "bits" / "zoo" / "questions" / "results.jsonl").exists()


def test_a_failure_is_told_with_its_reason(main, script, models, monkeypatch, capsys):
    grid = make_grid(bits=(16, 4), sites=("weights",), granularities=("group:7",)).schemes
    part = replace(script.PARTS["sites"], schemes=lambda _: grid)
    monkeypatch.setitem(script.PARTS, "sites", part)
    page, _ = main(models[0], "--parts", "sites")
    told = between(page, "sites")
    assert f"Failed: {models[0]}, " in told
    reason = told.split("Failed: ")[1].splitlines()[0]
    assert "7" in reason
    assert reason.rpartition(": ")[2] in capsys.readouterr().err


@pytest.mark.parametrize("models", [["smollm2-135m"], sorted(shipped())])
def test_groups_divide_the_rows_of_all_of_a_pages_models(script, models, request):
    page = script.Page.of(models)
    groups = {
        int(one.granularity.removeprefix("group:"))
        for entry in script.together(page)
        for one in entry
        if one.granularity.startswith("group:") and one.site == "weights"
    }
    assert groups == {page.group}
    for name in models:
        of_zoo = name.startswith("zoo:")
        model, _ = load(name, device="cpu") if of_zoo else request.getfixturevalue("smollm2")
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                assert module.in_features % page.group == 0


@pytest.mark.parametrize("models", [["smollm2-135m"], ["zoo:transformer"]])
def test_calibrations_are_not_for_the_repository(script, models):
    results = script.Page.of(models).results.relative_to(script.Page.of(models).file.parent)
    for name in ("calibration/a/calibration.safetensors", "figures/bits.png"):
        path = ROOT / "docs" / results / "logits" / name
        ignored = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False)
        assert ignored.returncode == 0
        path = path.parents[name.count("/")] / "results.jsonl"
        assert subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode


def test_the_zoo_is_measured_by_itself(main):
    with pytest.raises(SystemExit, match="a page of its own"):
        main("zoo:transformer", "smollm2-135m")


def test_clipped_inputs_stand_beside_the_same_grid_without_clipping(script):
    inputs = [
        [one for one in entry if one.site == "linear_inputs" and one.static]
        for entry in script.remedied(None)
    ]
    assert [one for found in inputs for one in found] == [
        Scheme("linear_inputs", 8, range, "tensor") for range in ("absmax", "percentile:99.9")
    ]


@pytest.mark.parametrize(
    ("model", "page"), [("smollm2-135m", "bits.md"), ("zoo:transformer", "bits_zoo.md")]
)
def test_the_pages_name_the_documents_of_their_text(script, model, page, request):
    of_zoo = model.startswith("zoo:")
    _, tokenizer = load(model, device="cpu") if of_zoo else request.getfixturevalue("smollm2")
    length = 256 if of_zoo else 1024
    windows = text_windows("corpus", tokenizer, tokens=16_384, seq_len=length).windows
    text = "".join(tokenizer.decode(window, skip_special_tokens=True) for window in windows)
    with lzma.open(ROOT / "calibration" / "corpus" / "heldout.jsonl.xz") as file:
        documents = [json.loads(line) for _, line in zip(range(6), file, strict=False)]
    years = [one["id"][:4] for one in documents if one["text"][:200] in text]
    told = " ".join((ROOT / "docs" / page).read_text().split("<!--")[0].split())
    assert f"of {', '.join(years[:-1])} and {years[-1]}" in told


@pytest.mark.parametrize("page", PAGES)
def test_every_part_has_a_place_on_the_page(script, page):
    text = (ROOT / "docs" / page).read_text()
    for part in (*script.PARTS, script.LAYERS):
        assert between(text, part).endswith("\n\n")
