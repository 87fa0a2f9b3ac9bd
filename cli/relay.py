"""The demo's work: three agents in a relay over one context, and what was measured on the way."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .. import (
    AgentScheduler,
    AgentSession,
    HandoffCoordinator,
    HandoffRecord,
    Sampling,
    SharedKVCacheManager,
)
from .interrupts import Interrupts
from .penalty import PenalizedSampler
from .streams import show_together
from .terminal import ProgressLine, Terminal
from .turn import Usage

if TYPE_CHECKING:
    from ..model import LoadedModel


@dataclass(frozen=True)
class Leg:
    """One agent's part: its name, its role prompt, what it is asked."""

    name: str
    role: str
    request: str


@dataclass(frozen=True)
class Turn:
    """What one agent's turn took. `memory_delta_bytes`: active memory after the handoff less before."""

    name: str
    reused_tokens: int
    computed_tokens: int
    first_token_seconds: float
    seal_seconds: float = 0.0
    memory_delta_bytes: int = 0
    handoff: HandoffRecord | None = None


@dataclass(frozen=True)
class RelayResult:
    """All turns; tokens that each agent holds at the end, and bytes of that."""

    turns: list[Turn]
    held_tokens: list[int]
    usage: Usage
    reprefill_tokens: int
    reprefill_seconds: float


class Relay:
    """Runs the legs in turn, or all but the first at the same time. At the end all sessions hold their context."""

    def __init__(
        self, model: LoadedModel, manager: SharedKVCacheManager, sampling: Sampling, max_tokens: int, terminal: Terminal
    ):
        self._model, self._manager, self._sampling = model, manager, sampling
        self._max_tokens, self._terminal = max_tokens, terminal
        self._coordinator = HandoffCoordinator(manager)
        self._sessions: list[AgentSession] = []
        self._prompt_ids: list[int] = []  # of the latest turn

    def run(self, legs: list[Leg], *, is_parallel: bool = False) -> RelayResult:
        """`is_parallel`: all but the first work at the same time, each on the first one's context."""
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(self._session(leg)) for leg in legs]
            requests = [leg.request for leg in legs]
            if is_parallel:
                turns = [self._turn(sessions[0], requests[0]), *self._together(sessions[1:], requests[1:])]
            else:
                turns = [self._turn(session, request) for session, request in zip(sessions, requests, strict=True)]
            for session in self._sessions:
                session.seal()
            self._manager.check_integrity()
            last, held = self._sessions[-1], [session.num_tokens for session in self._sessions]
            return RelayResult(
                turns=turns,
                held_tokens=held,
                usage=Usage.of(self._manager, last.num_tokens, last.max_context_tokens, held),
                reprefill_tokens=len(self._prompt_ids),
                reprefill_seconds=self._reprefill(),
            )

    def _session(self, leg: Leg) -> AgentSession:
        sampler = PenalizedSampler(self._sampling)
        return AgentSession(leg.name, self._model, self._manager, role_prompt=leg.role, sampler=sampler)

    def _turn(self, session: AgentSession, request: str) -> Turn:
        handed = self._hand_over(self._sessions[-1], session) if self._sessions else None
        self._sessions.append(session)
        seconds = self._speak(session, request)
        report = session.last_prefill
        seal_seconds, delta, record = handed or (0.0, 0, None)
        return Turn(session.name, report.reused_tokens, report.computed_tokens, seconds, seal_seconds, delta, record)

    def _together(self, sessions: list[AgentSession], requests: list[str]) -> list[Turn]:
        handed = [self._hand_over(self._sessions[0], session) for session in sessions]
        self._sessions.extend(sessions)
        with AgentScheduler(self._manager) as scheduler, Interrupts() as interrupts:
            pairs = zip(sessions, requests, strict=True)
            tasks = [scheduler.submit(session, request, max_tokens=self._max_tokens) for session, request in pairs]
            show_together(tasks, self._terminal, interrupts)
        for task in tasks:
            task.result(0)  # raises what it failed with
        self._terminal.line()
        self._prompt_ids = sessions[-1].token_ids[: -tasks[-1].num_tokens]
        return [
            Turn(
                task.name,
                task.session.last_prefill.reused_tokens,
                task.session.last_prefill.computed_tokens,
                task.ttft_seconds or 0.0,
                *handover,
            )
            for task, handover in zip(tasks, handed, strict=True)
        ]

    def _hand_over(self, sender: AgentSession, receiver: AgentSession) -> tuple[float, int, HandoffRecord]:
        """Seconds of sealing, change of active memory by the handoff, its record."""
        started = time.perf_counter()
        sender.seal()  # apart from the handoff: quantizing the sender's own turn changes the memory in use
        seal_seconds = time.perf_counter() - started
        before = mx.get_active_memory()
        record = self._coordinator.request_handoff(sender, receiver, keep_sender=True)
        return seal_seconds, mx.get_active_memory() - before, record

    def _speak(self, session: AgentSession, request: str) -> float:
        """Stream the reply; seconds to its first token."""
        progress, seconds = ProgressLine(self._terminal), 0.0
        started = time.perf_counter()
        what = f"{session.name}: prefill"
        stream = session.stream(request, max_tokens=self._max_tokens, progress=lambda a, b: progress(what, a, b))
        for chunk in stream:
            if not seconds:
                seconds = time.perf_counter() - started
                self._prompt_ids = session.token_ids[:-1]
                progress.close()
                self._terminal.label(session.name)
            self._terminal.stream(chunk.text + (" [...]" if chunk.finish_reason == "length" else ""))
        self._terminal.line("\n")
        return seconds

    def _reprefill(self) -> float:
        """Seconds to the first token of the last turn's prompt, from nothing: what a handoff saves."""
        progress = ProgressLine(self._terminal)
        manager = SharedKVCacheManager(self._model.spec, self._manager.quant, allow_unsafe=True)
        with AgentSession("reprefill", self._model, manager) as session, contextlib.closing(progress):
            started = time.perf_counter()
            stream = session.stream(
                self._prompt_ids, max_tokens=1, progress=lambda a, b: progress("re-prefill, for comparison", a, b)
            )
            next(stream)
            return time.perf_counter() - started
