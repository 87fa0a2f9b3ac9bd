"""What the core's tests share: specs without a model, random rows, stored chains, and logits behind a cache."""

from __future__ import annotations

import contextlib
import copy
import gc

import mlx.core as mx
import numpy as np
from tiny import tiny_config, tiny_model, tiny_tokenizer

from mlx_qkvshare import (
    CacheSpec,
    LoadedModel,
    QuantizedAttention,
    QuantSpec,
    SharedKVCacheManager,
    SharedPrefix,
    quantized_attention,
)
from mlx_qkvshare.model import describe
from mlx_qkvshare.spec import Fingerprint, LayerSpec

FINGERPRINT = Fingerprint("tiny", "weights", "rope", "tokenizer")
K8V8, FULL = QuantSpec(8, 8, 32), QuantSpec(16, 16)


def make_spec(layers=1, heads=1, k_dim=32, v_dim=None, dtype="float32", max_tokens=4096) -> CacheSpec:
    return CacheSpec((LayerSpec(heads, k_dim, v_dim or k_dim),) * layers, dtype, max_tokens, FINGERPRINT)


def make_manager(
    quant: QuantSpec = K8V8, *, budget_bytes: int = 2**30, may_drop_residuals: bool = False, **spec
) -> SharedKVCacheManager:
    return SharedKVCacheManager(
        make_spec(**spec), quant, budget_bytes=budget_bytes, may_drop_residuals=may_drop_residuals
    )


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).astype(dtype)


def random_layers(spec: CacheSpec, num_tokens: int, seed: int = 0) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of `num_tokens` tokens for every layer."""
    dtype = getattr(mx, spec.dtype)
    shapes = [[(1, it.n_kv_heads, num_tokens, dim) for dim in (it.k_head_dim, it.v_head_dim)] for it in spec.layers]
    return [
        tuple(normal(*s, seed=seed + 2 * i + j, dtype=dtype) for j, s in enumerate(p)) for i, p in enumerate(shapes)
    ]


def store(
    manager: SharedKVCacheManager, token_ids, prefix: SharedPrefix | None = None, *, seed: int = 0
) -> SharedPrefix:
    """Seal random rows for `token_ids` behind `prefix`."""
    ids = list(token_ids)
    slot = manager.allocate_shared_slot(len(ids), replacing=prefix)
    return manager.quantize_and_store(slot, ids, random_layers(manager.spec, len(ids), seed), prefix=prefix)


def loaded(*, wrap=None, **overrides) -> LoadedModel:
    """A tiny model of any mlx-lm architecture; `wrap` changes it after its cache was described."""
    config, tokenizer = tiny_config(**overrides), tiny_tokenizer()
    model = tiny_model(fresh=wrap is not None, **overrides)
    spec = describe(model, config, tokenizer)
    if wrap is not None:
        wrap(model)
    return LoadedModel(model, tokenizer, spec)


def words(prefix: SharedPrefix) -> list[list[np.ndarray]]:
    """Every packed array of a chain: per segment, in the order of its layers."""
    return [
        [np.array(a) for kv in view.segment.layers for t in (kv.keys, kv.values) for a in t.arrays]
        for view in prefix.views
    ]


def addresses(prefix: SharedPrefix) -> list[int]:
    """The address of every buffer that a chain reads."""
    segments = [view.segment for view in prefix.views]
    tensors = [t for s in segments for kv in s.layers for t in (kv.keys, kv.values)]
    return [np.array(a, copy=False).ctypes.data for t in tensors for a in t.arrays]


def flip_byte(array: mx.array, index: int = 0) -> None:
    """Damage one byte of the array's own buffer, as no MLX operation could."""
    np.array(array, copy=False).reshape(-1).view(np.uint8)[index] ^= 0xFF


@contextlib.contextmanager
def no_collector():
    """Active memory is compared inside the block: what earlier tests left behind must not be freed meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def logits_behind(model, caches, token_ids, attention: QuantizedAttention | None = None) -> np.ndarray:
    """Logits [L, V] of `token_ids` behind `caches`, on a fork that is dropped: the caches stay as they are."""
    fork = copy.deepcopy(caches)
    with quantized_attention(attention):
        return np.array(model(mx.array([list(token_ids)]), cache=fork)[0])


def stock_logits(model, token_ids) -> np.ndarray:
    """Logits [L, V] of all of `token_ids`, by mlx-lm alone and without any cache."""
    return np.array(model(mx.array([list(token_ids)]))[0])
