"""What a model's cache looks like (`CacheSpec`) and how it is packed (`QuantSpec`). Frozen, validated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .digest import digest_text
from .errors import InvalidValueError

FULL_PRECISION_BITS = 16
"""The `bits` value that means "not quantized": kept in the model's own dtype."""

SUPPORTED_BITS = (2, 3, 4, 5, 6, 8, FULL_PRECISION_BITS)
SUPPORTED_GROUP_SIZES = (32, 64, 128)
WINDOW_SLACK_TOKENS = 512
"""Tokens that a window's private tail takes in before its rows are moved to the front; also the longest step."""
LAYER_KINDS = ("full", "window", "chunk")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidValueError(message)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class TensorPlan:
    """How the rows of one layer's K (or V) are packed.

    Shapes: full precision [1, Hk, T, head_dim]; packed [1, Hk, T, padded_dim * bits / 32] uint32;
    scales and biases [1, Hk, T, padded_dim / group_size]. With bits 16 there is only the first.
    """

    head_dim: int
    bits: int
    group_size: int
    padded_dim: int

    @property
    def is_quantized(self) -> bool:
        return self.bits != FULL_PRECISION_BITS

    def row_bytes(self, item_bytes: int) -> int:
        """Exact bytes of one packed row (one head, one token)."""
        if not self.is_quantized:
            return self.head_dim * item_bytes
        return self.padded_dim * self.bits // 8 + 2 * (self.padded_dim // self.group_size) * item_bytes


def full_precision(head_dim: int) -> TensorPlan:
    """The plan of rows that are kept as they are."""
    return TensorPlan(head_dim, FULL_PRECISION_BITS, head_dim, head_dim)


