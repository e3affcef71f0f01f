"""Build the shipped corpus: the held-out text as it is, and an excerpt of the training text.

    python scripts/build_corpus.py TRAIN.jsonl.xz HELDOUT.jsonl.xz [--out calibration/corpus]

The same two files give the same text, and with the same liblzma the same bytes.
"""

import argparse
import hashlib
import json
import lzma
import shutil
from collections.abc import Sequence
from pathlib import Path

EXCERPT_BYTES = 1_000_000
DOCUMENT_BYTES = 8_192
# A leading part shorter than this is not worth a document of its own.
SHORTEST_PART = 1_024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--out", type=Path, default=Path("calibration/corpus"))
    options = parser.parse_args(arguments)

    train, heldout = read(options.train), read(options.heldout)
    check_split(train, heldout)
    rows = excerpt(train)
    options.out.mkdir(parents=True, exist_ok=True)
    # copyfile, not copy: the original may be read-only, but the copy must be replaceable.
    shutil.copyfile(options.heldout, options.out / "heldout.jsonl.xz")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    packed = lzma.compress(text, check=lzma.CHECK_CRC64, preset=9 | lzma.PRESET_EXTREME)
    (options.out / "train_excerpt.jsonl.xz").write_bytes(packed)

    print("source      documents  whole     bytes")
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in rows if row["source"] == source]
        whole = sum(row["whole"] for row in own)
        print(f"{source:<10} {len(own):>10} {whole:>6} {sum(map(size, own)):>9}")
    print(f"{len(packed)} bytes packed, sha256 of the text {hashlib.sha256(text).hexdigest()}")


def read(path: Path) -> list[dict]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def key(row: dict) -> int:
    return int(hashlib.sha256(f"{row['source']}/{row['id']}".encode()).hexdigest(), 16)


def is_held_out(row: dict) -> bool:
    return key(row) % 16 == 0


def size(row: dict) -> int:
    return len(row["text"].encode())


def check_split(train: list[dict], heldout: list[dict]) -> None:
    wrong = [row for row in train if is_held_out(row)]
    wrong += [row for row in heldout if not is_held_out(row)]
    if wrong:
        names = ", ".join(f"{row['source']}/{row['id']}" for row in wrong[:5])
        raise SystemExit(f"{len(wrong)} documents are on the wrong side of the split: {names}")


def excerpt(train: list[dict], total: int = EXCERPT_BYTES) -> list[dict]:
    """Documents or leading parts of them, each source by its share of the bytes of `train`.

    Within a source the order is that of the documents' hashes; the sources alternate so that
    every leading part of the excerpt mixes them as the whole does.
    """
    waiting: dict[str, list[dict]] = {}
    for row in sorted(train, key=key, reverse=True):
        waiting.setdefault(row["source"], []).append(row)
    whole = sum(map(size, train))
    quota = {name: total * sum(map(size, rows)) / whole for name, rows in waiting.items()}
    taken = dict.fromkeys(sorted(quota), 0)
    rows = []
    while open_sources := [name for name in taken if waiting[name]]:
        name = min(open_sources, key=lambda name: taken[name] / quota[name])
        left = int(quota[name]) - taken[name]
        row = waiting[name].pop()
        text = leading_part(row["text"], min(left, DOCUMENT_BYTES))
        if text != row["text"] and len(text.encode()) < SHORTEST_PART:
            waiting[name] = []
            continue
        part = {"source": name, "id": row["id"], "whole": text == row["text"], "text": text}
        taken[name] += size(part)
        rows.append(part)
    return rows


def leading_part(text: str, limit: int) -> str:
    """At most `limit` bytes of `text`, up to the end of a line, or a sentence in one long line."""
    if len(text.encode()) <= limit:
        return text
    part = text.encode()[:limit].decode(errors="ignore")
    return part[: max(part.rfind("\n"), part.rfind(". ") + 1)]


if __name__ == "__main__":
    main()
