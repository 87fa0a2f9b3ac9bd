"""The GGUF architectures that can be converted: a row for each of what its files spell otherwise than mlx-lm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from .gguf_file import GGUFFile

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """What is an architecture's own.

    block_names: GGUF's tensor of a block -> mlx-lm's module. own_config: entries of mlx-lm's config beside those that
    all have. restore: (mlx-lm's name, array, config) -> the array as mlx-lm wants it. rope_scaling: from the tensor
    `rope_freqs`, if its files may have one.
    """

    block_names: dict[str, str]
    own_config: Callable[[GGUFFile, Config], Config]
    restore: Callable[[str, mx.array, Config], mx.array]
    rope_scaling: Callable[[GGUFFile, mx.array, Config], Config] | None = None


_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# --- Llama ----------------------------------------------------------------------------------------


def _llama_config(gguf: GGUFFile, config: Config) -> Config:
    head_dim = config["head_dim"]
    rotary_dim = gguf.of_architecture("rope.dimension_count", head_dim)
    gguf.require(rotary_dim == head_dim, f"rotary over all {head_dim} dims, got {rotary_dim}")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }


def _undo_rotary_interleave(name: str, array: mx.array, config: Config) -> mx.array:
    """llama.cpp stores the rows of q and k in pairs of the rotary halves; mlx-lm has one half behind the other.

    Shapes: weight [heads * D, in], or a bias [heads * D].
    """
    if "q_proj" in name:
        heads = config["num_attention_heads"]
    elif "k_proj" in name:
        heads = config["num_key_value_heads"]
    else:
        return array
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _llama3_rope_scaling(gguf: GGUFFile, factors: mx.array, config: Config) -> Config:
    """Llama 3's scaling from `rope_freqs` [head_dim / 2]: rebuilt with the constants of 3.1 to 3.3, and compared."""
    stored = cast(list[float], factors.tolist())
    scaling = {
        "rope_type": "llama3",
        "factor": max(stored),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for index, value in enumerate(stored):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * index / config["head_dim"])
        smooth = min(max((8192 / wavelength - 1.0) / 3.0, 0.0), 1.0)
        expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        gguf.require(abs(value - expected) < 1e-2 * expected, f"rope_freqs of Llama 3, got {value} for {expected}")
    return scaling


# --- Gemma 3 --------------------------------------------------------------------------------------

_GEMMA3_27B_BLOCKS = 62


def _gemma3_config(gguf: GGUFFile, config: Config) -> Config:
    """Most files are silent about the pattern of sliding layers and their RoPE base, all about the scale of the
    queries: these are Gemma 3's own, as in llama.cpp."""
    cap = gguf.get("gemma3.final_logit_softcapping")
    gguf.require(not cap, f"logits without a soft cap, got one of {cap}")
    pattern = gguf.of_architecture("attention.sliding_window_pattern", 6)
    gguf.require(isinstance(pattern, int), f"every n-th layer to be global, got the pattern {pattern}")
    is_27b = config["num_hidden_layers"] == _GEMMA3_27B_BLOCKS
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": gguf.of_architecture("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": gguf.of_architecture("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
    }


def _take_one_from_norms(name: str, array: mx.array, config: Config) -> mx.array:
    """A norm of Gemma multiplies with 1 + weight; llama.cpp stores the sum, mlx-lm adds the 1 itself."""
    return array - 1 if name.endswith("norm.weight") else array


ARCHITECTURES = {
    "llama": Architecture(
        _BLOCK_NAMES | {"ffn_norm": "post_attention_layernorm"},
        _llama_config,
        _undo_rotary_interleave,
        _llama3_rope_scaling,
    ),
    "gemma3": Architecture(
        _BLOCK_NAMES
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3_config,
        _take_one_from_norms,
    ),
}
"""By GGUF's name (`general.architecture`)."""
