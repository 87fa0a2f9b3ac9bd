"""`qkvshare bench attention`: every route of one attention layer, shape by shape, and the router's table from it.

Letters: H query heads, Hk KV heads, R = H / Hk, L new tokens, N sessions, T tokens, D head dim.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .attention import QuantizedAttention
from .batch_cache import BatchLayerCache
from .errors import InvalidValueError
from .layer_cache import LayerCache
from .manager import SharedKVCacheManager
from .measure import AS_ASKED, interleaved_medians, seconds
from .routes import Kind, Route, RoutePoint, RouteTable, device_name
from .spec import CacheSpec, Fingerprint, LayerSpec, QuantSpec

TAIL_TOKENS = 16
COLD_BYTES = 2**27
"""What is read before cold memory is timed: more than most last-level caches hold."""
FULL_PRECISION = "full_precision"
_MARGIN = 0.05  # of two medians that are so near, noise says which is lower


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim) <= 0 or self.num_heads % self.num_kv_heads:
            raise InvalidValueError(f"[AttentionShape] expected query heads that KV heads divide, got {self}")

    @property
    def gqa_factor(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionRow:
    """Milliseconds of one layer by each route, and GB/s: the bytes that must be read once, in the time that it took.
    `stream_bandwidth` is what to hold the cold ones against.

    kind: "one" session with `queries` new tokens, or a "batch" of `sessions` with one each; `rows` is R times either.
    cold: layers that lie apart, as in a model, after `COLD_BYTES` of other memory; warm: the same layer over and over.
    full_precision: `mx.fast.scaled_dot_product_attention` on K and V that were never packed, each session's own.
    kernel: null without a Metal device. `route` is what the router should take there.
    """

    kind: Kind
    bits: int
    sessions: int
    queries: int
    rows: int
    tokens: int
    cold_milliseconds: dict[str, float | None]
    warm_milliseconds: dict[str, float | None]
    cold_gigabytes_per_second: dict[str, float | None]
    warm_gigabytes_per_second: dict[str, float | None]
    route: str

    @property
    def point(self) -> RoutePoint:
        times = {name: value for name, value in self.cold_milliseconds.items() if value is not None}
        return RoutePoint(self.kind, self.bits, self.rows, self.tokens, Route(self.route), times)


def bench_attention(
    shape: AttentionShape | None = None,
    *,
    bits: Sequence[int] = (8, 4),
    tokens: Sequence[int] = (512, 2048, 8192),
    queries: Sequence[int] = (1, 2, 4, 16, 64),
    sessions: Sequence[int] = (1, 2, 4, 8),
    group_size: int = 64,
    layers: int = 4,
    repeats: int = 3,
    note: Callable[[str], None] = lambda text: None,
) -> list[AttentionRow]:
    """A row for every count of bits and tokens, with every length of `queries` and every number of `sessions`."""
    shape, rows = shape or AttentionShape(), []
    for size in bits:
        for length in tokens:
            context = _Context(shape, QuantSpec(size, size, group_size), length, layers)
            for count in queries:
                note(f"{size} bits, {length} tokens: {count} new tokens of one session")
                rows.append(context.measure("one", count, repeats))
            for count in sessions:
                note(f"{size} bits, {length} tokens: {count} sessions")
                rows.append(context.measure("batch", count, repeats))
    return rows


def table_of(rows: Sequence[AttentionRow]) -> RouteTable:
    """The router's table of this device."""
    return RouteTable(device_name(), tuple(row.point for row in rows))


@dataclass(frozen=True)
class Crossover:
    """Where the route to take changes: `below` up to `rows_below` query rows of each KV head, `above` from `rows_above`
    on. Alone, with both None, where one route is the best all along."""

    kind: Kind
    bits: int
    tokens: int
    below: str
    rows_below: int | None = None
    above: str | None = None
    rows_above: int | None = None

    def __str__(self) -> str:
        who = "one session" if self.kind == "one" else "sessions together"
        place = f"{who}, {self.bits} bits, {self.tokens} tokens"
        if self.above is None:
            return f"{place}: {self.below} throughout"
        return f"{place}: {self.below} up to {self.rows_below} rows, {self.above} from {self.rows_above}"


