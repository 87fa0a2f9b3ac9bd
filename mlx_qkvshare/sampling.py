"""Choosing the next token. Each session draws from its own seeded sequence, so sessions never disturb each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from .errors import InvalidValueError


@dataclass(frozen=True)
class Sampling:
    """How a session samples. `temperature` 0 is greedy; the filters are off at their defaults.

    Args:
        temperature: divides the log probabilities; 0 takes the most likely token.
        top_p: keep the smallest set of tokens whose probability reaches this (Holtzman et al. 2019).
        top_k: keep this many tokens; 0 keeps all.
        min_p: keep tokens at least this times as likely as the most likely one (arXiv 2407.01082).
        seed: below 2**32. 0 and None differ: None takes a fresh seed for every session.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "temperature": (0 <= self.temperature < math.inf, ">= 0 and finite"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, ">= 0"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "seed": (self.seed is None or 0 <= self.seed < 2**32, "None or in [0, 2**32)"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise InvalidValueError(f"[Sampling] {name}: expected {expected}, got {getattr(self, name)!r}")

    def pick(self, logits: mx.array, seed: int, index: int) -> mx.array:
        """The `index`-th draw of the sequence that `seed` starts: a token id (0-d, lazy) from `logits` [V]."""
        if self.temperature == 0:
            return mx.argmax(logits)
        logprobs = logits.astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs)
        for keep in self._filters(logprobs):
            logprobs = mx.where(keep, logprobs, -mx.inf)
        # A key per draw, not the process-wide random state: interleaving and threads change nothing.
        key = mx.random.key((seed << 32) + index)
        return mx.random.categorical(logprobs / self.temperature, key=key)

    def _filters(self, logprobs: mx.array) -> list[mx.array]:
        """Boolean masks [V] of the tokens to keep; each holds the most likely token."""
        masks = []
        if 0 < self.top_k < logprobs.shape[-1]:
            masks.append(logprobs >= mx.sort(logprobs)[-self.top_k])
        if self.min_p > 0:
            masks.append(logprobs >= mx.max(logprobs) + mx.log(mx.array(self.min_p)))
        if self.top_p < 1:
            ascending = mx.sort(logprobs)
            below = mx.cumsum(mx.exp(ascending))  # mass of a token and all less likely ones
            threshold = mx.min(mx.where(below > 1 - self.top_p, ascending, mx.inf))
            masks.append(logprobs >= mx.minimum(threshold, ascending[-1]))
        return masks
