"""Whether an exported folder is what was measured: its files, and the model they contain."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import quantdiff
from quantdiff.errors import UsageError
from quantdiff.export.contents import check_files, check_tensors, pickles
from quantdiff.export.formats import Format, Options, find_format, package_versions
from quantdiff.export.passage import environment
from quantdiff.export.sidecar import (
    ARRAYS,
    LOGITS,
    QUANTIZED_LOGITS,
    SIDECAR,
    VERIFICATION,
    DamagedError,
    Sidecar,
    read_sidecar,
    reading,
)
from quantdiff.files import write_json
from quantdiff.models.options import resolve_device
from quantdiff.versions import versions

__all__ = ["Check", "Verification", "set_aside", "verify"]

FORMAT = "quantdiff.verification/1"

# Largest difference of a logit on another machine, relative to the largest logit: the effect of
# other kernels' order of summation.
_CLOSE = {"float32": 1e-5, "float64": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
# Where activations are rounded, one value on the other side of a boundary changes all that follows,
# so two machines give two draws of the rounding noise. With 8-bit linear inputs, the logits of
# SmolLM2-135M then move by 0.27 of their spread over the vocabulary (root mean squares); about
# twice that is allowed. Unrelated logits are √2 spreads apart.
_ROUNDED = 0.5
_TOLD = 300  # characters of another program's error


@dataclass(frozen=True)
class Check:
    """One check and its result.

    Attributes:
        name: for example `files`.
        passed: whether all is as it should be.
        detail: what was found, or what is wrong.
        compared: False if the check says nothing about the checkpoint: a loader did not run because
            memory is short or a package broken; rounding may move the logits anywhere; or those are
            as close as another machine's may be, but not equal on the machine of the record.
    """

    name: str
    passed: bool
    detail: str
    compared: bool = True


@dataclass
class Verification:
    """What a verification found.

    Attributes:
        folder: the checkpoint.
        checks: in the order in which they were made; they end after a failed one that the next
            depends on.
        seconds: how long it took.
        unwritten: why `verification.json` could not be written, or empty.
    """

    folder: str
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    unwritten: str = ""

    @property
    def passed(self) -> bool:
        """Whether all checks were made and passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def differs(self) -> bool:
        """Whether something was found to differ from what was exported."""
        return any(check.compared and not check.passed for check in self.checks)

    @property
    def failures(self) -> list[str]:
        """What is wrong, one sentence each."""
        return [check.detail for check in self.checks if not check.passed]

    def to_json(self) -> dict[str, Any]:
        """The content of `verification.json`."""
        return {
            "format": FORMAT,
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "seconds": round(self.seconds, 3),
            "versions": versions(),
        }

    def _add(self, name: str, wrong: list[str], right: str) -> bool:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        self.checks.append(Check(name, not wrong, f"{wrong[0]}{more}" if wrong else right))
        return not wrong


