"""Tasks of lm-evaluation-harness: found, loaded and fingerprinted."""

import functools
import hashlib
import inspect
import json
import logging
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantdiff.calibration.rows import first_line
from quantdiff.errors import MissingExtraError, UsageError, require

__all__ = ["FEWSHOT_SEED", "as_lm_eval", "lm_eval_version", "load_tasks", "task_fingerprint"]

# Those of lm_eval.simple_evaluate, so that its numbers are reproduced.
FEWSHOT_SEED = 1234
_SEEDS = {"random": 0, "numpy": 1234, "torch": 1234}

# Entries that state where the data come from. The data themselves are fingerprinted, and may move.
_PLACES = ("dataset_path", "dataset_name", "dataset_kwargs", "metadata")


def lm_eval_version() -> str:
    """Version of the installed lm-eval."""
    return version("lm_eval")


@contextmanager
def as_lm_eval() -> Iterator[None]:
    """Set the random state that lm-eval starts from, and shorten its log; restore both.

    What tasks print goes to stderr, since stdout may carry JSON.
    """
    states = random.getstate(), np.random.get_state()
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with (
            torch.random.fork_rng(devices=range(torch.cuda.device_count())),
            redirect_stdout(sys.stderr),
        ):
            random.seed(_SEEDS["random"])
            np.random.seed(_SEEDS["numpy"])
            torch.manual_seed(_SEEDS["torch"])
            yield
    finally:
        log.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


def load_tasks(name: str, tokenizer: Any) -> dict[str, Any]:
    """Load a task, group or tag of lm-eval, with its data.

    Args:
        name: as lm-eval knows it, or the path of a `.yaml` file; only its folder is then
            searched for what it refers to.
        tokenizer: for tasks that make texts of a given length in tokens, such as RULER's.

    Returns:
        What `TaskManager.load` returns: `tasks`, `groups`, `group_map`.

    Raises:
        UsageError: there is no such task, or its data cannot be loaded.
        MissingExtraError: lm-eval, or something else that the task needs, is not installed.
    """
    manager = require("lm_eval.tasks", "eval", f"run lm-eval:{name}").TaskManager
    path = Path(name)
    local = path.suffix in (".yaml", ".yml")
    if not name or (local and not path.is_file()):
        raise UsageError(
            f"there is no task file {name}: check the path"
            if name
            else "lm-eval: names no task: write lm-eval:TASK, or lm-eval:FILE.yaml"
        )
    with tempfile.TemporaryDirectory() as folder, as_lm_eval():
        tokenizer.save_pretrained(folder)
        try:
            if local:
                known = manager(
                    include_path=str(path.parent),
                    include_defaults=False,
                    metadata={"tokenizer": folder},
                )
            else:
                known = manager(metadata={"tokenizer": folder})
                if name not in known.all_tasks:
                    raise UsageError(f"lm-eval knows no task {name!r}: lm-eval ls tasks lists them")
            loaded: dict[str, Any] = known.load([_name_of(path, known) if local else name])
        except UsageError:
            raise
        except ImportError as error:
            raise MissingExtraError(
                f"lm-eval needs more to load {name}: {first_line(error)}"
            ) from error
        except Exception as error:  # tasks are other people's data and code: anything may be raised
            raise UsageError(
                f"lm-eval cannot load {name} ({type(error).__name__}: {first_line(error)}): check "
                "the task, and the connection where its data are on the hub"
            ) from error
    for task_name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UsageError(f"{task_name} runs code that the model writes; quantdiff does not")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def _name_of(path: Path, manager: Any) -> str:
    """The name of the task or group in a file: lm-eval 0.4.13 cannot load a group by its path."""
    for name, entry in manager.task_index.items():
        if entry.yaml_path is not None and Path(entry.yaml_path).resolve() == path.resolve():
            return str(name)
    return str(path)


def task_fingerprint(tasks: dict[str, Any], limit: int | None) -> tuple[str, int]:
    """SHA-256 of all that tasks ask and how they score it, as hex, and the number of documents.

    Args:
        tasks: by name.
        limit: documents of each task.

    Raises:
        UsageError: a task has no documents, or its requests cannot be built.
    """
    digest, count = hashlib.sha256(), 0
    for name in sorted(tasks):
        task = tasks[name]
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        try:
            with as_lm_eval():
                docs = [doc for _, doc in task.doc_iterator(limit=limit)]
                task.build_all_requests(limit=limit)
        except Exception as error:  # as above
            raise UsageError(
                f"lm-eval cannot ask the questions of {name} ({type(error).__name__}: "
                f"{first_line(error)}): check the task"
            ) from error
        # lm-eval's own dump writes nested functions with their addresses.
        config = task.config.to_dict(keep_callable=True)
        config = {k: v for k, v in config.items() if k not in _PLACES}
        asked = [instance.arguments for instance in task.instances]
        for part in (name, config, docs, asked):
            digest.update(json.dumps(part, sort_keys=True, default=_told).encode() + b"\n")
        count += len(docs)
    return digest.hexdigest(), count


def _told(value: Any) -> Any:
    """What JSON cannot represent, in a form that is the same in every process."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if callable(value):
        with suppress(TypeError, OSError):  # compiled, or a callable object
            return inspect.getsource(value)
    elif not re.search(r" at 0x[0-9a-fA-F]+", text := str(value)):
        return text
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', None)}.{kind.__qualname__}"
