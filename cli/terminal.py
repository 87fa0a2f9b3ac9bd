"""What the terminal gets to see. Text from models, users and errors is shown, never obeyed."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Control characters become their pictures (U+2400…), so that no escape code reaches the terminal.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
_UNPRINTABLE = dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], "\ufffd")
_HARMLESS = _PICTURES | _UNPRINTABLE


def harmless(text: str) -> str:
    """`text` with control characters (other than newline and tab) and lone surrogates made visible."""
    return text.translate(_HARMLESS)


def one_line(text: str) -> str:
    return " ".join(harmless(text).split("\n"))


def _console(*, stderr: bool) -> Console:
    # Without a color system rich writes no escape code at all, bold included. Markup and emoji codes stay off
    # everywhere: "[/INST]" in a name or a reply is text.
    system: Any = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, color_system=system, markup=False, emoji=False, highlight=False)


class Terminal:
    """Replies and results on stdout; banner, notices, progress and errors on stderr."""

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # an ASCII terminal gets \\u2019, undecodable input is seen later
                stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "backslashreplace")
        self.out, self.err = _console(stderr=False), _console(stderr=True)

    def label(self, name: str) -> None:
        """The name of the agent whose text is streamed next."""
        self.out.print(Text(f"{one_line(name)}:", style="bold cyan"), end=" ", soft_wrap=True)

    def stream(self, text: str) -> None:
        """A piece of a reply, as it comes."""
        self.out.file.write(harmless(text))  # rich would turn tabs into spaces
        self.out.file.flush()

    def line(self, text: str = "", style: str = "") -> None:
        self.out.print(Text(harmless(text), style=style), soft_wrap=True)

    def note(self, text: str) -> None:
        self.err.print(Text(harmless(text), style="dim"), soft_wrap=True)

    def error(self, error: BaseException | str) -> None:
        self.err.print(Text.assemble(("error: ", "bold red"), one_line(str(error))), soft_wrap=True)


class ProgressLine:
    """Progress on stderr: one line rewritten in place on a terminal, else one line per step."""

    def __init__(self, terminal: Terminal):
        self._err = terminal.err
        self._is_live = terminal.err.is_terminal and terminal.err.color_system is not None
        self._shown, self._what, self._last = "", "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._is_live:
            if what != self._what:
                self._write(f"{one_line(what)}...\n")
        elif what != self._what or done == total or time.monotonic() - self._last > 0.1:
            self._last = time.monotonic()
            self._rewrite(f"{one_line(what)} {100 * done // total}%" if total else one_line(what))
        self._what = what

    def close(self) -> None:
        """Leave no trace on the terminal."""
        if self._shown:
            self._rewrite("")
            self._write("\r")

    def _rewrite(self, text: str) -> None:
        text = text[: self._err.width - 1]
        self._write("\r" + text.ljust(len(self._shown)))
        self._shown = text

    def _write(self, text: str) -> None:
        self._err.file.write(text)
        self._err.file.flush()


class Interrupts:
    """Within the block the first Ctrl-C only sets `is_set`, so that work stops between two tokens; a second raises."""

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._before or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True

    def check(self) -> None:
        if self.is_set:
            raise KeyboardInterrupt


def make_table(terminal: Terminal, *columns: str) -> Table:
    """An empty table: the first column to the left, the others to the right."""
    can_draw = terminal.out.encoding.startswith("utf")
    table = Table(box=box.SIMPLE_HEAD if can_draw else None, pad_edge=False, padding=(0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def format_seconds(count: float) -> str:
    """0.0123 -> "12.3 ms"."""
    return f"{1000 * count:.3g} ms" if count < 1 else f"{count:.3g} s"
