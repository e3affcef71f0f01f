"""One prepared run that checks whether quantdiff is correct on this GPU, and how fast it is.

It needs torch and transformers, but no installation: it imports quantdiff from its own checkout.
Whatever the machine lacks, such as flash-attn, becomes a row with the reason.

    python scripts/gpu_check.py --minutes 6 --out runs/gpu_check.json
    python scripts/gpu_check.py --cpu     # all of it at small sizes, in about a minute

The exit code is 0 if everything ran and agreed, else 1.
"""

import argparse
import contextlib
import math
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpu_checks.common import Check, Found, MissingPartError, NotReachedError, Place  # noqa: E402

from quantdiff.files import write_json  # noqa: E402

# Parts in order, with the share of the time by which each of them must end.
SHARES = {
    "environment": 0.10,
    "log-sum-exp": 0.25,
    "tf32": 0.30,
    "attention": 0.45,
    "recording": 0.58,
    "maps": 0.63,
    "quantization": 0.70,
    "export": 0.76,
    "timing": 0.85,
    "flex recording": 0.91,
    "flex attention": 1.00,
}
LONGEST = 90  # seconds of one check, at most
VERDICTS = {True: "agreed", False: "NOT AGREED", None: "not finished"}


def parts(place: Place) -> dict[str, Callable[[], list[Check]]]:
    """Makers of each part's checks, which import only when called: no part can stop another."""

    def attention(flex: bool) -> list[Check]:
        from gpu_checks.attention import attention_checks

        return attention_checks(place, flex=flex)

    def recording(flex: bool) -> list[Check]:
        from gpu_checks.recording import recording_checks

        return recording_checks(place, flex=flex)

    def maps() -> list[Check]:
        from gpu_checks.maps import maps_checks

        return maps_checks(place)

    def quantization() -> list[Check]:
        from gpu_checks.quantization import quantization_checks

        return quantization_checks(place)

    def export() -> list[Check]:
        from gpu_checks.exports import export_checks

        return export_checks(place)

    def lse() -> list[Check]:
        from gpu_checks.logits import lse_checks

        return lse_checks(place)

    def tf32() -> list[Check]:
        from gpu_checks.logits import tf32_checks

        return tf32_checks(place)

    def timing() -> list[Check]:
        from gpu_checks.timing import timing_checks

        return timing_checks(place)

    def environment() -> list[Check]:
        from gpu_checks.machine import machine_checks

        return machine_checks(place)

    return {
        "environment": environment,
        "log-sum-exp": lse,
        "tf32": tf32,
        "attention": lambda: attention(False),
        "recording": lambda: recording(False),
        "maps": maps,
        "quantization": quantization,
        "export": export,
        "timing": timing,
        "flex recording": lambda: recording(True),
        "flex attention": lambda: attention(True),
    }


class Report:
    """The rows of all parts; the file is rewritten after each row.

    Attributes:
        content: what is written. `finished` is whether every part was reached and some check kept
            its bounds; `agreed` is False where something failed, and None where nothing failed but
            not everything ran.
    """

    def __init__(self, out: Path, device: str, minutes: float) -> None:
        self.out = out
        self.content: dict[str, Any] = {
            "device": device,
            "minutes": minutes,
            "finished": False,
            "agreed": None,
            "parts": {name: {"status": "not reached", "rows": []} for name in SHARES},
        }

    def save(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.out, self.content)

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.content["parts"][part]["rows"].append(row)
        print(f"{part}: {row['check']}: {row['status']}", file=sys.stderr, flush=True)
        self.save()

    def close(self, part: str, seconds: float) -> None:
        entry = self.content["parts"][part]
        found = {row["status"] for row in entry["rows"]}
        order = ("failed", "not reached", "ok", "missing")
        entry["status"] = next((name for name in order if name in found), "ok")
        entry["seconds"] = round(seconds, 1)
        self.save()

    def end(self) -> None:
        """Combine the results of all parts."""
        parts = self.content["parts"].values()
        rows = [row for part in parts for row in part["rows"]]
        found = {item["status"] for item in (*parts, *rows)}
        # Only a number that kept its bound counts: names and times are always ok.
        compared = any(row["status"] == "ok" and row["within"] for row in rows)
        self.content["finished"] = compared and "not reached" not in found
        if "failed" in found:
            self.content["agreed"] = False
        elif self.content["finished"]:
            self.content["agreed"] = True
        self.save()


