"""Predicted time of one decode attention on Apple GPUs: the larger of memory and arithmetic, plus the launches.

Bandwidths are Apple's; core counts and clocks are public knowledge and not verified. The reached share of the bandwidth
is fitted to published MLX measurements on one chip (M5 Pro); on others predictions were off by up to 37 %.
Instructions are those that the simulator counts (`counted.py`). A GPU folds some of them into others (addresses,
conversions of half), so that more than one of them is done in a cycle; how many is fitted to the same chip, to the two
published rows of MLX's attention that memory does not explain (8 query heads for each KV head).
"""

from __future__ import annotations

from counted import ATTEND, ATTEND_IN_FULL, GROUP, MATMULS

# GB/s, GPU cores, GHz
CHIPS = {"M1": (68, 8, 1.28), "M4 Pro": (273, 20, 1.58), "M4 Max": (546, 40, 1.58), "M5 Pro": (307, 20, 1.62)}
_REACHED = 0.87  # of the bandwidth
_LANES = 128  # of a core
_COUNTED_A_CYCLE = 1.3  # instructions of a lane: 1.39 from mlx#4076 (M5 Pro, 32K, float16) at head dim 128, 1.21 at 64
_LAUNCH_SECONDS = 8e-6
_TILED_ROWS = 12
_TILED_UNPACK = 4  # an and, a shift, a conversion, a multiply-add for scale and bias
KV_HEADS, GQA, HEAD_DIM = 8, 4, 128


def seconds(chip: str, num_bytes: float, cycles: float, launches: int) -> float:
    """`cycles` of single lanes, all together."""
    bandwidth, cores, clock = CHIPS[chip]
    memory = num_bytes / (bandwidth * 1e9 * _REACHED)
    return launches * _LAUNCH_SECONDS + max(memory, cycles / (_LANES * cores * clock * 1e9))


def predict(chip: str, tokens: int, sessions: int) -> dict[str, float | int | str]:
    """Microseconds: the kernel at 8 and 4 bits, two quantized matmuls and a softmax, and MLX's SDPA on fp16.

    Of the matmuls it is assumed that memory is read once, that few rows unpack each for itself (the vector kernels) and
    many together (the tiled one, by its multiply-adds and loads, one a cycle: it uses simdgroup matrices);
    of the SDPA, that every session reads a copy of its own, once.
    """
    values, rows = 2 * KV_HEADS * tokens * HEAD_DIM, sessions * GQA
    packed = {bits: values * (bits / 8 + 4 / GROUP) for bits in (8, 4)}
    found: dict[str, float | int | str] = {"chip": chip, "tokens": tokens, "sessions": sessions}
    for bits, size in packed.items():
        kernel = seconds(chip, size, values * ATTEND[bits, sessions] / _COUNTED_A_CYCLE, 2)
        found[f"kernel_{bits}_bit"] = round(1e6 * kernel)
        scores = 3 * 2 * sessions * GQA * KV_HEADS * tokens * 2  # written, and read by softmax and by the second matmul
        each = rows * MATMULS[bits] / _COUNTED_A_CYCLE if rows < _TILED_ROWS else _TILED_UNPACK + rows * (1 + 1 / 4)
        matmuls = seconds(chip, size + scores, values * each, 3)
        found[f"matmuls_{bits}_bit"] = round(1e6 * matmuls)
    in_full = values * sessions * ATTEND_IN_FULL / _COUNTED_A_CYCLE
    found["fp16"] = round(1e6 * seconds(chip, values * 2 * sessions, in_full, 2))
    return found
