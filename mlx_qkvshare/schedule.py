"""`Schedule`: what a scheduler does in one step, and in which order; all of it belongs to the thread that steps.

Agents join and leave a running batch between any two steps (Orca, OSDI 2022), a long prompt is prefilled in chunks
between decode steps (Sarathi-Serve, arXiv 2403.02310), and among equals the agent with the fewest tokens served goes
first, with the counter lifted after a pause (virtual token counters, arXiv 2401.00588).
"""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .attention import QuantizedAttention
from .batch import AgentBatch, Joining
from .errors import (
    BudgetExceededError,
    DeadlineExceededError,
    DependencyError,
    QKVShareError,
    SessionClosedError,
    TaskCancelledError,
    typed_error,
)
from .manager import SharedKVCacheManager
from .prefix import SharedPrefix
from .session import AgentSession
from .task import AgentTask, Priority, Task

_POLL_SECONDS = 0.05  # how often a turn that waits for bytes looks whether others gave some back


@dataclass(frozen=True)
class SchedulerStats:
    """Tasks that wait, turns by what they do now, and counts since the scheduler was made."""

    num_waiting: int
    num_prefilling: int
    num_decoding: int
    num_paused: int
    num_steps: int
    num_finished: int
    num_failed: int
    prefill_tokens: int
    decode_tokens: int


@dataclass(eq=False)
class Job:
    """A task. Those of `after` must have succeeded before, and the earlier ones on its sessions have ended."""

    task: Task[Any]
    sessions: tuple[AgentSession, ...]
    after: tuple[Task[Any], ...]

    @property
    def failed_need(self) -> Task[Any] | None:
        return next((task for task in self.after if task.error() is not None), None)


@dataclass(eq=False)
class CallJob(Job):
    function: Callable[[], Any]


@dataclass(eq=False)
class TurnJob(Job):
    task: AgentTask
    prompt: str | Sequence[int] | None
    options: dict[str, Any]
    priority: Priority
    deadline: float | None  # of time.monotonic()
    arrival: int
    joining: Joining | None = None
    is_held: bool = False  # was its stored prefix looked up while it waits?

    @property
    def session(self) -> AgentSession:
        return self.sessions[0]