def run_part(report: Report, name: str, make: Callable[[], list[Check]], place: Place) -> None:
    """Run all checks of a part, independently of each other."""
    begin = time.monotonic()
    try:
        checks = make()
    except Exception as error:
        report.add(name, {"check": "the part itself", **_failure(error)})
        checks = []
    for title, check in checks:
        report.add(name, {"check": title, **run_check(check, place)})
    report.close(name, time.monotonic() - begin)


def run_check(check: Callable[[], Found], place: Place) -> dict[str, Any]:
    """Status, numbers and reason of one check."""
    begin, until = time.monotonic(), place.until
    if place.left <= 0:
        return {"status": "not reached", "reason": "the time of this part was over"}
    place.until = min(until, begin + LONGEST)
    try:
        with _limit(place.left + 1):
            found = check()
            place.wait()
    except MissingPartError as error:
        return {"status": "missing", "reason": str(error)}
    except NotReachedError as error:
        return {"status": "not reached", "reason": str(error)}
    except Exception as error:
        return _failure(error)
    finally:
        place.until = until
        if place.device.type == "cuda":
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
    return {
        "status": "ok" if found.good else "failed",
        "seconds": round(time.monotonic() - begin, 2),
        "within": {
            key: {"error": _plain(error), "bound": bound}
            for key, (error, bound) in found.within.items()
        },
        "told": {key: _plain(value) for key, value in found.told.items()},
    }


def _plain(value: Any) -> Any:
    """The value itself, or text for a number that JSON lacks."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _failure(error: Exception) -> dict[str, Any]:
    return {
        "status": "failed",
        "reason": f"{type(error).__name__}: {error}"[:500],
        "trace": traceback.format_exception(error)[-6:],
    }


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Stop whatever takes longer, such as a compilation."""

    def over(*_: Any) -> None:
        raise NotReachedError(f"stopped after {seconds:.0f} s")

    known = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, known)


def table(content: dict[str, Any]) -> str:
    """All rows as text, the worst of a row's errors first."""
    lines = []
    for name, part in content["parts"].items():
        lines.append(f"\n{name}: {part['status']}, {part.get('seconds', 0.0):.1f} s")
        for row in part["rows"]:
            told = [f"{key} {_short(value)}" for key, value in row.get("told", {}).items()]
            errors = sorted(row.get("within", {}).items(), key=_share, reverse=True)
            shown = errors if row["status"] == "failed" else errors[:2]
            numbers = [f"{key} {_short(x['error'])} ≤ {x['bound']:.3g}" for key, x in shown]
            text = "; ".join([*numbers, *told, *([row["reason"]] if "reason" in row else [])])
            lines.append(f"  {row['status']:<11} {row['check']:<42} {text}")
    lines.append(f"\n{VERDICTS[content['agreed']]}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _share(item: tuple[str, dict[str, Any]]) -> float:
    error, bound = item[1]["error"], item[1]["bound"]
    if isinstance(error, str):
        return float("inf")
    return float(error) / bound if bound else float("inf" if error else -1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=6.0, help="what is not reached is told")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_check.json")
    parser.add_argument("--cpu", action="store_true", help="small sizes, on the CPU")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU here; --cpu runs all of it at small sizes")
    warnings.filterwarnings("ignore", message=".*TF32.*")
    place = Place(torch.device("cpu" if options.cpu else "cuda"), small=options.cpu)
    if options.cpu:
        # Compiling flex_attention takes longer here than all the rest, and for narrow heads the
        # compiled form is wrong on some CPUs.
        torch.compiler.set_stance("force_eager")
        torch.set_num_threads(1)  # the sizes are too small for more
    # The imports count too.
    begin, seconds = time.monotonic() - time.process_time(), options.minutes * 60
    report = Report(options.out, str(place.device), options.minutes)
    made = parts(place)
    for name, share in SHARES.items():
        place.until = begin + share * seconds
        run_part(report, name, made[name], place)
    report.end()
    print(table(report.content))
    print(f"{time.monotonic() - begin:.0f} s; {options.out}")
    return 0 if report.content["agreed"] else 1


if __name__ == "__main__":
    sys.exit(main())
