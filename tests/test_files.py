"""Wherever a process is killed, a folder holds the earlier run or the new one."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from quantdiff.errors import UsageError
from quantdiff.files import staged_folder

OWNED = ("data-*", "figures/*.png")
EARLIER = {"run.json": "old", "data-1": "old", "data-2": "old", "figures/a.png": "old"}
NEW = {"run.json": "new", "data-1": "new", "figures/b.png": "new", "notes/c": "new"}
MINE = {"mine.txt": "mine", "figures/mine.txt": "mine"}


def fill(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def held(folder):
    """Texts of the files that are not a stage."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and ".staged-" not in str(path.relative_to(folder))
    }


def replace(out):
    with staged_folder(out, marker="run.json", owned=OWNED, overwrite=True) as stage:
        fill(stage, NEW)


KILLED = """
import os, signal, sys
from itertools import count
from pathlib import Path
from tests.test_files import EARLIER, MINE, NEW, fill, held, replace

STEPS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}
top, kind = Path(sys.argv[1]), sys.argv[2]
before, others = {"run": (EARLIER, MINE), "empty": ({}, {}), "in use": (EARLIER, MINE)}[kind]
old, new = before | others, NEW | others
seen = set()
for number in count():
    out = top / str(number)
    out.mkdir()
    fill(out, old)
    child = os.fork()
    if not child:
        if kind == "in use":
            os.chdir(out)
        steps = count()
        def hook(event, arguments):
            if event in STEPS and next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        replace(out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not out.exists():
        state = "missing"
        assert kind != "in use", number
    elif held(out) in (old, new):
        state = "old" if held(out) == old else "new"
    else:
        state = "between"
        assert kind == "in use", (number, held(out))
        assert not (out / "run.json").exists(), number
        assert held(out).items() >= others.items(), number
    seen.add(state)
    replace(out)
    assert held(out) == new, (number, state, held(out))
    if not status:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print(number > 10, *sorted(seen))
"""


@pytest.mark.parametrize(
    ("kind", "states"),
    [("run", "missing new old"), ("empty", "missing new old"), ("in use", "between new old")],
)
def test_kill_9(tmp_path, kind, states):
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), kind],
        env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout == f"True {states}\n", run.stderr[-3000:]


def test_the_earlier_run_comes_back(tmp_path):
    """Killed between the two renames, and then called without `overwrite`."""
    out = tmp_path / "out"
    for name, text in ((".out.abcdefgh-earlier", "old"), (".out.2.abcdefgh-earlier", "other's")):
        fill(tmp_path / name, {"run.json": text})
    with (
        pytest.raises(UsageError, match="holds another run"),
        staged_folder(out, marker="run.json", owned=OWNED, overwrite=False),
    ):
        pass
    assert held(out) == {"run.json": "old"}


def test_what_is_not_the_run_s_own_stays_as_it_is(tmp_path):
    out = tmp_path / "out"
    fill(out, EARLIER | MINE)
    (out / "link").symlink_to("mine.txt")
    (out / "mine.txt").chmod(0o640)
    out.chmod(0o750)
    known = (out / "mine.txt").stat()
    (tmp_path / "name").symlink_to("out")
    replace(tmp_path / "name")
    assert (tmp_path / "name").is_symlink()
    assert held(out) == NEW | MINE | {"link": "mine"}
    assert (out / "link").is_symlink()
    now = (out / "mine.txt").stat()
    assert (now.st_ino, now.st_mode, now.st_mtime) == (known.st_ino, known.st_mode, known.st_mtime)
    assert stat.S_IMODE(out.stat().st_mode) == 0o750
    assert {path.name for path in tmp_path.iterdir()} == {"out", "name"}


def test_folders_of_other_runs_are_not_renamed(tmp_path):
    """Their processes may be writing."""
    fill(tmp_path / "out", EARLIER | {"sweep/results.jsonl": "1"})
    known = (tmp_path / "out" / "sweep").stat().st_ino
    replace(tmp_path / "out")
    assert (tmp_path / "out" / "sweep").stat().st_ino == known
    assert held(tmp_path / "out") == NEW | {"sweep/results.jsonl": "1"}


def test_a_run_that_writes_within_the_folder_is_left_alone(tmp_path, monkeypatch):
    out = tmp_path / "out"
    fill(out, EARLIER)
    monkeypatch.chdir(out)
    with staged_folder(".", marker="other.json", owned=("other-*",), overwrite=False) as stage:
        fill(stage, {"other.json": "other"})
        monkeypatch.chdir(tmp_path)
        replace(out)
        assert (stage / "other.json").exists()
    assert held(out) == NEW | {"other.json": "other"}


def test_a_folder_that_came_meanwhile_keeps_its_place(tmp_path):
    out = tmp_path / "out"
    with staged_folder(out, marker="run.json", owned=OWNED, overwrite=True) as stage:
        fill(stage, NEW)
        fill(out, {"sweep/results.jsonl": "1"})
        known = out.stat().st_ino
    assert out.stat().st_ino == known
    assert held(out) == NEW | {"sweep/results.jsonl": "1"}


def test_what_was_replaced_does_not_come_back(tmp_path):
    """Killed behind the two renames."""
    out = tmp_path / "out"
    fill(out, NEW)
    fill(tmp_path / ".out.abcdefgh-earlier", EARLIER)
    replace(out)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_link_that_leads_to_itself(tmp_path):
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(UsageError, match="out "):
        replace(tmp_path / "out")


def test_a_name_that_no_folder_can_have(tmp_path):
    out = tmp_path / ("n" * 300)
    with (
        pytest.raises(UsageError, match="cannot be written: File name too long"),
        staged_folder(out, marker="run.json", owned=OWNED, overwrite=False),
    ):
        pass


def test_an_exception_leaves_the_earlier_run(tmp_path):
    fill(tmp_path / "out", EARLIER | MINE)

    def fail():
        with staged_folder(tmp_path / "out", marker="run.json", owned=OWNED, overwrite=True) as new:
            fill(new, NEW)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert held(tmp_path / "out") == EARLIER | MINE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
