"""docs/formats.md against files that are written here: keys, types, arrays and columns."""

import functools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import quantdiff
from quantdiff.analysis import figure_data
from quantdiff.analysis.compare import Comparison
from quantdiff.analysis.evaluation import Text
from quantdiff.analysis.exported import measuring
from quantdiff.analysis.profiling import profile_text
from quantdiff.analysis.sweep import SweepResults, sweep
from quantdiff.analysis.sweep.panels import sweep_figure_data
from quantdiff.analysis.sweep.record import RECORD
from quantdiff.calibration import text_windows
from quantdiff.export.verifying import verify
from quantdiff.quantization import Scheme, schemes
from tests.tiny import tiny_diff_v2, tiny_diffllama, tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "formats.md"
ZOO = ROOT / "quantdiff" / "models" / "zoo"
LOGITS = "attention_logits"
ALL = ("linear_inputs", "keys", "values", "hidden_states")
WINDOW = 24
SHIPPED = "training.json of a shipped model"
FIGURES = "figures/*.csv"
PLACE = ("name", "layer", "kind")  # of a map
PUBLISHED = ("table-5", "figure-8")

# Documented, and not made here: soft-capped logits, checkpoints and formats that need other
# libraries, lm-eval, tables that were merged before they were used.
NOT_MADE = {
    "profile.json": {f"{LOGITS}.sites[].heads[].uncapped_absmax"},
    "sweep.json": {
        "models.*.quantizers", "models.*.quantizers.*", "models.*.calibration.data.parts",
        "models.*.calibration.data.parts[].*",
        *(f"models.*.evaluations.*.settings.{name}" for name in (
            "lm_eval", "limit", "fewshot_seed", "num_fewshot", "num_fewshot.*", "generation"
        )),
    },
    "quantdiff.json": {
        "export.group", "packages.*", "calibration.data.parts", "calibration.data.parts[].*"
    },
    "profile.safetensors": {"attention_logits.uncapped"},
}  # fmt: skip


# The page


@dataclass(frozen=True)
class Entry:
    """A key, tensor, array or column list of the page; the cells of its row by their heading."""

    name: str
    cells: dict[str, str]

    @property
    def always(self) -> bool:
        return self.cells["there"] == "always"

    @property
    def parts(self) -> tuple[str, ...]:
        return parts_of(self.name)


@functools.cache
def parts_of(name: str) -> tuple[str, ...]:
    """`a[]."b.c".*` as its parts: a, [], b.c and *."""
    found = re.findall(r'"([^"]+)"|([^.\[\]"]+)|(\[\])', name)
    return tuple(next(filter(None, groups)) for groups in found)


def spread(text: str) -> list[str]:
    """`a.{b,c}` as a.b and a.c."""
    choices = [part[1:-1].split(",") if part[:1] == "{" else [part]
               for part in re.split(r"(\{[^{}]*\})", text)]  # fmt: skip
    return ["".join(words) for words in product(*choices)]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def names_in(text: str) -> list[str]:
    """All names of a cell."""
    return [name for span in spans(text) for name in spread(span)]


def page() -> dict[str, list[Entry]]:
    """Entries by the heading, which names the file."""
    found = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        found[title.replace("`", "")] = list(entries_of(body))
    return found


def entries_of(body: str) -> Iterator[Entry]:
    blocks = body.split("\n\n")
    for before, block in zip(["", *blocks], blocks, strict=False):
        lines = block.strip().split("\n")
        if not lines[0].startswith("| "):
            continue
        heads, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
        ]
        if heads[0] not in ("key", "tensor", "array", "table", "figure"):
            continue
        kind, _, within = before.partition(" within ")
        prefixes = spans(within) if kind.endswith(("Keys", "Tensors")) else []
        for row in rows:
            assert len(row) == len(heads), row
            for name in names_in(row[0]):
                for prefix in prefixes or [""]:
                    joined = f"{prefix}.{name}" if prefix else name
                    yield Entry(joined, dict(zip(heads, row, strict=True)))


