"""`HandoffCoordinator`: moves a context from one agent to another by reference, or not at all."""

from __future__ import annotations

import collections
import dataclasses
import time
from dataclasses import dataclass

from .errors import FingerprintMismatchError, HandoffError, IntegrityError
from .manager import SharedKVCacheManager
from .package import HandoffPackage
from .policy import EVERYTHING
from .segment import SegmentView
from .session import AgentSession

_KEPT_RECORDS = 4096


@dataclass(frozen=True)
class HandoffRecord:
    """One handoff: bytes the receiver now reads, KV bytes copied for it, tokens it need not prefill.

    `handoff_seconds` covers validation, retain and release; `seal_seconds` the quantization of what the
    sender had not sealed yet. Where something was held back, `redacted_tokens` did not go over, and `computed_tokens`,
    which had come behind them, were computed again, in `handoff_seconds`.
    """

    sender: str
    receiver: str
    sequence: int
    reused_tokens: int
    bytes_referenced: int
    bytes_copied: int
    seal_seconds: float
    handoff_seconds: float
    redacted_tokens: int = 0
    computed_tokens: int = 0


class HandoffCoordinator:
    """Hands contexts over between the sessions of one manager; any agent to any other, from any thread.

    `records` holds the latest few thousand handoffs.
    """

    def __init__(self, manager: SharedKVCacheManager):
        self.manager = manager
        self.records: collections.deque[HandoffRecord] = collections.deque(maxlen=_KEPT_RECORDS)

    def request_handoff(
        self,
        sender: AgentSession,
        receiver: AgentSession,
        *,
        keep_sender: bool = False,
        verify: bool = False,
        redact: bool = False,
    ) -> HandoffRecord:
        """Give `receiver` the whole context of `sender`, in place of its own.

        The receiver retains every segment before the sender releases any, and no other call runs on the
        sender meanwhile. With `keep_sender` it goes on with the context as well; `verify` recomputes the
        checksum of every packed byte first. With `redact` the receiver gets what it may read of a context that it may
        not read whole, see `AgentSession.redacting`.

        Raises `HandoffError` (or a subclass), `AccessError` that names what the receiver may not read, `IntegrityError`
        when `verify` finds changed bytes, or `SessionBusyError`: sender and receiver are as they were. After an
        `AuditError` the context has been handed over.
        """
        if sender is receiver:
            raise HandoffError(f"[request_handoff] expected two sessions, got {sender.name!r} twice")
        started = time.perf_counter()
        with sender.handing_over(keep=keep_sender) as package:
            sealed = time.perf_counter()
            part, num_redacted, num_computed = package, 0, 0
            if not redact or package.is_readable(receiver.access):
                copied = self._receive(package, receiver, verify)
            else:
                self.validate(package, verify=verify)
                with receiver.redacting(package) as (part, report):
                    copied = self._receive(part, receiver, False)
                num_redacted = max(0, package.num_tokens - part.num_tokens)
                num_computed = report.computed_tokens
            seconds = time.perf_counter() - sealed
        return self._record(
            part, receiver, copied, sealed - started, seconds,
            redacted_tokens=num_redacted, computed_tokens=num_computed,
        )  # fmt: skip

    def deliver(self, package: HandoffPackage, receiver: AgentSession, *, verify: bool = False) -> HandoffRecord:
        """Validate `package` and let `receiver` take it. A package is delivered once."""
        started = time.perf_counter()
        copied = self._receive(package, receiver, verify)
        return self._record(package, receiver, copied, 0.0, time.perf_counter() - started)

    def _receive(self, package: HandoffPackage, receiver: AgentSession, verify: bool) -> int:
        """Bytes of the arrays that the receiver reads and that were not the package's own before."""
        with self.manager.handoff_lock:
            stored = self._check(package, verify)
            receiver.take_over(package)
            self.manager.last_sequence[package.sender_id] = package.sequence
            read = [array for view in receiver.prefix.views for array in view.segment.arrays()]
            return receiver.private_bytes + sum(array.nbytes for array in read if id(array) not in stored)

    def _record(
        self,
        package: HandoffPackage,
        receiver: AgentSession,
        copied: int,
        seal_seconds: float,
        seconds: float,
        *,
        redacted_tokens: int = 0,
        computed_tokens: int = 0,
    ) -> HandoffRecord:
        record = HandoffRecord(
            sender=package.sender,
            receiver=receiver.name,
            sequence=package.sequence,
            reused_tokens=package.num_tokens - computed_tokens,
            bytes_referenced=sum(span.nbytes for span in package.spans),
            bytes_copied=copied,
            seal_seconds=seal_seconds,
            handoff_seconds=seconds,
            redacted_tokens=redacted_tokens,
            computed_tokens=computed_tokens,
        )
        self.records.append(record)
        slots = [span.slot for span in package.spans]
        self.manager.note("handoff", sender_id=package.sender_id, slots=slots, **dataclasses.asdict(record))
        return record

    def validate(self, package: HandoffPackage, *, verify: bool = False) -> None:
        """Raise unless `package` may be received now.

        Checks the manager, the fingerprint field by field, the quantization, the sequence number
        (against replay), spans contiguous from 0, live slots with the same tokens and checksums, and
        with `verify` the packed bytes themselves.
        """
        self._check(package, verify)

    def _check(self, package: HandoffPackage, verify: bool) -> set[int]:
        """`validate`; the ids of the arrays that the package names."""
        manager = self.manager
        if package.manager != manager.id:
            raise HandoffError(f"[validate] manager: expected {manager.id}, got {package.manager}")
        if (field := manager.spec.fingerprint.first_difference(package.fingerprint)) is not None:
            raise FingerprintMismatchError(f"[validate] {field}: the package was made for another model")
        if package.quant != manager.quant:
            raise FingerprintMismatchError(f"[validate] quant: expected {manager.quant}, got {package.quant}")
        last = manager.last_sequence.get(package.sender_id, 0)
        if package.sequence <= last:
            raise HandoffError(f"[validate] sequence: expected more than {last}, got {package.sequence} (a replay)")
        stop = 0
        for span in package.spans:
            if span.start != stop or not 0 < span.length <= len(span.token_ids):
                raise HandoffError(f"[validate] span: expected one from token {stop}, got {span.start}+{span.length}")
            stop = span.start + span.length
        prefix = manager.get_shared_kv_cache(package.slots, access=EVERYTHING)
        try:
            if not _same_tokens(package, prefix.views):
                raise HandoffError("[validate] token_ids: expected the stored segments' tokens, got others")
            stored = {view.segment.slot: view.segment.checksum for view in prefix.views}
            for span in package.spans:  # a compacted slot is gone; its words are covered by `verify`
                expected = stored.get(span.slot, span.checksum)
                if span.checksum != expected:
                    raise HandoffError(
                        f"[validate] checksum of slot {span.slot}: expected {expected}, got {span.checksum}"
                    )
            for view in prefix.views if verify else ():
                segment = view.segment
                sealed = segment.checksum, segment.residual_checksum
                found = segment.compute_checksum(), segment.compute_residual_checksum()
                if found != sealed:
                    raise IntegrityError(f"[validate] checksum: expected {sealed}, got {found}")
            return {id(array) for view in prefix.views for array in view.segment.arrays()}
        finally:
            prefix.release()


def _same_tokens(package: HandoffPackage, views: tuple[SegmentView, ...]) -> bool:
    """Does the chain hold the package's tokens? The same tuples, unless segments were compacted meanwhile."""
    if len(views) == len(package.spans):
        pairs = zip(package.spans, views, strict=True)
        if all(span.token_ids is view.segment.token_ids for span, view in pairs):
            return True
    return package.token_ids == [token for view in views for token in view.token_ids]
