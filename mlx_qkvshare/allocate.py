"""Bits for each block of a segment's tokens within a byte budget: more where attention looked, fewer where it did not.

The idea of mixed precision by token importance is the QKVShare paper's (arXiv 2605.03884); here whole blocks of tokens
share their bits, so that each is still one packed matrix.

Letters: H query heads, Hk KV heads, n queries, T tokens, D head dim.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import mlx.core as mx

from .guard import Looked, seen_weights
from .parts import compute_dtype

BLOCK_TOKENS = 128
BITS = (2, 3, 4, 5, 6, 8)
_TRUST = 0.25
"""The power to which what was seen is raised: later tokens look elsewhere than the last ones did. Of 1, 1/2, 0.35 and
1/4 the last did best on two models."""

KINDS = {"system": 1.0, "task": 0.5, "context": 0.0, "tool": 0.0, "chatter": -1.0}
"""Bits more than the average for what later agents will look at much, and fewer for what they will not."""
DEFAULT_KIND = "context"


def block_importance(looked: Looked, keys: mx.array) -> list[float]:
    """What an error in each block of `keys` [1, Hk, T, D] may do to attention, from the squared attention weights of
    the last n queries on its tokens: the error of an output is a sum of independent errors, each times its weight."""
    (num_kv_heads, num_tokens), compute = keys.shape[1:3], compute_dtype(keys.dtype)
    rows, is_seen = looked.rows(num_kv_heads, num_tokens, compute)
    weights = seen_weights(rows @ keys.astype(compute).swapaxes(-1, -2), is_seen)
    mass = mx.sum(mx.square(weights.astype(mx.float32)), axis=(0, 1, 2))
    starts = range(0, num_tokens, BLOCK_TOKENS)
    found = mx.stack([mx.sum(mass[start : start + BLOCK_TOKENS]) for start in starts])
    return [float(value) ** _TRUST for value in found.tolist()]  # type: ignore[union-attr,arg-type]


def allocate(importance: Sequence[float], num_tokens: Sequence[int], bits: float) -> list[int]:
    """Bits of every block, at most `bits` on average over all tokens, with the least sum of importance * 4^-bits.

    Every bit more takes three quarters of a block's error away, so steps of falling worth per bit are taken in order
    until no step fits: the optimum, but for what the last step leaves over.

    Args:
        importance: of an error in each block.
        num_tokens: of each block.
    """
    chosen = [0] * len(importance)  # places in BITS
    left = (bits - BITS[0]) * sum(num_tokens)
    steps = [step for block in range(len(importance)) if (step := _step(block, 0, importance, num_tokens))]
    heapq.heapify(steps)
    while steps:
        _, block, cost = heapq.heappop(steps)
        if cost > left:
            continue  # smaller blocks may still fit
        left -= cost
        chosen[block] += 1
        if step := _step(block, chosen[block], importance, num_tokens):
            heapq.heappush(steps, step)
    return [BITS[place] for place in chosen]


def _step(
    block: int, place: int, importance: Sequence[float], num_tokens: Sequence[int]
) -> tuple[float, int, float] | None:
    """Minus what the next step of a block is worth per bit, the block, and its cost in bits."""
    if place + 1 == len(BITS):
        return None
    now, then = BITS[place : place + 2]
    cost = float((then - now) * num_tokens[block])
    return -importance[block] * (4.0**-now - 4.0**-then) / cost, block, cost
