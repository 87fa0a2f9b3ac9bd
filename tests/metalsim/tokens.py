"""Preprocessed Metal text as tokens; line numbers survive every edit."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A gap is white space and whole lines that begin with '#': line markers and pragmas.
_TOKEN = re.compile(
    r"""(?P<gap>(?:[ \t\r\f\v\n]+|\\\n|(?<![^\n])\#[^\n]*)*)
        (?P<word>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)+'
          |\.?\d(?:[eEpP][+-]|[\w.])*|[A-Za-z_]\w*
          |<<=|>>=|\.\.\.|->|::|\+\+|--|<<|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Tokens:
    """Words, and before each the gap between it and the word in front of it.

    An edit replaces words by text; erased words stay as "", so that indices remain valid until `compact`.
    """

    def __init__(self, text: str) -> None:
        pairs = [(match["gap"], match["word"]) for match in _TOKEN.finditer(text)]
        self.gaps = [gap for gap, _ in pairs]
        self.words = [word for _, word in pairs]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> str:
        return self.words[i] if 0 <= i < len(self.words) else ""

    def find(self, *wanted: str) -> Iterator[int]:
        """Indices of the words that are one of `wanted`, as they are when the iteration gets there."""
        for i in range(len(self.words)):
            if self.words[i] in wanted:
                yield i

    def is_name(self, i: int) -> bool:
        return _NAME.match(self[i]) is not None

    def closing(self, i: int) -> int:
        """Index of the bracket that closes the one at `i`."""
        opening, closing = self[i], _CLOSING[self[i]]
        depth = 0
        for k in range(i, len(self.words)):
            depth += (self.words[k] == opening) - (self.words[k] == closing)
            if depth == 0:
                return k
        raise ValueError(f"unbalanced {opening!r}")

    def opening(self, i: int) -> int:
        """Index of the parenthesis that the one at `i` closes."""
        depth = 0
        for k in range(i, -1, -1):
            depth += (self.words[k] == ")") - (self.words[k] == "(")
            if depth == 0:
                return k
        raise ValueError("unbalanced ')'")

    def closing_angle(self, i: int) -> int | None:
        """Index of the '>' that ends the template arguments opened at `i`; None if it is a comparison."""
        depth = 0
        k = i
        while k < len(self.words):
            word = self.words[k]
            if word == "(":
                k = self.closing(k)
            elif word in (";", "{", "}"):
                return None
            depth += (word == "<") - (word == ">")
            if depth == 0:
                return k
            k += 1
        return None

    def text(self, begin: int, end: int) -> str:
        """Words from `begin` up to `end`, with single spaces."""
        return " ".join(word for word in self.words[begin:end] if word)

    def replace(self, begin: int, end: int, text: str = "") -> None:
        """Put `text` in the place of the words from `begin` up to `end`; gaps, and with them lines, stay."""
        self.words[begin:end] = [text] + [""] * (end - begin - 1)

    def compact(self) -> None:
        """Drop erased words; their gaps go to the next word."""
        gaps, words, gap = [], [], ""
        for own_gap, word in zip(self.gaps, self.words, strict=True):
            gap += own_gap
            if word:
                gaps.append(gap)
                words.append(word)
                gap = ""
            elif not gap:
                gap = " "  # what stood around the erased word must not grow together
        self.gaps, self.words = [*gaps, gap], [*words, ""]

    def __str__(self) -> str:
        return "".join(gap + word for gap, word in zip(self.gaps, self.words, strict=True))
