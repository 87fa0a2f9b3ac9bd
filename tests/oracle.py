"""Independent truth in float64 numpy: `mx.quantize`'s affine layout, and softmax attention. No library code.

Letters: H query heads, Hk KV heads, L new tokens, T all tokens, D head dim, G groups per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


def to_numpy(x: mx.array) -> np.ndarray:
    """Words stay integers, everything else becomes float64 (bfloat16 has no numpy type)."""
    return np.array(x) if x.dtype == mx.uint32 else np.array(x.astype(mx.float32)).astype(np.float64)


def unpack(packed: mx.array, scales: mx.array, biases: mx.array, bits: int) -> np.ndarray:
    """Codes are a little-endian bit stream over each row's words; a value is `code * scale + bias` of its group.

    Shapes:
        packed: [..., D * bits / 32] uint32
        scales, biases: [..., G]
        returns: [..., D] float64
    """
    words = np.ascontiguousarray(to_numpy(packed))
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*words.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    scale, bias = (np.repeat(to_numpy(a), codes.shape[-1] // a.shape[-1], axis=-1) for a in (scales, biases))
    return codes * scale + bias


def rows(tensor, length: int) -> np.ndarray:
    """The first `length` rows of a `QuantizedTensor`, read from its raw arrays: [1, Hk, length, D] float64."""
    if tensor.scales is None:
        return to_numpy(tensor.packed)[:, :, :length]
    full = unpack(tensor.packed, tensor.scales, tensor.biases, tensor.plan.bits)
    return full[:, :, :length, : tensor.plan.head_dim]


def attention(
    queries: np.ndarray,
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    *,
    scale: float,
    mask: np.ndarray | str | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention over the concatenation of `keys` and of `values`, head by head.

    Shapes:
        queries: [1, H, L, D]
        keys, values: parts [1, Hk, T_i, D] and [1, Hk, T_i, Dv]
        mask: None, "causal" (the last query sees everything), or bool / additive, broadcastable to [1, H, L, T]
        sinks: [H]
        returns: [1, H, L, Dv]
    """
    all_keys, all_values = np.concatenate(keys, axis=2), np.concatenate(values, axis=2)
    num_heads, num_queries = queries.shape[1:3]
    num_tokens = all_keys.shape[2]
    allowed = np.zeros((1, num_heads, num_queries, num_tokens))
    if isinstance(mask, str):
        assert mask == "causal", mask
        allowed[..., np.triu(np.ones((num_queries, num_tokens), bool), k=num_tokens - num_queries + 1)] = -np.inf
    elif mask is not None:
        allowed = allowed + (np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask)
    outputs = []
    for head in range(num_heads):
        kv_head = head * all_keys.shape[1] // num_heads
        scores = queries[0, head] @ all_keys[0, kv_head].T * scale + allowed[0, head]
        sink = -np.inf if sinks is None else sinks[head]
        top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        outputs.append(weights / total @ all_values[0, kv_head])
    return np.stack(outputs)[None]