def verify(
    folder: str | Path,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    report: Callable[[str], None] | None = None,
) -> Verification:
    """Check an exported folder, and write `verification.json` into it.

    Its files are compared with their hashes, its tensors are inspected, and it is loaded in a new
    process, once by the format's own loader and once by `quantdiff.load`, with its schemes. The
    logits that both give for a short passage are compared with those from before it was saved:
    to the bit on the same kind of machine with the same versions, otherwise to 1e-5 of the largest
    logit in fp32. Where activations are rounded to few bits, a value that falls on the other side
    of a rounding boundary changes all that follows: on another machine the root mean square of the
    differences may be twice that between the recorded logits with and without the schemes, plus
    half the logits' spread where the format's own loader rounds.

    Args:
        folder: what `quantdiff.export` wrote.
        device: where it is loaded; by default as in `quantdiff.load`.
        trust_remote_code: run modelling code in the folder that is not quantdiff's own.
        report: called with the name of each step.

    Raises:
        UsageError: it is not an exported folder, is of a newer version or cannot be read here; or
            it needs code that is not trusted.
        MissingExtraError: a package that its format needs is not installed.
    """
    folder, begin = Path(folder).expanduser(), time.perf_counter()
    with reading(folder):
        there = (folder / SIDECAR).is_file()
    if not there:
        raise UsageError(
            f"{folder} holds no exported checkpoint ({SIDECAR} is missing): give a folder that "
            "quantdiff export wrote"
        )
    where = resolve_device(device)
    result = Verification(str(folder))
    if report is not None:
        report("comparing the files with their hashes")
    with reading(folder):
        sidecar = _static(folder, result)
    if sidecar is not None and result.passed:
        chosen = find_format(sidecar.content["export"]["format"])
        chosen.check(Options(), where)
        trusted = trust_remote_code or not _foreign_code(folder, sidecar)
        if not trusted:
            raise UsageError(
                f"{folder} brings its own modelling code: read it, and if you trust it pass "
                "--trust-remote-code (trust_remote_code=True in Python)"
            )
        if report is not None:
            report("loading it in a new process")
        _reload(folder, sidecar, chosen, where, result)
    result.seconds = time.perf_counter() - begin
    try:
        write_json(folder / VERIFICATION, result.to_json())
    except OSError as error:  # the folder may be somebody else's
        result.unwritten = f"{folder / VERIFICATION} cannot be written: {error.strerror}"
    return result


def _static(folder: Path, result: Verification) -> Sidecar | None:
    """The checks that need no model."""
    found = pickles(folder)
    result._add(
        "pickles",
        [f"{name} is a pickle, which can run any code" for name in found],
        "there is no pickle",
    )
    try:
        sidecar = read_sidecar(folder)
    except DamagedError as error:
        result._add("sidecar", [str(error)], "")
        return None
    result._add("sidecar", [], f"{SIDECAR} and {ARRAYS} belong together")
    content = sidecar.content
    wrong = check_files(folder, content)
    size = sum(entry["bytes"] for entry in content["files"].values())
    result._add("files", wrong, f"{len(content['files'])} files, {size:,} bytes, as exported")
    count, wrong = check_tensors(folder)
    result._add("tensors", wrong, f"{count:,} tensors finite, all scales greater than 0")
    return sidecar


def _foreign_code(folder: Path, sidecar: Sidecar) -> bool:
    """Whether there is code that is not quantdiff's own."""
    import quantdiff.models

    own = Path(quantdiff.models.__file__).parent / "diff_v2"
    for name in sidecar.content["files"]:
        if name.endswith(".py"):
            ours = own / name
            if not ours.is_file() or ours.read_bytes() != (folder / name).read_bytes():
                return True
    return False