def crossovers(rows: Sequence[AttentionRow]) -> list[Crossover]:
    """Those that the router should use, for every kind, number of bits and of tokens."""
    found: list[Crossover] = []
    for place in dict.fromkeys((row.kind, row.bits, row.tokens) for row in rows):
        line = sorted((it for it in rows if (it.kind, it.bits, it.tokens) == place), key=lambda it: it.rows)
        changes = [
            Crossover(*place, before.route, before.rows, after.route, after.rows)
            for before, after in itertools.pairwise(line)
            if before.route != after.route
        ]
        found += changes or [Crossover(*place, line[0].route)]
    return found


def choose(milliseconds: dict[str, float | None], leanest: Route) -> Route:
    """The route to take: the fastest, or `leanest` if that is slower by no more than noise."""
    found = {route: milliseconds.get(route.value) for route in Route}
    times = {route: value for route, value in found.items() if value is not None}
    best = min(times, key=lambda route: times[route])
    return leanest if times[leanest] <= times[best] * (1 + _MARGIN) else best


def stream_bandwidth() -> float:
    """Bytes per second, read and written, of adding `COLD_BYTES` in place to as many: what memory streams. A route that
    reads from a cache, or only reads, may do better."""
    source, sums = _other_memory(), [_other_memory()]

    def add() -> None:
        sums[0] = sums[0] + source  # in its own buffer: a new one would be timed with its page faults
        mx.eval(sums)

    (took,) = interleaved_medians({"add": lambda: seconds(add)}, 5).values()
    return 3 * source.nbytes / took


