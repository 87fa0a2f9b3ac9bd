"""`SharedKVCacheManager`: a byte budget over immutable segments that many sessions read.

There is no big array: a preallocated pool would be copied whole at the first write after a handoff.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from .allocate import DEFAULT_KIND, KINDS
from .errors import (
    AccessError,
    BudgetExceededError,
    ContextLimitError,
    IntegrityError,
    InvalidValueError,
    NonFiniteError,
    QKVShareError,
    RevokedError,
    SessionClosedError,
)
from .figures import ManagerStats, Tally
from .guard import Guard, Looked
from .integrity import check_table, require_equal
from .layer_cache import ChunkLayerCache, LayerCache, WindowLayerCache
from .packing import NOTHING, GuardReport, Packer, Source
from .policy import EVERYTHING, TEAM_ACCESS, Access, AuditLog, Receipt
from .prefix import Holding, SharedPrefix
from .quantize import Factors
from .segment import (
    LayerKV,
    LayerState,
    SegmentView,
    SharedSegment,
    layers_checksum,
    readable,
    residuals_checksum,
    truncate_views,
)
from .segment_layout import settled
from .spec import CacheSpec, LayerSpec, QuantSpec, StateSpec
from .state_cache import grouped, state_class
from .table import Record, Sealed, SegmentTable, SharedSlot, can_join
from .verdict import check_factors, choose

_CACHES = {"full": LayerCache, "window": WindowLayerCache, "chunk": ChunkLayerCache}
DEFAULT_BUDGET_BYTES = 4 * 2**30
_GUARD = Guard()

Content = tuple[Sealed, int, tuple[LayerKV | LayerState, ...]]
Saved = TypeVar("Saved", covariant=True)
Loaded = TypeVar("Loaded", covariant=True)


class Revoking(Protocol):
    def revoke(self, keys: Collection[str]) -> tuple[tuple[str, ...], int]: ...


class CardKeeper(Revoking, Protocol[Saved, Loaded]):
    """Where cards are kept: a `CardStore`."""

    def save(self, manager: SharedKVCacheManager, name: str, source: Any, *, keep_tokens: bool = True) -> Saved: ...
    def load(self, manager: SharedKVCacheManager, name: str) -> Loaded: ...


class Spill(Revoking, Protocol):
    """Where evicted segments go, and come back from: a `SpillStore`. Neither fails for want of room or of a disk."""

    def keep(self, manager: SharedKVCacheManager, views: Sequence[SegmentView]) -> bool: ...
    def find(
        self, manager: SharedKVCacheManager, token_ids: Sequence[int], access: Access, *, longer_than: int
    ) -> SharedPrefix | None: ...


class SharedKVCacheManager:
    """Holds each shared segment once, within `budget_bytes`, for every session of one model.

    Args:
        spec: the model's cache layout; its fingerprint binds the segments to the model.
        quant: how every segment in here is packed: a `QuantSpec`, a preset's name, or None for what `qkvshare doctor`
            found best for this model, `safe` if it was never asked.
        budget_bytes: the limit for packed segments, private tails and reservations together.
        key_factors: of every layer's keys, [1, Hk, 1, D] or None, see `calibrate`: a model's own constants, which make
            4 bits better. They are not counted. None takes those that the doctor kept, if a preset is better with them.
        allow_unsafe: take a `quant` that the doctor refused for this model, which raises `UnsafeQuantError` otherwise.
        guard: raises the bits of layers whose attention a seal would damage, and says so in `stats()`; None for none.
        may_drop_residuals: of nested precision; what does not fit even after evicting then costs all segments their
            residuals (`drop_residuals`) before it is refused.
        spill: keeps what is evicted, which comes back when a prompt begins like it; None to drop it.
        audit: gets a line for every handoff, refusal and revocation.

    `id` tells its slots from another manager's. All methods may be called from any thread. Nothing is
    written to a segment after it is stored.
    """

    def __init__(
        self,
        spec: CacheSpec,
        quant: QuantSpec | str | None = None,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        key_factors: Factors | None = None,
        allow_unsafe: bool = False,
        guard: Guard | None = _GUARD,
        may_drop_residuals: bool = False,
        spill: Spill | None = None,
        audit: AuditLog | None = None,
    ):
        if not isinstance(budget_bytes, int) or budget_bytes <= 0:
            raise InvalidValueError(f"[SharedKVCacheManager] budget_bytes: expected an int > 0, got {budget_bytes!r}")
        self.spec, self.budget_bytes = spec, budget_bytes
        self.quant, factors = choose(spec, quant, key_factors, allow_unsafe=allow_unsafe)
        self.id, self.may_drop_residuals = secrets.token_hex(8), may_drop_residuals
        self.spill, self.audit = spill, audit
        self._packer = Packer(spec, self.quant, [None] * len(spec.layers) if factors is None else factors, guard)
        check_factors(self._packer.factors, spec)
        self.plans = self._packer.plans
        self.packed_token_bytes = self.quant.packed_token_bytes(spec)
        self._lock = threading.RLock()
        self._table = SegmentTable(spec)
        self._holdings: dict[int, Holding] = {}
        self._free_bytes = budget_bytes  # kept as a running balance, which `check_integrity` holds against the table
        self.dropped: collections.deque[int] = collections.deque()  # holders that were garbage collected
        self._ids, self._clock = itertools.count(1), itertools.count(1)
        self._tally = Tally()
        self._revoked_keys: set[str] = set()
        self.handoff_lock = threading.RLock()  # one handoff at a time, whatever coordinator carries it
        self.last_sequence: dict[str, int] = {}  # of every sender, against replay

    # --- allocate, store, get ----------------------------------------------------------------------

    def allocate_shared_slot(self, num_tokens: int, *, replacing: SharedPrefix | None = None) -> SharedSlot:
        """Reserve the packed bytes of a segment, but for what the guard may add, evicting unreferenced segments if it
        takes that.

        `replacing` names the holder whose private tail the segment will take the place of: bytes that
        the tail has budgeted already are not asked for twice.

        Raises:
            BudgetExceededError: the bytes do not fit; nothing was evicted or reserved.
            ContextLimitError: more tokens than the model has positions.
        """
        if num_tokens <= 0:
            raise InvalidValueError(f"[allocate_shared_slot] num_tokens: expected > 0, got {num_tokens}")
        self._check_context(replacing, num_tokens)
        nbytes = self.quant.packed_bytes(self.spec, num_tokens, start=replacing.num_tokens if replacing else 0)
        with self._locked():
            counted = max(0, nbytes - (replacing.private_bytes if replacing else 0))
            self._take(counted, f"a segment of {num_tokens} tokens")
            return self._table.allocate(num_tokens, nbytes, counted)

    def free_slot(self, slot: SharedSlot) -> None:
        """Give back an allocated slot that was not stored into."""
        with self._locked():
            record = self._table.records.get(slot.slot)
            if record is not None and record.segment is None:
                del self._table.records[slot.slot]
                self._free_bytes += record.counted_bytes

    def check_storable(self, token_ids: Sequence[int], layers: Sequence[tuple[mx.array, ...]]) -> None:
        """Raise unless `layers` [(keys [1, Hk, T, Dk], values [1, Hk, T, Dv]), …] fit the spec and are finite.

        A sliding layer has the last min(T, window) rows, a layer with a state its arrays.
        """
        dtype = getattr(mx, self.spec.dtype)
        if len(layers) != len(self.spec.layers):
            raise InvalidValueError(f"[quantize_and_store] layers: expected {len(self.spec.layers)}, got {len(layers)}")
        for index, (spec, arrays) in enumerate(zip(self.spec.layers, layers, strict=True)):
            where = f"[quantize_and_store] layer {index}"
            if isinstance(spec, StateSpec):
                _check_state(where, spec, arrays)
                continue
            rows = spec.sealed_rows(len(token_ids))
            for name, x, dim in zip(("keys", "values"), arrays, (spec.k_head_dim, spec.v_head_dim), strict=True):
                expected = (1, spec.n_kv_heads, rows, dim)
                if tuple(x.shape) != expected:
                    raise InvalidValueError(f"{where} {name}: expected shape {expected}, got {tuple(x.shape)}")
                if x.dtype != dtype:
                    raise InvalidValueError(f"{where} {name}: expected {dtype}, got {x.dtype}")
                _require_finite(f"{where} {name}", x)

    def quantize_and_store(
        self,
        slot: SharedSlot,
        token_ids: Sequence[int],
        layers: list[Any],
        *,
        prefix: SharedPrefix | None = None,
        consume: bool = False,
        looked: Mapping[int, Looked] = NOTHING,
        kind: str = DEFAULT_KIND,
        access: Access = TEAM_ACCESS,
    ) -> SharedPrefix:
        """Quantize full-precision K/V once, freeze them in `slot`, and extend `prefix` (or a new one) by the segment.

        Args:
            layers: per layer keys [1, Hk, T, Dk] (after RoPE) and values [1, Hk, T, Dv]; of a sliding layer the last
                min(T, window) rows; of a layer with a state its arrays behind the last token.
            prefix: the holder behind whose tokens the K/V were computed.
            consume: empty `layers` one by one, so that packed and full precision never both exist whole.
            looked: the queries of the last tokens by layer, with which the guard tries what was packed, and adaptive
                precision sees which blocks matter.
            kind: what the tokens are, one of `allocate.KINDS`; adaptive precision gives some more bits than others.
            access: of the new prefix where there is none; the segment is written into the prefix's domain, and those of
                its tail.

        Raises:
            NonFiniteError, InvalidValueError, BudgetExceededError (if the guard needs more than was allocated): the
            slot is free again, `prefix` and `layers` are as they were.
        """
        record = self._table.record(slot.slot)
        if record.segment is not None:
            raise InvalidValueError(f"[quantize_and_store] slot {slot.slot}: expected an empty slot, got a stored one")
        try:
            _check_kind(kind)
            if len(token_ids) != slot.num_tokens:
                raise InvalidValueError(
                    f"[quantize_and_store] token_ids: expected {slot.num_tokens} as allocated, got {len(token_ids)}"
                )
            if prefix is not None:
                self._check_held(prefix.holding)
            self._check_context(prefix, len(token_ids))
            self.check_storable(token_ids, layers)
            start = prefix.num_tokens if prefix else 0
            source = Source(slot.slot, start, len(token_ids), prefix.views if prefix else (), looked, kind)
            report = GuardReport()
            packed = tuple(self._packer.pack(source, layers, report, consume=consume))
            own = frozenset({prefix.access.writes, *prefix.holding.tail_domains} if prefix else {access.writes})
            segment = SharedSegment(
                slot.slot, start, tuple(token_ids), packed, self.quant,
                self.spec.fingerprint.digest, layers_checksum(packed), residuals_checksum(packed),
                own, _inherited(prefix.views if prefix else ()) | own,
            )  # fmt: skip
            return self._store(record, segment, prefix or self._retained((), access), report)
        except BaseException:
            self.free_slot(slot)
            raise

    def seal(
        self,
        prefix: SharedPrefix,
        caches: Sequence[Any],
        token_ids: Sequence[int],
        *,
        look: Callable[[int], Mapping[int, Looked]] | None = None,
        kind: str = DEFAULT_KIND,
    ) -> None:
        """Extend `prefix` by `token_ids`, whose rows are the private tails of `caches`, one for each layer: by what
        stands sealed already, or by a segment of those rows. The caches keep none of them, unless it fails before the
        first layer is packed. `look(n)` tells what attention asks for the last n tokens; `kind` and what it is for:
        `quantize_and_store`."""
        if not token_ids or self.extend_if_sealed(prefix, token_ids):
            return
        _check_kind(kind)  # before anything is taken from the caches
        num_looked = self._packer.num_looked
        looked = look(num_looked) if look and num_looked else NOTHING
        slot = self.allocate_shared_slot(len(token_ids), replacing=prefix)
        layers: list[Any] = [cache.take_tail() for cache in caches]
        try:
            self.quantize_and_store(slot, token_ids, layers, prefix=prefix, consume=True, looked=looked, kind=kind)
        except BaseException:
            if all(layer is not None for layer in layers):  # nothing was consumed yet
                for cache, tail in zip(caches, layers, strict=True):
                    cache.put_back(tail)
            raise

    def _store(self, record: Record, segment: SharedSegment, prefix: SharedPrefix, report: GuardReport) -> SharedPrefix:
        with self._locked():
            self._check_held(prefix.holding)  # again: another thread may have closed it meanwhile
            # Allocated without the holder it is stored behind, a slot may have room for a beginning that is not here.
            record.slot = dataclasses.replace(record.slot, nbytes=segment.nbytes)
            more = record.slot.nbytes - record.counted_bytes - prefix.private_bytes
            self._take(more, f"a segment of {segment.num_tokens} tokens")
            prefix.holding.private_rows = 0  # the tail's bytes are the segment's now
            self._table.fill(record, segment, prefix.views[-1].segment.slot if prefix.views else None)
            self._set_views(prefix.holding, (*prefix.views, SegmentView(segment, segment.num_tokens)))
            prefix.holding.tail_domains = frozenset()
            self._tally.guarded(segment.domains, report)
            return prefix

    def _check_context(self, prefix: SharedPrefix | None, num_tokens: int) -> None:
        stop = num_tokens + (prefix.num_tokens if prefix else 0)
        if stop > self.spec.max_context_tokens:
            raise ContextLimitError(
                f"[SharedKVCacheManager] needed {stop} positions, available {self.spec.max_context_tokens}"
            )

    def get_shared_kv_cache(self, spans: Iterable[tuple[int, int]], *, access: Access = TEAM_ACCESS) -> SharedPrefix:
        """Retain the chain named by `spans` [(slot, length), …], for who has `access`.

        Raises `HandoffError` if a slot is gone or misfits, and `AccessError` for what may not be read.
        """
        with self._locked():
            return self._retain(self._table.resolve(spans), access)

    # --- cards -------------------------------------------------------------------------------------

    def save_card(self, store: CardKeeper[Saved, Loaded], name: str, source: Any, *, keep_tokens: bool = True) -> Saved:
        """Keep a session's or a package's context under `name`. See `CardStore.save`."""
        return store.save(self, name, source, keep_tokens=keep_tokens)

    def load_card(self, store: CardKeeper[Saved, Loaded], name: str) -> Loaded:
        """Bring back what was kept under `name`, for `AgentSession.receive_state`. See `CardStore.load`; `restore` does
        both, and computes again what does not fit."""
        return store.load(self, name)

    @property
    def key_factors(self) -> Sequence[mx.array | None]:
        """Of every layer: what keys are packed with here."""
        return tuple(self._packer.factors)

    def standing(self, chain: Iterable[tuple[Sealed, int]]) -> SharedPrefix:
        """Retain as much of the beginning of `chain`, [(seal, length of the view), …], as stands here: the same bytes
        and domains, at the same place, behind the same segments."""
        with self._locked():
            views: tuple[SegmentView, ...] = ()
            for sealed, length in chain:
                segment = self._table.standing(views[-1] if views else None, sealed)
                if segment is None:
                    break
                views = (*views, SegmentView(segment, length))
            return self._retain(views, EVERYTHING)

    def require_room(self, nbytes: int) -> None:
        """Raise `BudgetExceededError` unless `nbytes` are free or can be made free; nothing is evicted."""
        with self._locked():
            self._check_room(nbytes, "a card")

    def make_room_for(self, chain: Iterable[tuple[Sealed, int, int]]) -> None:
        """Evict what must go for the segments of `chain`, [(seal, length of the view, bytes), …], that do not stand
        here. Raises `BudgetExceededError`."""
        chain = list(chain)
        prefix = self.standing((sealed, length) for sealed, length, _ in chain)
        try:
            needed = sum(nbytes for _, _, nbytes in chain[len(prefix.views) :])
            with self._locked():
                self._take(needed, "what comes back from disk")
                self._free_bytes += needed
        finally:
            prefix.release()

    def reserve_slots(self, sizes: Sequence[tuple[int, int]]) -> list[SharedSlot]:
        """Slots for segments of [(tokens, bytes), …] that are there already: all of them, or `BudgetExceededError`."""
        with self._locked():
            self._take(sum(nbytes for _, nbytes in sizes), "a card")
            return [self._table.allocate(count, nbytes, nbytes) for count, nbytes in sizes]

    def link(self, prefix: SharedPrefix, slots: Sequence[SharedSlot], contents: Sequence[Content]) -> None:
        """Extend `prefix` by sealed segments that were read from elsewhere, each behind the one before: [(seal, length
        of the view, layers), …]. What another thread linked meanwhile is taken.

        Raises `RevokedError`, for what was revoked meanwhile, too.
        """
        with self._locked():
            self._check_held(prefix.holding)
            if any(not self._revoked_keys.isdisjoint(sealed.keys) for sealed, _, _ in contents):
                raise RevokedError("[load_card] expected a context to read, got one that was revoked")
            views = prefix.views
            for slot, (sealed, length, layers) in zip(slots, contents, strict=True):
                behind = views[-1] if views else None
                segment = self._table.standing(behind, sealed)
                if segment is not None:
                    self.free_slot(slot)
                else:
                    its_layers = settled(layers, slot.slot, behind.segment.layers if behind else None)
                    start, fingerprint = behind.stop if behind else 0, self.spec.fingerprint.digest
                    segment = SharedSegment(
                        slot=slot.slot, start=start, layers=its_layers, quant=self.quant, fingerprint=fingerprint,
                        **sealed._asdict(),
                    )  # fmt: skip
                    assert segment.nbytes == slot.nbytes, (segment.nbytes, slot.nbytes)
                    self._table.fill(self._table.record(slot.slot), segment, behind.segment.slot if behind else None)
                views = (*views, SegmentView(segment, length))
            self._set_views(prefix.holding, views)

    def make_caches(self, prefix: SharedPrefix, *, reads_base: bool = False) -> list[LayerCache]:
        """A cache per layer over `prefix`, grouped as mlx-lm's model takes them: its `cache`.

        `reads_base` is what a batch goes by; where one session is attended, its attention says it.
        """
        dtype, caches = getattr(mx, self.spec.dtype), []
        for index, layer in enumerate(self.spec.layers):
            if isinstance(layer, LayerSpec):
                caches.append(_CACHES[layer.kind](prefix, index, layer, dtype))
                caches[-1].reads_base = reads_base
            else:
                caches.append(state_class()(prefix, index, layer))
        return grouped(caches, self.spec.grouping)

    # --- match, retain, release --------------------------------------------------------------------

    def match_prefix(
        self, token_ids: Sequence[int], *, held_tokens: int = 0, access: Access = TEAM_ACCESS
    ) -> SharedPrefix:
        """Retain views of the longest stored prefix of `token_ids`; empty when nothing matches.

        Found is only what is public or of the domain that `access` writes into. `held_tokens` of it the caller has
        already: only what goes beyond counts as reused in `stats()`.
        """
        with self._locked():
            prefix = self._retain(self._table.longest(tuple(token_ids), access), access)
        longest, returned = max(prefix.num_tokens, held_tokens), None
        if self.spill is not None and len(token_ids) > longest:  # not under the lock: it reads files
            returned = self.spill.find(self, token_ids, access, longer_than=longest)
            if returned is not None:
                prefix.release()
                prefix = returned
        with self._locked():
            more = max(0, prefix.num_tokens - held_tokens)
            self._tally.count(
                {access.writes}, num_returned=returned is not None, num_hits=more > 0, reused_tokens=more,
                num_misses=not more and held_tokens == 0,
            )  # fmt: skip
            return prefix

    def extend_if_sealed(self, prefix: SharedPrefix, token_ids: Sequence[int]) -> bool:
        """If all of `token_ids` stand sealed behind `prefix` already, extend `prefix` by them and say True.

        What was written elsewhere before as well stands nowhere.
        """
        if not prefix.access.may_find(prefix.holding.tail_domains, ()):
            return False
        with self._locked():
            self._check_held(prefix.holding)
            views = self._table.longest((*prefix.token_ids, *token_ids), prefix.access, prefix.views)
            if not token_ids or not views or views[-1].stop != prefix.num_tokens + len(token_ids):
                return False
            self._tally.count({prefix.access.writes}, reused_tokens=len(token_ids))
            prefix.release_tail()
            self._set_views(prefix.holding, views)
            prefix.holding.tail_domains = frozenset()
            return True

    def ref_count(self, slot: int) -> int:
        """The number of live holders of the segment in `slot`."""
        with self._locked():
            return len(self._table.record(slot).holders)

    def _retained(self, views: tuple[SegmentView, ...], access: Access) -> SharedPrefix:
        with self._locked():
            return self._retain(views, access)

    def _retain(self, views: tuple[SegmentView, ...], access: Access) -> SharedPrefix:
        _check_access(views, access)
        holding = Holding(next(self._ids), access)
        self._holdings[holding.holder] = holding
        prefix = SharedPrefix(self, holding)
        self._set_views(holding, views)
        return prefix

    def _set_views(self, holding: Holding, views: tuple[SegmentView, ...]) -> None:
        """Move the holder to `views`, which it must be allowed to read: the new ones are retained before the old ones
        are released."""
        _check_access(views, holding.access)
        after = [self._table.record(view.segment.slot) for view in views]
        before = [self._table.record(view.segment.slot) for view in holding.views]
        now = next(self._clock)
        for record in (*before, *after):
            record.last_used = now
        for record in after:
            record.holders.add(holding.holder)
        for record in before:
            if record not in after:
                record.holders.discard(holding.holder)
        holding.views = views

    def _check_held(self, holding: Holding) -> None:
        if holding.is_released:
            raise SessionClosedError("[SharedPrefix] expected a held prefix, got a released one")
        if holding.revoked_from is not None:
            raise RevokedError(f"[SharedPrefix] what was held was revoked from token {holding.revoked_from} on")

    # What a `SharedPrefix` asks for (`PrefixOwner`).

    def tail_bytes(self, num_rows: int) -> int:
        return self.spec.private_bytes(num_rows)

    def fork_prefix(self, holding: Holding, access: Access) -> SharedPrefix:
        with self._locked():
            self._check_held(holding)
            twin = self._retain(holding.views, access)
            twin.holding.tail_domains = holding.tail_domains
            return twin

    def write_in(self, holding: Holding, domain: str) -> None:
        with self._locked():
            holding.access = holding.access.writing(domain)

    def truncate_prefix(self, holding: Holding, num_tokens: int) -> None:
        with self._locked():
            self._set_views(holding, readable(truncate_views(holding.views, num_tokens), self.spec))

    def charge_private(self, holding: Holding, num_rows: int) -> None:
        with self._locked():
            if num_rows:
                self._check_held(holding)
            more = self.tail_bytes(num_rows) - self.tail_bytes(holding.private_rows)
            self._take(more, f"a private tail of {num_rows} tokens")
            holding.private_rows = num_rows

    def trim_private(self, holding: Holding, num_rows: int) -> None:
        with self._locked():
            kept = min(holding.private_rows, num_rows)
            self._free_bytes += self.tail_bytes(holding.private_rows) - self.tail_bytes(kept)
            holding.private_rows = kept

    def release_prefix(self, holder: int) -> None:
        with self._locked():
            self._forget(holder)

    def _forget(self, holder: int) -> None:
        holding = self._holdings.pop(holder, None)
        if holding is not None:
            self._set_views(holding, ())
            self._free_bytes += self.tail_bytes(holding.private_rows)
            holding.private_rows, holding.is_released = 0, True

    # --- the budget ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            while self.dropped:
                self._forget(self.dropped.popleft())
            yield

    def _take(self, nbytes: int, what: str) -> None:
        """Move `nbytes` from free to used (or back, if negative), evicting for it if it must and can."""
        if self._check_room(nbytes, what):
            self.drop_residuals()  # first, so that no more is evicted than must be
        while self._free_bytes < nbytes:
            self._evict(self._table.evictable_leaves()[0])
        self._free_bytes -= nbytes

    def _check_room(self, nbytes: int, what: str) -> bool:
        """Raise `BudgetExceededError` unless `nbytes` can be made free; True if that costs all residuals."""
        records = self._table.records.values()
        evictable = sum(record.counted_bytes for record in records if record.is_evictable)
        if nbytes > self._free_bytes + evictable:
            held = sum(record.residual_bytes for record in records if not record.is_evictable)
            if not self.may_drop_residuals or nbytes > self._free_bytes + evictable + held:
                raise BudgetExceededError(
                    f"[SharedKVCacheManager] {what} needs {nbytes} bytes; of the budget of {self.budget_bytes} bytes "
                    f"{self._free_bytes} are free and {evictable} evictable"
                )
            return True
        return False

    def _evict(self, record: Record) -> None:
        is_kept = self.spill is not None and self.spill.keep(self, self._table.chain(record))
        self._table.evict(record)
        self._free_bytes += record.counted_bytes
        self._tally.count(record.domains, num_evictions=1, num_spilled=is_kept)

    def evict_unreferenced(self) -> int:
        """Drop every segment that nobody holds; the number dropped."""
        with self._locked():
            num_evicted = 0
            while leaves := self._table.evictable_leaves():
                for record in leaves:
                    self._evict(record)
                num_evicted += len(leaves)
            return num_evicted

    def drop_residuals(self) -> int:
        """Drop the residual planes of all segments stored so far; the bytes freed, 0 where nothing is nested.

        Nothing is requantized, and no other byte moves. Who reads a segment reads its base from the next step on; a
        step that runs meanwhile keeps the planes that it has begun to read until it ends.
        """
        with self._locked():
            records = [record for record in self._table.records.values() if record.residual_bytes]
            sizes = [record.residual_bytes for record in records]
            freed = sum(sizes)
            bases = {record.slot.slot: record.segment.base for record in records if record.segment is not None}
            for record in records:
                record.put(bases[record.slot.slot])
            for holding in self._holdings.values():
                views = holding.views
                holding.views = tuple(SegmentView(bases.get(v.segment.slot, v.segment), v.length) for v in views)
            self._free_bytes += freed
            for record, nbytes in zip(records, sizes, strict=True):
                self._tally.count(record.domains, dropped_residual_bytes=nbytes)
        mx.clear_cache()  # hand the freed bytes back at once: somebody is in need of them
        return freed

    # --- revocation ----------------------------------------------------------------------------------

    def revoke(self, what: int | SharedSegment, *, stores: Iterable[Revoking] = ()) -> Receipt:
        """Take a segment, or the one in this slot, and all that was computed behind it, from everyone: in memory, where
        it was spilled, and in `stores`. A segment may have been evicted before.

        Who held any of it gets `RevokedError` from its next step on, and its own tail is not read again; other holders
        never notice. Cards that name it go, and the stores and this manager refuse its bytes from now on, wherever
        they come from.

        Raises `InvalidValueError` if the slot is free already, and `CardError` where a store could not be told, which
        is told again when the segment is revoked again; it is gone from all others then.
        """
        with self._locked():
            first = what if isinstance(what, SharedSegment) else self._table.stored(what)
            records = self._table.branches(first.keys)
            standing = [record.segment for record in records if record.segment is not None]
            segments = standing or [first]
            keys = {key for segment in segments for key in segment.keys}
            self._revoked_keys |= keys
            slots = {record.slot.slot for record in records}
            holders = {holder for record in records for holder in record.holders}
            for holder in holders:
                holding = self._holdings[holder]
                kept = tuple(view for view in holding.views if view.segment.slot not in slots)
                for record in records:
                    record.holders.discard(holder)
                holding.views, holding.revoked_from = kept, kept[-1].stop if kept else 0
            for record in reversed(records):
                self._table.evict(record)
                self._free_bytes += record.counted_bytes
        gone, errors = [], []
        for store in [*stores] if self.spill is None else [*stores, self.spill]:
            try:
                gone.append(store.revoke(keys))
            except QKVShareError as error:
                errors.append(error)
        receipt = Receipt(
            slots=tuple(segment.slot for segment in standing),
            seals=tuple(seal for segment in segments for seal in segment.seals),
            num_tokens=sum(segment.num_tokens for segment in standing),
            nbytes=sum(segment.nbytes for segment in standing),
            num_holders=len(holders),
            cards=tuple(name for names, _ in gone for name in names),
            disk_bytes=sum(nbytes for _, nbytes in gone),
        )
        self.note("revocation", num_failed_stores=len(errors), **dataclasses.asdict(receipt))
        if errors:
            raise errors[0]
        return receipt

    def note(self, event: str, **fields: Any) -> None:
        """Write to the audit log, if there is one."""
        if self.audit is not None:
            self.audit.write(event, **fields)

    # --- compaction ----------------------------------------------------------------------------------

    def compact(self, prefix: SharedPrefix) -> int:
        """Join small neighbours of the chain that have the same, idle holders. Returns the number of joins.

        Words move, nothing is requantized. A neighbour is joined when it is at most twice as long as what
        follows it, so a conversation of n turns keeps O(log n) segments and moves O(n log n) words.
        """
        joins = 0
        with self._locked():
            index = len(prefix.views) - 2
            while index >= 0:
                if self._can_join(*prefix.views[index : index + 2], caller=prefix):
                    self._join(*(view.segment for view in prefix.views[index : index + 2]))
                    joins += 1
                    index = min(index, len(prefix.views) - 2)  # the joined one may now join what follows it
                else:
                    index -= 1
            self._tally.count({prefix.access.writes}, num_compactions=joins)
        return joins

    def _can_join(self, first: SegmentView, second: SegmentView, *, caller: SharedPrefix) -> bool:
        left, right = self._table.record(first.segment.slot), self._table.record(second.segment.slot)
        return (
            not self.spec.windows  # rows and states that end where a segment ends would be lost
            and not self.spec.has_state
            and first.segment.num_tokens <= 2 * second.segment.num_tokens
            and second.segment.start == first.segment.stop
            and left.holders == right.holders
            and left.children == {second.segment.slot}
            and can_join(first.segment, second.segment)
            and left.slot.nbytes + right.slot.nbytes <= self._free_bytes  # both exist while words move
            and not any(self._holdings[h].is_busy for h in left.holders if h != caller.holding.holder)
        )

    def _join(self, first: SharedSegment, second: SharedSegment) -> None:
        holders = self._table.record(first.slot).holders
        joined = self._table.join(first, second)
        self._free_bytes += first.nbytes + second.nbytes - joined.nbytes  # one centre instead of two
        self._table.record(joined.slot).holders = set(holders)
        for holder in holders:
            holding = self._holdings[holder]
            index = next(i for i, view in enumerate(holding.views) if view.segment is first)
            view = SegmentView(joined, first.num_tokens + holding.views[index + 1].length)
            holding.views = (*holding.views[:index], view, *holding.views[index + 2 :])

    # --- looking -------------------------------------------------------------------------------------

    def stats(self, access: Access = EVERYTHING) -> ManagerStats:
        """Bytes now, and counts since the manager was made.

        With `access` only of what it may read, so that nothing tells what others have stored: neither their bytes, of
        which `free_bytes` are then not less, nor what was reused, nor the guard's figures, by which a guess at a text
        could be tried.
        """
        with self._locked():
            holdings = [it for it in self._holdings.values() if access.may_read({it.access.writes})]
            tails = [self.tail_bytes(it.private_rows) for it in holdings]
            return self._tally.stats(access, self.budget_bytes, self._free_bytes, self._table.records.values(), tails)

    def segments(self) -> tuple[SharedSegment, ...]:
        """Every stored segment, parents before children."""
        with self._locked():
            found = [record.segment for record in self._table.records.values() if record.segment is not None]
            return tuple(sorted(found, key=lambda segment: (segment.start, segment.slot)))

    def check_integrity(self, *, checksums: bool = False) -> None:
        """Raise `IntegrityError`, stating both sides, if an equation of the accounting does not hold."""
        with self._locked():
            stats = self.stats()
            require_equal(
                "used", stats.used_bytes, "evictable + protected", stats.evictable_bytes + stats.protected_bytes
            )
            if not 0 <= stats.free_bytes <= stats.budget_bytes:
                raise IntegrityError(f"[check_integrity] free is {stats.free_bytes}, budget is {stats.budget_bytes}")
            check_table(self._table, self._holdings.values(), checksums=checksums)


def _check_access(views: Sequence[SegmentView], access: Access) -> None:
    # Each has the domains of those before it, so that the last one decides; the first that may not be read is named.
    if views and not access.may_read(views[-1].segment.domains):
        view = next(view for view in views if not access.may_read(view.segment.domains))
        raise AccessError(
            f"[handoff] tokens {view.start} to {view.stop} (slot {view.segment.slot}): expected one of the domains "
            f"{sorted(access.reads or ())}, got {sorted(view.segment.domains)}"
        )


def _inherited(views: Sequence[SegmentView]) -> frozenset[str]:
    return views[-1].segment.domains if views else frozenset()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InvalidValueError(f"[seal] kind: expected one of {sorted(KINDS)}, got {kind!r}")


def _check_state(where: str, spec: StateSpec, arrays: Sequence[mx.array]) -> None:
    if len(arrays) != spec.num_arrays or any(array is None for array in arrays):
        raise InvalidValueError(f"{where}: expected a state of {spec.num_arrays} arrays, got {len(arrays)}")
    if (nbytes := sum(array.nbytes for array in arrays)) != spec.nbytes:
        raise InvalidValueError(f"{where}: expected a state of {spec.nbytes} bytes, got {nbytes}")
    for number, array in enumerate(arrays):
        _require_finite(f"{where} state {number}", array)


def _require_finite(what: str, x: mx.array) -> None:
    # One by one: the temporaries of all layers together would outweigh the packed segment.
    if not mx.all(mx.isfinite(x)).item():
        raise NonFiniteError(f"{what}: expected finite values, got NaN or infinity")
