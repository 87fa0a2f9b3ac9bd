"""`TokenContext`: the tokens of one holder, shared prefix and private tail, and the model's steps on them."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .allocate import DEFAULT_KIND
from .attention import QuantizedAttention, WatchedAttention, nan_error, quantized_attention, require_finite
from .errors import (
    BudgetExceededError,
    ContextLimitError,
    FingerprintMismatchError,
    IntegrityError,
    InvalidValueError,
    SessionBusyError,
    SessionClosedError,
    UnsupportedModelError,
)
from .guard import Looked
from .layer_cache import LayerCache, tail_capacity
from .manager import SharedKVCacheManager
from .policy import TEAM_ACCESS, Access
from .prefix import SharedPrefix
from .sampling import Sampling
from .segment import readable, truncate_views
from .spec import WINDOW_SLACK_TOKENS
from .state_cache import grouped, leaves
from .table import common_prefix

if TYPE_CHECKING:
    from .model import LoadedModel

Progress = Callable[[int, int], None]
Sampler = Callable[[mx.array], mx.array]
Prefilling = Generator[int, int | None]
"""A prefill in steps, so that others may run in between: it yields how many tokens are left before every chunk, and
may be sent how many the chunk may have at most. Up to the first yield nothing is computed."""

# The last rows of a prefill run alone: logits, the widest matrix of all, are then made for few rows only.
_LAST_CHUNK_TOKENS = 32


@dataclass(frozen=True)
class PrefillReport:
    """What one prefill reused (tokens whose K/V stood ready) and what it computed."""

    reused_tokens: int
    computed_tokens: int


class TokenContext:
    """Tokens whose keys and values are held: prefill, decode, seal and rewind, without a notion of messages.

    The floor of `AgentSession`, which has the public verbs. One call at a time: every public verb runs
    inside `_working`, which refuses a second one and, when a call fails, brings all layers back to the
    length of `token_ids`.
    """

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        manager: SharedKVCacheManager,
        *,
        sampling: Sampling | None = None,
        sampler: Sampler | None = None,
        max_context_tokens: int | None = None,
        prefill_step_tokens: int = 512,
        attention: QuantizedAttention | None = None,
        access: Access = TEAM_ACCESS,
    ):
        if (field := manager.spec.fingerprint.first_difference(model.spec.fingerprint)) is not None:
            raise FingerprintMismatchError(f"[AgentSession] {field}: the manager was made for another model")
        limit = model.spec.max_context_tokens if max_context_tokens is None else max_context_tokens
        if not 0 < limit <= model.spec.max_context_tokens:
            raise InvalidValueError(
                f"[AgentSession] max_context_tokens: expected 1..{model.spec.max_context_tokens}, got {limit}"
            )
        if prefill_step_tokens <= 0:
            raise InvalidValueError(f"[AgentSession] prefill_step_tokens: expected > 0, got {prefill_step_tokens}")
        self.name, self.manager = name, manager
        self.sampling, self.max_context_tokens = sampling or Sampling(), limit
        self.last_prefill = PrefillReport(0, 0)
        self._model, self._sampler = model, sampler
        # A longer step would leave rows in a sliding layer that are not budgeted, and could not be taken back.
        self._step = min(prefill_step_tokens, WINDOW_SLACK_TOKENS) if manager.spec.windows else prefill_step_tokens
        self._attention = attention or QuantizedAttention()
        self._seed = secrets.randbits(32) if self.sampling.seed is None else self.sampling.seed
        self._num_drawn = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._logits: mx.array | None = None  # of the last token, when its forward was the latest
        self._tail_ids: list[int] = []
        self._stand_on(manager.get_shared_kv_cache((), access=access))

    def _stand_on(self, prefix: SharedPrefix) -> None:
        """Read `prefix`, with an empty tail."""
        caches = self.manager.make_caches(prefix, reads_base=self._attention.reads_base)
        self._tail_ids, self._logits = [], None  # first: an interrupt must not leave a tail without its domains
        self._prefix, self._caches = prefix, caches
        self._leaves = leaves(caches)  # one for each layer, whatever lists the model takes them in
        self._tail_domains = frozenset()

    @property
    def _tail_domains(self) -> frozenset[str]:
        """Of tokens in the tail that were written elsewhere before."""
        return self._prefix.holding.tail_domains

    @_tail_domains.setter
    def _tail_domains(self, domains: frozenset[str]) -> None:
        self._prefix.holding.tail_domains = domains

    # --- looking -----------------------------------------------------------------------------------

    @property
    def prefix(self) -> SharedPrefix:
        """The shared prefix that this session holds."""
        return self._prefix

    @property
    def access(self) -> Access:
        """The domains that it may read, and the one that it writes into."""
        return self._prefix.access

    @property
    def caches(self) -> list[LayerCache]:
        """The per-layer caches, as mlx-lm's models take them. `copy.deepcopy` of the list is a fork."""
        return self._caches

    @property
    def num_tokens(self) -> int:
        return self._prefix.num_tokens + len(self._tail_ids)

    @property
    def token_ids(self) -> list[int]:
        """Every token whose keys and values the session has, shared and private."""
        return self._prefix.token_ids + self._tail_ids

    @property
    def private_bytes(self) -> int:
        """Bytes of the private tail's buffers."""
        return sum(cache.nbytes for cache in self._leaves)

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name!r}, {self._prefix.num_tokens} shared + {len(self._tail_ids)} private tokens)"

    # --- prefill -----------------------------------------------------------------------------------

    def _prefilling(
        self,
        wanted: list[int],
        progress: Progress | None = None,
        *,
        reserve: int = 0,
        is_budgeted: bool = False,
        domains: frozenset[str] = frozenset(),
    ) -> Prefilling:
        """Hold exactly `wanted`, in steps (see `Prefilling`): keep or find what there is of it, compute the rest.

        `reserve` more tokens must fit, with `is_budgeted` in bytes, too. `domains` are those that any of `wanted` may
        have been written into before; by tokens nothing of others is looked for.
        """
        self._check_room(len(wanted) + reserve)
        held = self.token_ids
        common = common_prefix(held, wanted)
        kept = self._reachable(common)
        domains |= self._domains_of(kept, common)
        findable = wanted if self.access.may_find(domains, ()) else ()
        stored = self.manager.match_prefix(findable, held_tokens=kept, access=self.access)
        if stored.num_tokens > kept:
            self._adopt(stored)
        else:
            stored.release()
            self._rewind(len(held) - common)
        self._tail_domains = domains | (self._tail_domains if self._tail_ids else frozenset())
        common = self.num_tokens
        try:
            self._make_room(len(wanted) - common, spare_tokens=reserve if is_budgeted else 0)
        except BudgetExceededError:
            self._rewind(common - kept)  # one that finds no room must not keep others' from being evicted
            raise
        for cache in self._leaves:
            cache.mark()
        yield from self._computing(wanted[common:], progress)
        self.last_prefill = PrefillReport(common, len(wanted) - common)

    def _computing(self, token_ids: list[int], progress: Progress | None = None) -> Prefilling:
        """Append `token_ids`, for which there is room, by running the model on them in steps."""
        total = left = len(token_ids)
        if progress and total:
            progress(0, total)
        while left:
            limit = yield left
            size = chunk_size(left, self._step if limit is None else max(1, min(limit, self._step)))
            chunk = token_ids[total - left : total - left + size]
            logits = self._run(_known(chunk))[-1]
            left -= size
            if left == 0:
                mx.eval(logits, [cache.state for cache in self._leaves])
                self._require_finite(logits)
                self._logits = logits
            else:
                mx.eval([cache.state for cache in self._leaves])
            self._tail_ids.extend(chunk)
            self._commit()
            mx.clear_cache()
            if progress:
                progress(total - left, total)

    def _check_room(self, needed: int) -> None:
        if needed > self.max_context_tokens:
            raise ContextLimitError(
                f"[AgentSession {self.name}] needed {needed} positions, available {self.max_context_tokens}"
            )

    def _make_room(self, num_tokens: int, *, spare_tokens: int = 0, is_clean: bool = False) -> bool:
        """Grow every layer's tail for `num_tokens` more, or raise `BudgetExceededError` and grow none.

        True if it grew. `spare_tokens` behind them are budgeted, for later. `is_clean` says that MLX's buffer
        cache was emptied just before.
        """
        stop = len(self._tail_ids) + num_tokens
        if spare_tokens:
            self._prefix.reserve_tail(tail_capacity(stop + spare_tokens))
        if all(cache.capacity >= stop for cache in self._leaves):
            return False
        self._prefix.reserve_tail(tail_capacity(stop))
        if not is_clean:
            # MLX hands out cached buffers up to two pages too large, which on a short tail is a third.
            mx.clear_cache()
        for cache in self._leaves:
            cache.grow(tail_capacity(stop))
        mx.eval([cache.state for cache in self._leaves])
        return True

    def _run(self, token_ids: mx.array, caches: list[LayerCache] | None = None) -> mx.array:
        """Logits [L, V], lazy, of `token_ids` [L] behind all that is cached."""
        if self._is_closed:  # between two steps of a stream
            raise SessionClosedError(f"[AgentSession {self.name}] expected an open session, got a closed one")
        self._logits = None
        self._prefix.require_readable()  # a recurrent layer would not ask
        with quantized_attention(self._attention):
            return self._model.model(token_ids[None], cache=caches or self._caches)[0]

    def _require_finite(self, logits: mx.array) -> None:
        require_finite(logits, self._model.spec.fingerprint.architecture)

    # --- decode ------------------------------------------------------------------------------------

    def _tokens(self, limit: int) -> Iterator[int]:
        """At most `limit` tokens, each appended when it is yielded; the step behind it is queued already."""
        token, is_nan = self._pick(self._next_logits(), 0), mx.array(False)
        mx.eval(token)  # its logits are there: the first token need not wait for the step that is queued next
        for left in reversed(range(limit)):
            self._make_room(1)
            logits = self._run(token.reshape(1))[-1]
            # Flags ride along and are read a step later, so that the queue never runs dry.
            queued, next_is_nan = [logits], mx.any(mx.isnan(logits))
            if left:
                queued.append(self._pick(logits, 1))
            mx.async_eval(next_is_nan, *queued)
            if is_nan.item():
                self._rewind(1)  # the keys and values of the token before are not finite either
                raise nan_error(self._model.spec.fingerprint.architecture)
            self._accept(int(token.item()), logits)  # type: ignore[arg-type]
            yield self._tail_ids[-1]
            token, is_nan = queued[-1], next_is_nan

    def _accept(self, token: int, logits: mx.array) -> None:
        """The step of `token` is queued; `logits` [V] are those behind it."""
        self._tail_ids.append(token)
        self._commit()
        self._logits = logits
        self._num_drawn += 1

    def _commit(self) -> None:
        """The layers are as long as `token_ids` now, and go back to here if the next step fails."""
        for cache in self._leaves:
            cache.commit(len(self._tail_ids))

    def _pick(self, logits: mx.array, ahead: int) -> mx.array:
        if self._sampler is not None:
            return self._sampler(logits)
        return self.sampling.pick(logits, self._seed, self._num_drawn + ahead)

    def _next_logits(self) -> mx.array:
        """The logits behind the last token; where its K/V came ready-made (a handoff, an exact hit), it runs again."""
        self._prefix.require_readable()
        if (ready := self._logits) is not None:
            try:
                self._require_finite(ready)
            except UnsupportedModelError:
                self._rewind(1)
                raise
            return ready
        if self.num_tokens == 0:
            raise InvalidValueError(f"[AgentSession {self.name}] expected tokens to go on from, got an empty session")
        behind = self.num_tokens - 1
        if not self._tail_ids or self.manager.spec.has_state or self._reachable(behind) < behind:
            return self._logits_elsewhere()
        tail = list(self._tail_ids)
        try:
            self._rewind(1)
            run_through(self._computing(tail[-1:]))
        except BaseException:
            self._tail_ids = tail  # its row is still there
            raise
        assert self._logits is not None
        return self._logits

    def _logits_elsewhere(self) -> mx.array:
        """On a fork that is dropped: a sealed last token stays the one that everyone reads, and a layer that cannot go
        back by one token and be put back stays where it is."""
        with contextlib.closing(_Spare(self.manager, self._prefix, self.token_ids)) as spare:
            for start in range(0, len(spare.token_ids), self._step):
                chunk = spare.token_ids[start : start + self._step]
                logits = self._run(_known(chunk), spare.caches)[-1]
                mx.eval(logits, [cache.state for cache in leaves(spare.caches)])
        self._require_finite(logits)
        return logits

    # --- seal and rewind ---------------------------------------------------------------------------

    def _seal(self, kind: str = DEFAULT_KIND) -> int:
        count = len(self._tail_ids)
        self.manager.seal(self._prefix, self._leaves, self._tail_ids, look=self._look, kind=kind)
        self._tail_ids, self._logits = [], None
        for cache in self._leaves:
            cache.reset_tail()
        self._prefix.release_tail()
        if count:
            self.manager.compact(self._prefix)
        return count

    def _domains_of(self, start: int, stop: int) -> frozenset[str]:
        """Of the tokens from `start` to `stop`, which stay what they are when they are computed again."""
        views = [view for view in self._prefix.views if max(start, view.start) < min(stop, view.stop)]
        own = [view.segment.own_domains for view in views]
        return frozenset().union(*own, self._tail_domains if stop > max(start, self._prefix.num_tokens) else ())

    def _look(self, num_tokens: int) -> dict[int, Looked]:
        """What every layer's attention asks for the last `num_tokens` tokens of the tail, or fewer: they run once more
        on the rows that are there, which costs a step of so many tokens and leaves no trace. Recurrent layers have no
        state but the one behind them, so that queries above these are near what they were, not equal."""
        found: dict[int, Looked] = {}

        def keep(layer: int, queries: mx.array, scale: float) -> None:
            found[layer] = Looked(queries, scale)

        seen = [cache for cache in self._leaves if isinstance(cache, LayerCache)]
        num_tokens = min([num_tokens, *(cache.tail_rows for cache in seen)])
        if num_tokens == 0:
            return found
        if not all(cache.can_stand_at(self.num_tokens - num_tokens) for cache in seen):
            num_tokens = 1
        caches = grouped([cache.replay(num_tokens) for cache in self._leaves], self.manager.spec.grouping)
        attention = self._attention
        watched = WatchedAttention(attention.route, attention.table, attention.reads_base, watch=keep)
        with quantized_attention(watched):
            self._model.model(mx.array(self._tail_ids[-num_tokens:])[None], cache=caches)
        mx.eval([looked.queries for looked in found.values()])
        mx.clear_cache()  # packed arrays would be put into its buffers, which may be too large
        return found

    def _reachable(self, target: int) -> int:
        """How many of the first `target` tokens can be kept: all, or as many as the model can go on from."""
        if all(cache.can_stand_at(target) for cache in self._leaves):
            return target
        views = readable(truncate_views(self._prefix.views, target), self.manager.spec)
        return views[-1].stop if views else 0

    def _rewind_exactly(self, num_tokens: int) -> None:
        """`_rewind`, and compute again what it had to forget beyond that."""
        wanted = self.token_ids[: self.num_tokens - num_tokens]
        num_missing = len(wanted) - self._reachable(len(wanted))
        if num_missing:
            self._prefix.reserve_tail(tail_capacity(num_missing))  # before anything is forgotten
        domains = self._domains_of(len(wanted) - num_missing, len(wanted))
        self._rewind(num_tokens)
        if not self._tail_ids:
            self._tail_domains = domains
        if num_missing:
            self._make_room(num_missing)
            run_through(self._computing(wanted[self.num_tokens :]))

    def _rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens, or more where a layer cannot be cut there (`_reachable`)."""
        if num_tokens == 0:
            return
        target = self.num_tokens - num_tokens
        if (reachable := self._reachable(target)) != target:
            self._tail_ids.clear()
            self._prefix.truncate(reachable)
            self._prefix.release_tail()
            self._stand_on(self._prefix)
            return
        before = [(cache.shared_tokens, cache.tail_tokens) for cache in self._leaves]
        trimmed = [cache.trim(num_tokens) for cache in self._leaves]
        wrong = next((i for i, count in enumerate(trimmed) if count != num_tokens), None)
        if wrong is not None:
            for cache, lengths in zip(self._leaves, before, strict=True):
                cache.set_length(*lengths)
            raise IntegrityError(f"[rewind] layer {wrong}: expected to trim {num_tokens}, got {trimmed[wrong]}")
        self._logits = None
        if num_tokens <= len(self._tail_ids):
            del self._tail_ids[len(self._tail_ids) - num_tokens :]
        else:
            self._tail_ids.clear()  # first: an interrupt in between must not leave a tail behind a shorter prefix
            self._tail_domains = frozenset()
            self._prefix.truncate(target)

    def _shrink(self) -> None:
        """Give back the room that the tail does not need any more."""
        rows = tail_capacity(len(self._tail_ids)) if self._tail_ids else 0
        if all(cache.capacity <= rows for cache in self._leaves):
            return
        for cache in self._leaves:
            cache.shrink(rows)
        mx.eval([cache.state for cache in self._leaves])
        mx.clear_cache()
        self._prefix.trim_tail(rows)

    # --- one call at a time, all or nothing --------------------------------------------------------

    def close(self) -> None:
        """Release everything, a call that is still running on another thread ends with `SessionClosedError` first.

        Twice is harmless. Also on leaving a `with` block and when garbage collected.
        """
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        self._prefix.release()
        self._tail_ids, self._logits, self._caches, self._leaves = [], None, [], []

    def _adopt(self, prefix: SharedPrefix) -> None:
        """Stand on `prefix` with an empty tail; what was held before is released after."""
        before, prefix.is_busy = self._prefix, self._lock.locked()
        self._stand_on(prefix)
        before.release()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError(f"[AgentSession {self.name}] another call on this session is still running")
        try:
            if self._is_closed:
                raise SessionClosedError(f"[AgentSession {self.name}] expected an open session, got a closed one")
            self._prefix.is_busy = True
            yield
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._prefix.is_busy = False
            self._lock.release()
            if self._is_closed:  # meanwhile, on another thread
                self.close()

    def _roll_back(self) -> None:
        """Bring every layer to the length of `token_ids`; if the tail cannot be evaluated, to the sealed length."""
        is_whole = all(cache.holds(len(self._tail_ids)) for cache in self._leaves)
        for cache in self._leaves:
            cache.set_length(self._prefix.num_tokens, len(self._tail_ids))
        try:
            mx.eval([cache.state for cache in self._leaves])
        except (RuntimeError, MemoryError):
            is_whole = False
        if not is_whole:
            self._tail_ids, self._logits = [], None
            for cache in self._leaves:
                cache.reset_tail()
            self._prefix.release_tail()


class _Spare:
    """Caches of what `prefix` has of `token_ids` less the last one, for steps that leave no trace, and the tokens that
    are missing; a few more where the model cannot go on from there."""

    def __init__(self, manager: SharedKVCacheManager, prefix: SharedPrefix, token_ids: list[int]):
        self._prefix = prefix.fork()
        self._prefix.truncate(len(token_ids) - 1)
        self.token_ids = token_ids[self._prefix.num_tokens :]
        self.caches: list[Any] = manager.make_caches(self._prefix)

    def close(self) -> None:
        self._prefix.release()


def _known(token_ids: list[int]) -> mx.array:
    """Tokens [L] to run. Of a card without its tokens only what comes after it can be."""
    if min(token_ids) < 0:
        raise InvalidValueError(
            "[AgentSession] token_ids: expected 0 or more, got tokens whose ids a card did not keep"
        )
    return mx.array(token_ids)


def run_through(steps: Prefilling) -> None:
    for _ in steps:
        pass


def chunk_size(left: int, limit: int) -> int:
    """Tokens of the next chunk when `left` are missing and at most `limit` may run at once."""
    if left <= min(limit, 2 * _LAST_CHUNK_TOKENS):
        return left
    return min(limit, left - min(limit, _LAST_CHUNK_TOKENS))
