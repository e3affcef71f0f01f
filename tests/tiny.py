"""Tiny random models of real transformers classes, and a real byte-level tokenizer for them.

Everything is deterministic: the same call gives the same weights, and the global random state is
left as it was.
"""

from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from quantdiff.models import DiffV2Config, DiffV2ForCausalLM

__all__ = [
    "VOCABULARY",
    "build",
    "save_tiny",
    "tiny_diff_v2",
    "tiny_diffllama",
    "tiny_ids",
    "tiny_llama",
    "tiny_tokenizer",
]

Model = TypeVar("Model", bound=PreTrainedModel)

# Three special tokens, the 256 bytes, and a few merges so that some tokens span several bytes.
SPECIALS = ("<s>", "</s>", "<pad>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("a", "n"), ("an", "d"))
VOCABULARY = len(SPECIALS) + 256 + len(MERGES)

# pad_token_id stays unset in the model: transformers would zero the pad token's embedding, and a
# test that padding changes nothing would then pass too easily. initializer_range is ten times the
# usual one, or attention would be all but uniform at this width.
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def build(model_class: type[Model], config: Any, seed: int = 0) -> Model:
    """A model with weights drawn from `seed`, in eval mode; the global random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()


def tiny_llama(*, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A Llama of 2 layers, 4 heads of width 8 and 2 KV heads; `overrides` go to its config."""
    return build(LlamaForCausalLM, LlamaConfig(**SETTINGS | overrides), seed)


def tiny_diffllama(*, seed: int = 0, **overrides: Any) -> DiffLlamaForCausalLM:
    """A DiffLlama of the same sizes: 4 query heads make 2 differential heads a layer."""
    return build(DiffLlamaForCausalLM, DiffLlamaConfig(**SETTINGS | overrides), seed)


def tiny_diff_v2(*, seed: int = 0, **overrides: Any) -> DiffV2ForCausalLM:
    """A DIFF V2 of the same sizes: 4 query heads of width 16 leave 2 heads a layer."""
    settings: dict[str, Any] = {"num_key_value_heads": 1}
    return build(DiffV2ForCausalLM, DiffV2Config(**SETTINGS | settings | overrides), seed)


def tiny_ids(batch: int = 2, length: int = 16, *, seed: int = 0) -> torch.Tensor:
    """Random token ids without special tokens, (batch, length), int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIALS), VOCABULARY, (batch, length), generator=generator)


def tiny_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens; any text survives a round trip.

    Args:
        bos: whether encoding puts `<s>` in front by itself, as Llama's tokenizer does.
    """
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=SETTINGS["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def save_tiny(folder: Path, model: PreTrainedModel | None = None, **options: Any) -> Path:
    """Write a model (by default `tiny_llama()`) and the tokenizer; returns `folder`."""
    (model or tiny_llama()).save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return folder
