"""`qkvshare serve`: mlx-lm's server, whose prompts share what they begin with."""

from __future__ import annotations

import sys

import typer

from .options import Bits, Budget, GroupSize, KBits, Preset, Unsafe, VBits, parse_bytes, quant_spec


def serve(
    context: typer.Context,
    bits: Bits = None,
    preset: Preset = None,
    k_bits: KBits = None,
    v_bits: VBits = None,
    group_size: GroupSize = 64,
    budget: Budget = "4G",
    unsafe: Unsafe = False,
) -> None:
    """Run mlx-lm's own server on shared caches: prompts that begin alike are computed, quantized and held once.

    All other options are those of `mlx_lm.server` (--model, --port, ...); `qkvshare serve -- --help` shows them.
    """
    from ..serve import shared_server  # imports mlx-lm

    quant = quant_spec(bits, k_bits, v_bits, group_size, preset)
    with shared_server(quant=quant, budget_bytes=parse_bytes(budget), allow_unsafe=unsafe) as server:
        before, sys.argv = sys.argv, ["qkvshare serve", *context.args]
        try:
            server.main()
        finally:
            sys.argv = before
