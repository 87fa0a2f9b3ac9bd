"""`HandoffPackage`: what one agent passes to another. References and numbers, never keys or values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .chat import Message
from .digest import digest_text
from .policy import Access
from .segment import SegmentView
from .spec import Fingerprint, QuantSpec


@dataclass(frozen=True)
class Span:
    """`length` tokens of the segment in `slot`, at absolute positions from `start` on.

    `token_ids` are the segment's own (all of them, by reference), `checksum` and `nbytes` its packed bytes';
    `own_domains` and `domains` as of a segment.
    """

    slot: int
    start: int
    length: int
    token_ids: tuple[int, ...]
    checksum: str
    nbytes: int
    own_domains: frozenset[str]
    domains: frozenset[str]

    @classmethod
    def of(cls, view: SegmentView) -> Span:
        segment = view.segment
        return cls(
            segment.slot, segment.start, view.length, segment.token_ids, segment.checksum, segment.nbytes,
            segment.own_domains, segment.domains,
        )  # fmt: skip


@dataclass(frozen=True)
class HandoffPackage:
    """A frozen state descriptor. It holds no reference: validity is checked, not guaranteed, until it is received.

    `manager` names the manager whose slots these are; `sequence` counts the sender's packages, so that
    one cannot be replayed; `messages`, which follow the first `base_tokens` tokens, let the receiver go
    on with the conversation. `hops` counts the handoffs that the context came through; `is_role_due` says that the
    sender has not said its role yet.
    """

    manager: str
    sender: str
    sender_id: str
    sequence: int
    fingerprint: Fingerprint
    quant: QuantSpec
    spans: tuple[Span, ...]
    base_tokens: int = 0
    messages: tuple[Message, ...] = ()
    hops: int = 0
    is_role_due: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def slots(self) -> list[tuple[int, int]]:
        """(slot, length) of every span, as the manager resolves them."""
        return [(span.slot, span.length) for span in self.spans]

    @property
    def token_ids(self) -> list[int]:
        return list(itertools.chain.from_iterable(span.token_ids[: span.length] for span in self.spans))

    def is_readable(self, access: Access) -> bool:
        """May who has `access` read all of it?"""
        spoken = {message.domain for message in self.messages}
        return access.may_read(spoken.union(*(span.domains for span in self.spans)))

    def readable_slots(self, access: Access) -> list[tuple[int, int]]:
        """Those of the longest beginning that `access` may read."""
        readable = itertools.takewhile(lambda span: access.may_read(span.domains), self.spans)
        return [(span.slot, span.length) for span in readable]

    @property
    def checksum(self) -> str:
        """A digest over the segments' checksums: equal packages of equal bytes have equal ones."""
        text = ":".join(f"{span.checksum}/{span.length}" for span in self.spans)
        return digest_text(text)
