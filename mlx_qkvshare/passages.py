"""Real text, cut into what is sealed and what is scored behind it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from .errors import InvalidValueError
from .measure import sample_text

TEXTS = ("moby-dick", "union-1962", "reference")
"""Prose and a speech that ship with the package, and the language reference that every Python carries."""
CALIBRATION_TEXT = "union-1863"
_UNKNOWN = 16  # tokens at the start of a copy
_STEP = 4000  # characters: tokenizers warn of texts beyond the model's context


@dataclass(frozen=True)
class Passage:
    """Token ids: `prefix` is sealed, `scored` is fed behind it.

    `recalled` are the places in `scored` whose next token stands in the prefix, to be recalled from there; a passage
    that has any counts for recall alone.
    """

    name: str
    prefix: tuple[int, ...]
    scored: tuple[int, ...]
    recalled: tuple[int, ...] = ()


def text_of(name: str) -> str:
    """One of `TEXTS`, or `CALIBRATION_TEXT`."""
    if name == "reference":
        return sample_text()
    return (resources.files(__package__) / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def tokens_of(tokenizer: Any, text: str, num_tokens: int) -> list[int]:
    """The first `num_tokens` token ids of `text`, behind the BOS token where the tokenizer adds one: some models
    (Gemma) are lost without. Raises `InvalidValueError` if the text has fewer."""
    ids: list[int] = list(tokenizer.encode(""))
    for start in range(0, len(text), _STEP):
        if len(ids) >= num_tokens:
            break
        ids.extend(tokenizer.encode(text[start : start + _STEP], add_special_tokens=False))
    if len(ids) < num_tokens:
        raise InvalidValueError(f"[fidelity] text: expected {num_tokens} tokens or more, got {len(ids)}")
    return ids[:num_tokens]


def passage(tokenizer: Any, name: str, text: str, *, prefix_tokens: int, scored_tokens: int) -> Passage:
    """The beginning of `text`, cut behind `prefix_tokens`."""
    ids = tokens_of(tokenizer, text, prefix_tokens + scored_tokens)
    return Passage(name, tuple(ids[:prefix_tokens]), tuple(ids[prefix_tokens:]))


def copy_passage(tokenizer: Any, text: str, *, prefix_tokens: int, scored_tokens: int, seed: int = 0) -> Passage:
    """Tokens of `text` in random order, sealed, and the first of them once more behind: only attention to the right
    tokens of the prefix can tell what comes next, so that a copy shows damage that perplexity hides."""
    begin: Sequence[int] = tokenizer.encode("")
    body = tokens_of(tokenizer, text, prefix_tokens)[len(begin) :]
    random.Random(seed).shuffle(body)
    # At first nobody can know that it is a copy.
    return Passage("copy", (*begin, *body), tuple(body[:scored_tokens]), tuple(range(_UNKNOWN, scored_tokens - 1)))
