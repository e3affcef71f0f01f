"""Where text comes from: what `--data` accepts, read as a stream of documents."""

import json
import lzma
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO

from quantdiff.calibration.hub import hub_documents
from quantdiff.calibration.rows import TEXT_FIELDS, filled, first_line, listed, text_field
from quantdiff.errors import UsageError

__all__ = ["CORPUS", "TEXT_FIELDS", "document_chunks", "read_documents"]

CORPUS = {"corpus": "heldout.jsonl.xz", "corpus:train": "train_excerpt.jsonl.xz"}

_CORPUS_FOLDER = Path(__file__).with_name("corpus")
_CHUNK = 1 << 15  # characters
_KINDS = ".txt, .jsonl, .parquet, .txt.xz, .jsonl.xz, hub:ID[:split[:column]], corpus, corpus:train"


def read_documents(source: str | Path) -> Iterator[str]:
    """Documents of a `--data` value, in order; blank ones are left out.

    Args:
        source: one of
            `corpus`, the shipped held-out text, or `corpus:train`, the shipped excerpt of the
            training text;
            a `.txt` file: one document;
            a `.jsonl` file: one object per line, its text in the first of `TEXT_FIELDS` that the
            first line has;
            a `.parquet` file: its text in the first of `TEXT_FIELDS` that is a column;
            a `.txt.xz` or `.jsonl.xz` file: the same, compressed;
            `hub:ID[:split[:column]]`: a dataset on the Hugging Face hub or a local folder of data
            files, streamed through `datasets`. `ID` is `owner/name`, or `owner/name/config` for
            one with several configurations. Unless named, the split is `train` or the only one,
            the column the first of `TEXT_FIELDS`.

    Raises:
        UsageError: a source that is missing, unknown, broken, not UTF-8 or without text. A
            missing or unknown file is refused at once, the others when reading gets there.
        MissingExtraError: `hub:` without `datasets`.
    """
    return ("".join(chunks) for chunks in document_chunks(source))


def document_chunks(source: str | Path) -> Iterator[Iterable[str]]:
    """`read_documents`, each document in parts, so that a file of any size is never held whole.

    The parts of a document must be read before the next document is requested.
    """
    name = str(source)
    if name.startswith("hub:"):
        return _not_empty(hub_documents(name), name)
    if name in CORPUS:
        path = _CORPUS_FOLDER / CORPUS[name]
    elif name.startswith("corpus:"):
        raise UsageError(f"there is no shipped text {name!r}: use {' or '.join(CORPUS)}")
    else:
        path = Path(source)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] == [".xz"]
    kind = suffixes[:-1][-1:] if compressed else suffixes[-1:]
    if path.is_dir():
        raise UsageError(f"{name!r} is a folder: name a file in it, or read it as hub:{name}")
    if kind not in ([".txt"], [".jsonl"]) and (compressed or kind != [".parquet"]):
        raise UsageError(f"{name!r} is not a kind of text that can be read: use {_KINDS}")
    if not path.is_file():
        raise UsageError(f"there is no file {name}: check the path")
    if kind == [".parquet"]:
        return _not_empty(_parquet_documents(path, name), name)
    return _not_empty(_file_documents(path, name, kind[0], compressed), name)


def _not_empty(documents: Iterator[Iterable[str]], name: str) -> Iterator[Iterable[str]]:
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise UsageError(f"{name} holds no text: name a source with at least one filled document")


@contextmanager
def _mendable_errors(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 ({error.reason}): save it as UTF-8") from error
    except (lzma.LZMAError, EOFError) as error:
        raise UsageError(f"{name} is broken or no xz file ({error}): compress it again") from error
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error


def _file_documents(path: Path, name: str, kind: str, compressed: bool) -> Iterator[Iterable[str]]:
    with _mendable_errors(name), lzma.LZMAFile(path) if compressed else path.open("rb") as stream:
        yield from (_plain_document if kind == ".txt" else _json_documents)(stream, name)


def _plain_document(stream: IO[bytes], name: str) -> Iterator[Iterable[str]]:
    chunks = _decoded_chunks(stream, name)
    head = ""
    for chunk in chunks:
        head += chunk
        if head.strip():
            yield chain([head], chunks)
            return


def _decoded_chunks(stream: IO[bytes], name: str) -> Iterator[str]:
    # utf-8-sig: the byte order mark that Windows editors write first is not text.
    text = TextIOWrapper(stream, encoding="utf-8-sig")
    # Again, because these parts are read outside the frame of `_file_documents`.
    with _mendable_errors(name):
        while chunk := text.read(_CHUNK):
            yield chunk


def _json_documents(stream: IO[bytes], name: str) -> Iterator[Iterable[str]]:
    field = None
    for number, raw in enumerate(stream, start=1):
        place = f"{name}, line {number},"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{place} is not UTF-8: save the file as UTF-8") from error
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place} is not JSON ({error}): mend or drop the line") from error
        if not isinstance(row, dict):
            raise UsageError(f'{place} is not an object: write {{"text": "..."}} on each line')
        field = field or text_field(row, None, place)
        if field not in row:
            raise UsageError(
                f"{place} has no field {field!r}, which the first line has "
                f"(found: {listed(row)}): name the text alike on each line"
            )
        yield from filled(row[field], field, place)


def _parquet_documents(path: Path, name: str) -> Iterator[Iterable[str]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        with file:
            column = text_field(file.schema_arrow.names, None, name)
            number = 0
            # Small batches: a row may be a whole book.
            for batch in file.iter_batches(batch_size=64, columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield from filled(value, column, f"{name}, row {number},")
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{name} is broken or no parquet file ({first_line(error)}): write it again"
        ) from error
