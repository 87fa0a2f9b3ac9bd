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

_WARM_TOKENS = 64


@dataclass(frozen=True)
class PrefillRow:
    """Peak bytes above the weights, and seconds, of a prefill of `tokens` tokens in steps of 512.

    ours: sealed at the end, so both the full-precision tail and its packed form are in it. stock: mlx-lm in full
    precision. stock_quantized: mlx-lm with `kv_bits`, quantizing while it prefills; None where it refuses to.
    `ratio` is that of the peaks, ours / stock, `time_ratio` that of the seconds.
    """

    tokens: int
    ours_peak_bytes: int
    stock_peak_bytes: int
    stock_quantized_peak_bytes: int | None
    ours_seconds: float
    stock_seconds: float
    ratio: float
    stock_quantized_seconds: float | None
    time_ratio: float


def bench_prefill(
    lm: LoadedModel,
    *,
    tokens: Sequence[int] = (512, 1024, 2048),
    repeats: int = 1,
    quant: QuantSpec | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[PrefillRow]:
    """A row for every length of `tokens`: the highest peak and the median time of `repeats` rounds, ours and mlx-lm's
    in turn, behind a warm-up round of a few tokens."""
    quant, lengths = quant or QuantSpec(), [sample_tokens(lm.tokenizer, count) for count in tokens]
    note("warm-up")
    sides = _sides(lm, lengths[0][:_WARM_TOKENS], quant)
    for side in sides.values():
        side.measure()
    return [_row(_sides(lm, ids, quant), len(ids), repeats, note) for ids in lengths]


def _sides(lm: LoadedModel, ids: list[int], quant: QuantSpec) -> dict[str, _Side]:
    return {
        "ours": _Side(lambda: prefill_and_seal(lm, ids, quant)),
        "mlx-lm": _Side(lambda: StockCache(lm, ids)),
        f"mlx-lm, {quant.k_bits} bits": _Side(lambda: stock_prefilled_quantized(lm, ids, quant)),
    }


def _row(sides: dict[str, _Side], num_tokens: int, repeats: int, note: Callable[[str], None]) -> PrefillRow:
    for _ in range(repeats):
        for name, side in sides.items():
            note(f"{num_tokens} tokens: {name}")
            side.measure()
    ours, stock, quantized = sides.values()
    return PrefillRow(
        tokens=num_tokens,
        ours_peak_bytes=ours.peak_bytes,
        stock_peak_bytes=stock.peak_bytes,
        stock_quantized_peak_bytes=None if quantized.gave_nothing else quantized.peak_bytes,
        ours_seconds=ours.median_seconds,
        stock_seconds=stock.median_seconds,
        ratio=ours.peak_bytes / stock.peak_bytes,
        stock_quantized_seconds=None if quantized.gave_nothing else quantized.median_seconds,
        time_ratio=ours.median_seconds / stock.median_seconds,
    )


class _Side:
    """One way to prefill: its highest peak, and its times. Where mlx-lm refuses it gives nothing."""

    def __init__(self, run: Callable[[], Any]):
        self._run = run
        self.peak_bytes, self._seconds, self.gave_nothing = 0, list[float](), False

    def measure(self) -> None:
        """What it returns is forgotten."""
        found: list[Any] = []
        peak = peak_bytes(lambda: self._seconds.append(seconds(lambda: found.append(self._run()))))
        self.peak_bytes = max(self.peak_bytes, peak)
        self.gave_nothing = found[0] is None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self._seconds)


def prefill_and_seal(lm: LoadedModel, ids: Sequence[int], quant: QuantSpec | None = None) -> None:
    """Once through, and nothing is kept. The guard looks, as it does by default."""
    manager = SharedKVCacheManager(lm.spec, quant, allow_unsafe=True)
    with AgentSession("prefill", lm, manager, prefill_step_tokens=PREFILL_STEP) as agent:
        agent.prefill(ids)
        agent.seal()
