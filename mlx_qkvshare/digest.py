"""The one digest of bytes: SHA-256, for which Apple's chips and x86 have instructions, cut to `DIGEST_BYTES`.

Many buffers have the digest of their own digests, so that all cores can work on one.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

DIGEST_BYTES = 16
_MAX_THREADS = 8
_WORTH_BYTES = 4 << 20  # below, threads take longer to start than to work
_CHUNK_BYTES = 1 << 18  # what is read is hashed while it is in a core's cache
Done = TypeVar("Done")

hasher = hashlib.sha256


def digest_text(text: str) -> str:
    return digest_bytes(text.encode("utf-8", "surrogatepass"))


def digest_bytes(data: bytes) -> str:
    return hasher(data).hexdigest()[: 2 * DIGEST_BYTES]


def digest_buffers(buffers: Sequence[memoryview]) -> str:
    """Of all of them in order."""
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    return joined(at_once([partial(digest_buffer, buffer) for buffer in buffers], num_bytes))


def digest_buffer(buffer: memoryview) -> bytes:
    """Of one, as `joined` takes it."""
    return hasher(buffer).digest()


def digest_region(handle: int, start: int, num_bytes: int, target: memoryview | None = None) -> bytes:
    """Of a part of a file, which may end sooner, as `joined` takes it; `target`, if there is one, gets the bytes.

    Raises `OSError`.
    """
    digest, done = hasher(), 0
    chunk = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES) if target is None else 0))
    while done < num_bytes:
        part = chunk[: num_bytes - done] if target is None else target[done : done + _CHUNK_BYTES]
        count = os.preadv(handle, [part], start + done)
        if not count:
            break
        digest.update(part[:count])
        done += count
    return digest.digest()


def is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 2 * DIGEST_BYTES and set(text) <= set("0123456789abcdef")


def joined(digests: Iterable[bytes]) -> str:
    return digest_bytes(b"".join(digests))


def at_once(tasks: Sequence[Callable[[], Done]], num_bytes: int) -> list[Done]:
    """What the tasks return, in their order. They begin in it, on this thread and, where `num_bytes` to hash, read or
    write are worth it, on others beside it; so none of them touches MLX. What one raises is raised, with no more begun.
    """
    num_threads = min(os.cpu_count() or 1, len(tasks), _MAX_THREADS) if num_bytes >= _WORTH_BYTES else 1
    left = deque(enumerate(tasks))
    found: dict[int, Done] = {}

    def take() -> tuple[int, Callable[[], Done]] | None:
        try:
            return left.popleft()
        except IndexError:
            return None

    def work() -> None:
        try:
            for index, task in iter(take, None):
                found[index] = task()
        except BaseException:
            left.clear()
            raise

    if num_threads < 2:
        work()
    else:
        with ThreadPoolExecutor(num_threads - 1) as pool:
            others = [pool.submit(work) for _ in range(num_threads - 1)]
            work()
        for other in others:
            other.result()
    return [found[index] for index in range(len(tasks))]
