"""`SharedState`: a recurrent layer's state, and the lists of caches that mlx-lm's models take.

Imports mlx-lm when a model needs these classes: its models tell them by `isinstance`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .layer_cache import NO_LIMIT, LayerCache, PrefixHolder
from .segment import LayerState
from .spec import StateSpec


@functools.cache
def state_class() -> Any:
    """mlx-lm's ArraysCache, whose arrays may be a segment's: models replace them whole and never write into them."""
    from mlx_lm.models.cache import ArraysCache

    class SharedState(ArraysCache):
        """One layer's state behind all tokens. It can be taken back to the last step that was committed, to where a
        prefill began (`mark`), and to where a segment ends."""

        cache: list[Any]
        can_batch = is_decoding_routed = False
        num_keys = 0

        def __init__(self, prefix: PrefixHolder, layer: int, spec: StateSpec):
            super().__init__(spec.num_arrays)
            self.prefix, self.layer, self.spec = prefix, layer, spec
            self.reset_tail()

        @property
        def offset(self) -> int:
            return self.shared_tokens + self.tail_tokens

        @property  # type: ignore[misc]
        def state(self) -> Any:
            """The arrays; the holder rides along so that `save_prompt_cache` refuses."""
            return [*(array for array in self.cache if array is not None), self.prefix]

        @property
        def nbytes(self) -> int:
            return sum(array.nbytes for array in self.cache if array is not None) if self.tail_tokens else 0

        def size(self) -> int:
            return self.offset

        def empty(self) -> bool:
            return self.cache[0] is None

        def is_trimmable(self) -> bool:
            return False

        @property
        def capacity(self) -> int:
            """Any number of tokens once the state of its own is budgeted."""
            return NO_LIMIT if self._is_budgeted else 0

        def grow(self, num_rows: int) -> None:
            self.prefix.reserve_tail(num_rows)
            self._is_budgeted = True

        def shrink(self, num_rows: int) -> None:
            """A state has one size; none of its own is needed where there is no tail."""
            self._is_budgeted &= num_rows > 0

        def commit(self, tail_tokens: int) -> None:
            self._committed, self._committed_tokens = list(self.cache), tail_tokens
            self.tail_tokens = tail_tokens

        def mark(self) -> None:
            self._marked, self._marked_tokens = list(self._committed), self._committed_tokens

        def holds(self, tail_tokens: int) -> bool:
            return self._committed_tokens == tail_tokens

        def can_stand_at(self, target: int) -> bool:
            ends = {view.stop for view in self.prefix.views if view.length == view.segment.num_tokens}
            return target in ends | {0, self.offset, self._marked_tokens + self.shared_tokens}

        def set_length(self, shared_tokens: int, tail_tokens: int) -> None:
            """Back to the last committed step, which had this length."""
            self.cache, self.shared_tokens, self.tail_tokens = list(self._committed), shared_tokens, tail_tokens

        def trim(self, n: int) -> int:
            """Forget `n` tokens if a segment ends there, else none (0)."""
            target = self.offset - max(0, min(n, self.offset))
            if target == self.offset or not self.can_stand_at(target):
                return 0
            if target == self.shared_tokens + self._marked_tokens and self._marked_tokens:
                self.cache = list(self._marked)
                self.commit(self._marked_tokens)
                return n
            behind = [view.segment for view in self.prefix.views if view.stop <= target]
            self._stand_on(behind[-1] if behind else None, target)
            return n

        def _stand_on(self, segment: Any, shared_tokens: int) -> None:
            found = [None] * self.spec.num_arrays if segment is None else segment.layers[self.layer].arrays
            self.cache = list(found)
            self.shared_tokens, self.tail_tokens = shared_tokens, 0
            self._committed, self._committed_tokens = list(self.cache), 0
            self._is_budgeted = False
            self.mark()

        def take_tail(self) -> tuple[mx.array, ...]:
            return tuple(self.cache)

        def put_back(self, tail: tuple[mx.array, ...]) -> None:
            self.cache = list(tail)

        def reset_tail(self) -> None:
            views = self.prefix.views
            self._stand_on(views[-1].segment if views else None, self.prefix.num_tokens)

        def replay(self, num_tokens: int) -> Any:
            """A twin for tokens that are run once more, with the state behind them: there is no earlier one."""
            twin = copy.copy(self)
            twin.cache = list(self.cache)
            return twin

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            key = id(self.prefix)
            if key not in memo:
                memo[key] = self.prefix.fork()
            twin = type(self)(memo[key], self.layer, self.spec)
            twin.cache, twin._committed = list(self.cache), list(self._committed)
            twin._committed_tokens = self._committed_tokens
            twin.mark()
            twin.shared_tokens, twin.tail_tokens = self.shared_tokens, self.tail_tokens
            if self.tail_tokens:
                twin.grow(self.tail_tokens)
            return twin

    return SharedState


def snapshot(arrays: Sequence[mx.array]) -> LayerState:
    """Arrays of their own: what a model keeps may be a view that holds a whole prefill's buffer."""
    return LayerState(tuple(array + mx.zeros((), array.dtype) for array in arrays))


def grouped(caches: Sequence[Any], grouping: Sequence[int]) -> list[Any]:
    """The caches of single layers as the model takes them, see `CacheSpec.grouping`."""
    if not grouping:
        return list(caches)
    from mlx_lm.models.cache import CacheList

    found, left = [], iter(caches)
    for count in grouping:
        members = [next(left) for _ in range(max(1, count))]
        found.append(CacheList(*members) if count else members[0])
    return found


def leaves(caches: Sequence[Any]) -> list[LayerCache]:
    """The caches of single layers, in the order of the spec."""
    return [leaf for cache in caches for leaf in getattr(cache, "caches", (cache,))]
