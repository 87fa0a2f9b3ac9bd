"""What the terminal gets to see. Text from models, users and errors is shown, never obeyed."""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from typing import Any, ClassVar

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

_SECONDS_BETWEEN_LINES = 10.0
# Control characters become their pictures (U+2400…), so that no escape code reaches the terminal.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
_UNPRINTABLE = dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], "\ufffd")
_HARMLESS = _PICTURES | _UNPRINTABLE


def harmless(text: str) -> str:
    """`text` with control characters (other than newline and tab) and lone surrogates made visible."""
    return text.translate(_HARMLESS)


def one_line(text: str) -> str:
    return " ".join(harmless(text).split("\n"))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise


def _console(*, stderr: bool) -> Console:
    # Without a color system rich writes no escape code at all, bold included. Markup and emoji codes stay off
    # everywhere: "[/INST]" in a name or a reply is text.
    system: Any = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(stderr=stderr, color_system=system, markup=False, emoji=False, highlight=False)


def padded(text: str, width: int) -> str:
    """`text` as one line of `width` cells at least; a CJK character or an emoji takes two."""
    text = one_line(text)
    return text + " " * (width - cell_len(text))


def cut_to(text: str, width: int) -> str:
    """`text` as one line of `width` cells at most."""
    text = one_line(text)
    return text if cell_len(text) <= width else f"{set_cell_size(text, max(0, width - 3)).rstrip()}..."


class Terminal:
    """Replies and results on stdout; banner, notices, progress and errors on stderr."""

    shows_tracebacks: ClassVar[bool] = False

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # an ASCII terminal gets \\u2019, undecodable input is seen later
                stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "backslashreplace")
        self.out, self.err = _console(stderr=False), _console(stderr=True)

    def silence(self) -> None:
        """Show no more replies: stdout is for one JSON object."""
        self.out = Console(file=io.StringIO(), color_system=None, markup=False, emoji=False, highlight=False)

    def label(self, name: str, colour: str = "cyan") -> None:
        """The name of the agent whose text is streamed next."""
        self.out.print(Text(f"{one_line(name)}:", style=f"bold {colour}"), end=" ", soft_wrap=True)

    def stream(self, text: str) -> None:
        """A piece of a reply, as it comes."""
        self.out.file.write(harmless(text))  # rich would turn tabs into spaces
        self.out.file.flush()

    def line(self, text: str = "", style: str = "") -> None:
        self._show(self.out, Text(harmless(text), style=style))

    def pairs(self, pairs: list[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        width = max(cell_len(one_line(name)) for name, _ in pairs)
        for name, value in pairs:
            self.line(f"{padded(name, width)}  {value}")

    def note(self, text: str) -> None:
        self._show(self.err, Text(harmless(text), style="dim"))

    def _show(self, console: Console, text: Text) -> None:
        # A window wraps at words; in a file one line stays one line.
        console.print(text, soft_wrap=not console.is_terminal)

    def error(self, error: BaseException | str, text: str | None = None) -> None:
        """One line: `text`, or what the error says of itself."""
        if self.shows_tracebacks and isinstance(error, BaseException):
            self.note("".join(traceback.format_exception(error)).rstrip())
        said = one_line(text or str(error) or type(error).__name__)
        self.err.print(Text.assemble(("error: ", "bold red"), said), soft_wrap=True)


class ProgressLine:
    """Progress on stderr: one line rewritten in place on a terminal, else a line per step, and for a long one every
    ten seconds."""

    def __init__(self, terminal: Terminal):
        self._err = terminal.err
        self._is_live = terminal.err.is_terminal and terminal.err.color_system is not None
        self._shown, self._what, self._last = "", "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._is_live:
            is_new, now = what != self._what, time.monotonic()
            if is_new or (0 < done < total and now - self._last > _SECONDS_BETWEEN_LINES):
                self._last = now
                self._write(f"{one_line(what)}{'...' if is_new else f' {100 * done // total}%'}\n")
        elif what != self._what or done == total or time.monotonic() - self._last > 0.1:
            self._last = time.monotonic()
            self._rewrite(self._bar(one_line(what), done, total) if total else one_line(what))
        self._what = what

    def close(self) -> None:
        """Leave no trace on the terminal."""
        if self._shown:
            self._rewrite("")
            self._write("\r")

    def _bar(self, what: str, done: int, total: int) -> str:
        percent, room = 100 * done // total, min(30, self._err.width - cell_len(what) - 9)
        if room < 8:  # a narrow window
            return f"{what} {percent}%"
        filled = room * done // total
        return f"{what} [{'#' * filled}{'.' * (room - filled)}] {percent}%"

    def _rewrite(self, text: str) -> None:
        text = set_cell_size(text, min(cell_len(text), self._err.width - 1))
        self._write("\r" + text + " " * (cell_len(self._shown) - cell_len(text)))
        self._shown = text

    def _write(self, text: str) -> None:
        self._err.file.write(text)
        self._err.file.flush()


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
