import json
import lzma
import subprocess
import sys
from importlib.util import find_spec
from itertools import islice

import pyarrow as pa
import pytest
from pyarrow import parquet

from quantdiff.calibration import read_documents
from quantdiff.errors import MissingExtraError, UsageError
from tests.conftest import needs

DOCUMENTS = ["First.\n\nStill the first.", "Zweites, für sich.", "第三 λ"]


def jsonl(documents, field="text"):
    return "".join(json.dumps({"id": i, field: d}) + "\n" for i, d in enumerate(documents))


def refusal(source):
    with pytest.raises(UsageError) as caught:
        list(read_documents(source))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("as_type", [str, lambda path: path])
def test_a_txt_file_is_one_document(tmp_path, as_type):
    path = tmp_path / "book.txt"
    path.write_text("One.\n\nTwo. λ\n", encoding="utf-8")
    assert list(read_documents(as_type(path))) == ["One.\n\nTwo. λ\n"]


def test_a_txt_file_longer_than_one_read_comes_whole(tmp_path):
    text = "naïve words\n" * 10_000
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    assert list(read_documents(path)) == [text]


def test_windows_marks_and_line_ends_are_no_text(tmp_path):
    path = tmp_path / "notepad.txt"
    path.write_bytes(b"\xef\xbb\xbfOne\r\ntwo\r\n")
    assert list(read_documents(path)) == ["One\ntwo\n"]
    lines = tmp_path / "notepad.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "One"}\r\n\r\n{"text": "two"}\r\n')
    assert list(read_documents(lines)) == ["One", "two"]


@pytest.mark.parametrize("field", ["text", "content", "sentence"])
def test_jsonl_with_a_usual_field_name(tmp_path, field):
    path = tmp_path / "rows.JSONL"
    path.write_text(jsonl(DOCUMENTS, field), encoding="utf-8")
    assert list(read_documents(path)) == DOCUMENTS


def test_blank_and_missing_documents_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(jsonl(["", DOCUMENTS[0], " \n", None, DOCUMENTS[1]]), encoding="utf-8")
    assert list(read_documents(path)) == DOCUMENTS[:2]
    table = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": [None, DOCUMENTS[0], "", DOCUMENTS[1]]}), table)
    assert list(read_documents(table)) == DOCUMENTS[:2]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet(tmp_path, kind):
    documents = DOCUMENTS * 50
    path = tmp_path / "rows.parquet"
    column = pa.array(documents, kind)
    parquet.write_table(pa.table({"id": range(150), "document": column}), path, row_group_size=40)
    assert list(read_documents(path)) == documents


def test_xz_of_txt_and_jsonl(tmp_path):
    text = tmp_path / "book.v2.txt.xz"
    text.write_bytes(lzma.compress(DOCUMENTS[0].encode()))
    assert list(read_documents(text)) == DOCUMENTS[:1]
    rows = tmp_path / "rows.jsonl.xz"
    rows.write_bytes(lzma.compress(jsonl(DOCUMENTS).encode()))
    assert list(read_documents(rows)) == DOCUMENTS


