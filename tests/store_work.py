"""What the store's tests run in processes of their own; importing it costs no more than the library does."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_qkvshare import Card, CardStore, HandoffPackage, Message, QuantSpec, SharedKVCacheManager, import_card
from mlx_qkvshare.errors import CardWriteError
from mlx_qkvshare.package import Span
from mlx_qkvshare.spec import CacheSpec, Fingerprint, LayerSpec

SAFE = QuantSpec(8, 8, 32, sink_tokens=4, is_rotated=True, is_centred=True)
LARGE = {"layers": 30, "heads": 8}
LARGE_TOKENS = 2800  # of them 107 MB


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


def whole_number(store: CardStore, name: str = "card", **sizes: int) -> int:
    """Load the card, and require that all of it is of one number, which is returned."""
    manager = make_manager(**sizes)
    with manager.load_card(store, name) as loaded:
        (number,) = set(loaded.prefix.token_ids)
        assert [m.content for m in loaded.package.messages] == [f"generation {number}"]
        (view,) = loaded.prefix.views
        assert view.segment.checksum == checksum_of(number, view.length, **sizes)
        manager.check_integrity(checksums=True)
    return number


@functools.cache
def checksum_of(number: int, num_tokens: int, **sizes: int) -> str:
    return fill(make_manager(**sizes), number, num_tokens).views[0].segment.checksum


def python_path() -> str:
    """Where a process of its own finds the tests and the library."""
    tests = Path(__file__).resolve().parent
    return os.pathsep.join(filter(None, [str(tests), str(tests.parent), os.environ.get("PYTHONPATH")]))


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


def save_the_other(folder: str, sources: str, is_ready: Any, is_done: Any) -> None:
    """Save over the card the one of two large contexts that it does not hold, once, then wait to be killed."""
    manager, store = make_manager(**LARGE), CardStore(folder)
    number = 3 - number_in(store.inspect("card"))
    with manager.load_card(CardStore(sources), str(number)) as loaded:
        is_ready.set()
        manager.save_card(store, "card", loaded.package)
        is_done.set()
        signal.pause()


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
    assert not leftovers(Path(folder))


def import_under_a_limit(folder: str, file: str, limit_bytes: int) -> None:
    store = CardStore(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    with contextlib.suppress(CardWriteError):
        import_card(store, file, replace=True)
        os._exit(3)


def save_on_a_full_disk(folder: str) -> None:
    """On a file system that has room for one context and not for two: the second save fails, and the first one stands.
    When there is room again it goes through."""
    manager, store = make_manager(), CardStore(Path(folder) / "store")
    save(manager, store, 1, 1000)
    ballast = Path(folder) / "ballast"
    for left in (0, 1 << 14, store.stored_bytes("card") // 2, store.stored_bytes("card") - (1 << 14)):
        ballast.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        assert free > left
        with open(ballast, "wb") as file:
            file.write(bytes(free - left))
        before = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()}
        try:
            save(manager, store, 2, 1000)
        except CardWriteError as error:
            assert isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
        else:
            raise AssertionError("expected a full disk")
        assert {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()} == before
        assert whole_number(store) == 1 and not leftovers(store.folder)
    ballast.unlink()
    save(manager, store, 2, 1000)
    assert whole_number(store) == 2


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name != ".lock"]


if __name__ == "__main__":
    save_on_a_full_disk(sys.argv[1])
