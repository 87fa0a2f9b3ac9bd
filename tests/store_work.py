"""What the store's tests run in processes of their own; importing it costs no more than the library does."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import resource
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_qkvshare import Card, CardStore, HandoffPackage, Message, QuantSpec, SharedKVCacheManager
from mlx_qkvshare.errors import CardWriteError
from mlx_qkvshare.package import Span
from mlx_qkvshare.spec import CacheSpec, Fingerprint, LayerSpec

SAFE = QuantSpec(8, 8, 32, sink_tokens=4, is_rotated=True, is_centred=True)


def make_manager(quant=SAFE, *, layers=2, heads=2, dim=64, **options) -> SharedKVCacheManager:
    fingerprint = Fingerprint("tiny", "weights", "rope", "tokenizer")
    spec = CacheSpec((LayerSpec(heads, dim, dim),) * layers, "float32", 4096, fingerprint)
    return SharedKVCacheManager(spec, quant, **options)


def package_of(manager, prefix, *, number=0, sender="writer") -> HandoffPackage:
    spans = tuple(Span.of(view) for view in prefix.views)
    messages = (Message("user", f"generation {number}"),)
    return HandoffPackage(manager.id, sender, sender, 1, manager.spec.fingerprint, manager.quant, spans, 0, messages, 2)


def fill(manager, number: int, num_tokens: int, prefix=None):
    """A context whose tokens and rows tell its `number`."""
    slot = manager.allocate_shared_slot(num_tokens, replacing=prefix)
    keys = [mx.random.key(2 * number + side) for side in (0, 1)]
    layers = [
        tuple(mx.random.normal((1, it.n_kv_heads, num_tokens, it.k_head_dim), key=key) for key in keys)
        for it in manager.spec.layers
    ]
    return manager.quantize_and_store(slot, [number] * num_tokens, layers, prefix=prefix)


def save(manager, store: CardStore, number: int, num_tokens: int, name: str = "card") -> None:
    prefix = fill(manager, number, num_tokens)
    manager.save_card(store, name, package_of(manager, prefix, number=number))
    prefix.release()
    manager.evict_unreferenced()


def whole_number(store: CardStore, name: str = "card") -> int:
    """Load the card, and require that all of it is of one number, which is returned."""
    manager = make_manager()
    with manager.load_card(store, name) as loaded:
        (number,) = set(loaded.prefix.token_ids)
        assert [m.content for m in loaded.package.messages] == [f"generation {number}"]
        (view,) = loaded.prefix.views
        assert view.segment.checksum == checksum_of(number, view.length)
        manager.check_integrity(checksums=True)
    return number


@functools.cache
def checksum_of(number: int, num_tokens: int) -> str:
    return fill(make_manager(), number, num_tokens).views[0].segment.checksum


# --- the processes -----------------------------------------------------------------------------------


def save_in_a_loop(folder: str, start: int, num_tokens: int, count: int, collect: bool, step: int = 1) -> None:
    manager, store = make_manager(), CardStore(folder)
    for number in range(start, start + step * count, step):
        save(manager, store, number, num_tokens)
        if collect:
            store.gc()


def save_in_turns(folder: str, is_ready: Any) -> None:
    """Two contexts under one name for ever; the one that is not named any more is removed, and so written again."""
    manager, store, source = make_manager(), CardStore(folder), CardStore(Path(folder) / "source")
    loaded = {number: manager.load_card(source, str(number)) for number in (1, 2)}
    now = number_in(store.inspect("card"))
    is_ready.set()
    for number in itertools.cycle((3 - now, now)):
        manager.save_card(store, "card", loaded[number].package)
        store.gc()


def number_in(card: Card) -> int:
    return card.segments[0].known_ids[0]


def load_in_a_loop(folder: str, count: int) -> None:
    seen = [whole_number(CardStore(folder)) for _ in range(count)]
    assert seen, "never saved"


def save_under_a_limit(folder: str, limit_bytes: int) -> None:
    manager, store = make_manager(), CardStore(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    with contextlib.suppress(CardWriteError):
        save(manager, store, 2, 40)
        os._exit(3)
    assert whole_number(store) == 1
    left = [path.name for path in Path(folder).rglob(".*") if path.name != ".lock"]
    assert not left, left