def test_documents_come_before_a_later_fault(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(jsonl(DOCUMENTS) + "{broken\n", encoding="utf-8")
    assert list(islice(read_documents(path), 3)) == DOCUMENTS
    assert "line 4" in refusal(path)


def test_missing_and_unknown_files_are_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match=r"there is no file .*nowhere\.txt"):
        read_documents(tmp_path / "nowhere.txt")
    with pytest.raises(UsageError, match=r"table\.csv.*use \.txt, \.jsonl, \.parquet"):
        read_documents(tmp_path / "table.csv")
    with pytest.raises(UsageError, match=r"is a folder.*hub:"):
        read_documents(tmp_path)
    with pytest.raises(UsageError, match=r"rows\.parquet\.xz"):
        read_documents(tmp_path / "rows.parquet.xz")
    with pytest.raises(UsageError, match="corpus or corpus:train"):
        read_documents("corpus:test")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", b"", ["a.txt", "no text"]),
        ("a.txt", b" \n\n", ["a.txt", "no text"]),
        ("a.txt", b"caf\xe9 noir", ["a.txt", "UTF-8"]),
        ("a.jsonl", b"", ["a.jsonl", "no text"]),
        ("a.jsonl", b'{"text": ""}\n', ["a.jsonl", "no text"]),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "caf\xe9"}\n', ["line 2", "UTF-8"]),
        ("a.jsonl", b'{"text": "ok"}\n\n{"text": \n', ["line 3", "JSON"]),
        ("a.jsonl", b"[" * 100_000, ["line 1", "JSON"]),
        ("a.jsonl", b'"ok"\n', ["line 1", "not an object"]),
        ("a.jsonl", b'{"Text": "ok", "label": 1}\n', ["line 1", "Text, label", "content"]),
        ("a.jsonl", b'{"text": "ok"}\n{"content": "x"}\n', ["line 2", "'text'", "content"]),
        ("a.jsonl", b'{"text": ["ok"]}\n', ["line 1", "'text'", "list"]),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ["line 1", "surrogate"]),
        ("a.txt.xz", b"plain", ["a.txt.xz", "xz"]),
        ("a.txt.xz", lzma.compress(b"words " * 9999)[:-40], ["a.txt.xz", "broken"]),
        ("a.jsonl.xz", lzma.compress(b'{"text": "ok"}\n' * 99)[:-9], ["a.jsonl.xz", "broken"]),
        ("a.xz", lzma.compress(b"words"), ["a.xz", ".txt.xz"]),
        ("a.parquet", b"PAR1 or not", ["a.parquet", "parquet"]),
    ],
)
def test_refusals_name_the_thing(tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(path)
    for part in parts:
        assert part in message


def test_parquet_without_text_lists_its_columns(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"question": ["a"], "answer": ["b"]}), path)
    assert "question, answer" in refusal(path)
    parquet.write_table(pa.table({"text": [1, 2]}), path)
    assert "row 0" in refusal(path)


hub = needs(find_spec("datasets") is not None, "needs datasets")


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(jsonl(DOCUMENTS), encoding="utf-8")
    (folder / "test.jsonl").write_text(jsonl(["only a test"]), encoding="utf-8")
    return folder


@hub
def test_hub_folder(hub_folder):
    assert list(read_documents(f"hub:{hub_folder}")) == DOCUMENTS
    assert list(read_documents(f"hub:{hub_folder}:test")) == ["only a test"]
    assert list(read_documents(f"hub:{hub_folder}:train:text")) == DOCUMENTS
    assert list(read_documents(f"hub:{hub_folder}::text")) == DOCUMENTS


@hub
def test_hub_takes_the_only_split(tmp_path):
    (tmp_path / "test.jsonl").write_text(jsonl(["only a test"], "prose"), encoding="utf-8")
    assert list(read_documents(f"hub:{tmp_path}::prose")) == ["only a test"]
    assert "id, prose" in refusal(f"hub:{tmp_path}")


@hub
def test_hub_refusals(hub_folder, tmp_path):
    assert "found: train, test" in refusal(f"hub:{hub_folder}:validation")
    message = refusal(f"hub:{hub_folder}:train:body")
    assert "'body'" in message
    assert "id, text" in message
    assert "no text in 'id' but a int" in refusal(f"hub:{hub_folder}:train:id")
    assert "--tokens" in refusal(f"hub:{hub_folder}:train[:10]")
    assert "hub:ID[:split[:column]]" in refusal("hub:")
    assert "hub:ID[:split[:column]]" in refusal("hub:a:b:c:d")
    assert "cannot be opened" in refusal(f"hub:{tmp_path}")


@hub
def test_hub_name_with_configuration(monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, name=None, **options):
        asked.append((path, name, options))
        raise datasets.exceptions.DatasetNotFoundError("no network here\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("hub:owner/name", "hub:owner/name/config:train"):
        message = refusal(source)
        assert source in message
        assert "no network here" in message
    assert asked == [
        ("owner/name", None, {"streaming": True}),
        ("owner/name", "config", {"streaming": True}),
    ]


def test_hub_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'quantdiff\[eval\]'"):
        list(read_documents("hub:owner/name"))


def test_import_brings_no_heavy_library():
    code = (
        "import sys, quantdiff.calibration\n"
        "print({'datasets', 'pyarrow', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