ENTRIES = page()


# What is compared


def objects(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict]]:
    """All objects of a JSON value, with their places."""
    if isinstance(value, dict):
        yield at, value
        for key, inner in value.items():
            yield from objects(inner, (*at, key))
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner, (*at, "[]"))


def fits(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a place is that of a key on the page, whose parts may end in a star."""
    return len(path) == len(pattern) and all(
        word == part or (part[-1] == "*" and word != "[]" and word.startswith(part[:-1]))
        for word, part in zip(path, pattern, strict=True)
    )


@functools.cache
def told_of(file: str, path: tuple[str, ...]) -> list[Entry]:
    """What the page says of a key; where a star and a name do, the name."""
    found = [entry for entry in ENTRIES[file] if fits(path, entry.parts)]
    fewest = min((entry.name.count("*") for entry in found), default=0)
    return [entry for entry in found if entry.name.count("*") == fewest]


@functools.cache
def always_in(file: str, path: tuple[str, ...]) -> list[str]:
    """Keys that an object in this place has."""
    own = [entry.parts for entry in ENTRIES[file] if entry.always]
    return [parts[-1] for parts in own if fits(path, parts[:-1]) and parts[-1] != "*"]


def of_type(value: Any, told: str) -> bool:
    words = set(re.findall(r"\w+", told))
    if isinstance(value, list):
        return "list" in words and all(of_type(one, words_of_list(told)) for one in value)
    kinds = {
        bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"},
        dict: {"object"}, type(None): {"null"},
    }  # fmt: skip
    return bool(kinds[type(value)] & words)


def words_of_list(told: str) -> str:
    """`list of numbers and nulls, or null` as `number null`, what its entries are."""
    inner = told.partition("list of ")[2].partition(", or")[0].removesuffix(" or null")
    return "list of integers" if inner == "lists" else re.sub(r"s\b", "", inner)


def check_json(file: str, contents: list[Any], *, all_made: bool = True, new: bool = True) -> None:
    """Every key is on the page with its type, and what is always there is there.

    Args:
        file: of the page.
        contents: of such files, or lines.
        all_made: together they have all that is documented, but for `NOT_MADE`.
        new: none is from before some key was always there.
    """
    seen = set()
    for content in contents:
        for at, inner in objects(content):
            place = ".".join(at)
            for key, value in inner.items():
                entries = told_of(file, (*at, key))
                assert entries, f"{file}: {key} of {place or 'all'} is not on the page"
                for entry in entries:
                    told = entry.cells["type"]
                    assert of_type(value, told), f"{file}: {entry.name} is {value!r}, not {told}"
                    seen.add(entry.name)
            lacking = set(always_in(file, at)) - set(inner) if new else None
            assert not lacking, f"{file}: {place or 'all'} lacks {lacking}"
    if all_made:
        check_made(file, seen)


def check_made(file: str, seen: set[str]) -> None:
    """All that the page names was seen in some file, but for what is not made here."""
    missing = {entry.name for entry in ENTRIES[file]} - seen
    known = NOT_MADE.get(file, set())
    assert missing == known, (
        f"{file}: no file has {missing - known}, and some have {known - missing}"
    )


def check_array(entry: Entry, array: np.ndarray) -> None:
    kind = "str" if array.dtype.kind == "U" else str(array.dtype)
    assert kind == entry.cells["dtype"], entry.name
    shapes = [text.split(",") for text in re.findall(r"\(([^)]*)\)", entry.cells["shape"])]
    assert any(
        len(shape) == array.ndim
        and all(not word.strip().isdigit() or int(word) == size
                for word, size in zip(shape, array.shape, strict=True))
        for shape in shapes
    ), (entry.name, array.shape)  # fmt: skip


def pattern_of(name: str) -> re.Pattern[str]:
    """Of a tensor's name: `*` has no dots, `**` may."""
    words = {"**": ".+", "*": "[^.]+"}
    return re.compile("".join(words.get(part, re.escape(part))
                              for part in re.split(r"(\*\*|\*)", name)))  # fmt: skip


def check_tensors(file: str, folders: list[Path]) -> None:
    entries, seen = ENTRIES[file], set()
    for folder in folders:
        arrays = load_file(folder / file)
        for name, array in arrays.items():
            found = [entry for entry in entries if pattern_of(entry.name).fullmatch(name)]
            assert len(found) == 1, f"{file}: {name} fits {[entry.name for entry in found]}"
            check_array(found[0], array)
            seen.add(found[0].name)
        for parts in {name.partition(".")[0] for name in arrays}:
            for entry in entries:
                if entry.always and entry.name.split(".")[0] == parts:
                    assert any(map(pattern_of(entry.name).fullmatch, arrays)), entry.name
    check_made(file, seen)


def check_columns(file: str, name: str, columns: list[str]) -> None:
    """The columns of a table or figure, whose name on the page may end in a star."""
    names = [entry for entry in ENTRIES[file] if fnmatchcase(name, entry.name)]
    entry = max(names, key=lambda entry: len(entry.name))
    listed = entry.cells["columns"].partition(", and ")[0]
    for column in columns:
        assert any(fnmatchcase(column, one) for one in names_in(listed)), (name, column)
    for one in names_in(re.sub(r"`[^`]+`\?", "", listed)):
        assert any(fnmatchcase(column, one) for column in columns), (name, one)


# The files


@dataclass(frozen=True)
class Written:
    """Folders of each command."""

    profiles: list[Path]
    calibrations: list[Path]
    sweep: Path
    exports: list[Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Iterator[Written]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: threads would wait for one another
    top = tmp_path_factory.mktemp("formats")
    texts = []
    for name, words in (("a", "the king and the sea "), ("b", "er and an inner land ")):
        texts.append(str(top / f"{name}.txt"))
        Path(texts[-1]).write_text(words * 40, encoding="utf-8")
    yield Written(
        write_profiles(top, texts[0]), write_calibrations(top, texts), write_sweep(top, texts[0]),
        write_exports(top, texts[0]),
    )  # fmt: skip
    torch.set_num_threads(threads)


def windows_of(text: str, tokens: int = 4 * WINDOW) -> Any:
    return text_windows(text, tiny_tokenizer(), tokens=tokens, seq_len=WINDOW)


def write_profiles(top: Path, text: str) -> list[Path]:
    windows, folders = windows_of(text, 2 * WINDOW), []
    for model, options in (
        (tiny_diff_v2(), {"maps": True, "sites": ALL, "spans": [(2, 4), (1, 3)]}),
        (tiny_diffllama(), {"detail": "extremes", "top_k": 5, "sites": ("keys", "hidden_states")}),
        (tiny_llama(), {"maps": True}),
    ):
        folders.append(top / f"profile-{len(folders)}")
        profile_text(model, windows, **options).save(folders[-1])
    model = tiny_llama()
    with torch.no_grad(), quantdiff.record(model, top_k=0) as recorder:
        model(input_ids=windows.windows[0][None])
    folders.append(top / "profile-recorded")
    recorder.profile().save(folders[-1])
    return folders


def write_calibrations(top: Path, texts: list[str]) -> list[Path]:
    model, windows = tiny_llama(), list(map(windows_of, texts))
    first = quantdiff.calibrate(model, windows[1], sites=ALL)
    first.save(top / "table")
    first.merge(quantdiff.calibrate(model, windows[0], sites=ALL)).save(top / "merged")
    one = windows[0].windows[0][None]
    quantdiff.calibrate(model, {"input_ids": one}).save(top / "one-batch")
    return [top / name for name in ("table", "merged", "one-batch")]


def write_sweep(top: Path, text: str) -> Path:
    live = tiny_llama(max_position_embeddings=512)
    out, model = top / "sweep", (live, tiny_tokenizer(), "live")
    questions = top / "questions.jsonl"
    rows = [{"query": f"in the {i}", "choices": ["a", "the", "an"][: 2 + i % 2], "gold": i % 2}
            for i in range(6)]  # fmt: skip
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {"out": out, "text": Text(text, 2 * WINDOW, WINDOW), "command": "quantdiff sweep"}

    def run(wanted, evaluations, model=model, **more):
        sweep([model], wanted, evaluations, **options | more)

    run(
        [
            (), Scheme(LOGITS, 4), Scheme(LOGITS, 6, "absmax", "head"),
            Scheme("keys", 4, newest=4), Scheme(LOGITS, 4, layers=(0,)),
            Scheme(LOGITS, 4, heads=(1,)), Scheme(LOGITS, 4, heads=(9,)),  # which is not there
            schemes("W8A8+KV4r4"),
            [Scheme(LOGITS, 4, layers=(0,), heads=(0,)), Scheme("values", 4, layers=(0,))],
        ],
        ["perplexity", "divergence"], tables=[top / "table"],
    )  # fmt: skip
    run([schemes("W8A8")], ["perplexity"], remedies=["smooth:0.5"], calibration_tokens=64)
    more = ["noise", f"choice:{questions}", f"order:{questions}", "needles:2,1@320"]
    run([(), Scheme(LOGITS, 4)], more, command=None)
    diff = tiny_diffllama(), tiny_tokenizer(), "diff"
    run([Scheme(LOGITS, 4)], ["divergence", "noise"], diff)
    return out


def write_exports(top: Path, text: str) -> list[Path]:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    table = quantdiff.CalibrationTable.load(top / "table")
    measure, _ = measuring(model, tokenizer, Text(text, WINDOW, WINDOW))
    static = [
        Scheme(LOGITS, 6, "absmax", "head"),
        Scheme("linear_inputs", 8, "absmax", layers=(1,)),
    ]
    quantdiff.export(
        model, tokenizer, top / "static", format="bf16", table=table, measure=measure, check=False,
        schemes=[*static, Scheme("keys", 8, "absmax", "channel", heads=(0,))],
    )  # fmt: skip
    quantdiff.export(model, tokenizer, top / "plain", format="bf16", check=False)
    # A folder that lacks a file is not loaded in a new process; it is told of in the same keys.
    shutil.copytree(top / "plain", top / "broken")
    (top / "broken" / "model.safetensors").unlink()
    verify(top / "broken")
    return [top / "static", top / "plain", top / "broken"]


def read(folders: list[Path], name: str) -> list[Any]:
    return [json.loads((folder / name).read_text(encoding="utf-8")) for folder in folders]


def lines(path: Path) -> list[Any]:
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))


