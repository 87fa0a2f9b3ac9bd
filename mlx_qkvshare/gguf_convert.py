"""Turn a Llama-family GGUF file into an mlx-lm directory, offline: config, weights, tokenizer. No PyTorch.

What a GGUF file hides from a naive reader, and where it is undone here: llama.cpp interleaves the rotary halves
of q and k (`_undo_rotary_interleave`); Llama 3 stores its RoPE scaling as a tensor (`_llama3_rope_scaling`);
the tokenizer comes as lists, and its pre-tokenizer only as a name (`make_tokenizer`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import ModelLoadError, UnsupportedModelError
from .gguf_file import GGUFFile, read_gguf

ARCHITECTURE = "llama"
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQS = "rope_freqs.weight"
_SHARD_BYTES = 1 << 30

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"


def convert(source: Path, target: Path, dtype: mx.Dtype, report: Callable[[int, int], None] | None = None) -> None:
    """Write `target`, an mlx-lm directory (config.json, model*.safetensors, tokenizer.json, tokenizer_config.json).

    Weights are dequantized in float32 and stored in `dtype`: in float32 they are exactly what llama.cpp
    computes with; float16 rounds each to 11 significant bits. `report(done, total)` counts tensors.

    Raises:
        UnsupportedModelError: an architecture or a variant that this converter does not know, by name.
        ModelLoadError: the file cannot be read.
    """
    gguf = read_gguf(source)
    architecture = gguf.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(
            f"[gguf] {source.name}: expected architecture {ARCHITECTURE!r}, got {architecture!r}"
        )
    try:
        config = make_config(gguf)
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


def make_config(gguf: GGUFFile) -> dict[str, Any]:
    """mlx-lm's config for the file.

    Raises:
        UnsupportedModelError: experts, unequal heads, partial rotary or a RoPE scaling that is not known here.
    """
    meta = gguf.metadata

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{ARCHITECTURE}.{key}", default)

    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    head_dim = get("attention.key_length", hidden // heads)
    _require(gguf, not get("expert_count"), f"dense layers, got {get('expert_count')} experts (Mixtral)")
    _require(gguf, isinstance(get("attention.head_count_kv", heads), int), "one KV head count, got one per layer")
    _require(gguf, get("attention.value_length", head_dim) == head_dim, "equal K and V head dims")
    rotary_dim = get("rope.dimension_count", head_dim)
    _require(gguf, rotary_dim == head_dim, f"rotary over all {head_dim} dims, got {rotary_dim}")
    eos = [meta[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in meta]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": meta["llama.block_count"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        # The file holds float32: 1e-5 reads 9.99999974e-06.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _linear_rope_scaling(gguf),
        "max_position_embeddings": meta["llama.context_length"],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos if len(eos) > 1 else meta["tokenizer.ggml.eos_token_id"],
    }


def _require(gguf: GGUFFile, condition: bool, expected: str) -> None:
    if not condition:
        raise UnsupportedModelError(f"[gguf] {gguf.path.name}: llama: expected {expected}")


def _linear_rope_scaling(gguf: GGUFFile) -> dict[str, Any] | None:
    kind = gguf.get("llama.rope.scaling.type", "none")
    factor = gguf.get("llama.rope.scaling.factor", gguf.get("llama.rope.scale_linear", 1.0))
    _require(gguf, kind in ("none", "linear"), f"RoPE scaling 'none' or 'linear', got {kind!r}")
    return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}


def _llama3_rope_scaling(gguf: GGUFFile, factors: mx.array, config: dict[str, Any]) -> dict[str, Any]:
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
        _require(gguf, abs(value - expected) < 1e-2 * expected, f"rope_freqs of Llama 3, got {value} for {expected}")
    return scaling


def _undo_rotary_interleave(weight: mx.array, heads: int) -> mx.array:
    """Rows of a q or k projection from llama.cpp's order (pairs) back to mlx-lm's (halves).

    Shapes: weight [heads * D, in], or a bias [heads * D].
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _mlx_name(gguf: GGUFFile, name: str) -> str:
    base, _, kind = name.rpartition(".")
    if block := re.fullmatch(r"blk\.(\d+)\.(\w+)", base):
        _require(gguf, block[2] in _BLOCK_NAMES, f"tensors {sorted(_BLOCK_NAMES)} in a block, got {name}")
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{kind}"
    _require(gguf, base in _TOP_NAMES, f"tensors {sorted(_TOP_NAMES)} outside blocks, got {name}")
    return f"{_TOP_NAMES[base]}.{kind}"