def _reload(
    folder: Path, sidecar: Sidecar, chosen: Format, device: torch.device, result: Verification
) -> None:
    """Load the folder in a new process and compare the logits."""
    known = sidecar.content["reference"]
    threads = known["threads"] or torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="quantdiff-verify-") as place:
        out = Path(place) / "logits.safetensors"
        # Nothing is fetched, no module cache of the user serves another version of the code, and
        # this quantdiff is found wherever it was imported from.
        environ = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": f"{place}/modules",
            "PYTHONPATH": os.pathsep.join(
                filter(
                    None, [str(Path(quantdiff.__file__).parents[1]), os.environ.get("PYTHONPATH")]
                )
            ),
        }
        run = subprocess.run(
            [sys.executable, "-m", "quantdiff.export.reload", str(folder.absolute()), str(out),
             str(device), str(threads)],
            env=environ, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        found = load_file(out) if out.is_file() else {}
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    # The new process used the thread count of the record.
    here = environment(device) | versions() | {"threads": known["threads"]}
    same = here == known and package_versions(chosen) == sidecar.content["packages"]
    dtype = sidecar.content["export"]["dtype"]
    for name, what in (
        (LOGITS, f"the loader of {chosen.name}"),
        (QUANTIZED_LOGITS, "quantdiff.load"),
    ):
        if name not in found:
            told = f"{what} fails: {lines[-1][:_TOLD]}"
            result.checks.append(Check(name, passed=False, detail=told, compared=False))
            return
        # Without schemes, quantdiff.load gives the weights alone too.
        wanted = sidecar.logits.get(name, sidecar.logits[LOGITS])
        rounding = _rounding(wanted, sidecar.logits[LOGITS], chosen)
        check = _compare(name, found[name], wanted, _CLOSE[dtype], rounding, same=same)
        result.checks.append(replace(check, detail=f"{what} gives {check.detail}"))


def _rounding(wanted: Tensor, plain: Tensor, chosen: Format) -> float:
    """How far rounded activations may move logits on another machine, as a root mean square.

    Args:
        wanted: (R, V), those of the record.
        plain: (R, V), those of the record without schemes.
        chosen: the format.
    """
    # On both machines the schemes move the same logits, by about as much as in the record.
    own = 2 * _rms(wanted - plain)
    return own + _ROUNDED * _spread(wanted) if chosen.rounds_activations else own


def _compare(
    name: str, found: Tensor, wanted: Tensor, close: float, rounding: float, *, same: bool
) -> Check:
    """Whether logits are those of the record, and how far they are from it.

    Args:
        name: of the check.
        found: (R, V).
        wanted: (R, V), those of the record.
        close: the largest difference on another machine than that of the record, relative to the
            largest logit, without any rounding of activations.
        rounding: what `_rounding` gives.
        same: whether this is the machine of the record, where no difference is allowed; one
            within `close` says something about the machine and not about the checkpoint.
    """
    if found.shape != wanted.shape:
        told = f"logits of shape {tuple(found.shape)} and not {tuple(wanted.shape)}"
        return Check(name, passed=False, detail=told)
    if torch.equal(found, wanted):
        return Check(name, passed=True, detail="the logits from before it was saved, to the bit")
    gap, size = (found - wanted).abs().max().item(), wanted.abs().max().item()
    told = f"logits that differ by {gap:.3g} where the largest is {size:.3g}"
    if same:
        told += ", on the same kind of machine"
        return Check(name, passed=False, detail=told, compared=not gap <= close * size)
    told += ", on another kind of machine"
    if not rounding:
        return Check(name, passed=gap <= close * size, detail=told)
    gap, spread, limit = _rms(found - wanted), _spread(wanted), rounding + close * size
    told += f"; the root mean square of the differences is {gap:.3g}"
    if not gap <= limit:  # NaN too
        more = f", more than the {limit:.3g} that the rounding of activations explains"
        return Check(name, passed=False, detail=told + more)
    if gap > spread:
        more = (
            f" and that of the logits about their mean {spread:.3g}: at so few bits the rounding "
            "of activations explains any logits; verify it on the kind of machine that exported it"
        )
        return Check(name, passed=False, detail=told + more, compared=False)
    more = f", which the rounding of activations explains (up to {min(limit, spread):.3g})"
    return Check(name, passed=True, detail=told + more)


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def _spread(logits: Tensor) -> float:
    """Root mean square of (R, V) logits about their row's mean, which does not affect softmax."""
    return _rms(logits - logits.mean(1, keepdim=True))


def set_aside(folder: str | Path) -> Path:
    """Rename a checkpoint; its new name ends in `.failed`, or in `.failed-N`.

    Raises:
        UsageError: it cannot be renamed.
    """
    folder = Path(folder).expanduser().resolve()
    names = [f"{folder.name}.failed", *(f"{folder.name}.failed-{n}" for n in range(2, 1000))]
    target = next(folder.with_name(name) for name in names if not folder.with_name(name).exists())
    try:
        folder.rename(target)
    except OSError as error:
        raise UsageError(f"{folder} cannot be renamed to {target.name}: {error.strerror}") from None
    return target
