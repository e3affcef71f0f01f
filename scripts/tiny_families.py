"""Tiny random models of every causal-LM family, and what each of them itself passes to softmax."""

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Names that families give to the same few sizes. Only those a config has are set.
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64,
    "emb_dim": 64, "dim_model": 64, "word_embed_proj_dim": 64, "embedding_size": 64,
    "hidden_size_global": 64, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16,
    "intermediate_size": 80, "ffn_dim": 80, "decoder_ffn_dim": 80, "encoder_ffn_dim": 80,
    "n_inner": 80, "dff": 80, "dim_ff": 80, "ffn_hidden_size": 80, "d_ff": 80,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "encoder_layers": 2, "num_decoder_layers": 4, "num_kv_shared_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "n_positions": 128,
    "max_sequence_length": 128, "seq_length": 128, "max_seq_len": 128, "n_ctx": 128,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_num_experts": 4, "moe_top_k": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "sliding_window": 8, "attention_chunk_size": 8,
    "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
    "mamba_d_ssm": 128, "rotary_dim": 8, "rotary_pct": 0.5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "initializer_range": 0.2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1, 3],
    "is_decoder": True, "add_cross_attention": False, "use_cache": True,
}  # fmt: skip

LATENT = {"head_dim": 8, "num_key_value_heads": 4}

# What individual configs need beyond that, by model type.
SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 96, "local_attention_window_len": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
            "full_attention": None,
        },
    },
    # Its attention needs a rope_theta that its own default config lacks.
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma3n_text": {"laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gemma4_text": {"global_head_dim": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 96,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 16,
        "feed_forward_size": 80,
        "axial_pos_shape": [4, 5],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "xmod": {"default_language": "en_XX"},
}

# Families whose models do not run on their own, and why.
NOT_ALONE = dict.fromkeys(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "it drafts tokens for a larger model and attends to that model's keys and values, so that it "
    "does not run on its own",
)


def family_classes(family: str) -> tuple[type, type]:
    """The config and the causal model of a family."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[family]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if model_class.config_class is not config_class:
        # AutoModelForCausalLM, too, gives a text model the text part of a composite config.
        part = type(config_class().get_text_config(decoder=True))
        if part is model_class.config_class:
            config_class = part
    return config_class, model_class


def small_config(config_class: type) -> Any:
    """A config of this class with small sizes, made by its own constructor."""
    default = config_class()
    aliases = getattr(config_class, "attribute_map", {})
    fixed = {
        name for name in dir(config_class) if isinstance(getattr(config_class, name), property)
    }
    fixed |= {alias for alias, name in aliases.items() if name in fixed}
    settable = {*vars(default), *aliases} - fixed
    given = {name: value for name, value in SIZES.items() if name in settable}
    if "qk_rope_head_dim" in settable:  # multi-head latent attention
        given |= {name: value for name, value in LATENT.items() if name in settable}
    for name, value in vars(default).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            given[name] = small_config(type(value)).to_dict()
    layers = given.get("num_hidden_layers") or given.get("n_layer") or given.get("num_layers") or 4
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types"):
        kinds = getattr(default, name, None)
        if isinstance(kinds, list | tuple) and kinds and name not in fixed:
            # Every kind of layer that the family has, in its own order.
            unlike = list(dict.fromkeys(kinds))
            given[name] = (unlike * layers)[:layers]
    for name in ("rope_parameters", "rope_scaling"):
        value = vars(default).get(name)
        if isinstance(value, dict):
            given[name] = copy.deepcopy(value)
    given |= copy.deepcopy(SPECIAL.get(config_class.model_type, {}))
    try:
        return config_class(**given)
    except Exception:
        # One size is tied to another in this family: try leaving out each of them.
        for name in list(given):
            rest = {key: value for key, value in given.items() if key != name}
            with contextlib.suppress(Exception):
                return config_class(**rest)
        raise


def build(model_class: type, config: Any, attention: str, state: Any = None) -> torch.nn.Module:
    """A random model of this config, or one with the weights of `state`."""
    config = copy.deepcopy(config)
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > 60_000_000:
        raise RuntimeError(f"not made small: {parameters:,} parameters")
    if state is not None:
        model.load_state_dict(state)
    return model.eval()


def batch(model: torch.nn.Module) -> dict[str, Tensor]:
    """Three sequences: one whole, one padded on the left, one on the right."""
    embedding = model.get_input_embeddings()
    vocabulary = next(embedding.parameters()).shape[0]
    # Music models have one table per codebook, and one row for each makes a sequence.
    rows = 3 * (len(embedding) if isinstance(embedding, torch.nn.ModuleList) else 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, min(vocabulary, 96), (rows, 20), generator=generator)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :7] = 0
    mask[2, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def untried(family: str, error: Exception) -> str:
    """Why there is no tiny model of a family, given the error of building or running it."""
    if family in NOT_ALONE:
        return NOT_ALONE[family]
    if isinstance(error, ImportError):
        return f"a package is missing here: {short(error)}"
    return f"the model could not be built or run: {short(error)}"


def short(error: Exception, limit: int = 160) -> str:
    """An error's message on one line, in whole sentences where they fit."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= limit:
        return text
    end = text.rfind(". ", 0, limit)
    return text[: end + 1] if end > 0 else text[:limit]


class SoftmaxInputs(TorchFunctionMode):
    """Keep every tensor of attention's shape that goes into a softmax, with its module's name."""

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
                    x = before  # its rows' maxima were subtracted for stability
                self.kept.append((self.stack[-1] if self.stack else "", x.detach().clone()))
            self.before_max = None
        elif getattr(func, "__name__", "") == "max" and isinstance(args[0], Tensor):
            self.before_max = args[0]
        return func(*args, **kwargs)


def own_logits(
    model: torch.nn.Module, given: dict[str, Tensor]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What each module passes to softmax, and which entries count, both (B, H, N, M)."""
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
        # DiffLlama attends twice with the same queries and keys.
        if seen.any() and not (calls and torch.equal(calls[-1][0], s)):
            calls.append((s, seen.expand(s.shape)))
    return {name: calls for name, calls in found.items() if calls}
