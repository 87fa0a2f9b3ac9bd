"""What the benchmarks are made of: live bytes, medians, peaks, the machine, real text."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .versions import cpu_model, versions

AS_ASKED: dict[str, Any] = {"allow_unsafe": True, "guard": None}
"""Of a manager whose bits are measured: neither refused nor raised."""


def live_bytes() -> int:
    """Bytes that MLX holds right now, with garbage and its buffer cache gone first."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that MLX held at once while `run` ran, above what it held before."""
    before = live_bytes()
    mx.reset_peak_memory()
    run()
    return max(mx.get_peak_memory(), before) - before


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved_medians(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each run; one warm-up round, then `repeats` rounds of all in turn, so that a slow
    moment of the machine meets them all. A run times its own part and returns it."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(repeats + 1):
        for name, run in runs.items():
            took = run()
            if index:
                samples[name].append(took)
    return {name: statistics.median(values) for name, values in samples.items()}


def buffer_address(array: mx.array) -> int:
    """The address of an evaluated array's first element: equal addresses are the same bytes."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array  # bfloat16 has no buffer protocol
    return int(np.array(plain, copy=False).__array_interface__["data"][0])


def machine() -> dict[str, Any]:
    """The machine and what MLX computes on; figures from different machines do not compare."""
    info: dict[str, Any] = {
        "system": platform.system(),
        "processor": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "device": str(mx.default_device()),
        "metal": mx.metal.is_available(),
    }
    if mx.metal.is_available():
        info["chip"] = mx.device_info()["device_name"]
    return info


def available_memory() -> tuple[int, str]:
    """Bytes that a model and its caches may take on this machine, and what they are: with Metal what the GPU can keep
    resident, else all physical memory."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"]), "recommended working set of the GPU"
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "physical memory"


def report(bench: str, model: str, results: Sequence[Any]) -> dict[str, Any]:
    """The one JSON object in which every benchmark ends."""
    return {"bench": bench, "machine": machine(), "versions": versions(), "model": model, "results": list(results)}


def sample_text() -> str:
    """A few hundred kB of real English prose that every Python carries: the language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def sample_tokens(tokenizer: Any, num_tokens: int, *, skip: int = 0) -> list[int]:
    """`num_tokens` token ids of `sample_text`, from token `skip` on."""
    ids: list[int] = []
    text, step = sample_text(), 4000
    for start in range(0, len(text), step):  # piece by piece: tokenizers warn of texts beyond the model's context
        if len(ids) >= skip + num_tokens:
            break
        ids.extend(tokenizer.encode(text[start : start + step], add_special_tokens=False))
    assert len(ids) >= skip + num_tokens, (len(ids), skip + num_tokens)
    return ids[skip : skip + num_tokens]
