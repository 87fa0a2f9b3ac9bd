"""What a model's own keys and queries say about how to pack keys: a factor for each channel, measured once per model.

Letters: H query heads, Hk KV heads, R = H / Hk, L new tokens, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .attention import QuantizedAttention
from .errors import InvalidValueError
from .folders import default_cache_dir, written_whole
from .layer_cache import LayerCache
from .manager import SharedKVCacheManager, check_factors
from .measure import sample_tokens
from .session import AgentSession
from .spec import FULL_PRECISION_BITS, SINK_TOKENS, CacheSpec, QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel

_FLOOR = 0.01  # of the mean: a channel that is hardly used must not be blown up


@dataclass(frozen=True)
class _Recorder(QuantizedAttention):
    """Attention that sums up the squares of the queries of every layer, channel by channel: [Hk, D]."""

    squares: dict[int, mx.array] = field(default_factory=dict)

    def attend(self, queries: mx.array, cache: Any, **options: Any) -> mx.array:
        num_kv_heads = cache.spec.n_kv_heads
        rows = queries.astype(mx.float32).reshape(num_kv_heads, -1, queries.shape[-1])
        found = mx.sum(rows * rows, axis=1)
        self.squares[cache.layer] = self.squares.get(cache.layer, 0) + found
        mx.async_eval(self.squares[cache.layer])
        return super().attend(queries, cache, **options)


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
    ids = list(token_ids) if token_ids is not None else sample_tokens(lm.tokenizer, num_tokens)
    if len(ids) < 64:
        raise InvalidValueError(f"[calibrate] token_ids: expected 64 or more, got {len(ids)}")
    recorder = _Recorder()
    manager = SharedKVCacheManager(lm.spec, QuantSpec(FULL_PRECISION_BITS, FULL_PRECISION_BITS))
    with AgentSession("calibrate", lm, manager, attention=recorder) as session:
        session.prefill(ids, progress=progress)
        return [_factors(leaf, recorder.squares.get(index)) for index, leaf in enumerate(session._leaves)]


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


def save_factors(factors: Sequence[mx.array | None], spec: CacheSpec, folder: Path | None = None) -> Path:
    """Keep them for this model, named by its fingerprint. Raises `OSError`."""
    path = _path(spec, folder)
    with written_whole(path) as partial:
        mx.save_safetensors(str(partial), {str(i): f for i, f in enumerate(factors) if f is not None})
    return path


def load_factors(spec: CacheSpec, folder: Path | None = None) -> list[mx.array | None] | None:
    """What was kept for this model, or None; a file that does not fit counts as none."""
    path = _path(spec, folder)
    try:
        found: Any = mx.load(str(path))
        factors = [found.get(str(index)) for index in range(len(spec.layers))]
        mx.eval([f for f in factors if f is not None])
        check_factors(factors, spec)
    except (OSError, RuntimeError, InvalidValueError):
        return None
    return factors


def _path(spec: CacheSpec, folder: Path | None) -> Path:
    return (folder or default_cache_dir()) / f"key-factors-{spec.fingerprint.digest}.safetensors"
