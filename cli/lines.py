"""Reading lines from a person or a pipe: whatever bytes come, text goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from .terminal import Terminal, one_line

_BOM = "\ufeff"
_UNUSABLE = dict.fromkeys([0, *range(0xD800, 0xE000)], "\ufffd")
_BLOCK = '"""'
_KEPT_LINES = 1000


def clean(text: str) -> tuple[str, int]:
    """`text` with U+FFFD for NUL and for what could not be decoded, and how many there were."""
    return text.translate(_UNUSABLE), sum(ord(c) in _UNUSABLE for c in text)


class LineReader:
    """Messages from stdin: a line, lines that end in a backslash and the next one, or a block between two of \\"\\"\\".

    With a terminal at both ends `input` gives a prompt, line editing and a history, which `close` writes to `history`.
    """

    def __init__(self, terminal: Terminal, history: Path | None = None):
        self._terminal, self._is_first = terminal, True
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._history = history if self.is_interactive else None
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # input() uses it from here on

                readline.set_history_length(_KEPT_LINES)
                if history is not None:
                    with contextlib.suppress(OSError, UnicodeError):  # none yet, or another library's
                        readline.read_history_file(history)

    def read(self, prompt: str) -> str | None:
        """The next message, or None at the end of input."""
        line = self._line(prompt)
        if line is None:
            return None
        if line.lstrip().startswith(_BLOCK):
            return self._block(line.lstrip().removeprefix(_BLOCK))
        while line.endswith("\\"):
            more = self._line("...")
            line = f"{line[:-1]}\n{more}" if more is not None else line[:-1]
        return line

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
