"""Attention over a shared packed prefix and a private tail, and the seam that routes mlx-lm's models to it.

Letters: H query heads, Hk KV heads, R = H / Hk, L new tokens, S tokens of one part, T all tokens, D head dim.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .batch_cache import BatchLayerCache
from .cascade import attend_together
from .cascade_kernel import attend_with_kernel
from .errors import UnsupportedModelError
from .layer_cache import LayerCache, layer_kv, routing
from .parts import compute_dtype, part_output, part_scores
from .routes import Decision, Kind, Route, RouteTable, device_name, of_device
from .segment import KVBlock
from .spec import FULL_PRECISION_BITS


@dataclass(frozen=True)
class QuantizedAttention:
    """Attention for queries over (packed segments ++ full-precision tail), with a router between its ways.

    The router looks up the nearest point of `table`, by default this device's: the one that `qkvshare bench attention
    --save` measured here, else the one that comes with the package. `route` forces a route; the kernel needs a
    Metal device, and does not read nested precision in full, of which the packed route is taken then.

    `reads_base`: of nested precision read the base alone, 4 bits; what is not nested is read as it is.
    """

    route: Route | None = None
    table: RouteTable | None = None
    reads_base: bool = False

    def decide(self, num_queries: int, gqa_factor: int, *, num_tokens: int, bits: int = 8) -> Decision:
        """The route of one session for L = `num_queries` new tokens and R = `gqa_factor` over `num_tokens` shared ones,
        with `bits` for keys or values, whichever has more."""
        return self._decide("one", bits, num_queries * gqa_factor, num_tokens)

    def decide_batch(self, num_sessions: int, gqa_factor: int, *, num_tokens: int, bits: int = 8) -> Decision:
        """The route of `num_sessions` sessions that decode one token each together over `num_tokens` shared ones."""
        return self._decide("batch", bits, num_sessions * gqa_factor, num_tokens)

    def _decide(self, kind: Kind, bits: int, rows: int, tokens: int) -> Decision:
        is_missing = self.route is Route.KERNEL and not mx.metal.is_available()
        if self.route is not None and not is_missing:
            return Decision(self.route, "as asked")
        found = (self.table or of_device(device_name())).decide(kind, bits=bits, rows=rows, tokens=tokens)
        if is_missing:
            return Decision(found.route, f"{found.reason}; the kernel was asked for, but there is no Metal device")
        return found

    def attend(
        self,
        queries: mx.array,
        cache: LayerCache | BatchLayerCache,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Softmax attention of `queries` over all `cache.offset` tokens. The queries are left as they are.

        Shapes:
            queries: [1, H, L, D], the last L tokens of the cache
            mask: None, "causal", or bool / additive, broadcastable to [1, H, L, T]
            sinks: [H] logits that take part in the softmax and have no value
            returns: [1, H, L, Dv]

        A `BatchLayerCache` takes one query of every session, [N, H, 1, D], and no mask. Who of them reads the base is
        marked on its own cache.
        """
        num_heads, num_queries = queries.shape[1:3]
        gqa_factor = num_heads // cache.spec.n_kv_heads
        if isinstance(cache, BatchLayerCache):
            tokens = sum(max(group.lengths) for group in cache.groups)
            bits = _bits_of(kv for kv, _ in cache.rows[0].parts())
            route = self.decide_batch(len(cache.rows), gqa_factor, num_tokens=tokens, bits=bits).route
            read = (block for group in cache.groups for block in layer_kv(group.segment, cache.layer).blocks)
            if route is Route.KERNEL and not _are_nested(read):
                return attend_with_kernel(queries, cache, scale=scale, sinks=sinks, window=cache.spec.window or None)
            unpack = route is Route.DEQUANTIZE
            return attend_together(queries, cache, scale=scale, sinks=sinks, unpack=unpack)
        cache.reads_base = self.reads_base
        parts = list(cache.parts())
        blocks, num_shared = [kv for kv, _ in parts], sum(rows for _, rows in parts)
        route = self.decide(num_queries, gqa_factor, num_tokens=num_shared, bits=_bits_of(blocks)).route
        if route is Route.KERNEL and _are_nested(blocks):
            route = Route.PACKED
        # The kernel's own masks are the causal one and the layer's window.
        is_causal = mask is None if num_queries == 1 else isinstance(mask, str)
        if route is Route.KERNEL and is_causal:
            return attend_with_kernel(queries, cache, scale=scale, sinks=sinks, window=cache.spec.window or None)
        if not parts or route is not Route.PACKED:
            keys, values = cache.keys_and_values()
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return _attend_packed(queries, cache, parts, scale=scale, mask=mask, sinks=sinks)


@dataclass(frozen=True)
class WatchedAttention(QuantizedAttention):
    """Attention that shows its queries [1, H, L, D], not scaled yet, to `watch(layer, queries, scale)`."""

    watch: Callable[[int, mx.array, float], None] = lambda layer, queries, scale: None

    def attend(self, queries: mx.array, cache: Any, *, scale: float, **options: Any) -> mx.array:
        self.watch(cache.layer, queries, scale)
        return super().attend(queries, cache, scale=scale, **options)


def _bits_of(blocks: Iterable[KVBlock]) -> int:
    """The larger of K and V bits of these blocks; the few tokens in front that are not packed do not count."""
    packed = (max(kv.keys.bits, kv.values.bits) for kv in blocks)
    return max((bits for bits in packed if bits != FULL_PRECISION_BITS), default=FULL_PRECISION_BITS)


def _are_nested(blocks: Iterable[KVBlock]) -> bool:
    """Have some of them residuals? The kernel knows one plane of codes."""
    return any(kv.residuals for kv in blocks)


def _attend_packed(
    queries: mx.array,
    cache: LayerCache,
    parts: Sequence[tuple[KVBlock, int]],
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """The ops twin of the decode kernel: scores per part, one softmax over all of them, outputs per part summed."""
    num_kv_heads = cache.spec.n_kv_heads
    _, num_heads, num_queries, _ = queries.shape
    gqa_factor = num_heads // num_kv_heads
    compute = compute_dtype(queries.dtype)
    # Heads of one KV head are neighbours, so folding them into rows is a reshape, not a stride-0 broadcast.
    rows = (queries.astype(compute) * scale).reshape(1, num_kv_heads, gqa_factor * num_queries, -1)

    scores = [part_scores(rows, kv.keys, length) for kv, length in parts]
    tail = cache.tail() if cache.tail_tokens else None
    if tail is not None:
        scores.append(rows @ tail[0].astype(compute).swapaxes(-1, -2))
    weights = _softmax(mx.concatenate(scores, axis=-1) if len(scores) > 1 else scores[0],
                       mask=mask, sinks=sinks, gqa_factor=gqa_factor, num_queries=num_queries)  # fmt: skip

    outputs, start = [], 0
    for kv, length in parts:
        outputs.append(part_output(weights[..., start : start + length], kv.values, length))
        start += length
    if tail is not None:
        outputs.append(weights[..., start:] @ tail[1].astype(compute))
    output = functools.reduce(mx.add, outputs)
    return output.reshape(1, num_heads, num_queries, -1).astype(queries.dtype)


def _softmax(
    scores: mx.array, *, mask: mx.array | str | None, sinks: mx.array | None, gqa_factor: int, num_queries: int
) -> mx.array:
    """Masked softmax of `scores` [1, Hk, R * L, T]; `sinks` [H] take their share of the sum."""
    _, num_kv_heads, num_rows, num_tokens = scores.shape
    if mask is None and sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    scores = scores.reshape(1, num_kv_heads, gqa_factor, num_queries, num_tokens)
    if isinstance(mask, str):  # "causal": aligned at the lower right, so the shared parts are all visible
        mask = mx.arange(num_tokens) <= mx.arange(num_tokens - num_queries, num_tokens)[:, None]
    if mask is not None:
        mask = _unfold_heads(mask, num_kv_heads, gqa_factor)
        low = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, low) if mask.dtype == mx.bool_ else scores + mask.astype(scores.dtype)
    if sinks is not None:
        column = sinks.astype(scores.dtype).reshape(1, num_kv_heads, gqa_factor, 1, 1)
        column = mx.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :num_tokens]
    return weights.reshape(1, num_kv_heads, num_rows, num_tokens)


def _unfold_heads(mask: mx.array, num_kv_heads: int, gqa_factor: int) -> mx.array:
    """Give a mask of up to four axes the split head axis: [.., Hk or 1, R or 1, L, T]."""
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    if mask.shape[1] == 1:
        return mask[:, :, None]
    return mask.reshape(mask.shape[0], num_kv_heads, gqa_factor, *mask.shape[2:])


# --- the seam -------------------------------------------------------------------------------------


_patch_lock = threading.Lock()
_patch: tuple[Any, Any] | None = None  # (mlx-lm's own function, ours) while at least one block is open
_num_inside = 0


def _routed_over(original: Any) -> Any:
    """A stand-in for `original`, `mlx_lm.models.base.scaled_dot_product_attention`, that attends tagged arrays.

    It keeps its original, so that somebody who wrapped it inside a block may call it ever after.
    """

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: Any = None,
    ) -> mx.array:
        layer_cache, attention = getattr(keys, "layer_cache", None), routing.attention
        if layer_cache is None or attention is None or not _is_pair(keys, values):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        layer_cache.mark_routed(queries.shape[2])
        return attention.attend(queries, layer_cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention


def _is_pair(keys: Any, values: Any) -> bool:
    """Keys and values of one cache, each in its role: models with latents hand one array in as both (MLA)."""
    is_same = getattr(values, "layer_cache", None) is keys.layer_cache
    return is_same and (keys.role, values.role) == ("k", "v")


def _base() -> Any:
    from mlx_lm.models import base

    return base


@functools.lru_cache(maxsize=1)
def _model_modules(num_loaded: int, last_loaded: int) -> list[Any]:
    """The loaded mlx-lm modules that hold the function; looked up again when `sys.modules` has changed."""
    found = [m for name, m in list(sys.modules.items()) if name.startswith("mlx_lm.models.")]
    return [m for m in found if hasattr(m, "scaled_dot_product_attention")]


def _swap(old: Any, new: Any) -> None:
    """Rebind the function in every module in which it still is `old`: another package's patch stays."""
    for module in _model_modules(len(sys.modules), id(list(sys.modules.values())[-1])):
        if module.scaled_dot_product_attention is old:
            module.scaled_dot_product_attention = new


@contextlib.contextmanager
def quantized_attention(attention: QuantizedAttention | None = None) -> Iterator[QuantizedAttention]:
    """Route the attention of mlx-lm's models to `attention` inside the block; restored when the last block ends.

    Only arrays that a `LayerCache` tagged are treated, on threads that are inside a block; everything
    else in the process runs mlx-lm's own function. Blocks nest.
    """
    global _num_inside, _patch
    chosen = attention or QuantizedAttention()
    with _patch_lock:
        if _patch is None:
            original = _base().scaled_dot_product_attention
            _patch = (original, _routed_over(original))
            _swap(*_patch)
        _num_inside += 1
    before, routing.attention = routing.attention, chosen
    try:
        yield chosen
    finally:
        routing.attention = before
        with _patch_lock:
            _num_inside -= 1
            if _num_inside == 0:
                # A module imported meanwhile copied ours out of base: it gets the original, too.
                _swap(_patch[1], _patch[0])
                _patch = None


def require_finite(logits: mx.array, model_name: str) -> None:
    """Raise `UnsupportedModelError` if `logits` hold NaN: the model reads K or V beside its attention call."""
    if mx.any(mx.isnan(logits)).item():
        raise nan_error(model_name)


def nan_error(model_name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"[attention] {model_name}: logits are NaN; either the weights are not finite, or the model reads "
        "keys or values beside attention in a way that sharing does not cover"
    )
