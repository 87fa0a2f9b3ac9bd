"""Many agents come, speak, are cancelled and fail at random, on a tight budget.

`python tests/scheduler_load.py SEED STEPS` prints what happened as one JSON line; the tests call `run`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import sys
import threading
import time
from typing import Any

import mlx.core as mx
from reference import T, active_bytes

from mlx_qkvshare import AgentScheduler, AgentSession, AgentTask, Priority, QKVShareError, SharedKVCacheManager, Task
from mlx_qkvshare.errors import QueueFullError

NUM_SESSIONS = 64
SHARED = [0, *range(60, 160)]
WAIT_SECONDS = 60.0


class Unreliable:
    """A model that raises now and then, and counts where: a call with several tokens a session is a prefill."""

    def __init__(self, draw: random.Random):
        self._draw, self.failures, self.is_calm = draw, collections.Counter[str](), True

    def __call__(self, token_ids: mx.array, **options: Any) -> mx.array:
        logits = T.model(token_ids, **options)
        kind = "prefill" if token_ids.shape[1] > 1 else "decode"
        if not self.is_calm and self._draw.random() < {"prefill": 0.06, "decode": 0.02}[kind]:
            self.failures[kind] += 1
            raise RuntimeError("an injected failure")
        return logits


class Load:
    """One run: `act` does something at random, `check` is what must hold at the end."""

    def __init__(self, seed: int):
        self.draw, self.model = random.Random(seed), Unreliable(random.Random(seed + 1))
        self.lm = T._replace(model=self.model)
        self.manager = SharedKVCacheManager(T.spec, budget_bytes=6 * 2**20)
        with AgentSession("first", self.lm, self.manager) as first:
            first.prefill(SHARED)
            first.seal()
        self.scheduler = AgentScheduler(self.manager, max_agents=12, step_tokens=48, max_tasks=100)
        self.failing = random.Random(seed + 2)
        self.sessions: list[AgentSession] = []
        self.tasks: list[Task[Any]] = []
        self.readers: list[threading.Thread] = []
        self.num_refused = 0

    def arrive(self) -> None:
        self.sessions.append(self.make_session(f"agent {len(self.sessions)}"))

    def make_session(self, name: str) -> AgentSession:
        sampler = self.unreliable_sampler if self.draw.random() < 0.1 else None
        return AgentSession(name, self.lm, self.manager, sampler=sampler)

    def unreliable_sampler(self, logits: mx.array) -> mx.array:
        if not self.model.is_calm and self.failing.random() < 0.05:
            self.model.failures["sampler"] += 1
            raise ValueError("an injected failure")
        return mx.argmax(logits)

    def turn(self, session: AgentSession) -> None:
        draw = self.draw
        own = [draw.randrange(10, 340) for _ in range(draw.randrange(1, 60))]
        start = [] if session.num_tokens or draw.random() < 0.1 else SHARED
        is_slow = draw.random() < 0.1
        task = self.scheduler.submit(
            session,
            draw.choice([[*start, *own], f"message {draw.random()}"]),
            max_tokens=draw.randrange(1, 30),
            ignore_eos=draw.random() < 0.5,
            stop=draw.choice([(), ("e", "zz"), "the"]),
            priority=draw.choice(list(Priority)),
            deadline_seconds=draw.choice([*[None] * 8, 0.01, 0.5]),
            after=[draw.choice(self.tasks)] if self.tasks and draw.random() < 0.05 else (),
            buffer_tokens=3 if is_slow else None,
        )
        self.tasks.append(task)
        if is_slow:
            reader = threading.Thread(target=self.read, args=(task, draw.random() / 200))
            reader.start()
            self.readers.append(reader)

    @staticmethod
    def read(task: AgentTask, pause: float) -> None:
        with contextlib.suppress(QKVShareError):
            for _ in task:
                time.sleep(pause)
        mx.clear_streams()

    def act(self) -> None:
        draw, scheduler, tasks = self.draw, self.scheduler, self.tasks
        session, kind = draw.choice(self.sessions), draw.random()
        if len(self.sessions) < NUM_SESSIONS and draw.random() < 0.3:
            self.arrive()
        elif kind < 0.6:
            self.turn(session)
        elif kind < 0.7:
            tasks.append(scheduler.handoff(session, draw.choice(self.sessions), keep_sender=draw.random() < 0.5))
        elif kind < 0.8 and tasks:
            draw.choice(tasks[-20:]).cancel()
        elif kind < 0.85:
            tasks.append(scheduler.call(session.reset, sessions=[session]))
        elif kind < 0.9:
            tasks.append(scheduler.call(session.seal, sessions=[session]))
        elif kind < 0.93:
            scheduler.runs_next(session, [*SHARED, 5])
        elif kind < 0.95:
            tasks.append(scheduler.call(lambda: 1 // 0))
        elif kind < 0.96:
            session.close()  # from this thread, whatever the session is doing
            place = self.sessions.index(session)
            self.sessions[place] = self.make_session(f"{session.name}'")

    def run(self, num_steps: int) -> dict[str, Any]:
        for _ in range(8):
            self.arrive()
        self.model.is_calm = False
        with self.scheduler as scheduler:
            while scheduler.stats().num_steps < num_steps or len(self.sessions) < NUM_SESSIONS:
                try:
                    self.act()
                except QueueFullError:
                    self.num_refused += 1
                    time.sleep(0.01)
                time.sleep(0.0005)
            give_up = time.monotonic() + WAIT_SECONDS
            while not all(task.done() for task in self.tasks):  # `result` would keep slow readers' agents from pausing
                assert time.monotonic() < give_up, [task for task in self.tasks if not task.done()]
                time.sleep(0.02)
        for reader in self.readers:
            reader.join(WAIT_SECONDS)
        self.model.is_calm = True
        return self.check()

    def check(self) -> dict[str, Any]:
        manager, tasks, failures = self.manager, self.tasks, self.model.failures
        errors = collections.Counter(type(task.error()).__name__ for task in tasks if task.error() is not None)
        assert all(task.done() for task in tasks)
        assert all(isinstance(error, QKVShareError) for task in tasks if (error := task.error()))
        assert not any(reader.is_alive() for reader in self.readers)
        manager.check_integrity(checksums=True)
        num_evictions = manager.stats().num_evictions
        for session in self.sessions:  # free, and every layer as long as its tokens
            assert {cache.offset for cache in session.caches} == {session.num_tokens}
            assert session.prefix.private_bytes == session.private_bytes
            session.close()
        manager.check_integrity(checksums=True)
        assert manager.stats().protected_bytes == 0
        manager.evict_unreferenced()
        assert manager.stats().used_bytes == 0
        assert failures["prefill"] and failures["decode"] and errors["TaskFailedError"], (failures, errors)
        num_finished = sum(task.error() is None for task in tasks)
        assert num_finished > len(tasks) / 5, (num_finished, errors)
        return {
            "steps": self.scheduler.stats().num_steps,
            "tasks": len(tasks),
            "finished": num_finished,
            "errors": dict(errors),
            "refused": self.num_refused,
            "failures": dict(failures),
            "evictions": num_evictions,
            "reader_threads": len(self.readers),
        }


def run(seed: int, num_steps: int) -> dict[str, Any]:
    """Raises unless everything ends with a result or a typed error, and all accounts are right."""
    before = active_bytes()
    found = Load(seed).run(num_steps)
    found["leaked_bytes"] = active_bytes() - before
    assert found["leaked_bytes"] == 0, found
    return found


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
