"""Record a tiny random model of every causal-LM family of the installed transformers.

For each family and attention implementation the recording is compared with what that model's own
eager code hands to softmax, which is caught as a tensor whatever the code looks like: the logits
after soft-cap and bias, with the mask added. Writes docs/families.md.

    python scripts/survey_families.py --out docs/families.md
    python scripts/survey_families.py llama gemma2 gpt_oss
"""

import argparse
import contextlib
import copy
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
from torch import Tensor
from torch.overrides import TorchFunctionMode

import quantdiff
from quantdiff.files import write_bytes

BACKENDS = ("eager", "sdpa", "flex_attention")

# Names that families give to the same few sizes. Only those a config has are set.
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64,
    "emb_dim": 64, "dim_model": 64, "word_embed_proj_dim": 64, "embedding_size": 64,
    "intermediate_size": 80, "ffn_dim": 80, "decoder_ffn_dim": 80, "encoder_ffn_dim": 80,
    "n_inner": 80, "dff": 80, "dim_ff": 80, "ffn_hidden_size": 80, "d_ff": 80,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "encoder_layers": 2, "num_decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "n_positions": 128,
    "max_sequence_length": 128, "seq_length": 128, "max_seq_len": 128, "n_ctx": 128,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_num_experts": 4, "moe_top_k": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "sliding_window": 8, "attention_chunk_size": 8,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
    "rotary_dim": 8, "rotary_pct": 0.5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "initializer_range": 0.2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1, 3],
    "is_decoder": True, "add_cross_attention": False, "use_cache": True,
}  # fmt: skip

LATENT = {"head_dim": 8, "num_key_value_heads": 4}

# What single families need beyond that.
SPECIAL: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 8},
    "xmod": {"default_language": "en_XX"},
}


@dataclass
class Result:
    """What one family gave: a word per backend, and reasons."""

    family: str
    name: str = ""
    words: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class SoftmaxInputs(TorchFunctionMode):
    """Keeps every tensor of attention's shape that goes into a softmax, and whose it is."""

    def __init__(self, model: torch.nn.Module, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.kept: list[tuple[str, Tensor]] = []
        self.stack: list[str] = []
        self.before_max: Tensor | None = None
        self.handles: list[Any] = []
        for name, module in model.named_modules():
            self.handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name))
            )
            self.handles.append(module.register_forward_hook(lambda *_: self.stack.pop() and None))

    def __exit__(self, *exception):
        for handle in self.handles:
            handle.remove()
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("softmax", "_softmax") and args:
            x = args[0]
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(x, Tensor) and dim in (-1, x.dim() - 1) and self.rows in x.shape[1:3]:
                before = self.before_max
                if before is not None and before.shape == x.shape and not x.amax(-1).any():
                    x = before  # its rows' maxima were taken off for stability
                self.kept.append((self.stack[-1] if self.stack else "", x.detach().clone()))
            self.before_max = None
        elif getattr(func, "__name__", "") == "max" and isinstance(args[0], Tensor):
            self.before_max = args[0]
        return func(*args, **kwargs)


def small_config(config_class: type, overrides: dict[str, Any]) -> Any:
    """A config of this class with small sizes, made by its own constructor."""
    default = config_class()
    known = {**vars(default), **dict.fromkeys(getattr(type(default), "attribute_map", {}))}
    fixed = {
        name for name in dir(type(default)) if isinstance(getattr(type(default), name), property)
    }
    given = {name: value for name, value in SIZES.items() if name in known and name not in fixed}
    if "qk_rope_head_dim" in known:  # multi-head latent attention
        given |= {n: v for n, v in LATENT.items() if n in known}
    for name, value in vars(default).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            given[name] = small_config(type(value), overrides).to_dict()
    layers = given.get("num_hidden_layers") or given.get("n_layer") or given.get("num_layers") or 4
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types"):
        kinds = getattr(default, name, None)
        if isinstance(kinds, list | tuple) and kinds and name not in fixed:
            # Every kind of layer that the family has, in its own order.
            unlike = list(dict.fromkeys(kinds))
            given[name] = (unlike * layers)[:layers]
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(default, name, None)
        if isinstance(value, dict):
            given[name] = copy.deepcopy(value)
    given.update(overrides)
    try:
        return config_class(**given)
    except Exception:
        # One size that the family ties to another: leave out what it refuses, one by one.
        for name in list(given):
            rest = {key: value for key, value in given.items() if key != name}
            with contextlib.suppress(Exception):
                return config_class(**rest)
        raise


def build(model_class: type, config: Any, attention: str, state: Any = None) -> torch.nn.Module:
    config = copy.deepcopy(config)
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention)
    if state is not None:
        model.load_state_dict(state)
    return model.eval()


