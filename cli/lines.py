"""Reading lines from a person or a pipe: whatever bytes come, text goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidValueError
from .interrupts import heard_while_waiting
from .terminal import Terminal, one_line

_BOM = "\ufeff"
_UNUSABLE = dict.fromkeys([0, *range(0xD800, 0xE000)], "\ufffd")
_BLOCK = '"""'
_KEPT_LINES = 1000
_MOST_CHARACTERS = 128


def clean(text: str) -> tuple[str, int]:
    """`text` with U+FFFD for NUL and for what could not be decoded, and how many there were."""
    return text.translate(_UNUSABLE), sum(ord(c) in _UNUSABLE for c in text)


def plain_name(text: str) -> str:
    """`text` as a name, in one form. Raises `InvalidValueError` for one that nobody could type, or tell from others."""
    name = unicodedata.normalize("NFC", text.strip())
    # Emoji are put together with joiners, which are not printable by themselves.
    if not 0 < len(name) <= _MOST_CHARACTERS or not name.replace("\u200d", "").isprintable():
        raise InvalidValueError(f"name: expected 1 to {_MOST_CHARACTERS} printable characters, got {text!r}")
    return name


class Typed(NamedTuple):
    """A message as it came: one line, or text of more than one, or a block."""

    text: str
    is_line: bool


class _Completer:
    """As readline asks for what `complete` offers: one after the other by index, None behind the last."""

    def __init__(self, complete: Callable[[str, str], Sequence[str]]):
        self._complete = complete
        self._offers: Sequence[str] = ()

    def __call__(self, word: str, index: int) -> str | None:
        if index == 0:  # looked for once a Tab, not once an offer
            import readline

            try:
                self._offers = self._complete(readline.get_line_buffer(), word)
            except Exception:  # a Tab that cannot be answered is no error
                self._offers = ()
        return self._offers[index] if index < len(self._offers) else None


class LineReader:
    """Messages from stdin: a line, lines that end in a backslash and the next one, or a block between two of \\"\\"\\".

    With a terminal at both ends `input` gives a prompt, line editing, what `complete` (line, last word) offers for a
    Tab, and a history, which `close` writes to `history`.
    """

    def __init__(
        self,
        terminal: Terminal,
        history: Path | None = None,
        complete: Callable[[str, str], Sequence[str]] = lambda line, word: (),
    ):
        self._terminal, self._is_first = terminal, True
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._history = history if self.is_interactive else None
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # input() uses it from here on

                readline.set_history_length(_KEPT_LINES)
                readline.set_completer_delims(" ")
                readline.set_completer(_Completer(complete))
                is_libedit = "libedit" in (readline.__doc__ or "")
                readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
                if history is not None:
                    with contextlib.suppress(OSError, UnicodeError):  # none yet, or another library's
                        readline.read_history_file(history)

    def read(self, prompt: str) -> Typed | None:
        """The next message, or None at the end of input."""
        line = self._line(prompt)
        if line is None:
            return None
        if line.lstrip().startswith(_BLOCK):
            return Typed(self._block(line.lstrip().removeprefix(_BLOCK)), is_line=False)
        while line.endswith("\\"):
            more = self._line("...")
            line = f"{line[:-1]}\n{more}" if more is not None else line[:-1]
        return Typed(line, is_line="\n" not in line)

    def _block(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(_BLOCK):
            more = self._line("...")
            if more is None:  # the end of the input ends the block
                return "\n".join(lines).strip("\n")
            lines.append(more)
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """The next line without its end, or None at the end of input."""
        try:
            line = self._typed(prompt) if self.is_interactive else self._piped()
        except EOFError:
            return None
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        line, count = clean(line)
        if count:
            self._terminal.note(f"({count} unreadable bytes in the input became U+FFFD)")
        return line

    def _typed(self, prompt: str) -> str:
        prompt = f"{one_line(prompt)}> " if prompt != "..." else "... "
        if not sys.stdout.isatty():  # stdout holds replies only
            self._terminal.err.out(prompt, end="", highlight=False)
            prompt = ""
        with heard_while_waiting():
            return input(prompt)

    def _piped(self) -> str:
        # A pipe is UTF-8 whatever the locale says; what is not stays visible as surrogates for `clean`.
        raw = sys.stdin.buffer.readline()
        if not raw:
            raise EOFError
        return raw.decode("utf-8", "surrogateescape").removesuffix("\n").removesuffix("\r")

    def close(self) -> None:
        """Keep the history, for its owner's eyes only."""
        if self._history is None:
            return
        with contextlib.suppress(ImportError, OSError):  # a history is no reason to fail
            import readline

            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            before = os.umask(0o077)  # readline may write a new file
            try:
                readline.write_history_file(self._history)
            finally:
                os.umask(before)
            self._history.chmod(0o600)
