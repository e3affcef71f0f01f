"""Record a tiny random model of every causal-LM family of the installed transformers.

For each family and attention implementation, the recording is compared with what the model's own
eager code passes to softmax, which is caught as a tensor whatever the code looks like: the logits
after soft-cap and bias, with the mask added. Writes docs/families.md.

    python scripts/survey_families.py --out docs/families.md
    python scripts/survey_families.py llama gemma2 gpt_oss
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_families import batch, build, family_classes, own_logits, short, small_config, untried
from torch import Tensor

import quantdiff
from quantdiff.files import write_bytes

BACKENDS = ("eager", "sdpa", "flex_attention")


@dataclass
class Result:
    """The outcome of one family: a word per backend, and reasons."""

    family: str
    name: str = ""
    words: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def compare(
    recorder: Any,
    own: dict[str, list[tuple[Tensor, Tensor]]],
    model: torch.nn.Module,
    given: dict[str, Tensor],
) -> str:
    """Empty where every site agrees, else what differs."""
    profile = recorder.profile()
    sites = {site.name.partition(" ")[0]: site for site in profile.attention_logits.sites}
    missing = set(own) ^ set(sites)
    if missing:
        return f"recorded {sorted(sites)}, there are {sorted(own)}"
    for name, calls in own.items():
        site = sites[name]
        heads = calls[0][0].shape[1]
        if heads != site.groups:
            return f"{name}: {site.groups} heads recorded, {heads} found"
        counts = sum(seen.sum((0, 2, 3)) for _, seen in calls).numpy()
        if not (counts == site.count).all():
            return f"{name}: {site.count.tolist()} logits counted, {counts.tolist()} there"
        low = [torch.where(seen, x, torch.inf).amin((0, 2, 3)) for x, seen in calls]
        high = [torch.where(seen, x, -torch.inf).amax((0, 2, 3)) for x, seen in calls]
        least, most = torch.stack(low).amin(0).numpy(), torch.stack(high).amax(0).numpy()
        size = np.maximum(np.abs(least), np.abs(most))
        for mine, theirs in ((site.min, least), (site.max, most)):
            if (np.abs(mine - theirs) > 1e-4 * size + 1e-6).any():
                return f"{name}: extremes {mine.tolist()} against {theirs.tolist()}"
        for head in range(heads):
            values = torch.cat([x[:, head][seen[:, head]].double() for x, seen in calls])
            mean, std = float(values.mean()), float(values.std(correction=0))
            near = abs(site.moments.mean[head] - mean) <= 1e-4 * std + 1e-6
            if not near or abs(site.moments.std[head] - std) > 1e-3 * std + 1e-6:
                return f"{name}: mean or standard deviation of head {head}"
    return _compare_hidden(profile, model, given)


def _compare_hidden(profile: Any, model: torch.nn.Module, given: dict[str, Tensor]) -> str:
    """Every layer's output, and the model's own list of hidden states where it returns one."""
    sites = profile.hidden_states.sites
    modules = dict(model.named_modules())
    outputs: dict[str, Tensor] = {}

    def keep(name):
        def hook(module, args, output):
            outputs[name] = output if isinstance(output, Tensor) else output[0]

        return hook

    handles = [modules[site.name].register_forward_hook(keep(site.name)) for site in sites]
    with torch.no_grad():
        states = model(**given, use_cache=False, output_hidden_states=True).get("hidden_states")
    for handle in handles:
        handle.remove()
    real = given["attention_mask"].bool()
    for site in sites:
        values = outputs[site.name][real].flatten().double()
        if len(values) != site.count[0]:
            return f"hidden states of {site.name}: {site.count[0]} counted, {len(values)} there"
        largest, mean = float(values.abs().max()), float(values.mean())
        near = abs(float(site.absmax[0]) - largest) <= 1e-4 * largest
        if not near or abs(site.moments.mean[0] - mean) > 1e-4 * float(values.std()):
            return f"hidden states of {site.name}: {float(site.absmax[0])} against {largest}"
    # The last entry of the model's own list has been through the final norm.
    if states is not None and len(states) == len(sites) + 1:
        for site, state in zip(sites[:-1], states[1:-1], strict=True):
            if not torch.equal(state, outputs[site.name]):
                return f"hidden states of {site.name} are not those that the model calls so"
    return ""


def survey(family: str, backends: Sequence[str] = BACKENDS) -> Result:
    """Try one family under each backend."""
    result = Result(family)
    try:
        config_class, model_class = family_classes(family)
        result.name = model_class.__name__
        config = small_config(config_class)
        model = build(model_class, config, "eager")
        state = model.state_dict()
        given = batch(model)
        own = own_logits(model, given)
    except Exception as error:
        reason = untried(family, error)
        for backend in backends:
            result.words[backend], result.reasons[backend] = "not tried", reason
        return result
    for backend in backends:
        word, reason = "", ""
        try:
            other = model if backend == "eager" else build(model_class, config, backend, state)
        except Exception as error:
            word, reason = "not offered", short(error)
        else:
            word, reason = _try(other, given, own)
            if word == "WRONG" and _differs(model, other, given):
                # The family itself lets padding leak under this backend: compare without any.
                bare = {**given, "attention_mask": torch.ones_like(given["attention_mask"])}
                word, reason = _try(other, bare, own_logits(model, bare))
                if word == "exact":
                    word = "unpadded"
                    reason = f"with padding, {backend} and eager differ in the model itself"
        result.words[backend], result.reasons[backend] = word, reason
    return result


def _try(model: torch.nn.Module, given: dict[str, Tensor], own: dict[str, Any]) -> tuple[str, str]:
    try:
        with torch.no_grad():
            before = model(**given, use_cache=False)
    except Exception as error:
        return "not offered", short(error)
    try:
        with torch.no_grad(), quantdiff.record(model) as recorder:
            during = model(**given, use_cache=False)
    except quantdiff.RecordingError as error:
        return "refused", str(error)
    if not torch.equal(before.logits.nan_to_num(), during.logits.nan_to_num()):
        return "WRONG", "the model's output changed"
    try:
        difference = compare(recorder, own, model, given)
    except Exception as error:
        difference = f"the comparison failed: {short(error)}"
    return ("WRONG", difference) if difference else ("exact", "")


def _differs(model: torch.nn.Module, other: torch.nn.Module, given: dict[str, Tensor]) -> bool:
    """Whether two backends of one model disagree at real tokens."""
    real = given["attention_mask"].bool()
    with torch.no_grad():
        a, b = (m(**given, use_cache=False).logits[real] for m in (model, other))
    return bool((a - b).abs().max() > 1e-3 * a.abs().max())


def page(results: list[Result]) -> str:
    """The results as Markdown."""
    from quantdiff.versions import versions

    both = [r for r in results if r.words["eager"] == r.words["sdpa"] == "exact"]
    single = sum("exact" in (r.words["eager"], r.words["sdpa"]) for r in results) - len(both)
    wrong = [r for r in results if "WRONG" in r.words.values()]
    made = ", ".join(f"{name} {value}" for name, value in versions().items())
    lines = [
        "# Families",
        "",
        "Written by `scripts/survey_families.py`: a tiny random model of every causal-LM family of "
        "the installed transformers is recorded under each attention implementation and compared "
        "with what its own eager code passes to softmax (counts equal; extremes and means to "
        "1e-4, standard deviations to 1e-3). flex_attention runs in its plain form, since torch "
        "2.13 compiles it incorrectly for the narrow heads of tiny models on CPUs without AVX-512.",
        "",
        f"- {len(both)} of {len(results)} families are exact under eager and sdpa, and {single} "
        "more under one of the two;",
        f"- {len(wrong)} give a wrong number;",
        "- *unpadded*: exact without padding; with padding the family's own backends differ, so "
        "there is nothing to compare with;",
        "- *refused*: quantdiff states why it does not record; *not offered*: the family does not "
        "run with this implementation here; *crashed*: the forward ends the process, even without "
        "quantdiff; *not tried*: no tiny model could be built or run.",
        "",
        f"Versions: {made}.",
        "",
        "| family | model | eager | sdpa | flex | reason |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        reasons = "; ".join(dict.fromkeys(reason for reason in r.reasons.values() if reason))
        cells = [
            r.family,
            r.name,
            *(r.words.get(b, "not tried") for b in BACKENDS),
            reasons.replace("|", "\\|"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def work(families: list[str], backends: list[str]) -> int:
    """Survey families, one JSON line each."""
    for family in families:
        # flex_attention in its plain form: torch 2.13's compiled one is wrong for the narrow heads
        # of tiny models on CPUs without AVX-512, and takes minutes to compile.
        with (
            torch.compiler.set_stance("force_eager"),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            result = survey(family, backends)
        print(json.dumps(asdict(result)), flush=True)
        gc.collect()
        torch._dynamo.reset()
    return 0


def supervise(families: list[str], backends: list[str]) -> Iterator[Result]:
    """Survey in a process of its own: a family that ends it does not end the survey."""
    left = list(families)
    while left:
        command = [sys.executable, __file__, "--worker", *left, "--backends", *backends]
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert worker.stdout is not None
        for line in worker.stdout:
            yield Result(**json.loads(line))
            left.pop(0)
        if worker.wait() and left:
            yield one_by_one(left.pop(0), backends)


def one_by_one(family: str, backends: list[str]) -> Result:
    """Each backend in a process of its own, to see which of them ends it."""
    merged = Result(family)
    for backend in backends:
        command = [sys.executable, __file__, "--worker", family, "--backends", backend]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            merged.words[backend] = "crashed"
            merged.reasons[backend] = f"{backend} ends the process"
            continue
        part = Result(**json.loads(done.stdout.splitlines()[-1]))
        merged.name = part.name
        merged.words |= part.words
        merged.reasons |= part.reasons
    return merged


def main() -> int:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", help="default: all of them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backends", nargs="*", default=BACKENDS, choices=BACKENDS)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    families = options.families or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if options.worker:
        return work(families, options.backends)
    results = []
    for result in supervise(families, options.backends):
        results.append(result)
        reasons = "; ".join(dict.fromkeys(reason for reason in result.reasons.values() if reason))
        print(
            f"{result.family:24}",
            *(f"{result.words[b]:12}" for b in options.backends),
            reasons[:150],
            flush=True,
        )
    if options.out:
        write_bytes(options.out, page(results).encode())
    return int(any("WRONG" in r.words.values() for r in results))


if __name__ == "__main__":
    sys.exit(main())