class Schedule:
    """The jobs of one scheduler, by what they wait for or do. `on_end` is told of every job that ends."""

    def __init__(
        self,
        manager: SharedKVCacheManager,
        *,
        max_agents: int,
        step_tokens: int,
        attention: QuantizedAttention | None,
        on_end: Callable[[], None],
    ):
        self._manager, self._max_agents, self._step_tokens, self._on_end = manager, max_agents, step_tokens, on_end
        self._batch = AgentBatch(manager, attention=attention)
        self._calls: list[CallJob] = []
        self._waiting: list[TurnJob] = []
        self._prefilling: list[TurnJob] = []
        self._decoding: dict[AgentSession, TurnJob] = {}
        self._unfinished: dict[AgentSession, list[Task[Any]]] = {}  # in the order in which they came
        self._served: weakref.WeakKeyDictionary[AgentSession, int] = weakref.WeakKeyDictionary()
        self._held: weakref.WeakKeyDictionary[AgentSession, SharedPrefix] = weakref.WeakKeyDictionary()
        self._room_when_blocked: dict[TurnJob, int] = {}  # turns that found too few bytes, and how many there were
        self._counters: collections.Counter[str] = collections.Counter()

    def stats(self, num_arriving: int) -> SchedulerStats:
        """`num_arriving` jobs are not added yet. May be called from any thread."""
        count, decoding = self._counters, list(self._decoding.values())
        return SchedulerStats(
            num_waiting=len(self._waiting) + len(self._calls) + num_arriving,
            num_prefilling=len(self._prefilling),
            num_decoding=len(decoding),
            num_paused=sum(turn.task._is_paused for turn in decoding),
            num_steps=count["steps"],
            num_finished=count["finished"],
            num_failed=count["failed"],
            prefill_tokens=count["prefill"],
            decode_tokens=count["decode"],
        )

    def step(self) -> bool:
        """What is due, admissions, a token for every agent, and prefill. False if there was nothing to do."""
        count = self._counters
        ended = count["finished"] + count["failed"]
        self._end_hopeless()
        self._run_calls()
        has_admitted = self._admit()
        num_rows = self._decode()
        num_computed = self._prefill(self._step_tokens - num_rows)
        count.update(steps=1, decode=num_rows, prefill=num_computed)
        # An end is work: what waited for it is due now.
        return has_admitted or num_rows + num_computed > 0 or count["finished"] + count["failed"] > ended

    def _turns(self) -> list[TurnJob]:
        return [*self._waiting, *self._prefilling, *self._decoding.values()]

    def add(self, job: Job) -> None:
        for session in set(job.sessions):
            self._lift(session)
            self._unfinished.setdefault(session, []).append(job.task)
        if isinstance(job, TurnJob):
            self._waiting.append(job)
        elif isinstance(job, CallJob):
            self._calls.append(job)

    def _lift(self, session: AgentSession) -> None:
        """One that did nothing for a while has no claim on all the tokens that it did not ask for."""
        if session not in self._unfinished:
            busy = [self._served.get(turn.session, 0) for turn in self._turns() if turn.joining or self._is_due(turn)]
            self._served[session] = max(self._served.get(session, 0), min(busy, default=0))

    def _has_its_turn(self, job: Job) -> bool:
        """Has all the earlier work on its sessions ended?"""
        return all(self._unfinished[session][0] is job.task for session in job.sessions)

    def _is_due(self, job: Job) -> bool:
        return self._has_its_turn(job) and all(task.done() and task.error() is None for task in job.after)

    def _end_hopeless(self) -> None:
        """End what was cancelled, is too late, waits for something that failed, or lost its session."""
        now = time.monotonic()
        for job in [*self._calls, *self._turns()]:
            task, deadline = job.task, getattr(job, "deadline", None)
            if task._is_unwanted:
                error: QKVShareError = TaskCancelledError(f"[AgentScheduler] {task.name}: the task was cancelled")
            elif deadline is not None and now >= deadline:
                error = DeadlineExceededError(f"[AgentScheduler] {task.name}: the deadline passed")
            elif (failed := job.failed_need) is not None:
                error = DependencyError(f"[AgentScheduler] {task.name}: {failed.name}, which goes before, failed")
                error.__cause__ = failed.error()
            elif isinstance(job, TurnJob) and job.joining and job.session._is_closed:  # a paused one takes no steps
                error = SessionClosedError(f"[AgentScheduler] {task.name} was closed")
            else:
                continue
            self._fail(job, error)

    def _run_calls(self) -> None:
        while due := next((call for call in self._calls if self._is_due(call)), None):
            try:
                result = due.function()
            except BaseException as error:
                self._fail_with(due, error)
            else:
                self._succeed(due, result)

    def patience(self) -> float | None:
        """Seconds to wait for news at most."""
        deadlines = [turn.deadline for turn in self._turns() if turn.deadline is not None]
        seconds = [max(0.0, min(deadlines) - time.monotonic())] if deadlines else []
        if self._room_when_blocked or self._decoding:  # bytes may become free, and paused sessions be closed, elsewhere
            seconds.append(_POLL_SECONDS)
        return min(seconds, default=None)

    # --- admission ---------------------------------------------------------------------------------

    def _order(self, turn: TurnJob) -> tuple[int, int, int]:
        return turn.priority, self._served.get(turn.session, 0), turn.arrival

    def _admit(self) -> bool:
        """Start the turns that are due, in order.

        Where bytes are missing the later ones wait as well, or many small turns would keep a large one out for
        ever; but not if all that could give bytes back is paused by its readers.
        """
        self._let_go([session for session in self._held if session._is_closed])
        has_admitted = False
        for turn in sorted(filter(self._is_due, self._waiting), key=self._order):
            active = [other for other in (*self._prefilling, *self._decoding.values()) if not other.task._is_paused]
            if len(active) >= self._max_agents:
                break
            if self._start(turn):
                has_admitted = True
            elif active:
                break
        for turn in self._waiting:
            if not turn.is_held and turn.session not in self._held and self._has_its_turn(turn):
                turn.is_held = True
                if turn.prompt is not None and turn.session.num_tokens == 0:
                    self.hold(turn.session, turn.prompt)
        return has_admitted

    def _start(self, turn: TurnJob) -> bool:
        """Let the turn be prefilled from now on, or end it; False if it has to wait for bytes."""
        is_running = bool(self._prefilling or self._decoding)
        if is_running and turn in self._room_when_blocked and self._room() <= self._room_when_blocked[turn]:
            return False
        try:
            turn.joining = self._batch.begin(turn.session, turn.prompt, is_budgeted=True, **turn.options)
        except BudgetExceededError as error:
            if is_running:
                self._room_when_blocked[turn] = self._room()
                return False
            if self._let_go([other for other in self._held if other is not turn.session]):
                return self._start(turn)  # a hint must not make a turn fail
            self._fail(turn, error)
        except Exception as error:
            self._fail_with(turn, error)
        else:
            self._leave_queue(turn)
            self._prefilling.append(turn)
            self._let_go([turn.session])
        return True

    def _leave_queue(self, turn: TurnJob) -> None:
        self._waiting.remove(turn)
        self._room_when_blocked.pop(turn, None)

    def _room(self) -> int:
        stats = self._manager.stats()
        return stats.free_bytes + stats.evictable_bytes

    def hold(self, session: AgentSession, prompt: str | Sequence[int]) -> None:
        """Retain what is stored of the session's next context, if it can be told now."""
        try:
            tokens = session.wanted_tokens(prompt)
        except Exception:  # busy, closed, not to be tokenized: the turn itself will say so
            return
        held = self._manager.match_prefix(tokens, held_tokens=len(tokens), access=session.access)
        self._let_go([session])
        self._held[session] = held

    def _let_go(self, sessions: Iterable[AgentSession]) -> bool:
        found = [self._held.pop(session) for session in sessions if session in self._held]
        for prefix in found:
            prefix.release()
        return bool(found)

    # --- the model's work --------------------------------------------------------------------------

    def _decode(self) -> int:
        """A token for every agent that is not paused; how many there were, with those that failed."""
        ready = [turn for turn in self._decoding.values() if not turn.task._is_paused]
        chosen = sorted(ready, key=self._order)[: self._max_agents]  # more, when readers come back all at once
        if not chosen:
            return 0
        try:
            return self._show({turn.session for turn in chosen})
        except Exception:
            return sum(self._decode_alone(turn) for turn in chosen)  # which one was it? The others go on

    def _decode_alone(self, turn: TurnJob) -> int:
        try:
            return self._show({turn.session})
        except Exception as error:
            self._fail_with(turn, error)
            return 1

    def _show(self, sessions: set[AgentSession]) -> int:
        events = self._batch.step(sessions)
        for session, chunk, error in events:
            turn = self._decoding[session]
            if chunk is None:
                assert error is not None
                self._fail(turn, error)
                continue
            self._served[session] = self._served.get(session, 0) + 1
            turn.task._put(chunk)
            if chunk.finish_reason is not None:
                self._succeed(turn, turn.task.text)
        return len(events)

    def _prefill(self, num_tokens: int) -> int:
        """Compute at most `num_tokens` of the prompts; how many they were."""
        left = num_tokens
        for turn in sorted(self._prefilling, key=self._order):
            while left > 0 and turn in self._prefilling:
                left -= self._advance(turn, left)
        return num_tokens - left

    def _advance(self, turn: TurnJob, num_tokens: int) -> int:
        """Prefill one chunk; its tokens. A prompt that stood ready still takes a step of the model."""
        joining = turn.joining
        assert joining is not None
        before = joining.num_left
        try:
            has_joined = joining.advance(num_tokens)
        except BaseException as error:
            self._fail_with(turn, error)
            return 1
        count = max(1, before - joining.num_left)
        self._served[turn.session] = self._served.get(turn.session, 0) + count
        if has_joined:
            self._prefilling.remove(turn)
            self._decoding[turn.session] = turn
        return count

    # --- endings -----------------------------------------------------------------------------------

    def _succeed(self, job: Job, result: Any) -> None:
        self._forget(job, "finished")
        job.task._succeed(result)

    def _fail(self, job: Job, error: QKVShareError) -> None:
        self._forget(job, "failed")
        job.task._fail(error)

    def _fail_with(self, job: Job, error: BaseException) -> None:
        """The job fails, whatever was raised; what is no `Exception` (Ctrl-C) goes on to the caller of `step`."""
        self._fail(job, typed_error(error, f"[AgentScheduler] {job.task.name}"))
        if not isinstance(error, Exception):
            raise error

    def _forget(self, job: Job, how: str) -> None:
        """Take the job out of everything, with its session free again, before anyone hears of its end."""
        if isinstance(job, CallJob):
            self._calls.remove(job)
        elif isinstance(job, TurnJob):
            if job in self._waiting:
                self._leave_queue(job)
            elif job in self._prefilling:
                self._prefilling.remove(job)
                assert job.joining is not None
                job.joining.abandon()
            elif self._decoding.pop(job.session, None):
                self._batch.leave(job.session)
            self._let_go(job.sessions)
        for session in set(job.sessions):
            self._unfinished[session].remove(job.task)
            if not self._unfinished[session]:
                del self._unfinished[session]
        self._on_end()
        self._counters[how] += 1

    def end_all(self, reason: QKVShareError) -> None:
        for job in [*self._calls, *self._turns()]:
            self._fail(job, reason)
        self._let_go(list(self._held))
        self._batch.close()
