import hashlib
import importlib.util
import json
import lzma
from pathlib import Path

import pytest

import quantdiff.calibration
from quantdiff.calibration import read_documents

FOLDER = Path(quantdiff.calibration.__file__).parent / "corpus"
SCRIPT = Path(__file__).parents[2] / "scripts" / "build_corpus.py"
SOURCES = {"sotu", "moby-dick", "kjv", "wordnet"}


def rows(path):
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def remainder(row):
    return int(hashlib.sha256(f"{row['source']}/{row['id']}".encode()).hexdigest(), 16) % 16


def size(rows):
    return sum(len(row["text"].encode()) for row in rows)


def test_shipped_texts_are_complete():
    heldout, excerpt = rows(FOLDER / "heldout.jsonl.xz"), rows(FOLDER / "train_excerpt.jsonl.xz")
    assert len(heldout) == 29
    assert size(heldout) == 875_313
    assert len(excerpt) == 127
    assert 990_000 < size(excerpt) <= 1_000_000
    assert {row["source"] for row in heldout} == {row["source"] for row in excerpt} == SOURCES
    assert list(read_documents("corpus")) == [row["text"] for row in heldout]
    assert list(read_documents("corpus:train")) == [row["text"] for row in excerpt]


def test_no_held_out_document_is_in_the_excerpt():
    heldout, excerpt = rows(FOLDER / "heldout.jsonl.xz"), rows(FOLDER / "train_excerpt.jsonl.xz")
    assert all(remainder(row) == 0 for row in heldout)
    assert all(remainder(row) != 0 for row in excerpt)
    whole = "\n".join(row["text"] for row in heldout)
    assert not [row["id"] for row in excerpt if row["text"][:200] in whole]


def test_a_short_calibration_sees_every_source():
    excerpt = rows(FOLDER / "train_excerpt.jsonl.xz")
    assert {row["source"] for row in excerpt[:4]} == SOURCES


def test_notice_holds_the_wordnet_licence():
    notice = (FOLDER / "NOTICE").read_text(encoding="utf-8")
    assert "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved." in notice
    assert 'THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS"' in notice
    assert (FOLDER / "README.md").is_file()


@pytest.fixture(scope="module")
def script():
    if not SCRIPT.is_file():
        pytest.skip("no checkout around these tests")
    specification = importlib.util.spec_from_file_location("build_corpus", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path):
    train, heldout = [], []
    for number in range(60):
        source = "large" if number % 3 else "small"
        text = f"Document {number}.\n" + "One more line.\n" * (2000 if number % 2 else 20)
        row = {"source": source, "id": str(number), "text": text}
        (train if remainder(row) else heldout).append(row)
    assert heldout
    paths = tmp_path / "train.jsonl.xz", tmp_path / "heldout.jsonl.xz"
    for path, content in zip(paths, (train, heldout), strict=True):
        path.write_bytes(lzma.compress("".join(json.dumps(r) + "\n" for r in content).encode()))
    return paths


def test_build_is_reproducible(script, files, tmp_path):
    for out in ("a", "b"):
        script.main([*map(str, files), "--out", str(tmp_path / out)])
    for name in ("heldout.jsonl.xz", "train_excerpt.jsonl.xz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "heldout.jsonl.xz").read_bytes() == files[1].read_bytes()


def test_excerpt_keeps_the_proportions_and_cuts_at_line_ends(script, files):
    train = rows(files[0])
    texts = {row["id"]: row["text"] for row in train}
    excerpt = script.excerpt(train, total=200_000)
    assert 0.9 * 200_000 < size(excerpt) <= 200_000
    for source in ("large", "small"):
        share = size([row for row in train if row["source"] == source]) / size(train)
        part = size([row for row in excerpt if row["source"] == source]) / size(excerpt)
        assert part == pytest.approx(share, abs=0.03)
    for row in excerpt:
        assert texts[row["id"]].startswith(row["text"])
        assert row["whole"] == (row["text"] == texts[row["id"]])
        assert row["whole"] or texts[row["id"]][len(row["text"])] == "\n"


def test_build_refuses_a_document_on_the_wrong_side(script, files, tmp_path):
    with pytest.raises(SystemExit, match="wrong side of the split"):
        script.main([str(files[1]), str(files[0]), "--out", str(tmp_path / "c")])
    assert not (tmp_path / "c").exists()
