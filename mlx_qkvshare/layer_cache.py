"""`LayerCache`: one attention layer's cache as mlx-lm sees it, over a shared prefix and a private tail."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import mlx.core as mx

from .errors import InvalidValueError
from .quantize import dequantize
from .segment import KVBlock, LayerKV, SegmentView, SharedSegment
from .spec import LayerSpec


class PrefixHolder(Protocol):
    """What a layer needs of the manager's `SharedPrefix`: the views and the budget for its tail."""

    @property
    def views(self) -> tuple[SegmentView, ...]: ...

    @property
    def num_tokens(self) -> int: ...

    def reserve_tail(self, num_rows: int) -> None: ...

    def fork(self) -> PrefixHolder: ...


class KVArray(mx.array):
    """Keys or values that remember their `LayerCache` and `role` ("k" or "v").

    Every MLX operation on it returns a plain `mx.array`, so a model that first does maths on K or V
    loses the tag and takes the exact fallback by itself.
    """

    layer_cache: Any  # a LayerCache, or the BatchLayerCache of several
    role: str


class _Routing(threading.local):
    """What attends tagged arrays on this thread right now; set by `attention.quantized_attention`."""

    attention: Any = None


routing = _Routing()

_MIN_STEP, _MAX_STEP = 16, 256


def tail_capacity(num_tokens: int) -> int:
    """Rows to allocate for a tail of `num_tokens`: at most 15 or an eighth more than asked, in steps of 16 to 256.

    mlx-lm grows by 256 rows at once, which for a short private tail costs more than a packed prefix.
    """
    step = min(_MAX_STEP, max(_MIN_STEP, 1 << max(0, num_tokens.bit_length() - 4)))
    return -(-num_tokens // step) * step


class LayerCache:
    """mlx-lm's cache contract (`offset`, `update_and_fetch`, `make_mask`, …) for one layer.

    The first `shared_tokens` tokens are read through the holder's views; the rest lives in a private
    full-precision tail, `keys` and `values` [1, Hk, capacity, D], of which `tail_tokens` rows are valid.
    It has no `to_quantized` (mlx-lm would replace it) and no `__len__` (mask making would be skipped).
    """

    def __init__(self, prefix: PrefixHolder, layer: int, spec: LayerSpec, dtype: mx.Dtype):
        self.prefix, self.layer, self.spec, self.dtype = prefix, layer, spec, dtype
        self.shared_tokens = prefix.num_tokens
        self.tail_tokens = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._routed_shapes: set[bool] = set()  # has one-row / many-row attention reached `attend` before?
        self.reads_base = False  # of nested precision; as the attention says that reads this cache
        self.can_batch = True  # may sessions take one step together on this layer?
        self._num_replayed = 0  # rows of the next step that stand in the tail already

    # --- the contract of mlx-lm -------------------------------------------------------------------

    @property
    def offset(self) -> int:
        return self.shared_tokens + self.tail_tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` [1, Hk, L, Dk] and `values` [1, Hk, L, Dv]; return tagged arrays of all `offset` tokens."""
        if keys.shape[0] != 1:
            raise InvalidValueError(f"[LayerCache.update_and_fetch] batch: expected 1 row, got {keys.shape[0]}")
        if routing.attention is not None:
            self.reads_base = routing.attention.reads_base
        self.append(keys, values)
        if routing.attention is not None and (keys.shape[2] > 1) in self._routed_shapes:
            # Building the full-precision graph that nobody reads costs more than the attention call on small
            # models; NaN makes a read that `attend` did not see impossible to overlook.
            return placeholder(self, keys, self.num_keys, "k"), placeholder(self, values, self.num_keys, "v")
        full_keys, full_values = self.keys_and_values()
        return _tagged(full_keys, self, "k"), _tagged(full_values, self, "v")

    @property
    def num_keys(self) -> int:
        """Rows that the last step's queries attend to."""
        return self.offset

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Write rows [1, Hk, L, D] behind the private tail, in place as long as nobody else holds its buffers."""
        step = keys.shape[2]
        if self._num_replayed:
            assert step == self._num_replayed, (step, self._num_replayed)
            self.tail_tokens, self._num_replayed = self.tail_tokens + step, 0
            return
        self._make_room(step)
        start, stop = self.tail_rows, self.tail_rows + step
        assert self.keys is not None and self.values is not None
        self.keys[..., start:stop, :] = keys
        self.values[..., start:stop, :] = values
        self.tail_tokens += step

    def _make_room(self, step: int) -> None:
        """Room for `step` rows behind the tail."""
        if self.capacity < self.tail_tokens + step:
            self.grow(tail_capacity(self.tail_tokens + step))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All `offset` tokens in full precision (lazy): the exact fallback of models that read K or V."""
        return self.materialize("k"), self.materialize("v")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of N new rows, as mlx-lm's caches make it: None, "causal", or bool [N, offset + N]."""
        if window_size is not None:  # the model slides over a layer that keeps all: nothing else knows how far
            self.can_batch = False
        if window_size is None and not return_array:
            return None if N == 1 else "causal"
        if window_size is None and N == 1:
            return None
        queries = mx.arange(self.offset, self.offset + N)[:, None]
        keys = mx.arange(self.offset + N)[None]
        mask = queries >= keys
        return mask if window_size is None else mask & (queries < keys + window_size)

    @property
    def state(self) -> Any:
        """The private arrays. The holder rides along so that `save_prompt_cache`, which would write the
        tail alone, refuses; `mx.eval` passes over it."""
        return [*(a for a in (self.keys, self.values) if a is not None), self.prefix]

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Private bytes only: the shared prefix belongs to the manager."""
        return sum(a.nbytes for a in (self.keys, self.values) if a is not None)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens (at most `offset`), the tail first, then a shorter view. Returns the count."""
        n = max(0, min(n, self.offset))
        from_tail = min(n, self.tail_tokens)
        self.tail_tokens -= from_tail
        self.shared_tokens -= n - from_tail
        return n

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache:
        """A fork: the shared prefix is retained once per copied list, the tail is copied at its first write."""
        key = id(self.prefix)
        if key not in memo:
            memo[key] = self.prefix.fork()
        twin = type(self)(memo[key], self.layer, self.spec, self.dtype)
        twin.shared_tokens, twin.tail_tokens = self.shared_tokens, self.tail_tokens
        twin.reads_base = self.reads_base
        if self.tail_tokens:
            twin.prefix.reserve_tail(self.tail_tokens)
            # A fresh array object of the exact rows: a write through either cache then copies, never aliases.
            twin.keys, twin.values = self._held()
            mx.eval(twin.keys, twin.values)  # views, no bytes; unevaluated they would be bound to this thread
        return twin

    def replay(self, num_tokens: int) -> LayerCache:
        """A twin that stands before the tail's last `num_tokens` tokens, and reads the rows that it has when they are
        appended once more: nothing is written or copied."""
        assert 0 < num_tokens <= self.tail_rows, (num_tokens, self.tail_rows)
        twin = copy.copy(self)
        twin.tail_tokens, twin._num_replayed = self.tail_tokens - num_tokens, num_tokens
        return twin

    # --- what attention and the session need -------------------------------------------------------

    def parts(self) -> Iterator[tuple[KVBlock, int]]:
        """The shared parts in order: this layer's packed K/V, block by block, and how many rows of each are read."""
        for segment, length in self.spans():
            kv = layer_kv(segment, self.layer)
            yield from kv.first(length - (segment.num_tokens - kv.num_rows))

    def spans(self) -> Iterator[tuple[SharedSegment, int]]:
        """The shared segments in order, as they are read, and how many tokens of each."""
        for view in self.prefix.views:
            if view.start >= self.shared_tokens:
                return
            yield (
                view.segment.base if self.reads_base else view.segment,
                min(view.length, self.shared_tokens - view.start),
            )

    def tail(self) -> tuple[mx.array, mx.array]:
        """The rows of the private tail that attention reads: keys and values [1, Hk, T, D]. Needs `tail_tokens` > 0."""
        return self._held()

    def _held(self, rows: slice | None = None) -> tuple[mx.array, mx.array]:
        """The valid rows of the private tail, or some of them, as views."""
        assert self.keys is not None and self.values is not None
        rows = rows or slice(self.tail_rows)
        return self.keys[..., rows, :], self.values[..., rows, :]

    def materialize(self, role: str) -> mx.array:
        """Keys ("k") or values ("v") of all `offset` tokens in full precision: [1, Hk, offset, D]."""
        arrays = [dequantize(kv.keys if role == "k" else kv.values, length) for kv, length in self.parts()]
        if self.tail_tokens:
            arrays.append(self.tail()[0 if role == "k" else 1])
        return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)

    def commit(self, tail_tokens: int) -> None:
        """A step went well: `tail_tokens` tokens are the session's. Rows need no note of that."""

    def mark(self) -> None:
        """A prefill of several steps begins here, and must be able to be taken back. Rows can be anyway."""

    def holds(self, tail_tokens: int) -> bool:
        """Can the tail be brought to `tail_tokens` tokens after a step that failed?"""
        return self.capacity >= tail_tokens

    def can_stand_at(self, target: int) -> bool:
        """Can this layer be taken back to `target` tokens?"""
        return 0 <= target <= self.offset

    def mark_routed(self, num_rows: int) -> None:
        self._routed_shapes.add(num_rows > 1)

    @property
    def oldest(self) -> int:
        """The oldest token that the last step's queries see."""
        return 0

    @property
    def tail_start(self) -> int:
        """The token of the tail's first row."""
        return self.shared_tokens

    @property
    def tail_rows(self) -> int:
        return self.tail_tokens

    @property
    def is_decoding_routed(self) -> bool:
        """Has a one-row attention call of this layer been seen to reach `attend`?"""
        return False in self._routed_shapes

    @property
    def capacity(self) -> int:
        """Tokens that fit the private tail's buffers."""
        return self._buffer_rows

    @property
    def _buffer_rows(self) -> int:
        return 0 if self.keys is None or self.values is None else min(self.keys.shape[2], self.values.shape[2])

    def grow(self, num_rows: int) -> None:
        """Make room for `num_rows` rows, keeping the valid ones (lazy). Raises `BudgetExceededError` before it."""
        self.prefix.reserve_tail(num_rows)
        self._replace_buffers(self.tail_rows, num_rows)

    def shrink(self, num_rows: int) -> None:
        """Room for no more than `num_rows` rows, which hold the tail (lazy)."""
        rows = max(self.spec.tail_rows(num_rows), self.tail_rows)
        if rows == 0:
            self.keys = self.values = None
        elif rows < self._buffer_rows:
            self._replace_buffers(self.tail_rows, rows)

    def _replace_buffers(self, kept: int, num_rows: int) -> None:
        """New buffers of `num_rows` rows that begin with the last `kept` ones."""
        rows, grown = slice(self.tail_rows - kept, self.tail_rows), []
        for buffer, dim in ((self.keys, self.spec.k_head_dim), (self.values, self.spec.v_head_dim)):
            room = mx.zeros((1, self.spec.n_kv_heads, num_rows - kept, dim), self.dtype)
            grown.append(room if buffer is None or kept == 0 else mx.concatenate([buffer[..., rows, :], room], axis=2))
        self.keys, self.values = grown

    def take_tail(self) -> tuple[mx.array, mx.array]:
        """The tail's rows to seal, of which this cache keeps no reference: freed when the caller lets go."""
        rows = self.tail()
        self.keys = self.values = None
        return rows

    def put_back(self, tail: tuple[mx.array, mx.array]) -> None:
        """Hold what `take_tail` gave again."""
        self.keys, self.values = tail

    def set_length(self, shared_tokens: int, tail_tokens: int) -> None:
        """Back to a length that it had before a step that failed."""
        self.shared_tokens, self.tail_tokens = shared_tokens, tail_tokens

    def reset_tail(self) -> None:
        """Drop the private tail and read all that the holder now shares."""
        self.keys = self.values = None
        self.tail_tokens = 0
        self.shared_tokens = self.prefix.num_tokens


NO_LIMIT = 1 << 62  # tokens: what fits a layer whose private bytes do not grow any more


class WindowLayerCache(LayerCache):
    """A layer whose tokens see the last `spec.window` ones, themselves among them (mlx-lm's RotatingKVCache).

    Rows stay in temporal order. The private tail takes in `WINDOW_SLACK_TOKENS` tokens beyond a window before its older
    rows are dropped, so that a step can be taken back. `keys_and_values`, attention and masks begin with the oldest row
    that a query of the step can see, or with the segment that has it.
    """

    def __init__(self, prefix: PrefixHolder, layer: int, spec: LayerSpec, dtype: mx.Dtype):
        super().__init__(prefix, layer, spec, dtype)
        assert spec.window > 0, spec
        self._dropped = 0  # tokens of the tail whose rows are gone
        self._step = 1  # tokens of the last step

    @property
    def tail_rows(self) -> int:
        return self.tail_tokens - self._dropped

    @property
    def tail_start(self) -> int:
        return self.shared_tokens + self._dropped

    @property
    def oldest(self) -> int:
        return self._oldest(self._before)

    def _oldest(self, offset: int) -> int:
        """The oldest token that a query at `offset` sees."""
        return max(0, offset - self.spec.window + 1)

    def _first(self, offset: int) -> int:
        """The token of the first row of `parts` and `tail` for queries from `offset` on."""
        for segment, _ in self._spans(offset):
            return segment.stop - layer_kv(segment, self.layer).num_rows
        return max(self._oldest(offset), self.tail_start)

    @property
    def _before(self) -> int:
        """The offset before the last step."""
        return self.offset - min(self._step, self.tail_tokens)

    @property
    def num_keys(self) -> int:
        return self.offset - self._first(self._before)

    def spans(self) -> Iterator[tuple[SharedSegment, int]]:
        return self._spans(self._before)

    def _spans(self, offset: int) -> Iterator[tuple[SharedSegment, int]]:
        oldest = self._oldest(offset)
        if self._dropped:  # the tail's rows are a window at least
            return
        for segment, length in super().spans():
            if segment.start + length > oldest:
                yield segment, length

    def tail(self) -> tuple[mx.array, mx.array]:
        first = self._first(self._before) - self.tail_start
        return self._held(slice(max(0, first), self.tail_rows))

    def append(self, keys: mx.array, values: mx.array) -> None:
        super().append(keys, values)
        self._step = keys.shape[2]

    def _make_room(self, step: int) -> None:
        """Room for `step` rows, by growing up to a window and its slack, then by dropping what no query can see."""
        if self._buffer_rows >= self.tail_rows + step:
            return
        wanted = self.tail_tokens + step
        limit = self.spec.tail_rows(NO_LIMIT)
        if self._dropped == 0 and wanted <= limit:
            self.grow(tail_capacity(wanted))
            return
        kept = min(self.tail_rows, self.spec.window)  # one more than a query sees: the last token can be taken back
        self.prefix.reserve_tail(wanted)
        self._replace_buffers(kept, max(limit, kept + step))
        self._dropped = self.tail_tokens - kept

    def grow(self, num_rows: int) -> None:
        self.prefix.reserve_tail(num_rows)
        rows = self.spec.tail_rows(num_rows)
        if rows > self._buffer_rows:
            self._replace_buffers(self.tail_rows, rows)

    def holds(self, tail_tokens: int) -> bool:
        return self._buffer_rows >= tail_tokens - self._dropped

    @property
    def capacity(self) -> int:
        rows = self._buffer_rows
        return NO_LIMIT if rows >= self.spec.tail_rows(NO_LIMIT) else rows

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of N new rows over the rows that their step reads; `window_size` may be narrower."""
        window = min(window_size or self.spec.window, self.spec.window)
        self.can_batch &= window == self.spec.window
        first, stop = self._first(self.offset), self.offset + N
        if first > stop - 1 - window and not return_array:
            return None if N == 1 else "causal"
        queries, keys = mx.arange(self.offset, stop)[:, None], mx.arange(first, stop)[None]
        return (queries >= keys) & (queries < keys + window)

    def is_trimmable(self) -> bool:
        """As mlx-lm's: any number of tokens can be taken back as long as the window has not moved."""
        return self.offset <= self.spec.window

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or none (0) if the rows before them are gone."""
        n = max(0, min(n, self.offset))
        target = self.offset - n
        if not self.can_stand_at(target):
            return 0
        super().trim(n)
        if self.tail_tokens == 0:
            self._dropped = 0
        self._step = 1
        return n

    def can_stand_at(self, target: int) -> bool:
        if target >= self.tail_start and target > self.shared_tokens:
            return not self._dropped or self._oldest(target) >= self.tail_start
        for segment, length in super().spans():
            if target == segment.start + length or target == segment.stop - 1:
                return True
            if segment.start < target < segment.start + length:
                return segment.num_tokens <= self.spec.window
        return target == 0

    def take_tail(self) -> tuple[mx.array, mx.array]:
        stop = self.tail_rows
        taken = self._held(slice(stop - self.spec.sealed_rows(self.tail_tokens), stop))
        self.keys = self.values = None
        return taken

    def put_back(self, tail: tuple[mx.array, mx.array]) -> None:
        super().put_back(tail)
        self._dropped = self.tail_tokens - tail[0].shape[2]

    def reset_tail(self) -> None:
        super().reset_tail()
        self._dropped = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> WindowLayerCache:
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, WindowLayerCache)
        twin._dropped = self._dropped
        return twin


class ChunkLayerCache(WindowLayerCache):
    """A layer whose tokens see those of their own chunk of `spec.window` tokens (mlx-lm's ChunkedKVCache, Llama 4).

    No chunk reaches back further than a window of its size; the model masks what of the window is of the chunk before.
    """

    @property
    def start_position(self) -> int:
        """The token of the first row that the next step reads."""
        return self._first(self.offset)

    def maybe_trim_front(self) -> None:
        """Rows are dropped when room is made. Who asks makes one mask for all rows of a batch."""
        self.can_batch = False


def layer_kv(segment: SharedSegment, layer: int) -> LayerKV:
    """An attention layer's packed K/V in a segment."""
    kv = segment.layers[layer]
    assert isinstance(kv, LayerKV)
    return kv


def _tagged(array: mx.array, cache: Any, role: str) -> KVArray:
    tagged = KVArray(array)
    tagged.layer_cache, tagged.role = cache, role
    return tagged


def placeholder(cache: Any, new: mx.array, num_tokens: int, role: str) -> KVArray:
    """An array of the right shape that only `attend` may read: all NaN."""
    nan = mx.array(float("nan"), new.dtype)
    return _tagged(mx.broadcast_to(nan, (*new.shape[:2], num_tokens, new.shape[3])), cache, role)


STACKED_TOKENS = 256  # tails up to here are stacked: a copy of them costs less than operations for every session


def stack_tails(caches: Sequence[LayerCache], role: Literal["keys", "values"]) -> mx.array:
    """The tail buffers of several sessions side by side [N, Hk, capacity, D], a copy; one session's is itself."""
    buffers = [getattr(cache, role) for cache in caches]
    if len(buffers) == 1:
        return buffers[0]
    capacity = max(buffer.shape[2] for buffer in buffers)
    missing = [capacity - buffer.shape[2] for buffer in buffers]
    widen = [[(0, 0), (0, 0), (0, count), (0, 0)] for count in missing]
    return mx.concatenate([mx.pad(b, w) if n else b for b, w, n in zip(buffers, widen, missing, strict=True)])
