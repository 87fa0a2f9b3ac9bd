"""`quantize_pack`: the kernel that quantizes and packs rows in one pass; its ops twin is `quantize`.

Letters: B batch, Hk KV heads, T tokens, D head dim, P padded dim, G group size.
"""

from __future__ import annotations

import mlx.core as mx

from .kernels import build_kernel
from .quantize import QuantizedTensor
from .spec import TensorPlan


def quantize_pack(x: mx.array, plan: TensorPlan) -> QuantizedTensor:
    """Pack `x` [B, Hk, T, D], strided or not, by `plan`, which must pack. Lazy: evaluate before it is shared."""
    assert plan.is_quantized and x.shape[3] == plan.head_dim, (plan, x.shape)
    groups = plan.padded_dim // plan.group_size
    lead = x.shape[:3]
    packed, scales, biases = build_kernel("quantize_pack", ("rows",), ("packed", "scales", "biases"))(
        inputs=[x],
        template=[
            ("T", x.dtype),
            ("BITS", plan.bits),
            ("GROUP", plan.group_size),
            ("DIM", plan.head_dim),
            ("GROUPS", groups),
        ],
        grid=(32 * groups * lead[0] * lead[1] * lead[2], 1, 1),
        threadgroup=(32 * groups, 1, 1),
        output_shapes=[(*lead, plan.padded_dim * plan.bits // 32), (*lead, groups), (*lead, groups)],
        output_dtypes=[mx.uint32, x.dtype, x.dtype],
    )
    return QuantizedTensor(plan, x.dtype, packed, scales, biases)
