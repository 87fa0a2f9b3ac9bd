"""What a card costs and saves: written, checked, read and gone on from, beside mlx-lm's own files and a re-prefill."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .bench_stock import PREFILL_STEP, StockCache, StockFile
from .errors import IntegrityError
from .manager import SharedKVCacheManager
from .measure import AS_ASKED, interleaved_medians, sample_tokens, seconds
from .restore import restore
from .session import AgentSession
from .spec import QuantSpec
from .store import CardStore

if TYPE_CHECKING:
    from .model import LoadedModel

Note = Callable[[str], None]
_CHECKED_TOKENS = 3


@dataclass(frozen=True)
class RestoreRow:
    """One context of `tokens` tokens, sealed as `packed_bytes`, in a store of `card_bytes`.

    A save ends when the bytes survive a power cut, a load when every byte of them was verified. ttft_restore: to the
    first token of a turn of `turn_tokens` tokens, the load included; ttft_reprefill: mlx-lm from nothing, measured
    once. stock: mlx-lm's `save_prompt_cache` and `load_prompt_cache` of its full-precision cache, which neither waits
    for the disk nor checks a byte; synced: with an fsync behind it; quantized: of its quantized cache, None where it
    refuses one. A `ratio` is our save + load over mlx-lm's, a `per_byte_ratio` the same of seconds a byte of the files.
    """

    tokens: int
    card_bytes: int
    packed_bytes: int
    save_seconds: float
    load_seconds: float
    verify_seconds: float
    ttft_restore_seconds: float
    ttft_reprefill_seconds: float
    stock_save_seconds: float
    stock_load_seconds: float
    stock_file_bytes: int
    stock_synced_save_seconds: float
    stock_quantized_save_seconds: float | None
    stock_quantized_synced_save_seconds: float | None
    stock_quantized_load_seconds: float | None
    stock_quantized_file_bytes: int | None
    turn_tokens: int
    card_ratio: float
    reprefill_ratio: float
    ratio: float
    synced_ratio: float
    per_byte_ratio: float
    synced_per_byte_ratio: float
    quantized_per_byte_ratio: float | None
    quantized_synced_per_byte_ratio: float | None


def bench_restore(
    lm: LoadedModel,
    *,
    tokens: Sequence[int] = (512, 2048),
    turn_tokens: int = 32,
    repeats: int = 5,
    quant: QuantSpec | None = None,
    folder: Path | None = None,
    note: Note = lambda text: None,
) -> list[RestoreRow]:
    """Rows for every length of `tokens`; all files are in a folder of their own in `folder` (default the system's for
    temporary files), and go at the end.

    Raises:
        IntegrityError: logits after a restore are not bit-equal to those before.
    """
    rows = []
    for count in tokens:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            note(f"{count} tokens: prefill")
            kept = _Kept(lm, count, turn_tokens, quant or QuantSpec(), Path(work))
            kept.check_logits()
            rows.append(_row(lm, kept, repeats, note))
    return rows


class _Kept:
    """A sealed context of `num_tokens` tokens, and the card of it."""

    def __init__(self, lm: LoadedModel, num_tokens: int, turn_tokens: int, quant: QuantSpec, folder: Path):
        self.shared = sample_tokens(lm.tokenizer, num_tokens)
        self.turn = sample_tokens(lm.tokenizer, turn_tokens, skip=num_tokens)
        self.quant, self.folder, self.store = quant, folder, CardStore(folder / "store")
        self._lm = lm
        self.manager = self._new_manager()
        self.owner = self._session(self.manager)
        self.owner.prefill(self.shared)
        self.owner.seal()
        self.save()

    def _new_manager(self) -> SharedKVCacheManager:
        return SharedKVCacheManager(self._lm.spec, self.quant, **AS_ASKED)

    def _session(self, manager: SharedKVCacheManager, **options: Any) -> AgentSession:
        return AgentSession("agent", self._lm, manager, prefill_step_tokens=PREFILL_STEP, **options)

    def save(self) -> float:
        """Seconds to write it anew."""
        if self.store.names():
            self.store.rm("card")
            self.store.gc()
        return seconds(lambda: self.manager.save_card(self.store, "card", self.owner))

    def load(self) -> float:
        """Seconds to bring it into a manager that holds nothing."""
        manager = self._new_manager()
        return seconds(lambda: manager.load_card(self.store, "card").prefix.release())

    def verify(self) -> float:
        return seconds(lambda: self.store.verify("card"))

    def first_token(self) -> float:
        """Seconds from an empty session to its first token behind the restored context and the turn."""

        def run() -> None:
            restore(session, self.store, "card")
            for _ in session.stream(self.turn, max_tokens=1):
                pass

        with self._session(self._new_manager()) as session:
            return seconds(run)

    def check_logits(self) -> None:
        """Raise unless a session that is restored has the logits of one that holds the context already."""
        before, after = self._logits(is_restored=False), self._logits(is_restored=True)
        if not mx.array_equal(before, after).item():
            raise IntegrityError("[bench_restore] logits: expected those before the card, bit for bit, got others")

    def _logits(self, *, is_restored: bool) -> mx.array:
        """Of the first tokens behind the turn: [L, V]."""
        found: list[mx.array] = []

        def sampler(logits: mx.array) -> mx.array:
            found.append(logits)
            return mx.argmax(logits)

        with self._session(self._new_manager() if is_restored else self.manager, sampler=sampler) as session:
            if is_restored:
                restore(session, self.store, "card")
            else:
                session.receive_state(self.owner.package_state())
            for _ in session.stream(self.turn, max_tokens=_CHECKED_TOKENS, ignore_eos=True):
                pass
        return mx.stack(found)


def _row(lm: LoadedModel, kept: _Kept, repeats: int, note: Note) -> RestoreRow:
    num_tokens = len(kept.shared)
    note(f"{num_tokens} tokens: mlx-lm's cache of them")
    cache = StockCache(lm, kept.shared)
    full = StockFile(cache.layers, kept.folder / "full.safetensors")
    packed = cache.quantized(kept.quant)
    quantized = None if packed is None else StockFile(packed.layers, kept.folder / "quantized.safetensors")
    note(f"{num_tokens} tokens: save, load, verify, restore")
    runs = {"save": kept.save, "load": kept.load, "verify": kept.verify, "restore": kept.first_token}
    for name, file in (("stock", full), ("quantized", quantized)):
        if file is not None:
            runs |= {f"{name} save": file.save, f"{name} synced": file.save_synced, f"{name} load": file.load}
    took = interleaved_medians(runs, repeats)
    note(f"{num_tokens} tokens: re-prefill")
    reprefill = StockCache(lm, ()).first_token([*kept.shared, *kept.turn])
    card_bytes, packed_bytes = kept.store.stored_bytes("card"), kept.store.inspect("card").packed_bytes

    def ratio(save: str, load: str) -> float:
        return (took["save"] + took["load"]) / (took[save] + took[load])

    def per_byte(save: str, load: str, file: StockFile | None) -> Any:
        return None if file is None else ratio(save, load) * file.nbytes / card_bytes

    return RestoreRow(
        tokens=num_tokens,
        card_bytes=card_bytes,
        packed_bytes=packed_bytes,
        save_seconds=took["save"],
        load_seconds=took["load"],
        verify_seconds=took["verify"],
        ttft_restore_seconds=took["restore"],
        ttft_reprefill_seconds=reprefill,
        stock_save_seconds=took["stock save"],
        stock_load_seconds=took["stock load"],
        stock_file_bytes=full.nbytes,
        stock_synced_save_seconds=took["stock synced"],
        stock_quantized_save_seconds=took.get("quantized save"),
        stock_quantized_synced_save_seconds=took.get("quantized synced"),
        stock_quantized_load_seconds=took.get("quantized load"),
        stock_quantized_file_bytes=None if quantized is None else quantized.nbytes,
        turn_tokens=len(kept.turn),
        card_ratio=card_bytes / packed_bytes,
        reprefill_ratio=reprefill / took["restore"],
        ratio=ratio("stock save", "stock load"),
        synced_ratio=ratio("stock synced", "stock load"),
        per_byte_ratio=per_byte("stock save", "stock load", full),
        synced_per_byte_ratio=per_byte("stock synced", "stock load", full),
        quantized_per_byte_ratio=per_byte("quantized save", "quantized load", quantized),
        quantized_synced_per_byte_ratio=per_byte("quantized synced", "quantized load", quantized),
    )
