"""Predicted time of one decode attention on Apple GPUs: the larger of memory and arithmetic, plus the launches.

Bandwidths are Apple's; core counts and clocks are public knowledge and not verified. The reached share of the bandwidth
is fitted to published MLX measurements on one chip (M5 Pro); on others predictions were off by up to 37 %.
"""

from __future__ import annotations

# GB/s, GPU cores, GHz
CHIPS = {"M1": (68, 8, 1.28), "M4 Pro": (273, 20, 1.58), "M4 Max": (546, 40, 1.58), "M5 Pro": (307, 20, 1.62)}
_REACHED = 0.87  # of the bandwidth
_LANES = 128 * 0.65  # lanes of a core, times an assumed issue rate
_LAUNCH_SECONDS = 8e-6
_TILED_ROWS = 12
KV_HEADS, GQA, HEAD_DIM, GROUP = 8, 4, 128, 64

# Instructions for each value, read off metal/attend_part.metal: the mean of the key and the value side. Unpacking is
# an and, a conversion and, where codes are parts of a word, a shift; a query or weight is loaded for four values.
UNPACK = {8: 3.0, 4: 3.0}


def instructions_per_value(bits: int, rows: int) -> float:
    """Of `attend_part`: unpack, scale (a value each; keys two for 32), and a multiply-add and a load / 4 a row."""
    scale = (1 + 2 * rows / 32) / 2
    return UNPACK[bits] + scale + rows * (1 + 1 / 4)


def seconds(chip: str, num_bytes: float, instructions: float, launches: int) -> float:
    bandwidth, cores, clock = CHIPS[chip]
    memory = num_bytes / (bandwidth * 1e9 * _REACHED)
    return launches * _LAUNCH_SECONDS + max(memory, instructions / (_LANES * cores * clock * 1e9))


def predict(chip: str, tokens: int, sessions: int) -> dict[str, float | int | str]:
    """Microseconds: the kernel at 8 and 4 bits, two quantized matmuls and a softmax, and MLX's SDPA on fp16.

    Of the matmuls it is assumed that memory is read once, that few rows unpack each for itself (the vector kernel) and
    many together (the tiled one); of the SDPA, that every session reads a copy of its own, once.
    """
    values, rows = 2 * KV_HEADS * tokens * HEAD_DIM, sessions * GQA
    packed = {bits: values * (bits / 8 + 4 / GROUP) for bits in (8, 4)}
    found: dict[str, float | int | str] = {"chip": chip, "tokens": tokens, "sessions": sessions}
    for bits, size in packed.items():
        kernel = seconds(chip, size, values * instructions_per_value(bits, rows), 2)
        found[f"kernel_{bits}_bit"] = round(1e6 * kernel)
        scores = 3 * 2 * sessions * GQA * KV_HEADS * tokens * 2  # written, and read by softmax and by the second matmul
        each = rows * (UNPACK[bits] + 2) if rows < _TILED_ROWS else UNPACK[bits] + 1 + rows * (1 + 1 / 4)
        matmuls = seconds(chip, size + scores, values * each, 3)
        found[f"matmuls_{bits}_bit"] = round(1e6 * matmuls)
    found["fp16"] = round(1e6 * seconds(chip, values * 2 * sessions, values * sessions * (GQA + 1), 2))
    return found
