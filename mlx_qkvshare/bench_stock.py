"""mlx-lm's own caches, as the benchmarks run them beside ours."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_map

from .measure import seconds
from .spec import QuantSpec
from .state_cache import leaves

if TYPE_CHECKING:
    from .model import LoadedModel

PREFILL_STEP = 512  # the same chunks for both sides


def stock_quantized(layers: Sequence[Any], quant: QuantSpec) -> list[Any] | None:
    """mlx-lm's quantized caches of the same tokens: of the layers that its `generate_step` would quantize.

    None where it refuses to (sliding layers, head dims that are no multiple of the group), or quantizes none of them.
    """
    if not any(hasattr(layer, "to_quantized") for layer in layers):
        return None
    options = {"group_size": quant.group_size, "bits": quant.k_bits}
    try:
        return [layer.to_quantized(**options) if hasattr(layer, "to_quantized") else layer for layer in layers]
    except (NotImplementedError, ValueError):
        return None


def stock_prefilled_quantized(lm: LoadedModel, tokens: Sequence[int], quant: QuantSpec) -> list[Any] | None:
    """mlx-lm's caches of `tokens` as its `kv_bits` makes them, quantizing while it prefills; None where it refuses."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    layers = make_prompt_cache(lm.model)
    options: dict[str, Any] = {"kv_bits": quant.k_bits, "kv_group_size": quant.group_size, "quantized_kv_start": 0}
    options |= {"prompt_cache": layers, "max_tokens": 0, "prefill_step_size": PREFILL_STEP}
    try:
        for _ in generate_step(mx.array(list(tokens)), lm.model, **options):
            pass
    except (NotImplementedError, ValueError):
        return None
    mx.eval([layer.state for layer in layers])
    return layers


class StockCache:
    """mlx-lm's own prompt cache of `tokens`, prefilled in full precision."""

    def __init__(self, lm: LoadedModel, tokens: Sequence[int]):
        from mlx_lm.models.cache import make_prompt_cache

        self._lm, self._tokens, self.layers = lm, tokens, make_prompt_cache(lm.model)
        if tokens:
            for _ in self._generate(tokens, max_tokens=0):
                pass
        self.evaluate()

    def copied(self) -> StockCache:
        """A deep copy of the caches, which MLX makes at the first write to them."""
        return self._with(copy.deepcopy(self.layers))

    def quantized(self, quant: QuantSpec) -> StockCache | None:
        """The same tokens in mlx-lm's quantized caches; None where there are none (`stock_quantized`)."""
        layers = stock_quantized(self.layers, quant)
        return None if layers is None else self._with(layers)

    def _with(self, layers: list[Any]) -> StockCache:
        twin = copy.copy(self)
        twin.layers = layers
        twin.evaluate()
        return twin

    def _generate(self, tokens: Sequence[int], max_tokens: int = -1) -> Any:
        from mlx_lm.generate import generate_step

        prompt, step = mx.array(list(tokens)), PREFILL_STEP
        return generate_step(
            prompt, self._lm.model, prompt_cache=self.layers, max_tokens=max_tokens, prefill_step_size=step
        )

    def evaluate(self) -> None:
        mx.eval([layer.state for layer in self.layers if not layer.empty()])

    def timed(self, tokens: Sequence[int], *, skip: int, count: int) -> float:
        """Seconds of `count` greedy tokens behind `tokens`, after `skip` untimed ones; the cache is then as before."""
        from mlx_lm.models.cache import KVCache, QuantizedKVCache, trim_prompt_cache

        can_be_cut = all(isinstance(layer, KVCache | QuantizedKVCache) for layer in self.layers)
        before = None if can_be_cut else written_out(self.layers)
        steps = self._generate(tokens)
        for _ in range(skip):
            next(steps)
        took = seconds(lambda: [next(steps) for _ in range(count)])
        steps.close()
        self.evaluate()
        if before is None:
            trim_prompt_cache(self.layers, self.layers[0].offset - len(self._tokens))
        else:
            self.layers = before
        return took

    def first_token(self, turn: Sequence[int]) -> float:
        return self.timed(turn, skip=0, count=1)

    def decode(self, count: int) -> float:
        return self.timed(self._tokens[-1:], skip=1, count=count) / count


class StockFile:
    """mlx-lm's own file of `layers`."""

    def __init__(self, layers: list[Any], path: Path):
        self._layers, self._path = layers, path
        self.save()
        self.nbytes = path.stat().st_size

    def save(self) -> float:
        from mlx_lm.models.cache import save_prompt_cache

        self._path.unlink(missing_ok=True)
        return seconds(lambda: save_prompt_cache(str(self._path), self._layers))

    def save_synced(self) -> float:
        def sync() -> None:
            with open(self._path, "rb+") as file:
                os.fsync(file.fileno())

        return self.save() + seconds(sync)

    def load(self) -> float:
        from mlx_lm.models.cache import load_prompt_cache

        return seconds(lambda: mx.eval([it.state for it in load_prompt_cache(str(self._path)) if not it.empty()]))


def written_out(layers: list[Any]) -> list[Any]:
    """A copy in buffers of its own, which nobody shares any more: a later write to either pays for no copy."""
    twins = copy.deepcopy(layers)
    for leaf in leaves(twins):
        own = tree_map(lambda value: value * 1 if isinstance(value, mx.array) else value, vars(leaf))
        vars(leaf).update(own)
    mx.eval([vars(leaf) for leaf in leaves(twins)])
    return twins
