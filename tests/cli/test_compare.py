import json

import pytest

import quantdiff
from tests.analysis.compare.conftest import recorded, write_checkpoint
from tests.cli.conftest import refused
from tests.tiny import tiny_diffllama, tiny_llama


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two profiles without maps, and a checkpoint."""
    top = tmp_path_factory.mktemp("runs")
    for name, model in (("plain", tiny_llama()), ("diff", tiny_diffllama())):
        recorded(model, f"zoo/{name}", maps=False).save(top / name)
    return top / "plain", top / "diff", write_checkpoint(top / "nf4")


def test_writes_a_report_and_prints_the_tables(run, folders, tmp_path):
    out = tmp_path / "report"
    code, printed, err = run("compare", *folders, "--out", out)
    assert code == 0, err
    assert {path.name for path in out.iterdir()} == {"report.html", "tables", "figures"}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"--out {out}" in page
    assert f"written to {out / 'report.html'}" in printed
    assert "2410.05258" in printed
    top = quantdiff.compare(*folders).outliers()
    for value in top["top1"]:
        assert f"{value:#.3g}" in printed or f"{value:.1f}" in printed
    assert "bnb-nf4" in printed
    assert "note: No sweep was given" in err
    refused(run("compare", *folders, "--out", out), "report.html", "--overwrite")

    # What was put there by somebody else stays; what an earlier report left alone goes.
    (out / "figures" / "mine.png").write_bytes(b"mine")
    (out / "tables" / "mine.csv").write_bytes(b"mine")
    assert (out / "tables" / "checkpoints.csv").exists()
    code, *_ = run("compare", *folders[:1], "--out", out, "--overwrite")
    assert code == 0
    assert (out / "figures" / "mine.png").read_bytes() == b"mine"
    assert (out / "tables" / "mine.csv").read_bytes() == b"mine"
    assert not (out / "tables" / "checkpoints.csv").exists()
    assert (out / "tables" / "outliers.csv").exists()


def test_json_is_the_frames(run, folders):
    code, printed, _ = run("compare", *folders, "--json")
    assert code == 0
    content = json.loads(printed)
    comparison = quantdiff.compare(*folders)
    assert content["models"] == ["plain", "diff"]
    assert content["report"] is None
    assert content["warnings"] == comparison.warnings
    frames = comparison.frames()
    assert set(content["frames"]) == set(frames)
    for name, frame in frames.items():
        rows = content["frames"][name]
        assert list(rows[0]) == list(frame.columns)
        assert len(rows) == len(frame)
    assert [row["top1"] for row in content["frames"]["outliers"]] == frames["outliers"][
        "top1"
    ].tolist()
    branches = [row["branch"] for row in content["frames"]["layers"]]
    assert branches == [None if branch is None else branch for branch in branches]
    assert set(branches) == {None, 1, 2}


def test_what_cannot_be_read_is_a_note(run, folders, tmp_path):
    (tmp_path / "profile.json").write_text("{")
    code, _, err = run("compare", folders[0], tmp_path, tmp_path / "none")
    assert code == 0
    assert "note: Left out" in err
    assert f"{tmp_path / 'none'} does not exist" in err


def test_no_digit_is_lost_in_a_narrow_terminal(run, folders, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, narrow, _ = run("compare", *folders[:2])
    monkeypatch.setenv("COLUMNS", "200")
    _, wide, _ = run("compare", *folders[:2])

    def numbers(text):
        return sorted(word for word in text.split() if word.replace(".", "").isdigit())

    assert numbers(narrow) == numbers(wide)
    assert "…" not in narrow


class TestRefusals:
    def test_nothing_to_compare(self, run, tmp_path):
        refused(run("compare", tmp_path), "nothing to compare", str(tmp_path))
        refused(run("compare", tmp_path / "none"), "does not exist")

    def test_the_folder_of_a_run(self, run, folders):
        refused(
            run("compare", *folders, "--out", folders[0]), "holds a run", "profile.json", "--out"
        )
        assert (folders[0] / "profile.json").exists()

    def test_a_file(self, run, folders, tmp_path):
        (tmp_path / "file").write_text("")
        refused(run("compare", *folders, "--out", tmp_path / "file"), "cannot be written")

    def test_nothing_is_left_behind(self, run, tmp_path):
        refused(run("compare", tmp_path / "none", "--out", tmp_path / "out"))
        assert list(tmp_path.iterdir()) == []
