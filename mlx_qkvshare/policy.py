"""Who may read what: domain labels on segments, the domains of a session, the receipt of a revocation, the audit log.

A segment is written into a *domain* and inherits those of all that it was computed behind, since its keys and values
contain them. Whoever holds a segment must be allowed to read every one of them; the manager asks at the one place where
a holder comes to its views. By tokens alone a session finds only what is public or of the domain that it writes into,
so that neither hits nor counters tell what stands in another (CVE-2025-46570 is such an oracle).
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import AuditError, InvalidValueError

PUBLIC, TEAM = "public", "team"
_PRIVATE = "private:"
_MAX_NAME = 128


def private(agent: str) -> str:
    """The domain of this agent alone."""
    return f"{_PRIVATE}{agent}"


@dataclass(frozen=True)
class Access:
    """The domain that a session writes into, and those that it may read; None for all of them.

    What is public and what it writes itself it may always read. `private:NAME` is for sessions named NAME only.

    Raises `InvalidValueError` for a domain that is no text of 1 to 128 printable characters.
    """

    writes: str = TEAM
    reads: frozenset[str] | None = frozenset({TEAM})

    def __post_init__(self) -> None:
        if isinstance(self.reads, str):
            raise InvalidValueError(f"[Access] reads: expected several domains, got the text {self.reads!r}")
        names = (self.writes, *(self.reads or ()))
        for name in names:
            if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
                raise InvalidValueError(
                    f"[Access] domain: expected 1 to {_MAX_NAME} printable characters, got {name!r}"
                )
        if self.reads is not None:
            object.__setattr__(self, "reads", frozenset({*self.reads, PUBLIC, self.writes}))

    def may_read(self, domains: Iterable[str]) -> bool:
        """Of a segment, which has them all."""
        return self.reads is None or self.reads.issuperset(domains)

    def may_find(self, own_domains: Iterable[str], domains: Iterable[str]) -> bool:
        """May a segment, whose own tokens are in `own_domains`, be found by these alone?"""
        return {PUBLIC, self.writes}.issuperset(own_domains) and self.may_read(domains)

    def writing(self, domain: str) -> Access:
        """The same, writing into another domain that it may read."""
        if not self.may_read({domain}):
            raise InvalidValueError(f"[Access] writes: expected one of {sorted(self.reads or ())}, got {domain!r}")
        return dataclasses.replace(self, writes=domain)

    def of_agent(self, name: str) -> Access:
        """What is left of it for an agent called `name`: not what is private to another."""
        writes = private(name) if self.writes.startswith(_PRIVATE) else self.writes
        if self.reads is None:
            return dataclasses.replace(self, writes=writes)
        return Access(writes, frozenset(it for it in self.reads if _is_for(it, name)))

    def check_name(self, name: str) -> None:
        """Raise `InvalidValueError` if an agent called `name` may not have it."""
        others = [it for it in (self.writes, *sorted(self.reads or ())) if not _is_for(it, name)]
        if others:
            raise InvalidValueError(
                f"[AgentSession {name}] access: expected no agent's own but {name}'s, got {others[0]!r}"
            )


def _is_for(domain: str, agent: str) -> bool:
    return not domain.startswith(_PRIVATE) or domain == private(agent)


TEAM_ACCESS = Access()
EVERYTHING = Access(reads=None)
"""For who looks after the manager, and hands nothing on."""


@dataclass(frozen=True)
class Receipt:
    """What a revocation took: segments by their slots and seals (the checksums), in memory; sessions that lost their
    context; and on disk the cards that went with them."""

    slots: tuple[int, ...]
    seals: tuple[str, ...]
    num_tokens: int
    nbytes: int
    num_holders: int
    cards: tuple[str, ...] = ()
    disk_bytes: int = 0


class AuditLog:
    """Handoffs, refusals and revocations, appended to `path` as JSON lines: names, ids and counts, never text.

    Threads and processes may share one file. Raises `AuditError` where it cannot be written; what was to be noted had
    been done, or refused, by then.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self._lock = Path(path), threading.Lock()
        self._append(b"")

    def write(self, event: str, **fields: Any) -> None:
        entry = {"time": round(time.time(), 3), "event": event} | fields
        self._append(json.dumps(entry, ensure_ascii=True).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            with self._lock:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                handle = os.open(self.path, flags, 0o600)
                try:
                    if os.write(handle, line) != len(line):  # one call, so that lines of others do not come between
                        raise OSError("the line was cut")
                finally:
                    os.close(handle)
        except OSError as error:
            raise AuditError(f"[AuditLog] {self.path}: expected a file to append to: {error}") from error
