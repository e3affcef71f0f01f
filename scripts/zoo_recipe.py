"""The recipe of the zoo, which train_zoo.py follows: text, tokens, order, models, schedule."""

import hashlib
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from quantdiff.models import DiffV2Config, DiffV2ForCausalLM

__all__ = ["KINDS", "SIZES", "Recipe", "Stream", "bigram_loss", "build", "train_tokenizer"]

KINDS = ("transformer", "diff-v1", "diff-v2")
VOCABULARY = 4096
END = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a training run, except the kind of attention.

    Attributes:
        hidden, layers, heads, ffn: of the Transformer; V1 has the same projections, V2 twice the
            query heads and a narrower feed-forward part that pays for them.
        length: tokens per window; batch: windows per step; tokens: to train on.
        rate: peak learning rate, reached after `warmup` steps, then cosine to a tenth.
        dtype: of the computation, by autocast; the weights are fp32.
        eps: of all norms; the configs of Llama and DiffLlama differ in their defaults.
    """

    hidden: int
    layers: int
    heads: int
    ffn: int
    length: int
    batch: int
    tokens: int
    rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.1
    seed: int = 0
    dtype: str = "bfloat16"
    eps: float = 1e-6

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return math.ceil(self.tokens / (self.length * self.batch))

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, 0 … steps − 1."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def fingerprint(self, kind: str, data: str) -> str:
        """SHA-256 over the recipe, the kind and the data's own fingerprint."""
        told = json.dumps([asdict(self), kind, data], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()


SIZES = {
    "tiny": Recipe(64, 2, 4, 176, length=64, batch=8, tokens=8_000, warmup=5),
    "small": Recipe(128, 4, 4, 344, length=256, batch=16, tokens=3_000_000),
    "base": Recipe(256, 6, 8, 688, length=256, batch=32, tokens=20_000_000),
    "medium": Recipe(
        512, 12, 8, 1376, length=1024, batch=64, tokens=1_000_000_000, rate=1e-3, warmup=500
    ),
    "large": Recipe(
        1024, 24, 16, 2752, length=2048, batch=128, tokens=10_000_000_000, rate=6e-4, warmup=1000
    ),
}


def build(kind: str, recipe: Recipe) -> Any:
    """A model with fresh weights, drawn from the recipe's seed."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "max_position_embeddings": recipe.length,
        "rms_norm_eps": recipe.eps,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    heads, width = recipe.heads, recipe.hidden // recipe.heads
    torch.manual_seed(recipe.seed)
    if kind == "diff-v2":
        # The query takes hidden² more weights and λ hidden·heads; three projections pay for them.
        narrower = recipe.ffn - round((recipe.hidden + heads) / 3)
        return DiffV2ForCausalLM(
            DiffV2Config(
                **common,
                num_attention_heads=2 * heads,
                num_key_value_heads=heads,
                head_dim=width,
                intermediate_size=narrower,
            )
        )
    pair = {
        "transformer": (LlamaConfig, LlamaForCausalLM),
        "diff-v1": (DiffLlamaConfig, DiffLlamaForCausalLM),
    }
    config, model = pair[kind]
    return model(
        config(
            **common,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=recipe.ffn,
        )
    )


def documents(path: Path) -> Iterator[str]:
    """The texts of a .jsonl.xz file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def train_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 4,096 tokens, the first of which ends a document."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(documents(path), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END, eos_token=END, clean_up_tokenization_spaces=False
    )


class Stream:
    """All documents in a row, each with its end token, cut into windows.

    The order of the windows is drawn anew for each epoch from the seed alone, so that step n sees
    the same tokens whatever ran before it, and whichever kind of model is trained.

    Attributes:
        tokens: all of them, (T,) uint16.
        fingerprint: SHA-256 of the tokens.
    """

    def __init__(self, path: Path, tokenizer: Any, length: int) -> None:
        end = tokenizer.eos_token_id
        texts = tokenizer.backend_tokenizer.encode_batch(list(documents(path)))
        self.tokens = np.concatenate([np.array([*text.ids, end], np.uint16) for text in texts])
        self.length = length
        self.fingerprint = hashlib.sha256(self.tokens.astype("<u2").tobytes()).hexdigest()

    @property
    def windows(self) -> int:
        """Whole windows in one epoch."""
        return len(self.tokens) // self.length

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The windows of one step, (size, length) int64."""
        places = []
        for index in range(step * size, (step + 1) * size):
            epoch, place = divmod(index, self.windows)
            places.append(self._order(epoch, seed)[place])
        rows = [self.tokens[p * self.length : (p + 1) * self.length] for p in places]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _order(self, epoch: int, seed: int) -> Any:
        known = getattr(self, "_drawn", None)
        if known is None or known[0] != (epoch, seed):
            order = np.random.default_rng([seed, epoch]).permutation(self.windows)
            self._drawn = known = ((epoch, seed), order)
        return known[1]


def bigram_loss(train: Any, windows: Any, prior: float = 16.0) -> float:
    """Nats per token of a bigram model, over the tokens that a model is scored on.

    p(b | a) = (n(a, b) + prior · p(b)) / (n(a) + prior), where p(b) has one added to every count.

    Args:
        train: tokens that are counted, (T,).
        windows: tokens that are scored, all but the first of each window, (W, N).
        prior: weight of the single tokens' frequencies.
    """
    pairs = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    single = np.bincount(train, minlength=VOCABULARY) + 1.0
    single /= single.sum()
    a, b = windows[:, :-1], windows[:, 1:]
    chance = (pairs[a, b] + prior * single[b]) / (pairs.sum(1)[a] + prior)
    return float(-np.log(chance).mean())