def batch(vocabulary: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (3, 20), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def own_logits(
    model: torch.nn.Module, given: dict[str, Tensor]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What each module hands to softmax, with the entries that count: (B, H, N, M) both."""
    rows = given["input_ids"].shape[1]
    with torch.no_grad(), SoftmaxInputs(model, rows) as catch:
        model(**given, use_cache=False)
    real = given["attention_mask"].bool()
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, caught in catch.kept:
        x = caught.float()
        if x.dim() == 3 and x.shape[0] % len(real) == 0:
            x = x.view(len(real), -1, *x.shape[1:])
        if x.dim() != 4 or x.shape[2] != rows or x.shape[3] < rows or x.shape[0] != len(real):
            continue
        s = x[..., :rows]  # without a sink's column
        seen = (s > torch.finfo(caught.dtype).min / 2) & real[:, None, :, None]
        calls = found.setdefault(name, [])
        # DiffLlama goes twice over the same queries and keys.
        if seen.any() and not (calls and torch.equal(calls[-1][0], s)):
            calls.append((s, seen.expand(s.shape)))
    return {name: calls for name, calls in found.items() if calls}


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
    """Every layer's output, and the model's own list of hidden states where it gives one."""
    sites = profile.hidden_states.sites
    modules = dict(model.named_modules())
    outputs: dict[str, list[Tensor]] = {site.name: [] for site in sites}

    def keep(name):
        def hook(module, args, output):
            first = output if isinstance(output, Tensor) else output[0]
            outputs[name].append(first)

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in outputs]
    with torch.no_grad():
        states = model(**given, use_cache=False, output_hidden_states=True).get("hidden_states")
    for handle in handles:
        handle.remove()
    real = given["attention_mask"].bool()
    for site in sites:
        values = torch.cat([output[real].flatten().double() for output in outputs[site.name]])
        if len(values) != site.count[0]:
            return f"hidden states of {site.name}: {site.count[0]} counted, {len(values)} there"
        largest, mean = float(values.abs().max()), float(values.mean())
        near = abs(float(site.absmax[0]) - largest) <= 1e-4 * largest
        if not near or abs(site.moments.mean[0] - mean) > 1e-4 * float(values.std()):
            return f"hidden states of {site.name}: {float(site.absmax[0])} against {largest}"
    # Of the model's own list the last entry has been through the final norm.
    once = all(len(kept) == 1 for kept in outputs.values())
    if states is not None and once and len(states) == len(sites) + 1:
        for site, state in zip(sites[:-1], states[1:-1], strict=True):
            if not torch.equal(state, outputs[site.name][0]):
                return f"hidden states of {site.name} are not those that the model calls so"
    return ""


def survey(family: str, backends: Sequence[str] = BACKENDS) -> Result:
    """Try one family under each backend."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    result = Result(family)
    try:
        config_class = CONFIG_MAPPING[family]
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        result.name = model_class.__name__
        config = small_config(config_class, SPECIAL.get(family, {}))
        model = build(model_class, config, "eager")
        parameters = sum(p.numel() for p in model.parameters())
        if parameters > 60_000_000:
            raise RuntimeError(f"not made small: {parameters:,} parameters")
        state = model.state_dict()
        vocabulary = model.get_input_embeddings().weight.shape[0]
        given = batch(min(vocabulary, 96))
        own = own_logits(model, given)
    except Exception as error:
        reason = f"the model could not be built or run: {_short(error)}"
        for backend in backends:
            result.words[backend], result.reasons[backend] = "not tried", reason
        return result
    for backend in backends:
        word, reason = "", ""
        try:
            other = model if backend == "eager" else build(model_class, config, backend, state)
        except Exception as error:
            word, reason = "not offered", _short(error)
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
        return "not offered", _short(error)
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
        difference = f"the comparison failed: {_short(error)}"
    return ("WRONG", difference) if difference else ("exact", "")


def _differs(model: torch.nn.Module, other: torch.nn.Module, given: dict[str, Tensor]) -> bool:
    """Whether two backends of one model disagree at real tokens."""
    real = given["attention_mask"].bool()
    with torch.no_grad():
        a, b = (m(**given, use_cache=False).logits[real] for m in (model, other))
    return bool((a - b).abs().max() > 1e-3 * a.abs().max())


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:160]


def page(results: list[Result]) -> str:
    """The results as Markdown."""
    from quantdiff.versions import versions

    both = [r for r in results if r.words["eager"] == r.words["sdpa"] == "exact"]
    wrong = [r for r in results if "WRONG" in r.words.values()]
    made = ", ".join(f"{name} {value}" for name, value in versions().items())
    lines = [
        "# Families",
        "",
        "Made by `scripts/survey_families.py`: a tiny random model of every causal-LM family of "
        "the installed transformers, recorded under each attention implementation and compared "
        "with what the model's own eager code hands to softmax (counts equal, extremes to 1e-4).",
        "",
        f"- {len(both)} of {len(results)} families are exact under eager and sdpa;",
        f"- {len(wrong)} give a wrong number;",
        "- *unpadded*: exact without padding; with it the family's own backends differ, so that "
        "there is nothing to compare with;",
        "- *refused*: quantdiff says why it will not record; *not offered*: the family does not "
        "run with this implementation here; *crashed*: the forward ends the process, also without "
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
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
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
