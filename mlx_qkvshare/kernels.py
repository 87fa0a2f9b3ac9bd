"""Metal kernels: read from `metal/*.metal` and built once; and `merge_state` with its ops twin.

They run where `Route.KERNEL` is asked for. By itself the router takes MLX's own operations, until a Mac has shown
where ours win.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from .errors import InvalidValueError

_HERE = Path(__file__).parent
# Inside an installed package; beside it in a checkout.
_FOLDERS = (_HERE / "metal", _HERE.parent / "metal")
_FUNCTION = re.compile(r"(?:template <[^>]*>\n)?\[\[kernel\]\] void (\w+)\((.*?)\) \{\n(.*)\n\}\s*\Z", re.DOTALL)


def kernel_source(name: str) -> tuple[str, str]:
    """(header, body) of `metal/<name>.metal`, a complete Metal file of one kernel function.

    `mx.fast.metal_kernel` writes the function's signature itself, so only what stands before the
    function and what stands in its braces is taken.
    """
    path = next((folder / f"{name}.metal" for folder in _FOLDERS if (folder / f"{name}.metal").is_file()), None)
    if path is None:
        raise InvalidValueError(f"[kernel_source] expected a kernel of this package, got {name!r}")
    text = path.read_text()
    match = _FUNCTION.search(text)
    assert match is not None and match[1] == name, path
    return text[: match.start()], match[3]


@functools.cache
def build_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """The kernel object of `metal/<name>.metal`; building needs no Metal device, launching does.

    Inputs come as they are, strided or not: a hidden copy of a shared segment would undo the sharing.
    """
    header, body = kernel_source(name)
    return mx.fast.metal_kernel(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        header=header,
        source=body,
        ensure_row_contiguous=False,
    )


def merge_state_kernel() -> Any:
    return build_kernel("merge_state", ("maxima", "sums", "outputs", "num_parts"), ("merged",))


def merge_state(maxima: mx.array, sums: mx.array, outputs: mx.array, dtype: mx.Dtype) -> mx.array:
    """Join partial softmax-attention results by log-sum-exp.

    Shapes:
        maxima, sums: [P, N] float32: largest score of each part, and sum of exp(score - maximum); a
            sum of 0 marks a part without tokens
        outputs: [P, N, D] float32, not normalized
        returns: [N, D] in `dtype`
    """
    if not mx.metal.is_available():
        return merge_state_ops(maxima, sums, outputs, dtype)
    num_parts, num_rows, head_dim = outputs.shape
    (merged,) = merge_state_kernel()(
        inputs=[*map(mx.contiguous, (maxima, sums, outputs)), mx.array(num_parts)],
        template=[("T", dtype)],
        grid=(head_dim, num_rows, 1),
        threadgroup=(min(head_dim, 256), 1, 1),
        output_shapes=[(num_rows, head_dim)],
        output_dtypes=[dtype],
    )
    return merged


def merge_state_ops(maxima: mx.array, sums: mx.array, outputs: mx.array, dtype: mx.Dtype) -> mx.array:
    """The ops twin of `merge_state`."""
    maxima = mx.where(sums > 0, maxima, mx.finfo(mx.float32).min)
    weights = mx.where(sums > 0, mx.exp(maxima - mx.max(maxima, axis=0)), 0)
    total = mx.sum(weights * sums, axis=0)[:, None]
    return (mx.sum(weights[..., None] * outputs, axis=0) / total).astype(dtype)
