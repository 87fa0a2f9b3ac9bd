"""`qkvshare bench prefill`: what a prefill needs at its peak, sealed at the end, mlx-lm's beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .bench_stock import PREFILL_STEP, StockCache, stock_prefilled_quantized
from .manager import SharedKVCacheManager
from .measure import peak_bytes, sample_tokens, seconds
from .session import AgentSession
from .spec import QuantSpec

if TYPE_CHECKING:
    from .model import LoadedModel


@dataclass(frozen=True)
class PrefillRow:
    """Peak bytes above the weights, and seconds, of a prefill of `tokens` tokens in steps of 512.

    ours: sealed at the end, so both the full-precision tail and its packed form are in it. stock: mlx-lm in full
    precision. stock_quantized: mlx-lm with `kv_bits`, quantizing while it prefills; None where it refuses to.
    `ratio` is that of the peaks, ours / stock.
    """

    tokens: int
    ours_peak_bytes: int
    stock_peak_bytes: int
    stock_quantized_peak_bytes: int | None
    ours_seconds: float
    stock_seconds: float
    ratio: float


def bench_prefill(
    lm: LoadedModel,
    *,
    tokens: Sequence[int] = (512, 1024, 2048),
    repeats: int = 1,
    quant: QuantSpec | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[PrefillRow]:
    """A row for every length of `tokens`: the highest peak and the median time of `repeats` rounds, ours and mlx-lm's
    in turn. mlx-lm's quantized prefill, which is not timed, runs once."""
    quant = quant or QuantSpec()
    return [_row(lm, sample_tokens(lm.tokenizer, count), quant, repeats, note) for count in tokens]


def _row(lm: LoadedModel, ids: list[int], quant: QuantSpec, repeats: int, note: Callable[[str], None]) -> PrefillRow:
    sides = {"ours": _Side(lambda: prefill_and_seal(lm, ids, quant)), "mlx-lm": _Side(lambda: StockCache(lm, ids))}
    quantized = _Side(lambda: stock_prefilled_quantized(lm, ids, quant))
    for _ in range(repeats):
        for name, side in sides.items():
            note(f"{len(ids)} tokens: {name}")
            side.measure()
    note(f"{len(ids)} tokens: mlx-lm, {quant.k_bits} bits")
    is_refused = quantized.measure() is None
    ours, stock = sides.values()
    return PrefillRow(
        tokens=len(ids),
        ours_peak_bytes=ours.peak_bytes,
        stock_peak_bytes=stock.peak_bytes,
        stock_quantized_peak_bytes=None if is_refused else quantized.peak_bytes,
        ours_seconds=statistics.median(ours.seconds),
        stock_seconds=statistics.median(stock.seconds),
        ratio=ours.peak_bytes / stock.peak_bytes,
    )


class _Side:
    """One way to prefill: its highest peak, and its times."""

    def __init__(self, run: Callable[[], Any]):
        self._run = run
        self.peak_bytes, self.seconds = 0, list[float]()

    def measure(self) -> Any:
        """What it returns, which is then forgotten."""
        found: list[Any] = []
        peak = peak_bytes(lambda: self.seconds.append(seconds(lambda: found.append(self._run()))))
        self.peak_bytes = max(self.peak_bytes, peak)
        return found[0]


def prefill_and_seal(lm: LoadedModel, ids: Sequence[int], quant: QuantSpec | None = None) -> None:
    """Once through, and nothing is kept. The guard looks, as it does by default."""
    manager = SharedKVCacheManager(lm.spec, quant, allow_unsafe=True)
    with AgentSession("prefill", lm, manager, prefill_step_tokens=PREFILL_STEP) as agent:
        agent.prefill(ids)
        agent.seal()
