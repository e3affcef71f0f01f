"""DIFF V2 models: Llama around DIFF V2 attention. Needs torch and transformers alone.

This file goes into saved folders, so that they load without quantdiff.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_diff_v2 import DiffV2Config

__all__ = ["DiffV2ForCausalLM", "DiffV2Model"]


class DiffV2Attention(LlamaAttention):
    """Differential attention, version 2 (microsoft/unilm, Diff-Transformer-V2).

    All 2h query heads attend in one call; of each pair (2i, 2i + 1), which shares its key-value
    head, the second output is taken off the first, times λ = sigmoid(W·x) for each token and pair.
    """

    def __init__(self, config: DiffV2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        left = config.num_attention_heads // 2
        self.o_proj = nn.Linear(
            left * self.head_dim, config.hidden_size, bias=config.attention_bias
        )
        self.lambda_proj = nn.Linear(config.hidden_size, left, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """From (B, N, C) to (B, N, C) and, under eager attention, the maps (B, 2h, N, M)."""
        # Its name changed between versions of transformers.
        caches = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        cache = next((cache for cache in caches if cache is not None), None)
        batch, rows = hidden_states.shape[:2]
        query, key, value = (
            proj(hidden_states).view(batch, rows, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, N, D)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, maps = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )  # (B, N, 2h, D)
        lam = torch.sigmoid(self.lambda_proj(hidden_states))[..., None]  # (B, N, h, 1)
        out = out[:, :, 0::2] - lam * out[:, :, 1::2]
        return self.o_proj(out.flatten(2)), maps


class DiffV2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with DIFF V2 attention."""

    def __init__(self, config: DiffV2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = DiffV2Attention(config, layer_idx)


class DiffV2PreTrainedModel(LlamaPreTrainedModel):
    """What transformers needs to know."""

    config: DiffV2Config
    config_class = DiffV2Config
    _no_split_modules: ClassVar = ["DiffV2DecoderLayer"]
    _can_record_outputs: ClassVar = {
        "hidden_states": DiffV2DecoderLayer,
        "attentions": DiffV2Attention,
    }


class DiffV2Model(DiffV2PreTrainedModel, LlamaModel):
    """The decoder, without a language-model head."""

    def __init__(self, config: DiffV2Config) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # LlamaModel's own would build Llama's layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            DiffV2DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class DiffV2ForCausalLM(DiffV2PreTrainedModel, LlamaForCausalLM):
    """The causal language model."""

    def __init__(self, config: DiffV2Config) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = DiffV2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


DiffV2Config.register_for_auto_class()
DiffV2Model.register_for_auto_class("AutoModel")
DiffV2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