def _other_memory() -> mx.array:
    other = mx.arange(COLD_BYTES // 4, dtype=mx.float32)
    mx.eval(other)
    return other


class _Context:
    """`layers` layers of one sealed context and the same in full precision, and sessions on it."""

    def __init__(self, shape: AttentionShape, quant: QuantSpec, num_tokens: int, layers: int):
        self._shape, self._quant, self._tokens, self._layers = shape, quant, num_tokens, layers
        dtype = "float32" if mx.default_device().type == mx.cpu else "float16"
        self._dtype: mx.Dtype = getattr(mx, dtype)
        layer = LayerSpec(shape.num_kv_heads, shape.head_dim, shape.head_dim)
        spec = CacheSpec((layer,) * layers, dtype, 2 * num_tokens + 4096, Fingerprint("bench", "", "", ""))
        self._manager = SharedKVCacheManager(spec, quant, budget_bytes=2**40, **AS_ASKED)
        self._other = _other_memory()
        self._full = [(self._random(num_tokens), self._random(num_tokens)) for _ in range(layers)]
        slot = self._manager.allocate_shared_slot(num_tokens)
        self._prefix = self._manager.quantize_and_store(slot, list(range(num_tokens)), self._full)
        mx.eval(self._full)

    def _random(self, num_tokens: int, batch: int = 1, heads: int | None = None) -> mx.array:
        heads = self._shape.num_kv_heads if heads is None else heads
        return mx.random.normal((batch, heads, num_tokens, self._shape.head_dim)).astype(self._dtype)

    def measure(self, kind: Kind, count: int, repeats: int) -> AttentionRow:
        """`count` new tokens of one session, or sessions with one each."""
        sessions, queries = (1, count) if kind == "one" else (count, 1)
        prefixes = [self._prefix.fork() for _ in range(sessions)]
        # New tokens are in the tail already when attention runs.
        caches = [self._session(prefix, TAIL_TOKENS + queries) for prefix in prefixes]
        asked = self._random(queries, sessions, self._shape.num_heads)
        mx.eval(asked)
        full = [self._full_precision(caches, layer) for layer in range(self._layers)]
        ways: dict[str, Callable[[int], mx.array]] = {
            FULL_PRECISION: lambda layer: self._attend_full(asked, *full[layer])
        }
        for route in Route:
            if route is not Route.KERNEL or mx.metal.is_available():
                ways[route.value] = functools.partial(
                    self._attend, QuantizedAttention(route=route), kind, caches, asked
                )
        runs = {f"{name} {cold}": self._run(way, cold) for name, way in ways.items() for cold in (True, False)}
        took = interleaved_medians(runs, repeats)
        cold, warm = (
            {name: _milliseconds(took.get(f"{name} {is_cold}")) for name in _NAMES} for is_cold in (True, False)
        )
        packed_bytes = sum(view.segment.layers[0].nbytes for view in self._prefix.views)
        tails = sum(cache.nbytes for cache in (row[0] for row in caches))
        full_bytes = sessions * sum(array.nbytes for array in self._full[0]) + tails
        sizes = {name: full_bytes if name == FULL_PRECISION else packed_bytes + tails for name in _NAMES}
        for prefix in prefixes:
            prefix.release()
        return AttentionRow(
            kind=kind,
            bits=max(self._quant.k_bits, self._quant.v_bits),
            sessions=sessions,
            queries=queries,
            rows=count * self._shape.gqa_factor,
            tokens=self._tokens,
            cold_milliseconds=cold,
            warm_milliseconds=warm,
            cold_gigabytes_per_second=_speeds(sizes, cold),
            warm_gigabytes_per_second=_speeds(sizes, warm),
            route=choose(cold, self._leanest(count * self._shape.gqa_factor)).value,
        )

    def _leanest(self, rows: int) -> Route:
        """Which needs less memory for a token: a float32 score for each row, or its unpacked key and value."""
        is_packed_leaner = 4 * rows < 2 * self._shape.head_dim * self._dtype.size
        return Route.PACKED if is_packed_leaner else Route.DEQUANTIZE

    def _session(self, prefix: Any, tail: int) -> list[LayerCache]:
        caches = self._manager.make_caches(prefix)
        for cache in caches:
            cache.append(self._random(tail), self._random(tail))
        mx.eval([cache.state for cache in caches])
        return caches

    def _run(self, attend: Callable[[int], mx.array], is_cold: bool) -> Callable[[], float]:
        """Seconds of one layer: all are asked for at once, as in a model."""
        layers = range(self._layers) if is_cold else [0] * self._layers

        def run() -> float:
            if is_cold:
                mx.eval(self._other.sum())  # a few layers of a short context would fit a cache
            return seconds(lambda: mx.eval([attend(layer) for layer in layers])) / self._layers

        return run

    def _attend(
        self, attention: QuantizedAttention, kind: Kind, caches: list[list[LayerCache]], queries: mx.array, layer: int
    ) -> mx.array:
        rows, scale = [cache[layer] for cache in caches], 1 / math.sqrt(self._shape.head_dim)
        if kind == "batch":
            batch = BatchLayerCache(rows, {}, mx.array([row.offset for row in rows]))
            return attention.attend(queries, batch, scale=scale)
        return attention.attend(queries, rows[0], scale=scale, mask="causal")

    def _full_precision(self, caches: list[list[LayerCache]], layer: int) -> list[mx.array]:
        """Keys and values of every session, side by side: copies, as a batch of caches of their own has them."""
        joined = []
        for index in (0, 1):
            each = [mx.concatenate([self._full[layer][index], cache[layer].tail()[index]], axis=2) for cache in caches]
            joined.append(mx.concatenate(each))
        mx.eval(joined)
        return joined

    def _attend_full(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        scale = 1 / math.sqrt(self._shape.head_dim)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")


_NAMES = [*(route.value for route in Route), FULL_PRECISION]


def _speeds(sizes: dict[str, int], milliseconds: dict[str, float | None]) -> dict[str, float | None]:
    """GB/s of what must be read at least."""
    return {name: None if took is None else sizes[name] / took / 1e6 for name, took in milliseconds.items()}


def _milliseconds(value: float | None) -> float | None:
    return None if value is None else 1e3 * value
