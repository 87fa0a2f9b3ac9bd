"""What a model's own keys and queries say about how to pack keys: a factor for each channel, measured once per model.

Letters: H query heads, Hk KV heads, R = H / Hk, L new tokens, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .attention import WatchedAttention
from .errors import InvalidValueError
from .layer_cache import LayerCache
from .manager import SharedKVCacheManager
from .passages import CALIBRATION_TEXT, text_of, tokens_of
from .session import AgentSession
from .spec import FULL_PRECISION_BITS, SINK_TOKENS, QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel

_FLOOR = 0.01  # of the mean: a channel that is hardly used must not be blown up


def calibrate(
    lm: LoadedModel,
    token_ids: Sequence[int] | None = None,
    *,
    num_tokens: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> list[mx.array | None]:
    """Factors [1, Hk, 1, D] for the keys of every layer, from one prefill of `token_ids`; by default of English prose.

    A channel's factor is (mean q^2 / variance k)^(1/4): with it, keys are rounded where queries look least (the
    balance of SmoothQuant, arXiv 2211.10438, for scores instead of activations). A wrong factor costs precision, never
    correctness. None for layers that attention does not reach, or that keep no keys.

    Raises:
        InvalidValueError: fewer than 64 tokens, of which nothing could be learnt.
    """
    ids = list(token_ids) if token_ids is not None else _default_tokens(lm, num_tokens)
    if len(ids) < 64:
        raise InvalidValueError(f"[calibrate] token_ids: expected 64 or more, got {len(ids)}")
    squares: dict[int, mx.array] = {}

    def add(layer: int, queries: mx.array, scale: float) -> None:
        rows = queries.astype(mx.float32).reshape(manager.spec.layers[layer].n_kv_heads, -1, queries.shape[-1])  # type: ignore[union-attr]
        squares[layer] = squares.get(layer, 0) + mx.sum(rows * rows, axis=1)
        mx.async_eval(squares[layer])

    manager = SharedKVCacheManager(lm.spec, QuantSpec(FULL_PRECISION_BITS, FULL_PRECISION_BITS))
    with AgentSession("calibrate", lm, manager, attention=WatchedAttention(watch=add)) as session:
        session.prefill(ids, progress=progress)
        return [_factors(leaf, squares.get(index)) for index, leaf in enumerate(session._leaves)]


def _default_tokens(lm: LoadedModel, num_tokens: int) -> list[int]:
    return tokens_of(lm.tokenizer, text_of(CALIBRATION_TEXT), min(num_tokens, lm.spec.max_context_tokens))


def _factors(cache: Any, squares: mx.array | None) -> mx.array | None:
    if squares is None or not isinstance(cache, LayerCache):
        return None
    keys, _ = cache.keys_and_values()
    # Without the sinks, whose keys are like no others.
    rows = keys[0, :, min(SINK_TOKENS, keys.shape[2] - 1) :].astype(mx.float32)
    looked, spread = (x + _FLOOR * mx.mean(x, axis=-1, keepdims=True) for x in (squares, mx.var(rows, axis=1)))
    factors = mx.power(looked / mx.maximum(spread, 1e-20), 0.25)
    factors = (factors / mx.mean(factors, axis=-1, keepdims=True))[None, :, None]  # only their ratios matter
    mx.eval(factors)
    return factors
