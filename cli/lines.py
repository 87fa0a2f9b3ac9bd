"""Reading lines from a person or a pipe: whatever bytes come, text goes on."""

from __future__ import annotations

import contextlib
import sys

from .terminal import Terminal, one_line

_BOM = "\ufeff"
_UNUSABLE = dict.fromkeys([0, *range(0xD800, 0xE000)], "\ufffd")


def clean(text: str) -> tuple[str, int]:
    """`text` with U+FFFD for NUL and for what could not be decoded, and how many there were."""
    return text.translate(_UNUSABLE), sum(ord(c) in _UNUSABLE for c in text)


class LineReader:
    """Lines from stdin. With a terminal at both ends `input` gives a prompt and line editing."""

    def __init__(self, terminal: Terminal):
        self._terminal, self._is_first = terminal, True
        self.is_interactive = sys.stdin.isatty()
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() uses it from here on)

    def read(self, prompt: str) -> str | None:
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
        prompt = f"{one_line(prompt)}> "
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
