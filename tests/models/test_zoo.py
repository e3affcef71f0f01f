"""The zoo: what is trained becomes a model that opens by name, with its card."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from quantdiff.errors import UsageError
from quantdiff.models import describe, known_names, load, zoo
from tests.tiny import save_tiny, tiny_ids

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A model of the zoo, put there as a trained one is; its weights are random here."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import ship_zoo
    from zoo_recipe import SIZES

    recipe = SIZES["tiny"].__dict__
    run = tmp_path / "runs" / "transformer"
    save_tiny(run / "model")
    told = {
        "kind": "transformer", "recipe": recipe, "parameters": 12345, "tokens": 8000,
        "held_out_loss": 5.25, "held_out_stderr": 0.125, "held_out_tokens": 640,
        "bigram_loss": 6.5, "seconds": 5400, "finished": "2001-02-03", "hardware": "a machine",
        "text": "its fingerprint",
    }  # fmt: skip
    (run / "training.json").write_text(json.dumps(told))
    records = [{"step": 10, "tokens": 5120, "loss": 6.0}, {"step": 10, "held_out": 6.1}]
    (run / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "zoo")
    for name, place in {
        "FOLDER": "zoo", "LOGS": "logs", "FIGURE": "curves.png", "PAGE": "zoo.md",
    }.items():  # fmt: skip
        monkeypatch.setattr(ship_zoo, name, tmp_path / place)
    (tmp_path / "zoo.md").write_text(f"before {ship_zoo.BEGIN} old {ship_zoo.END} after")
    monkeypatch.setattr(sys, "argv", ["ship_zoo.py", str(tmp_path / "runs")])
    assert ship_zoo.main() == 0
    return tmp_path


def test_it_opens_by_its_name(shipped):
    assert "zoo:transformer" in known_names()
    model, _ = load("zoo:transformer", device="cpu")
    trained, _ = load(shipped / "runs" / "transformer" / "model", device="cpu")
    assert describe(model)["name"] == "zoo:transformer"
    assert torch.equal(model(tiny_ids()).logits, trained(tiny_ids()).logits)


def test_its_card_and_curves(shipped):
    card = (shipped / "zoo" / "transformer" / "README.md").read_text()
    for word in (
        "ε = 1e-06",
        "12,345",
        "8,000",
        "5.2500 ± 0.1250",
        "6.5000",
        "2001-02-03",
        "1.5 hours",
        "0.003",
    ):
        assert word in card
    assert (shipped / "curves.png").stat().st_size > 5_000
    page = (shipped / "zoo.md").read_text()
    assert "| `zoo:transformer` | 12,345 | 8,000 | 5.2500 ± 0.1250 | 6.5000 |" in page
    log = (shipped / "logs" / "transformer" / "log.jsonl").read_text().splitlines()
    assert len(log) == 3
    assert json.loads(log[-1])["held_out_loss"] == 5.25
    assert page.startswith("before ")
    assert page.endswith(" after")
    assert "old" not in page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text": "another"}, "text another, its fingerprint"),
        ({"parameters": 12500}, "parameters 12500, 12345"),
        ({"recipe": {"rate": 0.1}}, "rate 0.1, 0.003"),
    ],
)
def test_what_was_not_trained_alike_is_not_shipped(shipped, change, said):
    import ship_zoo

    run = shipped / "runs" / "diff-v1"
    shutil.copytree(shipped / "runs" / "transformer", run)
    told = json.loads((run / "training.json").read_text()) | {"kind": "diff-v1"}
    changed = told | change | {"recipe": told["recipe"] | change.get("recipe", {})}
    (run / "training.json").write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match=f"diff-v1 was not trained as zoo:transformer: {said}"):
        ship_zoo.main()
    assert "zoo:diff-v1" not in known_names()
    (run / "training.json").write_text(json.dumps(told))
    assert ship_zoo.main() == 0
    assert "zoo:diff-v1" in known_names()
    logs = [shipped / "logs" / kind / "log.jsonl" for kind in ("transformer", "diff-v1")]
    assert [len(log.read_text().splitlines()) for log in logs] == [3, 3]


def test_what_is_not_there(shipped):
    assert "zoo:diff-v1" not in known_names()
    with pytest.raises(UsageError, match=r"no 'zoo:diff-v1' in the zoo; it has zoo:transformer"):
        load("zoo:diff-v1")


def test_what_is_shipped_is_small_told_and_trained_alike(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import ship_zoo

    assert ship_zoo.table() in (ROOT / "docs" / "zoo.md").read_text()
    alike, sizes = [], []
    for name, told in zoo.shipped().items():
        folder = zoo.locate(name)
        files = sorted(folder.iterdir())
        assert sum(file.stat().st_size for file in files) < 15e6
        assert not [file for file in files if file.suffix in (".bin", ".pt", ".pkl")]
        model, _ = load(name, dtype="auto", device="cpu")
        assert model.dtype == torch.bfloat16
        assert model.num_parameters() == told["parameters"]
        assert told["held_out_loss"] < told["bigram_loss"] - 0.5
        assert (folder / "README.md").read_text() == ship_zoo.card(folder, told)
        log = (ship_zoo.LOGS / told["kind"] / "log.jsonl").read_text().splitlines()
        end = json.loads(log[-1])
        assert end.keys() >= {"held_out_loss", "held_out_stderr", "held_out_tokens", "bigram_loss"}
        assert end.items() <= told.items()
        assert name in (ROOT / "README.md").read_text()
        alike.append((told["text"], told["tokens"], told["recipe"] | {"eps": None}))
        sizes.append(told["parameters"])
    assert all(one == alike[0] for one in alike)
    assert max(sizes) / min(sizes) < 1.01
