"""A tiny configuration for every model module of mlx-lm, made of its own argument class.

Fields are filled by name from `SIZES`, else keep their default; `OVERRIDES` has what one module wants otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from tiny import VOCAB_SIZE

WINDOW, LAYERS = 16, 4
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MIXED = [SLIDING, FULL, SLIDING, FULL]
DEFAULT_ROPE = {"rope_type": "default", "type": "default", "rope_theta": 10000.0}
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip

SIZES: dict[str, Any] = {
    # widths: 4 heads of 32, 2 of them for keys and values
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim", "block_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head", "num_swa_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_swa_key_value_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size"), 128),
    **dict.fromkeys(("head_dim", "hidden_size_per_head", "kv_channels", "global_head_dim", "group_norm_size"), 32),
    **dict.fromkeys(("vocab_size", "num_vocab", "embedding_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), 512),
    **dict.fromkeys(("n_inner", "ff_intermediate_size", "mlp_hidden_size", "block_ff_dim"), 128),
    "dim_model_base": 64,
    "rotary_dim": 32,
    "rope_theta": 10000.0,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 32.0,
    "tie_word_embeddings": False,
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), 1e-5),
    # multipliers
    **dict.fromkeys(("scale_depth", "scale_emb", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    "attention_multiplier": 0.2,
    "routed_scaling_factor": 1.0,
    # latent attention
    **dict.fromkeys(("q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32),
    "kv_lora_rank": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 64,
    # windows
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("loop_window_size", "conv_window"), WINDOW),
    "sliding_window_pattern": 2,
    "layer_types": MIXED,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "share_expert_dim"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq", "first_k_dense_replace"), 1),
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 2,
    # recurrent and convolutional layers
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv1d_width"), 4),
    "conv_L_cache": 3,
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_expand"), 1),
    "mamba_d_ssm": 128,
    "mamba_conv_bias": True,
    "use_conv_bias": True,
    "time_step_rank": 8,
    "time_step_limit": (0.0, 100.0),
    "layer_group_size": 2,
    "full_attention_interval": 2,
    "full_attn_idxs": [1, 3],
}

LLAMA_4_SCALING = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
QWEN_ROPE = {**DEFAULT_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
NAS_BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
]
KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}

OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2, "num_layers": 6, "hidden_dim_scale_factor": 1.0},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy"},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv_mixer", SLIDING, FULL, FULL]},
    "gemma3": {"text_config": "gemma3_text.ModelArgs"},
    "gemma3n": {"text_config": "gemma3n.TextConfig"},
    "gemma3n.TextConfig": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": [*MIXED, SLIDING, FULL],
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 16,
    },
    "gemma4": {"text_config": "gemma4_text.ModelArgs"},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": [*MIXED, SLIDING, FULL],
        "hidden_size_per_layer_input": 32,
        "global_head_dim": 64,
    },
    "glm_moe_dsa": {"rope_parameters": DEFAULT_ROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "cla_share_factor": 2,
        "use_cla": True,
        "rope_scaling": {"type": "dynamic", "alpha": 2.0, "factor": 1.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_dt_rank": 8,
    },
    "kimi_k25": {"text_config": "deepseek_v3.ModelArgs"},
    "kimi_k3": {"text_config": "kimi_k3.TextArgs"},
    "kimi_k3.TextArgs": {"linear_attn_config": KDA, "activation_situ_beta": 1.0, "attn_res_block_size": 2},
    "kimi_linear": {"linear_attn_config": KDA, "q_lora_rank": None},
    "kimi_vl": {"text_config": "kimi_vl.TextArgs"},
    "lfm2": {"block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "layer_types": None},
    "lfm2-vl": {"text_config": "lfm2.ModelArgs"},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": None},
    "llama4": {"text_config": "llama4.TextArgs"},
    "llama4.TextArgs": {
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity", **LONGCAT},
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mellum": {"rope_parameters": {SLIDING: DEFAULT_ROPE, FULL: DEFAULT_ROPE}},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 64,
        "v_head_dim": 64,
    },
    "minicpm3": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.5] * 16}},
    "minimax_m3_vl": {"text_config": "minimax_m3_vl.TextArgs"},
    "minimax_m3_vl.TextArgs": {
        "moe_layer_freq": [0, 1, 1, 1],
        "layer_types": [FULL, "sparse", FULL, "sparse"],
        "index_block_size": 16,
        "index_topk_blocks": 4,
        "rotary_dim": 16,
    },
    "ministral3": {"rope_parameters": {**DEFAULT_ROPE, **LLAMA_4_SCALING}},
    "mistral3": {"text_config": ("ministral3.ModelArgs", {"model_type": "ministral3"})},
    "mistral4": {"rope_parameters": {**YARN, **LLAMA_4_SCALING, "rope_theta": 10000.0}},
    "muse_spark": {"text_config": "muse_spark.TextArgs"},
    "muse_spark.TextArgs": {
        "post_norm_eps": 1e-8,
        "rope_parameters": DEFAULT_ROPE,
        "layer_rope_theta": [10000.0, 0, 10000.0, 10000.0],
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": NAS_BLOCKS},
    "nemotron_h": {
        "layer_types": None,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba", "moe", "attention"],
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmo_hybrid": {"layer_types": [LINEAR, FULL] * 2},
    "openelm": {
        "ffn_dim_divisor": 32,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0] * LAYERS,
    },
    "pixtral": {"text_config": "llama.ModelArgs"},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"full_attention_idx": [1, 3], "mamba_num_heads": 4},
    "prism_hadamard_qwen35": {
        "text_config": "qwen3_5.TextModelArgs",
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "qwen2_vl": {"text_config": "qwen2.ModelArgs"},
    "qwen3_5": {"text_config": "qwen3_5.TextModelArgs"},
    "qwen3_5.TextModelArgs": {"num_experts": 0, "rope_parameters": QWEN_ROPE},
    "qwen3_5_moe": {"text_config": ("qwen3_5.TextModelArgs", {"num_experts": 4})},
    "qwen3_vl": {"text_config": "qwen3.ModelArgs"},
    "qwen3_vl_moe": {"text_config": "qwen3_moe.ModelArgs"},
    "recurrent_gemma": {"logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"]},
    "rwkv7": {
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "smollm3": {"layer_types": None},
    "spark2_5": {"rope_parameters": {SLIDING: DEFAULT_ROPE, FULL: DEFAULT_ROPE}},
    "step3p5": {"num_attention_groups": 2, "moe_layers_enum": "1,2,3"},
}
"""By module, or by module and class where a wrapper reads its `text_config` with another class. A wrapper names that
class, or gives a pair with further overrides."""


def model_names() -> list[str]:
    """The modules of the installed mlx-lm, whether or not they hold a model."""
    return sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))


def model_module(name: str) -> Any:
    sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))  # olmo only asks whether it is there
    return importlib.import_module(f"mlx_lm.models.{name}")


def fill(args_class: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """A value for every field that has one by name, and for every one without a default."""
    config = {}
    for field in dataclasses.fields(args_class):
        if field.name in overrides:
            config[field.name] = overrides[field.name]
        elif field.name in SIZES:
            config[field.name] = SIZES[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if field.type not in (bool, "bool") and "Optional" not in str(field.type):
                raise KeyError(f"no value for {args_class.__module__}.{args_class.__name__}.{field.name}: {field.type}")
            config[field.name] = False if field.type in (bool, "bool") else None
    return config


def config_of(name: str) -> dict[str, Any]:
    """The configuration of one module, as its config.json would be."""
    overrides = {"model_type": name} | OVERRIDES.get(name, {})
    if (inner := overrides.get("text_config")) is not None:
        key, further = inner if isinstance(inner, tuple) else (inner, {})
        owner, _, args_class = key.rpartition(".")
        found = OVERRIDES.get(owner if args_class == "ModelArgs" else key, {})
        text = fill(getattr(model_module(owner), args_class), {"model_type": owner} | found | further)
        overrides = overrides | {"text_config": text}
    return fill(model_module(name).ModelArgs, overrides)


def build(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A random model of one module in float32, and its configuration."""
    module, config = model_module(name), config_of(name)
    mx.random.seed(seed)
    args = module.ModelArgs
    model = module.Model(args.from_dict(config) if hasattr(args, "from_dict") else args(**config))
    model.eval()
    model.apply(_shake)
    mx.eval(model.parameters())
    return model, config


def _shake(array: mx.array) -> mx.array:
    """Float32, and noise on what is all zeros or ones: a sink, bias or gate that is 0 would hide what it does."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    array = array.astype(mx.float32)
    is_flat = array.size > 0 and bool((array == array.reshape(-1)[0]).all())
    return array + 0.1 * mx.random.normal(array.shape) if is_flat else array
