"""`quantize_pack`: the kernel that centres, rotates, quantizes and packs rows in one pass, and its ops twin.

Letters: B batch, Hk KV heads, T tokens, D head dim, P padded dim, G group size.
"""

from __future__ import annotations

import mlx.core as mx

from .errors import InvalidValueError
from .kernels import build_kernel
from .quantize import Basis, QuantizedTensor, quantize
from .spec import TensorPlan


def quantize_pack(
    x: mx.array, plan: TensorPlan, *, centre: mx.array | None = None, is_rotated: bool = False
) -> QuantizedTensor:
    """Pack `x` by `plan`, which must pack; before that take `centre` off and rotate. Lazy: evaluate before sharing.

    Shapes:
        x: [B, Hk, T, D], strided or not
        centre: [Hk, D], taken off every token's row: the mean of each channel, say, since keys have channels far off
            zero (KIVI, arXiv 2402.02750). Keys without it shift a query's scores by a constant, which softmax ignores.
        is_rotated: rows are multiplied by the orthonormal Walsh-Hadamard matrix, after centring (QuaRot, arXiv
            2404.00456). Queries that are rotated as well give the same scores.

    All is computed in float32. The words of the plain variant are those of `mx.quantize` on a CPU, bit for bit (of the
    same values in float32). MLX's own Metal kernel differs from that: it begins the search for a group's maximum at 0,
    so that a group that is negative throughout is packed more coarsely than it need be.

    Raises:
        InvalidValueError: a rotation over a head dim that is not a power of two, or a centre of another shape.
    """
    _require_stages(x, plan, centre, is_rotated)
    groups = plan.padded_dim // plan.group_size
    lead = x.shape[:3]
    packed, scales, biases = build_kernel("quantize_pack", ("rows", "centre"), ("packed", "scales", "biases"))(
        inputs=[x, x if centre is None else mx.contiguous(centre.astype(mx.float32))],
        template=[
            ("T", x.dtype),
            ("BITS", plan.bits),
            ("GROUP", plan.group_size),
            ("DIM", plan.head_dim),
            ("GROUPS", groups),
            ("IS_CENTRED", centre is not None),
            ("IS_ROTATED", is_rotated),
        ],
        grid=(32 * groups * lead[0] * lead[1] * lead[2], 1, 1),
        threadgroup=(32 * groups, 1, 1),
        output_shapes=[(*lead, plan.padded_dim * plan.bits // 32), (*lead, groups), (*lead, groups)],
        output_dtypes=[mx.uint32, x.dtype, x.dtype],
    )
    return QuantizedTensor(plan, x.dtype, packed, scales, biases)


def quantize_pack_ops(
    x: mx.array, plan: TensorPlan, *, centre: mx.array | None = None, is_rotated: bool = False
) -> QuantizedTensor:
    """The ops twin of `quantize_pack`: on a CPU the same words, with every stage."""
    _require_stages(x, plan, centre, is_rotated)
    basis = Basis(is_rotated, None if centre is None else centre.astype(mx.float32)[None, :, None])
    packed, scales, biases = quantize(basis.enter(x), plan).arrays
    return QuantizedTensor(plan, x.dtype, packed, scales.astype(x.dtype), biases.astype(x.dtype))


def _require_stages(x: mx.array, plan: TensorPlan, centre: mx.array | None, is_rotated: bool) -> None:
    head_dim = plan.head_dim
    assert plan.is_quantized and x.shape[3] == head_dim, (plan, x.shape)
    if centre is not None and centre.shape != (x.shape[1], head_dim):
        expected = f"[Hk, D] = {(x.shape[1], head_dim)}"
        raise InvalidValueError(f"[quantize_pack] centre: expected {expected}, got {tuple(centre.shape)}")
    if is_rotated and head_dim & (head_dim - 1):
        expected = "a head dim that is a power of two for the Hadamard rotation"
        raise InvalidValueError(f"[quantize_pack] is_rotated: expected {expected}, got {head_dim}")