# The tests


def test_profile(written):
    check_json("profile.json", read(written.profiles, "profile.json"))
    check_tensors("profile.safetensors", written.profiles)


def test_calibration(written):
    check_json("calibration.json", read(written.calibrations, "calibration.json"))
    check_tensors("calibration.safetensors", written.calibrations)


def test_sweep(written):
    rows = lines(written.sweep / "results.jsonl")
    assert [row["error"] for row in rows if row["status"] == "error"]
    check_json(RECORD, read([written.sweep], RECORD))
    check_json("results.jsonl", rows)


def test_items(written):
    seen = set()
    for row in lines(written.sweep / "results.jsonl"):
        if row["status"] != "ok":
            continue
        kind = row["eval"].partition(":")[0]
        own = {}
        for entry in ENTRIES["items/*.npz"]:
            kinds, _, where = entry.cells["of"].partition(", where")
            if {"all", kind} & set(kinds.split(", ")):
                own[entry.name] = entry, bool(where)
        with np.load(written.sweep / "items" / f"{row['cell']}.npz", allow_pickle=False) as arrays:
            assert set(arrays.files) <= set(own)
            for name, (_, some) in own.items():
                assert some or name in arrays.files, (kind, name)
            for name in arrays.files:
                check_array(own[name][0], arrays[name])
                seen.add((kind, name))
    named = {
        (kind, entry.name)
        for entry in ENTRIES["items/*.npz"]
        for kind in entry.cells["of"].partition(", where")[0].split(", ")
    }
    assert named - seen == {("all", "_metrics"), ("lm-eval", "*")}


