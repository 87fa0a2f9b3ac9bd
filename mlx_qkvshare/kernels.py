"""Metal kernels: read from `metal/*.metal` and built once; and `merge_state` with its ops twin.

They run where `Route.KERNEL` is asked for. By itself the router takes MLX's own operations, until a Mac has shown
where ours win.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .errors import InvalidValueError, KernelBuildError

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


class Kernel:
    """A kernel of this package, called as the objects of `mx.fast.metal_kernel` are.

    Metal builds a variant (a set of template arguments) when it is first evaluated. So that a failure names what did
    not build, the first call of a variant is evaluated at once; all later ones are lazy.
    """

    def __init__(self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        header, body = kernel_source(name)
        self.name = name
        self._object: Any = mx.fast.metal_kernel(
            name=name,
            input_names=list(inputs),
            output_names=list(outputs),
            header=header,
            source=body,
            ensure_row_contiguous=False,
        )
        self._built: set[tuple[object, ...]] = set()

    def __call__(
        self, *, inputs: Sequence[mx.array], template: Sequence[tuple[str, bool | int | mx.Dtype]], **launch: Any
    ) -> list[mx.array]:
        """Launch the kernel.

        Raises:
            KernelBuildError: Metal's compiler refuses this variant, or it does not fit the device.
        """
        call = functools.partial(self._object, inputs=list(inputs), template=list(template), **launch)
        variant = (*template, *(x.size < _FEWEST_IN_DEVICE_MEMORY for x in inputs))
        # The inputs apart, so that what goes wrong before the kernel is not taken for its fault.
        if variant in self._built or not _is_evaluated(inputs):
            return call()
        try:
            outputs: list[mx.array] = call()
            if _is_evaluated(outputs):
                self._built.add(variant)
        except (RuntimeError, ValueError) as error:
            reason = _build_failure(str(error))
            if reason is None:
                raise
            raise KernelBuildError(f"[kernel {self.name}] {_described(template)}: {reason}") from error
        return outputs


_FEWEST_IN_DEVICE_MEMORY = 8  # elements; MLX declares an input of fewer as constant, in another text
_NOT_BUILT = ("Unable to build metal library", "Unable to load kernel", "Thread group size")  # of MLX's messages


def _is_evaluated(arrays: Sequence[mx.array]) -> bool:
    """Begin to evaluate. Inside `mx.compile`, `mx.vmap` and exports MLX refuses to; it cannot be asked beforehand."""
    try:
        mx.async_eval(*arrays)
    except ValueError as error:
        if "transformation" not in str(error):
            raise
        return False
    return True


def _build_failure(message: str) -> str | None:
    """The compiler's first error in MLX's message, or what else the device has against the kernel; None if nothing."""
    error = re.search(r"\S+:\d+:\d+: (?:fatal )?error: .*", message)
    if error is not None:
        return error[0]
    return " ".join(message.split()) if any(text in message for text in _NOT_BUILT) else None


def _described(template: Sequence[tuple[str, bool | int | mx.Dtype]]) -> str:
    return ", ".join(f"{name}={str(value).removeprefix('mlx.core.')}" for name, value in template)


@functools.cache
def build_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Kernel:
    """The kernel of `metal/<name>.metal`; making it needs no Metal device, launching it does.

    Inputs come as they are, strided or not: a hidden copy of a shared segment would undo the sharing.
    """
    return Kernel(name, inputs, outputs)


def merge_state_kernel() -> Kernel:
    return build_kernel("merge_state", ("maxima", "sums", "outputs", "num_parts"), ("merged",))


def merge_state(maxima: mx.array, sums: mx.array, outputs: mx.array, dtype: mx.Dtype) -> mx.array:
    """Join partial softmax-attention results by log-sum-exp.

    Shapes:
        maxima, sums: [P, N] float32: largest score of each part, and sum of exp(score - maximum); a
            sum of 0 marks a part without tokens
        outputs: [P, N, D] float32, not normalized
        returns: [N, D] in `dtype`; 0 where no part has a token
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
    return (mx.sum(weights[..., None] * outputs, axis=0) / mx.where(total > 0, total, 1)).astype(dtype)
