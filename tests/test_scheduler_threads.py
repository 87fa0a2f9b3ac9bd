"""The scheduler on its own thread, read from threads and from asyncio; and batches that change threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from reference import T, assert_consistent, some_ids
from test_scheduler import SHARED, Failing, setup, solo

from mlx_qkvshare import AgentBatch, AgentSession, HandoffCoordinator, SharedKVCacheManager
from mlx_qkvshare.errors import InvalidValueError, SessionBusyError, TaskCancelledError, TaskFailedError

HERE = Path(__file__).parent


def in_thread(function: Callable[[], object]) -> object:
    """What `function` gives on a thread that ends before this returns."""
    found: list[object] = []

    def work() -> None:
        try:
            found.append(function())
        finally:
            mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found, "the thread failed"
    return found[0]


def test_streams_in_threads_give_what_each_gives_alone():
    scheduler, sessions = setup(4)
    drawn: dict[int, list[int]] = {}

    def read(index: int) -> None:
        task = scheduler.submit(sessions[index], some_ids(9, seed=index), max_tokens=12, ignore_eos=True)
        drawn[index] = [chunk.token for chunk in task]

    with scheduler:
        readers = [threading.Thread(target=read, args=(i,)) for i in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(60)
    assert drawn == {i: solo(i, some_ids(9, seed=i), max_tokens=12, ignore_eos=True) for i in range(4)}


def test_b36_four_threads_of_five_turns_on_one_segment():
    scheduler, sessions = setup(4)
    turns = [[some_ids(3, seed=10 * i + k) for k in range(5)] for i in range(4)]
    texts: dict[int, list[str]] = {}

    def talk(index: int) -> None:
        texts[index] = [scheduler.submit(sessions[index], ids, max_tokens=5).result() for ids in turns[index]]

    with scheduler:
        threads = [threading.Thread(target=talk, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    _, twins = setup(4)
    for i, twin in enumerate(twins):
        assert texts[i] == [twin.reply(ids, max_tokens=5) for ids in turns[i]]
        assert sessions[i].token_ids == twin.token_ids
        assert_consistent(sessions[i])


def test_b36_two_threads_on_one_session_never_interleave():
    scheduler, (session,) = setup(1)
    texts: list[str] = []

    def go() -> None:
        texts.append(scheduler.submit(session, "go", max_tokens=9, ignore_eos=True).result())

    with scheduler:
        threads = [threading.Thread(target=go) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        blocking = scheduler.submit(session, max_tokens=99, ignore_eos=True)
        next(blocking)
        with pytest.raises(SessionBusyError):  # one from outside is refused, not mixed in
            session.rewind(0)
        blocking.cancel()
    _, (twin,) = setup(1)
    assert texts == ["".join(c.text for c in twin.stream("go", max_tokens=9, ignore_eos=True)) for _ in range(2)]


def test_b37_prefilled_in_a_thread_that_ended_then_stepped_together_elsewhere():
    manager = SharedKVCacheManager(T.spec)

    def research() -> list[AgentSession]:
        first = AgentSession("first", T, manager)
        first.prefill(SHARED)
        others = [first.fork("second"), first.fork("third")]
        for index, session in enumerate([first, *others]):
            session.prefill([150 + index, 151])
        return [first, *others]

    sessions = in_thread(research)
    receiver = AgentSession("receiver", T, manager)
    in_thread(lambda: HandoffCoordinator(manager).request_handoff(sessions[0], receiver))
    sessions[0] = receiver
    drawn: dict[str, list[int]] = {session.name: [] for session in sessions}
    with AgentBatch(manager) as batch:
        in_thread(lambda: [batch.join(s, max_tokens=7, ignore_eos=True) for s in sessions[:2]])
        batch.join(sessions[2], max_tokens=7, ignore_eos=True)
        step: Callable[[], object] = batch.step
        while len(batch):  # every second step on a thread of its own
            for event in [*batch.step(), *(in_thread(step) if len(batch) else [])]:
                drawn[event.session.name].append(event.chunk.token)
    twins = research()
    HandoffCoordinator(manager).request_handoff(twins[0], receiver := AgentSession("receiver", T, manager))
    for session, twin in zip(sessions, [receiver, *twins[1:]], strict=True):
        assert drawn[session.name] == [chunk.token for chunk in twin.stream(max_tokens=7, ignore_eos=True)]
        assert_consistent(session)


def test_a_session_is_usable_on_any_thread_after_its_turn():
    scheduler, (session,) = setup(1)
    with scheduler:
        tokens = [chunk.token for chunk in scheduler.submit(session, max_tokens=5, ignore_eos=True)]
        tokens.append(session.generate_token())
    tokens.append(in_thread(session.generate_token))
    assert tokens == solo(0, max_tokens=7, ignore_eos=True)


def test_all_work_is_on_one_thread_and_the_hand_is_off_it():
    threads: set[str] = set()
    model = T._replace(model=Failing(lambda ids: threads.add(threading.current_thread().name)))
    scheduler, sessions = setup(2, model=model)
    threads.clear()
    with scheduler:
        with pytest.raises(InvalidValueError, match="thread"):
            scheduler.step()
        tasks = [scheduler.submit(session, "hello", max_tokens=3) for session in sessions]
        assert scheduler.call(lambda: threading.current_thread().name).result() == "qkvshare-scheduler"
        for task in tasks:
            task.result()
    assert threads == {"qkvshare-scheduler"}


def test_asyncio_reads_many_streams_at_once():
    scheduler, sessions = setup(3)

    async def read(index: int) -> list[int]:
        task = scheduler.submit(sessions[index], max_tokens=10, ignore_eos=True, buffer_tokens=2 + index)
        found = []
        async for chunk in task:
            found.append(chunk.token)
            await asyncio.sleep(0.002 * index)  # a slow reader is an agent that pauses
        assert await task == task.text
        return found

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(read(i) for i in range(3)))

    with scheduler:
        assert asyncio.run(main()) == [solo(i, max_tokens=10, ignore_eos=True) for i in range(3)]


def test_asyncio_a_reader_that_leaves_ends_its_turn_and_no_other():
    scheduler, sessions = setup(2)

    async def impatient() -> str:
        async with scheduler.submit(sessions[0], "hello", max_tokens=300, ignore_eos=True) as task:
            async for _ in task:
                if task.num_tokens >= 3:
                    break
        with pytest.raises(TaskCancelledError):
            await task
        return task.text

    async def main() -> tuple[str, str]:
        other = scheduler.submit(sessions[1], max_tokens=20, ignore_eos=True)
        text = await asyncio.wait_for(impatient(), 60)
        return text, await other

    with scheduler:
        text, other = asyncio.run(main())
    assert sessions[0].messages[-1].content == text
    _, twins = setup(2)
    assert other == "".join(c.text for c in twins[1].stream(max_tokens=20, ignore_eos=True))


def test_asyncio_a_waiter_that_gives_up_does_not_end_the_task():
    scheduler, (session,) = setup(1)

    async def main() -> str:
        task = scheduler.submit(session, max_tokens=30, ignore_eos=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(task.__aiter__()), 1e-9)
        return await task

    with scheduler:
        text = asyncio.run(main())
    assert text == "".join(c.text for c in setup(1)[1][0].stream(max_tokens=30, ignore_eos=True))


def test_a_loop_that_closed_while_its_reader_waited_stops_nobody():
    scheduler, (session, other) = setup(2)
    release = threading.Event()
    blocked = scheduler.call(lambda: release.wait(30), sessions=[session])
    loop = asyncio.new_event_loop()
    with scheduler:
        task = scheduler.submit(session, max_tokens=4, ignore_eos=True)
        reader = loop.create_task(anext(task.__aiter__()))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        release.set()
        assert blocked.result(30) and scheduler.submit(other, max_tokens=4, ignore_eos=True).result(30) is not None
        assert task.result(30) == task.text and task.num_tokens == 4
    reader._log_destroy_pending = False  # it never ended: its loop is gone


def test_a_reader_that_drains_a_full_buffer_always_wakes_its_agent(monkeypatch):
    scheduler, (session,) = setup(1)
    with scheduler:
        task = scheduler.submit(session, max_tokens=12, ignore_eos=True, buffer_tokens=1)
        wake = task._wake

        def wake_and_dawdle() -> None:
            wake()
            time.sleep(0.02)  # time for the scheduler to look, and to go to sleep

        task._wake = wake_and_dawdle
        assert len(list(task)) == 12


def test_asyncio_a_reader_that_gave_up_is_forgotten():
    scheduler, (session,) = setup(1)
    release = threading.Event()

    async def main() -> int:
        task = scheduler.submit(session, max_tokens=2, ignore_eos=True)
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(task.__aiter__()), 0.001)
        count = len(task._readers)
        release.set()
        await task
        return count

    with scheduler:
        scheduler.call(lambda: release.wait(30), sessions=[session])
        assert asyncio.run(main()) == 0


def test_closing_ends_everything_and_leaves_the_sessions():
    scheduler, sessions = setup(3, max_agents=1)
    scheduler.start()
    tasks = [scheduler.submit(session, max_tokens=300, ignore_eos=True) for session in sessions]
    next(tasks[0])
    scheduler.close()
    scheduler.close()
    assert all(isinstance(task.error(), TaskCancelledError) for task in tasks)
    for session in sessions:
        assert session.generate_token() >= 0
        assert_consistent(session)
    assert not any(thread.name == "qkvshare-scheduler" for thread in threading.enumerate())


def test_closing_from_inside_a_call_is_possible():
    scheduler, (session,) = setup(1)
    with scheduler:
        posted = threading.Event()
        scheduler.call(lambda: posted.wait(30))
        call = scheduler.call(scheduler.close)
        late = scheduler.submit(session)
        posted.set()
        assert call.result(30) is None
        with pytest.raises(TaskCancelledError):
            late.result(30)
    assert session.generate_token() >= 0


def test_a_crash_of_the_thread_is_told_to_all_who_wait(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    scheduler, (session, other) = setup(2)

    def crash() -> None:
        raise SystemExit(3)

    with scheduler:
        waiting = scheduler.submit(session, max_tokens=400, ignore_eos=True)
        scheduler.call(crash)
        with pytest.raises(TaskFailedError, match="SystemExit"):
            waiting.result(30)
    assert session.generate_token() >= 0 and other.generate_token() >= 0


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from reference import T
from mlx_qkvshare import AgentScheduler, AgentSession, SharedKVCacheManager
manager = SharedKVCacheManager(T.spec)
scheduler = AgentScheduler(manager).start()
agents = [AgentSession(f"agent {i}", T, manager) for i in range(3)]
tasks = [scheduler.submit(agent, [0, 50], max_tokens=200, ignore_eos=True) for agent in agents]
next(tasks[0])
print("end of the program, tasks are running, nothing is closed")
"""


def test_b38_a_program_that_forgets_to_close_ends_well():
    for _ in range(3):
        found = subprocess.run([sys.executable, "-c", PROGRAM, HERE], capture_output=True, text=True, timeout=120)
        assert (found.returncode, found.stderr) == (0, ""), found
        assert found.stdout.startswith("end of the program")
