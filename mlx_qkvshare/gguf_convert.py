"""Turn a GGUF file into an mlx-lm directory, offline: config, weights, tokenizer. No PyTorch.

What a GGUF file hides from a naive reader is undone by the row of its architecture (`gguf_architectures`) and by
`gguf_tokenizer`, since the tokenizer comes as lists, and its pre-tokenizer only as a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from .errors import ModelLoadError, UnsupportedModelError
from .gguf_architectures import ARCHITECTURES, Config
from .gguf_file import GGUFFile, read_gguf
from .gguf_tokenizer import make_tokenizer

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQS = "rope_freqs.weight"
_SHARD_BYTES = 1 << 30


def convert(source: Path, target: Path, dtype: mx.Dtype, report: Callable[[int, int], None] | None = None) -> None:
    """Write `target`, an mlx-lm directory (config.json, model*.safetensors, tokenizer.json, tokenizer_config.json).

    Weights are dequantized in float32 and stored in `dtype`: in float32 they are exactly what llama.cpp
    computes with; float16 rounds each to 11 significant bits. `report(done, total)` counts tensors.

    Raises:
        UnsupportedModelError: an architecture or a variant that this converter does not know, by name.
        ModelLoadError: the file cannot be read.
    """
    gguf = read_gguf(source)
    config = _known_config(gguf)
    try:
        tokenizer, tokenizer_config = make_tokenizer(gguf)
    except KeyError as error:
        raise ModelLoadError(f"[gguf] {source.name}: the metadata has no {error}") from error
    target.mkdir(parents=True, exist_ok=True)
    scaling = _save_weights(gguf, config, target, dtype, report or (lambda done, total: None))
    if scaling:
        config["rope_scaling"] = scaling
    tokenizer.save(str(target / "tokenizer.json"))
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        (target / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def named_shapes(gguf: GGUFFile) -> tuple[Config, dict[str, tuple[int, ...]]]:
    """mlx-lm's config for the file, and the shapes of its weights by mlx-lm's names. Raises as `convert`."""
    config = _known_config(gguf)
    tensors = {name: tensor.shape for name, tensor in gguf.tensors.items() if not _is_scaling(gguf, name)}
    return config, {_mlx_name(gguf, name): shape for name, shape in tensors.items()}


def _known_config(gguf: GGUFFile) -> Config:
    if gguf.architecture not in ARCHITECTURES:
        known = " or ".join(map(repr, ARCHITECTURES))
        raise UnsupportedModelError(
            f"[gguf] {gguf.path.name}: expected architecture {known}, got {gguf.get('general.architecture')!r}"
        )
    try:
        return make_config(gguf)
    except KeyError as error:
        raise ModelLoadError(f"[gguf] {gguf.path.name}: the metadata has no {error}") from error


def _is_scaling(gguf: GGUFFile, name: str) -> bool:
    """Is it a RoPE scaling that came as a tensor?"""
    return name == _ROPE_FREQS and ARCHITECTURES[gguf.architecture].rope_scaling is not None


def make_config(gguf: GGUFFile) -> Config:
    """mlx-lm's config for the file.

    Raises:
        UnsupportedModelError: experts, unequal heads, partial rotary or a RoPE scaling that is not known here.
    """
    get, meta = gguf.of_architecture, gguf.metadata
    heads, hidden = get("attention.head_count"), get("embedding_length")
    kv_heads, head_dim = get("attention.head_count_kv", heads), get("attention.key_length", hidden // heads)
    experts = get("expert_count", 0)
    gguf.require(not experts, f"dense layers, got {experts} experts")
    gguf.require(isinstance(kv_heads, int), "one KV head count, got one per layer")
    gguf.require(get("attention.value_length", head_dim) == head_dim, "equal K and V head dims")
    eos = [meta[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in meta]
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        # The file holds float32: 1e-5 reads 9.99999974e-06.
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.3g}"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _linear_rope_scaling(gguf),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos if len(eos) > 1 else meta["tokenizer.ggml.eos_token_id"],
    }
    return config | ARCHITECTURES[gguf.architecture].own_config(gguf, config)


def _linear_rope_scaling(gguf: GGUFFile) -> Config | None:
    kind = gguf.of_architecture("rope.scaling.type", "none")
    factor = gguf.of_architecture("rope.scaling.factor", gguf.of_architecture("rope.scale_linear", 1.0))
    gguf.require(kind in ("none", "linear"), f"RoPE scaling 'none' or 'linear', got {kind!r}")
    return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}


def _mlx_name(gguf: GGUFFile, name: str) -> str:
    base, _, kind = name.rpartition(".")
    block_names = ARCHITECTURES[gguf.architecture].block_names
    if block := re.fullmatch(r"blk\.(\d+)\.(\w+)", base):
        gguf.require(block[2] in block_names, f"tensors {sorted(block_names)} in a block, got {name}")
        return f"model.layers.{block[1]}.{block_names[block[2]]}.{kind}"
    gguf.require(base in TOP_NAMES, f"tensors {sorted(TOP_NAMES)} outside blocks, got {name}")
    return f"{TOP_NAMES[base]}.{kind}"


def _mlx_arrays(gguf: GGUFFile, config: Config, dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    architecture = ARCHITECTURES[gguf.architecture]
    for name, array in gguf.arrays():
        if _is_scaling(gguf, name):
            yield name, array
            continue
        target = _mlx_name(gguf, name)
        yield target, architecture.restore(target, array, config).astype(dtype)


def _save_weights(
    gguf: GGUFFile, config: Config, target: Path, dtype: mx.Dtype, report: Callable[[int, int], None]
) -> dict[str, Any] | None:
    """Save in shards of 1 GiB, so that memory does not grow with the model; return the RoPE scaling that came as a
    tensor, or None."""
    rope_scaling = ARCHITECTURES[gguf.architecture].rope_scaling
    shard: dict[str, mx.array] = {}
    shard_bytes, num_shards, scaling = 0, 0, None

    def save() -> None:
        nonlocal shard, shard_bytes, num_shards
        name = f"model-{num_shards:05d}.safetensors" if num_shards else "model.safetensors"
        mx.save_safetensors(str(target / name), shard, {"format": "mlx"})
        shard, shard_bytes, num_shards = {}, 0, num_shards + 1

    for index, (name, array) in enumerate(_mlx_arrays(gguf, config, dtype)):
        report(index, len(gguf.tensors))
        if name == _ROPE_FREQS and rope_scaling is not None:
            scaling = rope_scaling(gguf, array, config)
            continue
        mx.eval(array)
        shard[name], shard_bytes = array, shard_bytes + array.nbytes
        if shard_bytes >= _SHARD_BYTES:
            save()
    if shard:
        save()
    report(len(gguf.tensors), len(gguf.tensors))
    return scaling
