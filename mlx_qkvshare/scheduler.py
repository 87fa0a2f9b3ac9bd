"""`AgentScheduler`: continuous batching of agents on one thread, with priorities, fairness, deadlines and handoffs."""

from __future__ import annotations

import atexit
import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from .attention import QuantizedAttention
from .errors import (
    InvalidValueError,
    QKVShareError,
    QueueFullError,
    SchedulerClosedError,
    TaskCancelledError,
    typed_error,
)
from .handoff import HandoffCoordinator, HandoffRecord
from .manager import SharedKVCacheManager
from .schedule import CallJob, Job, Schedule, SchedulerStats, TurnJob
from .session import AgentSession, stop_strings
from .task import AgentTask, Priority, Task

T = TypeVar("T")


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
    holds its prompt and its whole reply, so that it never runs out half-way; until then it waits, those behind
    it in the order as well, and it fails with `BudgetExceededError` only if nothing that runs here could give
    bytes back. An agent that its reader pauses keeps its bytes: give such turns a deadline.
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
        self._schedule = Schedule(
            manager, max_agents=max_agents, step_tokens=step_tokens, attention=attention, on_end=self._note_end
        )
        self._max_tasks = max_tasks
        self._lock = threading.Lock()  # of the three below
        self._inbox: collections.deque[Job | Callable[[], None]] = collections.deque()
        self._num_open, self._is_closed = 0, False
        self._news, self._arrivals = threading.Event(), itertools.count()
        self._thread: threading.Thread | None = None

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
        if deadline_seconds is not None and not 0 < deadline_seconds <= threading.TIMEOUT_MAX:
            raise InvalidValueError(f"[AgentScheduler.submit] deadline_seconds: expected > 0, got {deadline_seconds}")
        options = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "stop": stop_strings(stop)}
        task = AgentTask(session, limit, self._news.set)
        self._post(
            TurnJob(
                task=task,
                sessions=(session,),
                after=_tasks(after),
                prompt=prompt if prompt is None or isinstance(prompt, str) else list(prompt),
                options=options,
                priority=_priority(priority),
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

        For a session that is free now; it is busy for a moment. The hint of a session replaces its earlier one,
        and yields when nothing else would make room for a turn.
        """
        self._post(lambda: self._schedule.hold(session, prompt))

    def stats(self) -> SchedulerStats:
        return self._schedule.stats(len(self._inbox))

    def _call(
        self,
        name: str,
        function: Callable[[], T],
        sessions: tuple[AgentSession, ...],
        after: Iterable[Task[Any]],
    ) -> Task[T]:
        task: Task[T] = Task(name, self._news.set)
        self._post(CallJob(task, sessions, _tasks(after), function))
        return task

    def _post(self, item: Job | Callable[[], None]) -> None:
        for session in item.sessions if isinstance(item, Job) else ():
            if session.manager is not self.manager:
                raise InvalidValueError(f"[AgentScheduler] {session.name}: expected a session of its manager")
        with self._lock:
            if self._is_closed:
                raise SchedulerClosedError("[AgentScheduler] expected an open scheduler, got a closed one")
            if isinstance(item, Job):
                if self._num_open >= self._max_tasks:
                    raise QueueFullError(f"[AgentScheduler] {self._num_open} tasks are unfinished, as many as it takes")
                self._num_open += 1
            self._inbox.append(item)
        for task in item.after if isinstance(item, Job) else ():
            task._future.add_done_callback(lambda future: self._news.set())  # it may be another scheduler's
        self._news.set()

    # --- the thread --------------------------------------------------------------------------------

    def start(self) -> AgentScheduler:
        """Work on a thread of its own from here on, until `close`."""
        with self._lock:
            if self._thread is not None or self._is_closed:
                return self
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

    def _work(self) -> None:
        reason: QKVShareError = TaskCancelledError("[AgentScheduler] the scheduler was closed")
        try:
            while not self._is_closed:
                self._news.clear()
                if not self._step():
                    self._news.wait(self._schedule.patience())
        except BaseException as error:
            reason = typed_error(error, "[AgentScheduler] the thread")
            raise
        finally:
            with self._lock:
                self._is_closed = True
            atexit.unregister(self.close)
            try:
                self._end_all(reason)
            finally:
                mx.clear_streams()  # or the process may abort at exit on Linux

    # --- one step ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """One round of work: what is due, admissions, a token for every agent, prefill. False if there was none."""
        if self._thread is not None:
            raise InvalidValueError("[AgentScheduler.step] expected a scheduler without a thread, got a started one")
        return self._step()

    def _step(self) -> bool:
        self._take_in()
        return self._schedule.step()

    def _take_in(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Job):
                self._schedule.add(item)
            else:
                item()

    def _end_all(self, reason: QKVShareError) -> None:
        self._take_in()
        self._schedule.end_all(reason)

    def _note_end(self) -> None:
        with self._lock:
            self._num_open -= 1


def _tasks(after: Iterable[Task[Any]]) -> tuple[Task[Any], ...]:
    tasks = () if isinstance(after, Task) else tuple(after)  # a task is itself iterable: its stream
    if isinstance(after, Task) or not all(isinstance(task, Task) for task in tasks):
        raise InvalidValueError(f"[AgentScheduler] after: expected a list of tasks, got {after!r}")
    return tasks


def _priority(value: Priority) -> Priority:
    if value not in list(Priority):
        raise InvalidValueError(f"[AgentScheduler.submit] priority: expected one of {list(Priority)}, got {value!r}")
    return Priority(value)
