"""Documents that people bring along: a text file, or what comes through a pipe."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidValueError
from .lines import clean
from .terminal import one_line

_MOST_BYTES = 64 << 20
_STDIN = "from stdin"


class Document(NamedTuple):
    """`num_replaced` characters could not be read and became U+FFFD."""

    name: str
    text: str
    num_replaced: int

    @property
    def whence(self) -> str:
        return self.name if self.name == _STDIN else f"in {self.name}"

    @property
    def message(self) -> str:
        """As an agent gets to see it."""
        return f"Document {one_line(self.name)}:\n\n{self.text}"


def typed_path(text: str) -> Path:
    """A path as people type it, or drop it on a terminal: with ~, quotes or backslashes in front of spaces."""
    path = _at_home(text)
    if os.path.exists(path):  # False, too, where the name is too long for one
        return path
    try:
        words = shlex.split(text)
    except ValueError:
        return path
    return _at_home(words[0]) if len(words) == 1 else path


def _at_home(text: str) -> Path:
    return Path(os.path.expanduser(text))  # what has no such home stays as it is


def paths_from(beginning: str) -> list[str]:
    """The paths that `beginning` may become, those of folders with a slash behind them."""
    folder, _, name = beginning.rpartition("/")
    try:
        found = sorted(_at_home(f"{folder}/" if beginning.startswith("/") or folder else ".").iterdir())
    except OSError:
        return []
    hides = not name.startswith(".")
    front = beginning[: len(beginning) - len(name)]
    return [
        f"{front}{path.name}{'/' if path.is_dir() else ''}"
        for path in found
        if path.name.startswith(name) and not (hides and path.name.startswith("."))
    ]


def read_document(path: Path) -> Document:
    """A text file. Raises `InvalidValueError` where it is missing, of another kind, or far too long."""
    try:
        if os.path.exists(path) and not path.is_file():
            kind = "a folder" if path.is_dir() else "something else"
            raise InvalidValueError(f"[file {path}] expected a text file, got {kind}")
        with open(path, "rb") as file:
            return _document(path.name, file.read(_MOST_BYTES + 1))
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidValueError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidValueError(f"[file {path}] expected a file to read: {reason}") from None


def read_pipe() -> Document | None:
    """What stdin holds, if it is no terminal and not empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    document = _document(_STDIN, sys.stdin.buffer.read(_MOST_BYTES + 1))
    return document if document.text.strip() else None


def _document(name: str, raw: bytes) -> Document:
    if len(raw) > _MOST_BYTES:
        raise InvalidValueError(f"[file {name}] expected at most {_MOST_BYTES >> 20} MiB of text, got more")
    if b"\0" in raw:
        raise InvalidValueError(f"[file {name}] expected text, got bytes of another kind (a PDF, an image, a program?)")
    text, count = clean(raw.decode("utf-8", "surrogateescape").removeprefix("\ufeff"))
    if count > len(text) // 3:
        raise InvalidValueError(f"[file {name}] expected UTF-8 text, got {count} bytes that are none")
    if not text.strip() and name != _STDIN:
        raise InvalidValueError(f"[file {name}] expected some text, got none")
    return Document(name, text.replace("\r\n", "\n"), count)
