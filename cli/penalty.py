"""A repetition penalty for the demo: a model of 135M parameters soon goes round in circles without one."""

from __future__ import annotations

from collections import deque

import mlx.core as mx

from .. import Sampling


class PenalizedSampler:
    """A session's `sampler` that makes the latest tokens less likely (CTRL, arXiv 1909.05858).

    Args:
        sampling: how to pick once the penalty is applied; its seed None counts as 0.
        penalty: positive logits are divided by it, negative ones multiplied.
        window: the number of latest tokens concerned.
    """

    def __init__(self, sampling: Sampling, *, penalty: float = 1.1, window: int = 64):
        self._sampling, self._penalty, self._num_drawn = sampling, penalty, 0
        self._latest: deque[mx.array] = deque(maxlen=window)

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits [V] to a token id (0-d). The latest ids may be lazy still, so that decoding stays queued ahead."""
        if self._latest:
            ids = mx.stack(list(self._latest))
            chosen = logits[ids]
            logits = mx.array(logits)  # the session keeps its own
            logits[ids] = mx.where(chosen > 0, chosen / self._penalty, chosen * self._penalty)
        token = self._sampling.pick(logits, self._sampling.seed or 0, self._num_drawn)
        self._num_drawn += 1
        self._latest.append(token)
        return token
