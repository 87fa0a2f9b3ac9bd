"""`Card`: a context on disk by reference: its chain of segments, what was said, and all that must fit to go on.

A card is one JSON object in one form, with a digest of itself: any changed byte shows.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .chat import Message, require_readable
from .digest import DIGEST_BYTES, digest_bytes, digest_text, is_digest
from .errors import (
    AccessError,
    CardCorruptError,
    CardFormatError,
    ContextLimitError,
    FingerprintMismatchError,
    InvalidValueError,
)
from .policy import Access
from .segment import seal_keys
from .spec import CacheSpec, Fingerprint, LayerSpec, QuantSpec, StateSpec
from .table import Sealed

FORMAT = 2
MAX_CARD_BYTES = 1 << 28
_WIDTHS = {2: "<u2", 4: "<u4", 8: "<i8"}


@dataclass(frozen=True)
class CardSegment:
    """The first `length` tokens of the segment in the file named `digest`, `parent` being the one that it was computed
    behind. `token_ids` are all of the segment's, or None where only their digest was kept."""

    digest: str
    parent: str | None
    start: int
    length: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    tokens_digest: str
    checksum: str
    residual_checksum: str | None
    own_domains: tuple[str, ...]
    domains: tuple[str, ...]
    origins: tuple[str, ...]
    nbytes: int

    @property
    def sealed(self) -> Sealed:
        return Sealed(
            self.known_ids, self.checksum, self.residual_checksum,
            frozenset(self.own_domains), frozenset(self.domains), self.origins,
        )  # fmt: skip

    @property
    def keys(self) -> set[str]:
        """See `seal_keys`."""
        return seal_keys((self.checksum, *self.origins), self.own_domains, self.domains)

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Its tokens, or numbers in their place that are those of no other segment."""
        return hidden_ids(self.tokens_digest, self.num_tokens) if self.token_ids is None else self.token_ids


@dataclass(frozen=True)
class Card:
    """`agent` made it, of a context that came through `hops` handoffs. `messages` follow the first `base_tokens`
    tokens; `is_role_due` says that the agent's role is yet to be said. `versions` are those that it was written by."""

    name: str
    agent: str
    hops: int
    spec: CacheSpec
    quant: QuantSpec
    segments: tuple[CardSegment, ...]
    base_tokens: int = 0
    messages: tuple[Message, ...] = ()
    is_role_due: bool = True
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(segment.length for segment in self.segments)

    @property
    def distinct_segments(self) -> list[CardSegment]:
        """One for each file, in their order."""
        return list({segment.digest: segment for segment in self.segments}.values())

    @property
    def digests(self) -> frozenset[str]:
        """Those that name its segments' files."""
        return frozenset(segment.digest for segment in self.segments)

    @property
    def domains(self) -> frozenset[str]:
        """Of all its segments and messages."""
        return frozenset(message.domain for message in self.messages).union(*(it.domains for it in self.segments))

    def require_readable(self, access: Access) -> None:
        """Raise `AccessError`, naming the span, unless `access` may read all of it."""
        for segment in self.segments:
            if not access.may_read(segment.domains):
                raise AccessError(
                    f"[card] tokens {segment.start} to {segment.start + segment.length}: expected one of the domains "
                    f"{sorted(access.reads or ())}, got {list(segment.domains)}"
                )
        require_readable(self.messages, access)

    @property
    def packed_bytes(self) -> int:
        """Of its segments in memory."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def token_ids(self) -> list[int] | None:
        """Of the whole context; None where only their digests were kept."""
        found: list[int] = []
        for segment in self.segments:
            if segment.token_ids is None:
                return None
            found += segment.token_ids[: segment.length]
        return found

    def encoded(self) -> bytes:
        card = {it.name: getattr(self, it.name) for it in dataclasses.fields(self)} | {
            "spec": _plain_spec(self.spec),
            "quant": dataclasses.asdict(self.quant),
            "segments": [_plain_segment(segment) for segment in self.segments],
            "messages": [[m.role, m.content, m.author, _encode_ids(m.token_ids), m.domain] for m in self.messages],
        }
        return _dump({"format": FORMAT, "digest": _digest(card), "card": card})


def _dump(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":"), sort_keys=True).encode()


def _digest(plain: Any) -> str:
    return digest_bytes(_dump(plain))


def decode(raw: bytes, where: str) -> Card:
    """The inverse of `Card.encoded`.

    Raises:
        CardCorruptError: a byte has changed.
        CardFormatError: not a card, or of a version that is not read here.
    """
    try:
        whole = json.loads(raw)
        is_ours = isinstance(whole, dict) and isinstance(whole.get("card"), dict)
    except (ValueError, RecursionError) as error:
        raise CardCorruptError(f"[card {where}] expected JSON, got {raw[:40]!r}") from error
    if not is_ours or "format" not in whole:
        raise CardFormatError(f"[card {where}] format: expected a card, got {raw[:40]!r}; readable are [{FORMAT}]")
    if type(whole["format"]) is not int or whole["format"] != FORMAT:
        raise CardFormatError(f"[card {where}] format: found {whole['format']!r}, readable are [{FORMAT}]")
    try:
        if whole.get("digest") != (found := _digest(whole["card"])):
            raise CardCorruptError(f"[card {where}] digest: expected {whole.get('digest')!r}, got {found}")
        card = _parse(whole["card"])
        is_whole = card.encoded() == raw
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CardFormatError(f"[card {where}] expected the fields of a card: {error!r}") from error
    if not is_whole:
        raise CardCorruptError(f"[card {where}] expected the form that we write, got another")
    return card


def _parse(plain: dict[str, Any]) -> Card:
    messages = [Message(role, text, author, _decode_ids(ids), of) for role, text, author, ids, of in plain["messages"]]
    segments = tuple(_parse_segment(it) for it in plain["segments"])
    stop, inherited = 0, set[str]()
    for segment in segments:
        _check_segment(segment, stop, inherited)
        stop, inherited = stop + segment.length, set(segment.domains)
    if not 0 <= _count(plain["base_tokens"]) <= stop or _count(plain["hops"]) < 0:
        raise ValueError(f"base_tokens, hops: expected counts, got {plain['base_tokens']}, {plain['hops']}")
    if not isinstance(plain["name"], str) or not isinstance(plain["agent"], str):
        raise ValueError(f"name, agent: expected texts, got {plain['name']!r}, {plain['agent']!r}")
    parts = {
        "spec": _parse_spec(plain["spec"]),
        "quant": QuantSpec.from_plain(plain["quant"]),
        "segments": segments,
        "messages": tuple(messages),
    }
    return Card(**(plain | parts))


def _parse_segment(plain: dict[str, Any]) -> CardSegment:
    lists = {name: tuple(plain[name]) for name in ("own_domains", "domains", "origins")}
    return CardSegment(**(plain | lists | {"token_ids": _decode_ids(plain["token_ids"])}))


def _check_segment(segment: CardSegment, start: int, inherited: set[str]) -> None:
    ids = segment.token_ids
    counts = [_count(it) for it in (segment.start, segment.length, segment.num_tokens, segment.nbytes)]
    if segment.start != start or not 0 < segment.length <= segment.num_tokens or min(counts) < 0:
        raise ValueError(f"segment {segment.digest}: expected one from token {start}, got {counts}")
    if not segment.own_domains or not inherited.union(segment.own_domains) <= set(segment.domains):
        raise ValueError(
            f"segment {segment.digest}: expected its domains, got {segment.own_domains}, {segment.domains}"
        )
    if not is_digest(segment.digest) or not is_digest(segment.tokens_digest):
        raise ValueError(f"segment: expected digests, got {segment.digest!r} and {segment.tokens_digest!r}")
    if ids is not None and (len(ids) != segment.num_tokens or tokens_digest(ids) != segment.tokens_digest):
        raise ValueError(f"segment {segment.digest}: expected the tokens of its digest, got {len(ids)} others")


def _count(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an int, got {value!r}")
    return value


def _plain_segment(segment: CardSegment) -> dict[str, Any]:
    return vars(segment) | {"token_ids": _encode_ids(segment.token_ids)}


def _plain_spec(spec: CacheSpec) -> dict[str, Any]:
    groups = itertools.groupby(spec.layers)
    return dataclasses.asdict(spec) | {"layers": [[len(list(same)), dataclasses.asdict(it)] for it, same in groups]}


def _parse_spec(plain: dict[str, Any]) -> CacheSpec:
    layers: list[LayerSpec | StateSpec] = []
    for count, fields in plain["layers"]:
        if not 0 < count <= 100_000:
            raise ValueError(f"layers: expected a count, got {count!r}")
        layers += [StateSpec(**fields) if "num_arrays" in fields else LayerSpec(**fields)] * count
    parts = {
        "layers": tuple(layers),
        "grouping": tuple(plain["grouping"]),
        "fingerprint": Fingerprint(**plain["fingerprint"]),
    }
    return CacheSpec(**(plain | parts))


def _encode_ids(ids: Sequence[int] | None) -> list[Any] | None:
    """[bytes for each, base64]: two bytes where they do, since a page of them is a large part of a card."""
    if ids is None:
        return None
    least, most = min(ids, default=0), max(ids, default=0)
    width = next((width for width in (2, 4) if least >= 0 and most < 1 << 8 * width), 8)
    try:
        data = np.array(ids, _WIDTHS[width])
    except OverflowError as error:
        raise InvalidValueError(f"[save_card] token_ids: expected less than 2**63, got {most}") from error
    return [width, base64.b64encode(data.tobytes()).decode()]


def _decode_ids(plain: list[Any] | None) -> tuple[int, ...] | None:
    if plain is None:
        return None
    width, data = plain[0], base64.b64decode(plain[1], validate=True)
    if width not in _WIDTHS or len(data) % width:
        raise ValueError(f"token_ids: expected 2, 4 or 8 bytes for each, got {width!r}")
    return tuple(np.frombuffer(data, _WIDTHS[width]).tolist())


# --- does it fit? -------------------------------------------------------------------------------------


def check_fit(card: Card, spec: CacheSpec, quant: QuantSpec) -> None:
    """Raise `FingerprintMismatchError`, naming the field, or `ContextLimitError` unless this model can attend it."""
    if (differing := _spec_difference(spec, card.spec)) is not None:
        field, expected, got = differing
        raise FingerprintMismatchError(f"[load_card] {field}: expected {expected}, the card has {got}")
    if card.quant != quant:
        raise FingerprintMismatchError(f"[load_card] quant: expected {quant}, the card has {card.quant}")
    if card.num_tokens > spec.max_context_tokens:
        raise ContextLimitError(f"[load_card] needed {card.num_tokens} positions, available {spec.max_context_tokens}")


def _spec_difference(ours: CacheSpec, theirs: CacheSpec) -> tuple[str, object, object] | None:
    """The first field that differs: what a reader understands first, digests last."""
    if len(ours.layers) != len(theirs.layers):
        return "layers", len(ours.layers), len(theirs.layers)
    for index, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        if type(a) is not type(b):
            return f"kind of layer {index}", type(a).__name__, type(b).__name__
        for it in dataclasses.fields(a if isinstance(a, LayerSpec) else b):
            if getattr(a, it.name) != getattr(b, it.name):
                return f"{it.name} of layer {index}", getattr(a, it.name), getattr(b, it.name)
    for name in ("dtype", "grouping"):
        if getattr(ours, name) != getattr(theirs, name):
            return name, getattr(ours, name), getattr(theirs, name)
    if (field := ours.fingerprint.first_difference(theirs.fingerprint)) is None:
        return None
    return field, getattr(ours.fingerprint, field), getattr(theirs.fingerprint, field)


# --- tokens of which only a digest is kept -----------------------------------------------------------


def tokens_digest(token_ids: Sequence[int]) -> str:
    if are_hidden(token_ids) and tuple(token_ids) == hidden_ids(digest := _digest_in(token_ids[0]), len(token_ids)):
        return digest
    return digest_text(",".join(map(str, token_ids)))


def hidden_ids(digest: str, num_tokens: int) -> tuple[int, ...]:
    """Numbers below 0 in the place of tokens: equal for equal digests only, so that nothing else matches them."""
    return tuple(-1 - (int(digest, 16) << 32 | index) for index in range(num_tokens))


def are_hidden(token_ids: Sequence[int]) -> bool:
    return any(token < 0 for token in token_ids)


def _digest_in(token: int) -> str:
    return f"{(-1 - token) >> 32:0{2 * DIGEST_BYTES}x}"
