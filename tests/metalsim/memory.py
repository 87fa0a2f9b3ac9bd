"""Memory that faults when a kernel leaves its buffer."""

from __future__ import annotations

import ctypes
import functools
import mmap


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


class GuardedBytes:
    """A copy of bytes that ends, up to alignment, at an inaccessible page; the page before is inaccessible too.

    The bytes that alignment leaves over hold a pattern, to show whether something was written there.
    """

    _PROTECT_NONE, _ALIGNMENT, _GUARD, _PATTERN = 0, 16, 1 << 20, 0xA5
    _PRIVATE_ANONYMOUS_NORESERVE = 0x4022

    def __init__(self, data: bytes, *, read_only: bool) -> None:
        self.size = len(data)
        body = -(-max(self.size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._total = body + 2 * self._GUARD
        self._base = _libc().mmap(None, self._total, self._PROTECT_NONE, self._PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        self._begin, self._end = self._base + self._GUARD, self._base + self._GUARD + body
        _libc().mprotect(self._begin, body, mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = (self._end - self.size) & -self._ALIGNMENT
        ctypes.memset(self._begin, self._PATTERN, body)
        ctypes.memmove(self.address, data, self.size)
        if read_only:
            _libc().mprotect(self._begin, body, mmap.PROT_READ)

    def data(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def is_intact(self) -> bool:
        """Whether only the bytes that belong to the buffer were changed."""
        before = ctypes.string_at(self._begin, self.address - self._begin)
        end = self.address + self.size
        after = ctypes.string_at(end, self._end - end)
        return set(before + after) <= {self._PATTERN}

    def free(self) -> None:
        _libc().munmap(self._base, self._total)