def test_export(written):
    check_json("quantdiff.json", read(written.exports[:2], "quantdiff.json"))
    check_tensors("quantdiff.safetensors", written.exports[:2])


def test_verification(written):
    (content,) = read(written.exports[2:], "verification.json")
    assert not content["passed"]
    check_json("verification.json", [content])


def test_tables_of_a_report(written):
    runs = [*written.profiles[:3], written.calibrations[0], written.sweep, *written.exports[:2]]
    seen = set()
    for table in Comparison(runs).tables().tables:
        plain = re.sub(r"-\d+$", "", table.key)
        key = table.key if table.key in PUBLISHED else plain
        check_columns("tables/*.csv", key, list(table.frame.columns))
        seen |= {entry.name for entry in ENTRIES["tables/*.csv"] if fnmatchcase(key, entry.name)}
    check_made("tables/*.csv", seen)


def test_numbers_of_figures(written):
    profile = quantdiff.Profile.load(written.profiles[0])
    measures = {
        entry.parts[-1] for entry in ENTRIES["profile.json"] if entry.parts[:-1] == ("maps", "[]")
    }
    for kind in ("layers", "heads", "magnitudes", "maps", "channels"):
        columns = list(figure_data(profile, kind).columns)
        if kind == "maps":
            assert set(columns) >= measures - {"heads"}
            columns = [name for name in columns if name not in measures or name in PLACE]
        check_columns(f"{FIGURES} of a profile", kind, columns)
    results = SweepResults.load(written.sweep)
    columns = list(sweep_figure_data(results, model="live").columns)
    check_columns(f"{FIGURES} of a sweep", "bits", columns)
    check_columns(f"{FIGURES} of a report", "figure-perplexity", columns)
    comparison = Comparison([*written.profiles[:2], written.sweep])
    for name, frame in (
        ("layers", comparison.layers()),
        ("lambda", comparison.lambdas()),
        ("figure-differences-divergence", comparison.differences()),
    ):
        columns = list(frame.drop(columns="group").columns)
        check_columns(f"{FIGURES} of a report", name, columns)


def test_files_that_lie_in_the_repository():
    folders = [path.parent for path in (ROOT / "docs" / "bits").rglob(RECORD)]
    check_json(RECORD, read(folders, RECORD), all_made=False, new=False)
    for folder in folders:
        check_json("results.jsonl", lines(folder / "results.jsonl"), all_made=False)
    shipped = [path.parent for path in ZOO.glob("*/training.json")]
    check_json(SHIPPED, read(shipped, "training.json"), all_made=False)
    assert folders
    assert shipped


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"colour": "red"}, "colour of all is not on the page"),
        ({"versions": {"quantdiff": "0.1.0"}}, "versions lacks .*torch"),
        ({"seconds": 0.5}, "seconds is 0.5, not integer"),
    ],
)
def test_what_the_page_does_not_say_is_told(change, told):
    (content,) = read([ZOO / "transformer"], "training.json")
    with pytest.raises(AssertionError, match=told):
        check_json(SHIPPED, [content | change], all_made=False)


def test_what_no_file_has_is_told(written):
    with pytest.raises(AssertionError, match=r"no file has .*lambda"):
        check_json("profile.json", read(written.profiles[2:], "profile.json"))
