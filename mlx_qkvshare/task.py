"""`Task` and `AgentTask`: work that a scheduler does, for those who wait for it on other threads or in asyncio."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from .errors import QKVShareError
from .session import AgentSession, StreamChunk

T = TypeVar("T")


class Priority(enum.IntEnum):
    """Work of the first kind always goes before that of the second."""

    INTERACTIVE = 0
    BACKGROUND = 1


class Task(Generic[T]):
    """Something that a scheduler was asked to do. Every method may be called from any thread.

    `result()` waits for it on a thread, `await task` in asyncio. Whatever goes wrong, in the model, a
    sampler or a budget, ends the task with a `QKVShareError`, which both of them raise.
    """

    def __init__(self, name: str, wake: Callable[[], None]):
        self.name = name
        self._wake = wake
        self._future: Future[T] = Future()
        self._future.set_running_or_notify_cancel()  # the scheduler decides, not those who stop waiting
        self._is_unwanted = False

    def __repr__(self) -> str:
        state = "unfinished" if not self.done() else "failed" if self.error() else "finished"
        return f"{type(self).__name__}({self.name!r}, {state})"

    def done(self) -> bool:
        return self._future.done()

    def error(self) -> QKVShareError | None:
        """What the task failed with; None also while it has not ended."""
        return self._future.exception() if self._future.done() else None  # type: ignore[return-value]

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end. Raises what the task failed with, or `TimeoutError` after `timeout` seconds."""
        return self._future.result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def cancel(self) -> None:
        """Ask for the end; it comes between two steps, as `TaskCancelledError`. Harmless after the end."""
        self._is_unwanted = True
        self._wake()

    # What the scheduler calls, on its own thread.

    def _succeed(self, result: T) -> None:
        self._future.set_result(result)

    def _fail(self, error: QKVShareError) -> None:
        self._future.set_exception(error)


class AgentTask(Task[str]):
    """One turn of an agent: a stream of `StreamChunk`s, for `for` and `async for`; its result is the whole text.

    The stream buffers `buffer_tokens` chunks. When they wait unread, this agent pauses until someone reads,
    and no other agent does. In a `with` or `async with` block the task is cancelled at the end of the block.
    """

    def __init__(self, session: AgentSession, buffer_tokens: int, wake: Callable[[], None]):
        super().__init__(session.name, wake)
        self.session = session
        self.text = ""
        """All the text so far, read or not."""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.ttft_seconds: float | None = None
        """From submission to the first token."""
        self._submitted = time.perf_counter()
        self._buffer_tokens: float = buffer_tokens
        self._chunks: collections.deque[StreamChunk] = collections.deque()
        self._changed = threading.Condition()
        self._readers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._is_ended = False

    # --- reading -----------------------------------------------------------------------------------

    def read(self) -> list[StreamChunk]:
        """What waits unread now."""
        with self._changed:
            return [self._take() for _ in range(len(self._chunks))]

    def __iter__(self) -> AgentTask:
        return self

    def __next__(self) -> StreamChunk:
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._is_ended)
            if self._chunks:
                return self._take()
        self._require_success()
        raise StopIteration

    def __aiter__(self) -> AgentTask:
        return self

    async def __anext__(self) -> StreamChunk:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._chunks:
                    return self._take()
                if self._is_ended:
                    break
                reader = (loop, loop.create_future())
                self._readers.append(reader)
            try:
                await reader[1]
            finally:
                with self._changed, contextlib.suppress(ValueError):
                    self._readers.remove(reader)  # one that gave up
        self._require_success()
        raise StopAsyncIteration

    def result(self, timeout: float | None = None) -> str:
        """Wait for the end and return the whole text. From the call on the agent does not pause for readers."""
        self._lift_limit()
        return super().result(timeout)

    def __await__(self) -> Generator[Any, None, str]:
        self._lift_limit()
        return super().__await__()

    def __enter__(self) -> AgentTask:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.cancel()

    async def __aenter__(self) -> AgentTask:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.cancel()

    def _take(self) -> StreamChunk:
        was_paused, chunk = self._is_paused, self._chunks.popleft()
        if was_paused:  # told after, or the scheduler might look in between and go to sleep
            self._wake()
        return chunk

    def _require_success(self) -> None:
        if (error := self.error()) is not None:
            raise error

    def _lift_limit(self) -> None:
        self._buffer_tokens = float("inf")
        self._wake()

    # --- writing, on the scheduler's thread ----------------------------------------------------------

    @property
    def _is_paused(self) -> bool:
        return len(self._chunks) >= self._buffer_tokens

    def _put(self, chunk: StreamChunk) -> None:
        if self.ttft_seconds is None:
            self.ttft_seconds = time.perf_counter() - self._submitted
        with self._changed:
            self.text += chunk.text
            self.num_tokens += 1
            self.finish_reason = chunk.finish_reason
            self._chunks.append(chunk)
            self._tell()

    def _succeed(self, result: str) -> None:
        super()._succeed(result)
        self._end()

    def _fail(self, error: QKVShareError) -> None:
        super()._fail(error)
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        readers, self._readers = self._readers, []
        for loop, news in readers:
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_wake_reader, news)


def _wake_reader(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
