"""Ctrl-C stops what is being done; SIGTERM and SIGHUP end the command once that is in a state worth keeping."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from .terminal import ProgressLine, Terminal

_Handler = Callable[[int, FrameType | None], None]
_SECONDS_TO_HEAR = 0.1
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(SystemExit):
    """The process was asked to end; its exit code is 128 and the signal's number, as shells count."""

    def __init__(self, number: int):
        self.number = 128 + number
        super().__init__(self.number)


@contextlib.contextmanager
def _handling(handler: _Handler, *numbers: int) -> Iterator[None]:
    """Signals that were to be ignored (nohup, a shell's background) stay so."""
    before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number in numbers if before[number] is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number] or signal.SIG_DFL)


@contextlib.contextmanager
def ends_by_signal() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise `Terminated`, so that blocks around it end as they should."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    with _handling(end, *ENDING):
        yield


@contextlib.contextmanager
def heard_while_waiting() -> Iterator[None]:
    """Within the block a signal that was not heard is sent again: `input` looks for signals when its wait is broken
    off, so that one that comes just before the wait would be heard at the next key."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before, waiting = signal.set_wakeup_fd(writing, warn_on_full_buffer=False), threading.get_ident()
    is_over = threading.Event()

    def send_again() -> None:
        while number := os.read(reading, 1):
            if number[0] in (signal.SIGINT, *ENDING) and not is_over.wait(_SECONDS_TO_HEAR):
                signal.pthread_kill(waiting, number[0])

    helper = threading.Thread(target=send_again, daemon=True)
    helper.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
        helper.join()
        os.close(reading)


class Interrupts:
    """Within the block the first Ctrl-C, SIGTERM or SIGHUP only sets `is_set`, so that work stops between two tokens; a
    second one raises. After SIGTERM or SIGHUP the end of the block raises `Terminated`."""

    def __init__(self) -> None:
        self.is_set = False
        self._ending: int | None = None

    def __enter__(self) -> Interrupts:
        self._handling = _handling(self._note, signal.SIGINT, *ENDING)
        self._handling.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._handling.__exit__(None, None, None)
        if self._ending is not None:
            raise Terminated(self._ending)

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first, self.is_set = not self.is_set, True
        if number in ENDING:
            self._ending = number
        if not is_first:
            raise KeyboardInterrupt

    def check(self) -> None:
        if self.is_set:
            raise KeyboardInterrupt


@contextlib.contextmanager
def shown_prefill(terminal: Terminal, interrupts: Interrupts, what: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of a prefill to show as `what`; between two chunks Ctrl-C ends it by `KeyboardInterrupt`."""
    progress = ProgressLine(terminal)

    def prefilled(done: int, total: int) -> None:
        progress(what, done, total)
        interrupts.check()

    try:
        yield prefilled
    finally:
        progress.close()
