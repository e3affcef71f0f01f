"""Configuration of DIFF V2 models. Goes into saved folders and needs transformers alone."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

__all__ = ["DiffV2Config"]


@strict
class DiffV2Config(LlamaConfig):
    """A Llama with DIFF V2 attention.

    Fields are Llama's, with these differences:

    - `num_attention_heads`: all query heads, 2h; they pair up as 0 and 1, 2 and 3, and so on, and
      h remain after the subtraction;
    - `head_dim`: by default `hidden_size / h`, so that the output projection is that of a Llama
      with h heads;
    - `num_key_value_heads`: by default h; the two heads of a pair share one;
    - `attention_dropout`: 0, since the official code has none.

    Raises:
        ValueError: head counts that form no pairs, or pairs that do not share a key-value head;
            the message names the field.
    """

    model_type = "diff_v2"
    base_model_tp_plan = None

    head_dim: int | None = None
    num_key_value_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        left = max(1, self.num_attention_heads // 2)
        if self.head_dim is None:
            if self.hidden_size % left and self.num_attention_heads % 2 == 0:
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is not divided by {left} heads, those that "
                    "the subtraction leaves; give head_dim"
                )
            self.head_dim = self.hidden_size // left
        if self.num_key_value_heads is None:
            self.num_key_value_heads = left
        self.validate_architecture()  # here too, for an error of one line
        # A saved folder holds the code of all these, whichever of them was saved.
        files = {"AutoConfig": "configuration_diff_v2.DiffV2Config"}
        files["AutoModel"] = "modeling_diff_v2.DiffV2Model"
        files["AutoModelForCausalLM"] = "modeling_diff_v2.DiffV2ForCausalLM"
        kwargs.setdefault("auto_map", files)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Called by transformers when a configuration is made or saved."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or 0
        if heads < 2 or heads % 2:
            raise ValueError(f"num_attention_heads = {heads} must be even: DIFF V2's heads pair up")
        if kv_heads < 1 or heads % kv_heads or heads // kv_heads % 2:
            raise ValueError(
                f"num_key_value_heads = {kv_heads} must divide the {heads // 2} pairs of query "
                "heads: the two heads of a DIFF V2 pair share one key-value head"
            )
        if not self.head_dim or self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even, for the rotary embedding")
        if self.attention_dropout:
            raise ValueError(
                f"attention_dropout = {self.attention_dropout} must be 0: DIFF V2 does not define "
                "what dropout does to a pair of maps"
            )
