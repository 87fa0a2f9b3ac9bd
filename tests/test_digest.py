"""The digest of bytes: one, whichever threads make it."""

from __future__ import annotations

import hashlib
import threading
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_qkvshare import digest
from mlx_qkvshare.digest import DIGEST_BYTES, at_once, digest_buffer, digest_buffers, digest_bytes, digest_text, joined
from mlx_qkvshare.quantize import buffer_of, checksum


@pytest.fixture(params=["one thread", "threads"])
def threads(request, monkeypatch):
    monkeypatch.setattr(digest, "_WORTH_BYTES", 1 << 40 if request.param == "one thread" else 0)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return request.param


def test_it_is_sha256_cut():
    assert digest_text("abc") == digest_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223"
    assert len(digest_bytes(b"")) == 2 * DIGEST_BYTES == 32
    assert digest_text("\ud800") != digest_text("?")


def test_buffers_have_the_digest_of_their_digests(threads):
    parts = [bytes([index]) * (index * 1000) for index in range(20)]
    whole = b"".join(hashlib.sha256(part).digest() for part in parts)
    assert digest_buffers([memoryview(part) for part in parts]) == hashlib.sha256(whole).hexdigest()[:32]
    moved = [parts[0], parts[1] + parts[2][:1], parts[2][1:], *parts[3:]]
    assert digest_buffers([memoryview(part) for part in moved]) != digest_buffers([memoryview(part) for part in parts])


@pytest.mark.parametrize("dtype", [mx.bool_, mx.uint8, mx.uint32, mx.float16, mx.bfloat16, mx.float32])
def test_arrays_are_their_bytes_of_every_dtype_and_shape(threads, dtype):
    shapes = [(), (0,), (3, 0, 2), (7,), (1, 2, 5, 64)]
    arrays = [(mx.arange(max(1, int(np.prod(shape)))) % 2)[: int(np.prod(shape))].reshape(shape) for shape in shapes]
    arrays = [array.astype(dtype) for array in arrays]
    mx.eval(arrays)
    assert [buffer_of(array).nbytes for array in arrays] == [array.nbytes for array in arrays]
    assert checksum(arrays) == joined(digest_buffer(bytes(buffer_of(array))) for array in arrays)


def test_what_is_written_to_a_buffer_is_in_the_array():
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        array = mx.zeros((2, 3), dtype)
        mx.eval(array)
        buffer_of(array)[:] = bytes(buffer_of(mx.ones((2, 3), dtype)))
        assert mx.all(array == 1).item()


def test_tasks_run_beside_this_thread_in_their_order(threads):
    gate, seen = threading.Barrier(2), []

    def meet(index):
        seen.append(index)
        if threads == "threads":
            gate.wait(30)  # a second thread must come
        return index

    assert at_once([partial(meet, index) for index in range(8)], 1) == list(range(8))
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("error", [OSError, IndexError, KeyboardInterrupt])
def test_what_a_task_raises_is_raised_and_no_more_begun(threads, error):
    begun = []

    def run(index):
        begun.append(index)
        if index == 1:
            raise error("it")
        if index > 1:
            threading.Event().wait(0.01)

    with pytest.raises(error, match="it"):
        at_once([partial(run, index) for index in range(500)], 1)
    assert 2 <= len(begun) < 500
