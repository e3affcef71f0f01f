"""Every checkpoint format: written, loaded again, and the logits compared bit for bit."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import quantdiff
from gpu_checks.common import Check, Found, MissingPartError, Place
from quantdiff.errors import MissingExtraError
from quantdiff.export.formats import FORMATS, find_format
from quantdiff.export.passage import last_logits
from quantdiff.export.sidecar import LOGITS, QUANTIZED_LOGITS, read_sidecar

__all__ = ["export_checks"]

VOCABULARY = 256


def export_checks(place: Place) -> list[Check]:
    """All formats in this process, and one as a user gets it, verified in a new one."""
    checks: list[Check] = [(name, partial(_reload, place, name)) for name in FORMATS]
    if not place.small:
        checks.append(("bnb-nf4 in a new process", partial(_verified, place)))
    return checks


def _model(place: Place) -> LlamaForCausalLM:
    width = 128 if place.small else 512
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if place.small else torch.bfloat16
    return LlamaForCausalLM(config).eval().to(place.device, dtype)


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _export(place: Place, name: str, folder: Path, *, check: bool) -> None:
    scheme = quantdiff.Scheme("attention_logits", 4, granularity="head")
    windows = []
    if find_format(name).calibrated:
        windows = list(torch.randint(VOCABULARY, (8, 128)))
    try:
        quantdiff.export(
            _model(place), _tokenizer(), folder, format=name, schemes=[scheme],
            calibration=windows, check=check,
        )  # fmt: skip
    except MissingExtraError as error:
        raise MissingPartError(str(error)) from None


def _reload(place: Place, name: str) -> Found:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkpoint"
        _export(place, name, folder, check=False)
        sidecar = read_sidecar(folder)
        ids = sidecar.content["passage"]["ids"]
        dtype = getattr(torch, sidecar.content["export"]["dtype"])
        own = find_format(name).load(folder, place.device, dtype, trust_remote_code=False)
        ours, _ = quantdiff.load(folder, device=place.device)
        within = {
            "own loader": (_gap(last_logits(own, ids), sidecar.logits[LOGITS]), 0.0),
            "quantdiff.load": (_gap(last_logits(ours, ids), sidecar.logits[QUANTIZED_LOGITS]), 0.0),
        }
        return Found(within, {"bits per weight": sidecar.content["size"]["bits_per_weight"]})


def _gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _verified(place: Place) -> Found:
    with tempfile.TemporaryDirectory() as parent:
        _export(place, "bnb-nf4", Path(parent) / "checkpoint", check=True)
        return Found(told={"verified": True})
