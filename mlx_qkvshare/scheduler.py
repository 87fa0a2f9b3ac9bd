"""`AgentScheduler`: continuous batching of agents on one thread, with priorities, fairness, deadlines and handoffs.

Agents join and leave a running batch between any two steps (Orca, OSDI 2022), a long prompt is prefilled in chunks
between decode steps (Sarathi-Serve, arXiv 2403.02310), and among equals the agent with the fewest tokens served goes
first, with the counter lifted after a pause (virtual token counters, arXiv 2401.00588).
"""

from __future__ import annotations

import atexit
import collections
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from .attention import QuantizedAttention
from .batch import AgentBatch, Joining
from .errors import (
    BudgetExceededError,
    DeadlineExceededError,
    DependencyError,
    InvalidValueError,
    QKVShareError,
    QueueFullError,
    SchedulerClosedError,
    TaskCancelledError,
    TaskFailedError,
)
from .handoff import HandoffCoordinator, HandoffRecord
from .manager import SharedKVCacheManager
from .prefix import SharedPrefix
from .session import AgentSession, stop_strings
from .task import AgentTask, Priority, Task

T = TypeVar("T")

_POLL_SECONDS = 0.05  # how often a turn that waits for bytes looks whether others gave some back


@dataclass(frozen=True)
class SchedulerStats:
    """Turns by what they do now, and counts since the scheduler was made."""

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
class _Job:
    """A task. Those of `after` must have succeeded before, and those of `behind`, on the same sessions, have ended."""

    task: Task[Any]
    sessions: tuple[AgentSession, ...]
    after: tuple[Task[Any], ...]
    behind: list[Task[Any]] = field(default_factory=list, kw_only=True)

    @property
    def has_its_turn(self) -> bool:
        self.behind = [task for task in self.behind if not task.done()]
        return not self.behind

    @property
    def is_due(self) -> bool:
        return self.has_its_turn and all(task.done() for task in self.after)

    @property
    def failed_need(self) -> Task[Any] | None:
        return next((task for task in self.after if task.error() is not None), None)


@dataclass(eq=False)
class _Call(_Job):
    function: Callable[[], Any]


@dataclass(eq=False)
class _Turn(_Job):
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


