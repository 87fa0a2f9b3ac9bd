"""A process on a pseudo-terminal: type to it, wait for words, and see what a person would have seen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence

# Colours and cursor movements, titles, and the other short codes.
_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]")
_ERASED = "\x18"  # stands for the code that empties a line


class Screen:
    """`command` in a session of its own on a new terminal of `columns` columns, which is its stdin, stdout and stderr.

    `stdout` may be another file descriptor. Ctrl-C, Ctrl-D and a closed window work as they do for a person.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ):
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._fd, child = pty.openpty()
        self._is_open, self.raw, self._start = True, "", 0
        self._pending = b""
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._before = termios.tcgetattr(self._fd)
        self._child = child  # kept open, so that the terminal outlives the process and can be looked at
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child if stdout is None else stdout,
            stderr=child,
            preexec_fn=_take_terminal,
            start_new_session=True,
            env=inherited | {"TERM": "xterm-256color"} | dict(env or {}),
        )

    @property
    def text(self) -> str:
        """What was shown since the last `wait_for`, without escape codes."""
        return _CODES.sub("", self.raw[self._start :])

    @property
    def is_restored(self) -> bool:
        """Does the terminal echo and edit lines as it did before?"""
        return termios.tcgetattr(self._fd)[:4] == self._before[:4]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, words: str, seconds: float = 30) -> str:
        """Read up to `words`, a regular expression whose dot takes line ends; what came before and with them."""
        found = self._read(seconds, lambda: re.search(words, self.text, re.DOTALL))
        if not found:
            raise AssertionError(f"expected {words!r} within {seconds} s, got:\n{self.text}")
        shown = self.text[: found.end()]
        self._start = len(self.raw) - self._rest(found.end())
        return shown

    def _rest(self, end: int) -> int:
        """How much of `raw` follows the first `end` visible characters since the last `wait_for`."""
        position, seen = self._start, 0
        while seen < end:
            code = _CODES.match(self.raw, position)
            position, seen = (code.end(), seen) if code else (position + 1, seen + 1)
        return len(self.raw) - position

    def end(self, seconds: float = 30) -> int:
        """Wait until the process has ended; its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.05, lambda: False)
        self._read(0.05, lambda: False)
        return self.process.wait(timeout=1)

    def hang_up(self) -> None:
        """Close the window."""
        self._is_open = False
        os.close(self._child)
        os.close(self._fd)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if self._is_open:
            self.hang_up()

    def _read(self, seconds: float, is_done: Callable[[], object]) -> re.Match[str] | None:
        deadline = time.monotonic() + seconds
        while not (found := is_done()) and time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    data = os.read(self._fd, 65536)
                except OSError:  # Linux says so when the other side is closed
                    break
                if not data:
                    break
                self._pending += data
                whole, self._pending = _whole_characters(self._pending)
                self.raw += whole
        return found or is_done()  # type: ignore[return-value]


def _take_terminal() -> None:
    """In the child: the terminal becomes its own, and Ctrl-C is not ignored, whoever started us."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """The text of `data`, and the bytes at its end that begin a character."""
    for size in range(min(4, len(data)) + 1):
        with contextlib.suppress(UnicodeDecodeError):
            return data[: len(data) - size].decode(), data[len(data) - size :]
    return data.decode(errors="replace"), b""


def as_seen(raw: str) -> str:
    """The lines that are left on the screen in the end: without codes, rewritten lines in their last state."""
    lines = []
    for line in _CODES.sub("", raw.replace("\x1b[2K", _ERASED)).replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        place = 0
        for character in line:
            if character == _ERASED:
                cells.clear()
            elif character == "\r":
                place = 0
            elif character == "\b":
                place = max(0, place - 1)
            elif unicodedata.combining(character) or character in "\u200d\ufe0f":
                if place:
                    cells[place - 1] += character
            elif character >= " " or character == "\t":
                cells[place : place + 1] = [character]
                place += 1
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)