def _mlx_arrays(gguf: GGUFFile, config: dict[str, Any], dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    for name, array in gguf.arrays():
        if name == _ROPE_FREQS:
            yield name, array
            continue
        target = _mlx_name(gguf, name)
        if "q_proj" in target:
            array = _undo_rotary_interleave(array, config["num_attention_heads"])
        elif "k_proj" in target:
            array = _undo_rotary_interleave(array, config["num_key_value_heads"])
        yield target, array.astype(dtype)


def _save_weights(
    gguf: GGUFFile, config: dict[str, Any], target: Path, dtype: mx.Dtype, report: Callable[[int, int], None]
) -> dict[str, Any] | None:
    """Save in shards of 1 GiB, so that memory does not grow with the model; return Llama 3's rope scaling or None."""
    shard: dict[str, mx.array] = {}
    shard_bytes, num_shards, scaling = 0, 0, None

    def save() -> None:
        nonlocal shard, shard_bytes, num_shards
        name = f"model-{num_shards:05d}.safetensors" if num_shards else "model.safetensors"
        mx.save_safetensors(str(target / name), shard, {"format": "mlx"})
        shard, shard_bytes, num_shards = {}, 0, num_shards + 1

    for index, (name, array) in enumerate(_mlx_arrays(gguf, config, dtype)):
        report(index, len(gguf.tensors))
        if name == _ROPE_FREQS:
            scaling = _llama3_rope_scaling(gguf, array, config)
            continue
        mx.eval(array)
        shard[name], shard_bytes = array, shard_bytes + array.nbytes
        if shard_bytes >= _SHARD_BYTES:
            save()
    if shard:
        save()
    report(len(gguf.tensors), len(gguf.tensors))
    return scaling


def make_tokenizer(gguf: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The fast tokenizer and its tokenizer_config.

    Raises:
        UnsupportedModelError: a tokenizer or pre-tokenizer kind that is not known here; a guess would split
            text in another way than the model was trained on.
    """

    def get(key: str, default: Any = None) -> Any:
        return gguf.get(f"tokenizer.ggml.{key}", default)

    tokens, types = gguf.metadata["tokenizer.ggml.tokens"], gguf.metadata["tokenizer.ggml.token_type"]
    kind, pre = get("model"), get("pre", "default")
    _require(gguf, kind in ("gpt2", "llama"), f"tokenizer 'gpt2' or 'llama', got {kind!r}")
    tokenizer = _byte_level_bpe(gguf, tokens, pre) if kind == "gpt2" else _sentencepiece_bpe(gguf, tokens, types)
    for special, wanted in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        added = [
            AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, types, strict=True) if k in wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.metadata["llama.context_length"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := get(f"{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[index]
    # llama.cpp's own defaults where the file does not say.
    if get("add_bos_token", kind == "llama" or pre in _LLAMA3_KINDS):
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    if template := gguf.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return tokenizer, config


def _byte_level_bpe(gguf: GGUFFile, tokens: list[str], pre: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in gguf.metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_KINDS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in _LLAMA3_KINDS:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    else:
        known = ("gpt-2", "smollm", *_LLAMA3_KINDS)
        _require(gguf, pre == "gpt-2", f"one of the pre-tokenizers {known}, got {pre!r}")
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(gguf: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Llama 2's tokenizer: a merge for each way to build a piece of two others, best score first."""
    scores = gguf.metadata["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN, _BYTE, _USER_DEFINED):
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        local = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        ranked += [
            (-score, pair) for pair in sorted(local, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ]
    merges = [pair for _, pair in sorted(ranked, key=lambda item: item[0])]
    unknown = tokens[gguf.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = gguf.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