@dataclass(frozen=True)
class LayerPlan:
    """The packing of one layer's keys and of its values."""

    keys: TensorPlan
    values: TensorPlan

    @property
    def is_packed(self) -> bool:
        return self.keys.is_quantized or self.values.is_quantized


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer's cache: KV heads, K and V head dims (V 0: keys alone, as of an index), and its kind.

    kind "full": every token is kept. "window": a token sees the `window` last ones, itself among them, and older rows
    are dropped (mlx-lm's RotatingKVCache). "chunk": it sees those of its own chunk of `window` tokens (ChunkedKVCache).
    """

    n_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    kind: str = "full"
    window: int = 0

    def __post_init__(self) -> None:
        _require(self.kind in LAYER_KINDS, f"[LayerSpec] kind: expected one of {LAYER_KINDS}, got {self.kind!r}")
        names = ["n_kv_heads", "k_head_dim", *(["v_head_dim"] if self.v_head_dim != 0 else [])]
        for name in names + ([] if self.kind == "full" else ["window"]):
            _require(
                _is_count(getattr(self, name)),
                f"[LayerSpec] {name}: expected a positive int, got {getattr(self, name)!r}",
            )

    def sealed_rows(self, num_tokens: int) -> int:
        """Rows that a segment of `num_tokens` tokens keeps: a window's, one more than what comes next can see, so that
        the last token may be computed again."""
        return min(num_tokens, self.window) if self.window else num_tokens

    def tail_rows(self, num_rows: int) -> int:
        """Rows of a private tail for `num_rows` tokens: a window slides on `WINDOW_SLACK_TOKENS` before rows move."""
        return min(num_rows, self.window + WINDOW_SLACK_TOKENS) if self.window else num_rows

    def row_bytes(self, item_bytes: int) -> int:
        """Bytes of one token in full precision."""
        return self.n_kv_heads * (self.k_head_dim + self.v_head_dim) * item_bytes


@dataclass(frozen=True)
class StateSpec:
    """A layer with a state of fixed size instead of rows (mlx-lm's ArraysCache): recurrent and convolutional ones.

    It is shared as it is, in full precision, where a segment ends, and nowhere else.
    """

    num_arrays: int
    nbytes: int

    def __post_init__(self) -> None:
        _require(_is_count(self.num_arrays), f"[StateSpec] num_arrays: expected a positive int, got {self.num_arrays}")
        _require(_is_count(self.nbytes), f"[StateSpec] nbytes: expected a positive int, got {self.nbytes}")


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal before one model may attend another's cache. All fields are digests or names."""

    architecture: str
    weights: str
    rope: str
    tokenizer: str

    @property
    def digest(self) -> str:
        return digest_text(json.dumps(dataclasses.astuple(self)))

    def first_difference(self, other: Fingerprint) -> str | None:
        """The name of the first field in which the two differ, or None."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != getattr(other, field.name):
                return field.name
        return None


@dataclass(frozen=True)
class CacheSpec:
    """Every layer's cache, the dtype of K and V, the context limit in tokens, and the fingerprint.

    `grouping` says how the layers become the list that the model is given: 0 for one by itself, n for n of them in one
    `CacheList`; empty where each is by itself.
    """

    layers: tuple[LayerSpec | StateSpec, ...]
    dtype: str
    max_context_tokens: int
    fingerprint: Fingerprint
    grouping: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.layers) > 0, "[CacheSpec] layers: expected at least one, got none")
        _require(
            self.dtype in ITEM_BYTES, f"[CacheSpec] dtype: expected one of {sorted(ITEM_BYTES)}, got {self.dtype!r}"
        )
        _require(
            _is_count(self.max_context_tokens),
            f"[CacheSpec] max_context_tokens: expected a positive int, got {self.max_context_tokens!r}",
        )
        _require(
            not self.grouping or sum(max(1, count) for count in self.grouping) == len(self.layers),
            f"[CacheSpec] grouping: expected {len(self.layers)} layers in all, got {self.grouping!r}",
        )

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def attention(self) -> tuple[LayerSpec, ...]:
        """The layers that keep rows."""
        return tuple(layer for layer in self.layers if isinstance(layer, LayerSpec))

    @property
    def windows(self) -> frozenset[int]:
        """The distinct windows of its sliding layers."""
        return frozenset(layer.window for layer in self.attention if layer.window)

    @property
    def has_state(self) -> bool:
        return any(isinstance(layer, StateSpec) for layer in self.layers)

    @property
    def private_token_bytes(self) -> int:
        """Bytes of one full-precision token over all layers that keep rows."""
        return sum(layer.row_bytes(self.item_bytes) for layer in self.attention)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers that keep one."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, StateSpec))

    def private_bytes(self, num_rows: int) -> int:
        """Bytes of a private tail of `num_rows` tokens in full precision, over all layers."""
        state = 2 * self.state_bytes if num_rows else 0  # and the one to go back to if a prefill fails
        return state + sum(layer.tail_rows(num_rows) * layer.row_bytes(self.item_bytes) for layer in self.attention)

    def context_bytes(self, num_tokens: int) -> int:
        """Bytes of a cache of `num_tokens` tokens in full precision at its exact length, as mlx-lm keeps it."""
        rows = (layer.sealed_rows(num_tokens) * layer.row_bytes(self.item_bytes) for layer in self.attention)
        return self.state_bytes + sum(rows)


@dataclass(frozen=True)
class QuantSpec:
    """Bits of keys and of values, and the group size, in `mx.quantize`'s affine layout.

    `bits` are 2, 3, 4, 5, 6, 8, or 16 for "not quantized". Keys and values are independent, since
    most models bear coarse values better than coarse keys (KIVI, arXiv 2402.02750; mlx-lm #1550).

    What makes low bits safe, all of it exact but for rounding and attended as it is packed (`quantize.Basis`):

    `sink_tokens`: so many of a context's first tokens stay in full precision. Much attention rests on them, and their
        keys stand out (StreamingLLM, arXiv 2309.17453).
    `is_rotated`: keys and values are packed after a Walsh-Hadamard transform, which spreads what stands out.
    `is_centred`: keys are packed less their mean over the segment, channel by channel.
    `is_fitted`: a group's range is fitted for the least squared error; pays at 4 bits and below.
    `is_adaptive`: k_bits and v_bits, which are equal, are what blocks of tokens have on average, more of them where
        attention looked and fewer where it did not (`allocate`).
    `layer_bits`: (layer, k_bits, v_bits) of layers that differ; -1 is the last one. Where one side differs from
        `k_bits` and `v_bits` in a few layers only, as to protect the first and the last.

    `is_nested` stores 8 bits as two planes of 4, the base and its residual, in as many bytes: one agent may read the
    base alone (`QuantizedAttention.reads_base`), and a manager may drop the residuals (any-precision weights, arXiv
    2402.10517, for a cache).

    Where `group_size` does not divide a head dim, `resolve_tensor` picks among the group sizes up
    to the asked one the cheapest packing in bytes per row, padding the row to whole groups: 96 takes
    groups of 32, 80 and 72 are padded to 96 in groups of 32, 112 to 128 in groups of 64.
    """

    k_bits: int = 8
    v_bits: int = 8
    group_size: int = 64
    sink_tokens: int = 0
    is_rotated: bool = False
    is_centred: bool = False
    is_fitted: bool = False
    layer_bits: tuple[tuple[int, int, int], ...] = ()
    is_adaptive: bool = False
    is_nested: bool = False

    def __post_init__(self) -> None:
        _require(
            not self.is_adaptive or (self.k_bits == self.v_bits < 8 and not self.layer_bits),
            "[QuantSpec] is_adaptive: expected k_bits == v_bits below 8 and no layer_bits, "
            f"got K{self.k_bits}V{self.v_bits} and {self.layer_bits}",
        )
        for entry in self.layer_bits:
            is_known = len(entry) == 3 and isinstance(entry[0], int) and set(entry[1:]) <= set(SUPPORTED_BITS)
            _require(is_known, f"[QuantSpec] layer_bits: expected (layer, k_bits, v_bits), got {entry!r}")
        _require(
            isinstance(self.sink_tokens, int) and self.sink_tokens >= 0,
            f"[QuantSpec] sink_tokens: expected an int >= 0, got {self.sink_tokens!r}",
        )
        for name in ("k_bits", "v_bits"):
            bits = getattr(self, name)
            is_known = _is_count(bits) and bits in SUPPORTED_BITS
            _require(is_known, f"[QuantSpec] {name}: expected one of {SUPPORTED_BITS}, got {bits!r}")
        _require(
            _is_count(self.group_size) and self.group_size in SUPPORTED_GROUP_SIZES,
            f"[QuantSpec] group_size: expected one of {SUPPORTED_GROUP_SIZES}, got {self.group_size!r}",
        )
        _require(
            not self.is_nested or (not self.is_adaptive and self._all_bits <= {8, FULL_PRECISION_BITS}),
            f"[QuantSpec] is_nested: expected 8 bits for all that is packed, got K{self.k_bits}V{self.v_bits}",
        )

    @classmethod
    def preset(cls, name: str) -> QuantSpec:
        """One of `PRESETS` by its name."""
        if name not in PRESETS:
            raise InvalidValueError(f"[QuantSpec] preset: expected one of {sorted(PRESETS)}, got {name!r}")
        return PRESETS[name]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> QuantSpec:
        """The inverse of `dataclasses.asdict`, also after a way through JSON. Raises `InvalidValueError`."""
        try:
            return cls(**(dict(plain) | {"layer_bits": tuple(map(tuple, plain.get("layer_bits", ())))}))
        except TypeError as error:
            raise InvalidValueError(f"[QuantSpec] expected its fields, got {dict(plain)!r}") from error

    def __str__(self) -> str:
        name = next((name for name, spec in PRESETS.items() if spec == self), None)
        bits = f"K{self.k_bits}V{self.v_bits} g{self.group_size}"
        if name is not None:
            return f"{name} ({bits})"
        flags = [flag for flag in ("rotated", "centred", "fitted", "nested", "adaptive") if getattr(self, f"is_{flag}")]
        flags += [f"sinks{self.sink_tokens}"] if self.sink_tokens else []
        return " ".join([bits, *flags, *(f"layer{layer}:K{k}V{v}" for layer, k, v in self.layer_bits)])

    @property
    def is_packed(self) -> bool:
        """Is anything quantized at all?"""
        return self._all_bits != {FULL_PRECISION_BITS}

    @property
    def fewest_bits(self) -> int:
        """The fewest that keys or values of any layer have."""
        return min(self._all_bits)

    @property
    def most_bits(self) -> tuple[int, int]:
        """The most that any layer has for keys, and for values."""
        return (
            max(self.k_bits, *(k for _, k, _ in self.layer_bits), 0),
            max(self.v_bits, *(v for _, _, v in self.layer_bits), 0),
        )

    @property
    def _all_bits(self) -> set[int]:
        return {self.k_bits, self.v_bits, *(b for entry in self.layer_bits for b in entry[1:])}

    def raised(self, bits: int) -> QuantSpec:
        """With `bits` at least, in every layer and block."""
        return dataclasses.replace(
            self,
            is_adaptive=False,
            k_bits=max(bits, self.k_bits),
            v_bits=max(bits, self.v_bits),
            layer_bits=tuple((layer, max(bits, k), max(bits, v)) for layer, k, v in self.layer_bits),
        )

    def resolve_tensor(self, head_dim: int, bits: int, item_bytes: int) -> TensorPlan:
        if bits == FULL_PRECISION_BITS or head_dim == 0:
            return TensorPlan(head_dim, FULL_PRECISION_BITS, self.group_size, head_dim)
        plans = [
            TensorPlan(head_dim, bits, group, -(-head_dim // group) * group)
            for group in SUPPORTED_GROUP_SIZES
            if group <= self.group_size
        ]
        exact = [plan for plan in plans if plan.group_size == self.group_size and plan.padded_dim == head_dim]
        return exact[0] if exact else min(plans, key=lambda plan: (plan.row_bytes(item_bytes), plan.group_size))

    def resolve(self, spec: CacheSpec) -> tuple[LayerPlan | None, ...]:
        """One `LayerPlan` per layer, None for a state; K and V are resolved each for its own head dim.

        Raises `InvalidValueError` where `layer_bits` names a layer that is not there or keeps no rows.
        """
        for index, *_ in self.layer_bits:
            is_there = -len(spec.layers) <= index < len(spec.layers) and isinstance(spec.layers[index], LayerSpec)
            _require(
                is_there, f"[QuantSpec] layer_bits: expected one of {len(spec.layers)} layers with rows, got {index}"
            )
        return tuple(self.resolve_layer(spec, index) for index in range(len(spec.layers)))

    def resolve_layer(self, spec: CacheSpec, index: int) -> LayerPlan | None:
        layer, (k_bits, v_bits) = spec.layers[index], self._bits_of(index, len(spec.layers))
        if not isinstance(layer, LayerSpec):
            return None
        return LayerPlan(
            self.resolve_tensor(layer.k_head_dim, k_bits, spec.item_bytes),
            self.resolve_tensor(layer.v_head_dim, v_bits, spec.item_bytes),
        )

    def _bits_of(self, index: int, num_layers: int) -> tuple[int, int]:
        found = ((k, v) for layer, k, v in self.layer_bits if layer % num_layers == index)
        return next(found, (self.k_bits, self.v_bits))

    def sinks_of(self, layer: LayerSpec, start: int, num_tokens: int) -> int:
        """Rows in full precision at the front of a segment of `num_tokens` tokens from token `start` on."""
        is_kept = layer.sealed_rows(num_tokens) == num_tokens  # a window has moved beyond them
        return min(max(0, self.sink_tokens - start), num_tokens) if self.is_packed and is_kept else 0

    def packed_bytes(self, spec: CacheSpec, num_tokens: int, *, start: int = 0) -> int:
        """Exact bytes of a segment of `num_tokens` tokens from token `start` on, over all layers."""
        total = spec.state_bytes
        for layer, plan in zip(spec.layers, self.resolve(spec), strict=True):
            if isinstance(layer, StateSpec) or plan is None:
                continue
            sinks = self.sinks_of(layer, start, num_tokens)
            rows = layer.sealed_rows(num_tokens) - sinks
            row = plan.keys.row_bytes(spec.item_bytes) + plan.values.row_bytes(spec.item_bytes)
            total += sinks * layer.row_bytes(spec.item_bytes) + rows * layer.n_kv_heads * row
            if self.is_centred and plan.keys.is_quantized and rows:
                total += layer.n_kv_heads * layer.k_head_dim * spec.item_bytes
        return total

    def packed_token_bytes(self, spec: CacheSpec) -> int:
        """Exact bytes of one packed token more, over all layers that keep rows."""
        start = self.sink_tokens
        return self.packed_bytes(spec, 2, start=start) - self.packed_bytes(spec, 1, start=start)


SINK_TOKENS = 4
_SAFE = QuantSpec(8, 8, 64, sink_tokens=SINK_TOKENS, is_rotated=True, is_centred=True)
PRESETS = {
    "safe": _SAFE,
    "balanced": dataclasses.replace(_SAFE, k_bits=6, v_bits=6),
    "tight": dataclasses.replace(_SAFE, k_bits=4, v_bits=4, is_fitted=True),
}
"""What `QuantSpec.preset` and the CLI know by name; what each costs in quality: benchmarks/README.md."""