class AgentScheduler:
    """Runs the turns of many agents of one manager and model; all MLX work is on one thread.

    Args:
        max_agents: agents that are prefilled or decode at a time; one that is paused by its reader does not count.
        step_tokens: tokens that one step computes at most: a row for every decoding agent, the rest of them
            prefill. It bounds how long a long prompt can hold up the agents that decode.
        max_tasks: unfinished tasks, beyond which `QueueFullError` is raised.

    In a `with` block, or after `start`, a thread of its own does the work. Without, call `step` yourself, from
    one thread.

    Work on one session is done in the order in which it was submitted. A turn starts when the manager's budget
    holds its prompt and its whole reply, so that it never runs out half-way; until then it waits, and it fails
    with `BudgetExceededError` only if nothing else that runs here could give bytes back.
    """

    def __init__(
        self,
        manager: SharedKVCacheManager,
        *,
        max_agents: int = 32,
        step_tokens: int = 256,
        max_tasks: int = 1024,
        attention: QuantizedAttention | None = None,
    ):
        if not 0 < max_agents < step_tokens:
            raise InvalidValueError(
                f"[AgentScheduler] expected 0 < max_agents < step_tokens, got {max_agents} and {step_tokens}"
            )
        if max_tasks <= 0:
            raise InvalidValueError(f"[AgentScheduler] max_tasks: expected > 0, got {max_tasks}")
        self.manager, self.coordinator = manager, HandoffCoordinator(manager)
        self._max_agents, self._step_tokens, self._max_tasks = max_agents, step_tokens, max_tasks
        self._batch = AgentBatch(manager, attention=attention)
        self._lock = threading.Lock()  # of the two below, which other threads touch
        self._inbox: collections.deque[_Job | Callable[[], None]] = collections.deque()
        self._is_closed = False
        self._news, self._arrivals = threading.Event(), itertools.count()
        self._num_open = 0
        self._thread: threading.Thread | None = None
        # All that follows belongs to the thread that steps.
        self._calls: list[_Call] = []
        self._waiting: list[_Turn] = []
        self._prefilling: list[_Turn] = []
        self._decoding: dict[AgentSession, _Turn] = {}
        self._unfinished: dict[AgentSession, list[Task[Any]]] = {}
        self._served: weakref.WeakKeyDictionary[AgentSession, int] = weakref.WeakKeyDictionary()
        self._held: dict[AgentSession, SharedPrefix] = {}
        self._room_when_blocked: int | None = None
        self._counters: collections.Counter[str] = collections.Counter()

    # --- asking, from any thread -------------------------------------------------------------------

    def submit(
        self,
        session: AgentSession,
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int = 256,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        priority: Priority = Priority.INTERACTIVE,
        deadline_seconds: float | None = None,
        after: Iterable[Task[Any]] = (),
        buffer_tokens: int | None = None,
    ) -> AgentTask:
        """Let `session` take a turn, as `AgentSession.stream` does.

        Args:
            deadline_seconds: from now; then the turn ends with `DeadlineExceededError`, what it said is kept.
            after: tasks that must have succeeded before; if one fails, this one fails with `DependencyError`.
            buffer_tokens: unread tokens at which this agent pauses. Default: all `max_tokens`, so it never does.

        Raises `QueueFullError`, `SchedulerClosedError`, or `InvalidValueError` for arguments out of range. All
        that can go wrong later is the task's `error()`.
        """
        limit = max_tokens if buffer_tokens is None else buffer_tokens
        for name, value in (("max_tokens", max_tokens), ("buffer_tokens", limit)):
            if not isinstance(value, int) or value <= 0:
                raise InvalidValueError(f"[AgentScheduler.submit] {name}: expected an int > 0, got {value!r}")
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise InvalidValueError(f"[AgentScheduler.submit] deadline_seconds: expected > 0, got {deadline_seconds}")
        options = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "stop": stop_strings(stop)}
        task = AgentTask(session, limit, self._news.set)
        self._post(
            _Turn(
                task=task,
                sessions=(session,),
                after=tuple(after),
                prompt=prompt if prompt is None or isinstance(prompt, str) else list(prompt),
                options=options,
                priority=Priority(priority),
                deadline=None if deadline_seconds is None else time.monotonic() + deadline_seconds,
                arrival=next(self._arrivals),
            )
        )
        return task

    def handoff(
        self,
        sender: AgentSession,
        receiver: AgentSession,
        *,
        keep_sender: bool = False,
        verify: bool = False,
        after: Iterable[Task[Any]] = (),
    ) -> Task[HandoffRecord]:
        """`HandoffCoordinator.request_handoff`, when the earlier tasks of both sessions have ended.

        To be sure that a turn of the receiver has the context, name the handoff in its `after`; and likewise
        here the sender's turn that it waits for.
        """

        def hand_over() -> HandoffRecord:
            return self.coordinator.request_handoff(sender, receiver, keep_sender=keep_sender, verify=verify)

        return self._call(f"{sender.name} to {receiver.name}", hand_over, (sender, receiver), after)

    def call(
        self, function: Callable[[], T], *, sessions: Iterable[AgentSession] = (), after: Iterable[Task[Any]] = ()
    ) -> Task[T]:
        """Run `function()` on the MLX thread between two steps: a seal, a fork, a `say`.

        `sessions` are those that it uses: it comes behind their earlier tasks and before their later ones.
        """
        return self._call(getattr(function, "__name__", "call"), function, tuple(sessions), after)

    def runs_next(self, session: AgentSession, prompt: str | Sequence[int]) -> None:
        """A hint: what the manager stores of `session`'s context with `prompt` is not evicted until its next turn.

        The hint of a session replaces its earlier one. It yields when nothing else would make room for a turn.
        """
        self._post(lambda: self._hold(session, prompt))

    def stats(self) -> SchedulerStats:
        count, decoding = self._counters, list(self._decoding.values())
        return SchedulerStats(
            num_waiting=len(self._waiting) + len(self._inbox),
            num_prefilling=len(self._prefilling),
            num_decoding=len(decoding),
            num_paused=sum(turn.task._is_paused for turn in decoding),
            num_steps=count["steps"],
            num_finished=count["finished"],
            num_failed=count["failed"],
            prefill_tokens=count["prefill"],
            decode_tokens=count["decode"],
        )

    def _call(
        self,
        name: str,
        function: Callable[[], T],
        sessions: tuple[AgentSession, ...],
        after: Iterable[Task[Any]],
    ) -> Task[T]:
        task: Task[T] = Task(name, self._news.set)
        self._post(_Call(task, sessions, tuple(after), function))
        return task

    def _post(self, item: _Job | Callable[[], None]) -> None:
        for session in item.sessions if isinstance(item, _Job) else ():
            if session.manager is not self.manager:
                raise InvalidValueError(f"[AgentScheduler] {session.name}: expected a session of its manager")
        with self._lock:
            if self._is_closed:
                raise SchedulerClosedError("[AgentScheduler] expected an open scheduler, got a closed one")
            if isinstance(item, _Job):
                if self._num_open >= self._max_tasks:
                    raise QueueFullError(f"[AgentScheduler] {self._num_open} tasks are unfinished, as many as it takes")
                self._num_open += 1
            self._inbox.append(item)
        self._news.set()

    # --- the thread --------------------------------------------------------------------------------

    def start(self) -> AgentScheduler:
        """Work on a thread of its own from here on, until `close`."""
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._work, name="qkvshare-scheduler", daemon=True)
            atexit.register(self.close)  # a daemon in the middle of MLX work would abort the process
            self._thread.start()
        return self

    def __enter__(self) -> AgentScheduler:
        return self.start()

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all that has not ended, and end the thread. Sessions stay usable. Twice is harmless."""
        with self._lock:
            self._is_closed = True
        self._news.set()
        if self._thread is None:
            self._end_all(TaskCancelledError("[AgentScheduler] the scheduler was closed"))
        elif threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)

    def _work(self) -> None:
        reason: QKVShareError = TaskCancelledError("[AgentScheduler] the scheduler was closed")
        try:
            while not self._is_closed:
                self._news.clear()
                if not self._step():
                    self._news.wait(self._patience())
        except BaseException as error:
            reason = _typed(error, "the scheduler's thread")
            raise
        finally:
            with self._lock:
                self._is_closed = True
            try:
                self._end_all(reason)
            finally:
                mx.clear_streams()  # or the process may abort at exit on Linux

    def _patience(self) -> float | None:
        """Seconds to wait for news at most."""
        deadlines = [turn.deadline for turn in self._turns() if turn.deadline is not None]
        seconds = [max(0.0, min(deadlines) - time.monotonic())] if deadlines else []
        return min(seconds + [_POLL_SECONDS] * (self._room_when_blocked is not None), default=None)

    # --- one step ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """One round of work: what is due, admissions, a token for every agent, prefill. False if there was none."""
        if self._thread is not None:
            raise InvalidValueError("[AgentScheduler.step] expected a scheduler without a thread, got a started one")
        return self._step()

    def _step(self) -> bool:
        self._take_in()
        has_worked = self._end_hopeless() | self._run_calls() | self._admit()
        num_rows = self._decode()
        num_computed = self._prefill(self._step_tokens - num_rows)
        self._counters.update(steps=1, decode=num_rows, prefill=num_computed)
        return has_worked or num_rows + num_computed > 0

    def _turns(self) -> list[_Turn]:
        return [*self._waiting, *self._prefilling, *self._decoding.values()]

    def _take_in(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if not isinstance(item, _Job):
                item()
                continue
            if isinstance(item, _Turn):
                self._lift(item.session)
                self._waiting.append(item)
            elif isinstance(item, _Call):
                self._calls.append(item)
            for session in set(item.sessions):  # behind all of them: one may end early, while an earlier one still runs
                unfinished = self._unfinished.setdefault(session, [])
                item.behind.extend(unfinished)
                unfinished.append(item.task)

    def _lift(self, session: AgentSession) -> None:
        """One that did nothing for a while has no claim on all the tokens that it did not ask for."""
        if session not in self._unfinished:
            busy = [self._served.get(other, 0) for other in self._unfinished]
            self._served[session] = max(self._served.get(session, 0), min(busy, default=0))

    def _end_hopeless(self) -> bool:
        """End what was cancelled, is too late, or waits for something that failed."""
        now, found = time.monotonic(), False
        for job in [*self._calls, *self._turns()]:
            task, deadline = job.task, getattr(job, "deadline", None)
            if task._is_unwanted:
                error: QKVShareError = TaskCancelledError(f"[AgentScheduler] {task.name}: the task was cancelled")
            elif deadline is not None and now >= deadline:
                error = DeadlineExceededError(f"[AgentScheduler] {task.name}: the deadline passed")
            elif (failed := job.failed_need) is not None:
                error = DependencyError(f"[AgentScheduler] {task.name}: {failed.name}, which goes before, failed")
                error.__cause__ = failed.error()
            else:
                continue
            self._fail(job, error)
            found = True
        return found

    def _run_calls(self) -> bool:
        has_run = False
        while due := next((call for call in self._calls if call.is_due and call.failed_need is None), None):
            try:
                result = due.function()
            except Exception as error:
                self._fail(due, _typed(error, due.task.name))
            else:
                self._succeed(due, result)
            has_run = True
        return has_run

    # --- admission ---------------------------------------------------------------------------------

    def _order(self, turn: _Turn) -> tuple[int, int, int]:
        return turn.priority, self._served.get(turn.session, 0), turn.arrival

    def _admit(self) -> bool:
        """Start the turns that are due, in order, while there is room for the next one."""
        due = [turn for turn in self._waiting if turn.is_due]
        has_admitted = False
        if due and self._may_have_room():
            self._room_when_blocked = None
            for turn in sorted(due, key=self._order):
                num_active = len(self._prefilling) + sum(not t.task._is_paused for t in self._decoding.values())
                if num_active >= self._max_agents or not self._start(turn):
                    break
                has_admitted = True
        for turn in self._waiting:
            if not turn.is_held and turn.session not in self._held and turn.has_its_turn:
                turn.is_held = True
                if turn.prompt is not None and turn.session.num_tokens == 0:
                    self._hold(turn.session, turn.prompt)
        return has_admitted

    def _start(self, turn: _Turn) -> bool:
        """Let the turn be prefilled from now on, or end it; False if it has to wait for bytes."""
        while True:
            try:
                turn.joining = self._batch.begin(turn.session, turn.prompt, is_budgeted=True, **turn.options)
            except BudgetExceededError as error:
                if self._is_running:
                    self._room_when_blocked = self._room()
                    return False
                if self._let_go(other for other in self._held if other is not turn.session):
                    continue  # a hint must not make a turn fail
                self._fail(turn, error)
            except Exception as error:
                self._fail(turn, _typed(error, turn.task.name))
            else:
                self._waiting.remove(turn)
                self._prefilling.append(turn)
                self._let_go([turn.session])
            return True

    def _may_have_room(self) -> bool:
        return self._room_when_blocked is None or not self._is_running or self._room() > self._room_when_blocked

    @property
    def _is_running(self) -> bool:
        return bool(self._prefilling or self._decoding)

    def _room(self) -> int:
        stats = self.manager.stats()
        return stats.free_bytes + stats.evictable_bytes

    def _hold(self, session: AgentSession, prompt: str | Sequence[int]) -> None:
        """Retain what is stored of the session's next context, if it can be told now."""
        try:
            tokens = session.wanted_tokens(prompt)
        except Exception:  # busy, closed, not to be tokenized: the turn itself will say so
            return
        held = self.manager.match_prefix(tokens, held_tokens=len(tokens))
        self._let_go([session])
        self._held[session] = held

    def _let_go(self, sessions: Iterable[AgentSession]) -> bool:
        found = [self._held.pop(session) for session in list(sessions) if session in self._held]
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

    def _decode_alone(self, turn: _Turn) -> int:
        try:
            return self._show({turn.session})
        except Exception as error:
            self._fail(turn, _typed(error, turn.task.name))
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
        computed = 0
        for turn in sorted(self._prefilling, key=self._order):
            if computed >= num_tokens:
                break
            joining = turn.joining
            assert joining is not None
            before = joining.num_left
            try:
                has_joined = joining.advance(num_tokens - computed)
            except Exception as error:
                self._fail(turn, _typed(error, turn.task.name))
                continue
            count = max(1, before - joining.num_left)  # a prompt that stood ready still takes a step
            computed += count
            self._served[turn.session] = self._served.get(turn.session, 0) + count
            if has_joined:
                self._prefilling.remove(turn)
                self._decoding[turn.session] = turn
        return computed

    # --- endings -----------------------------------------------------------------------------------

    def _succeed(self, job: _Job, result: Any) -> None:
        self._forget(job, "finished")
        job.task._succeed(result)

    def _fail(self, job: _Job, error: QKVShareError) -> None:
        self._forget(job, "failed")
        job.task._fail(error)

    def _forget(self, job: _Job, how: str) -> None:
        """Take the job out of everything, with its session free again, before anyone hears of its end."""
        if isinstance(job, _Call):
            self._calls.remove(job)
        elif isinstance(job, _Turn):
            if job in self._waiting:
                self._waiting.remove(job)
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
        with self._lock:
            self._num_open -= 1
        self._counters[how] += 1

    def _end_all(self, reason: QKVShareError) -> None:
        self._take_in()
        for job in [*self._calls, *self._turns()]:
            self._fail(job, reason)
        self._let_go(list(self._held))
        self._batch.close()


def _typed(error: BaseException, name: str) -> QKVShareError:
    """The error itself if it is one of ours, else one of ours with it as its cause."""
    if isinstance(error, QKVShareError):
        return error
    typed = TaskFailedError(f"[AgentScheduler] {name}: {type(error).__name__}: {error}")
    typed.__cause__ = error
    return typed
