"""Contexts of every kind that a store keeps. Run as a script it restores them and writes down their logits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from core_helpers import loaded
from reference import FULL, T, probe, some_ids
from tiny import RECURRENT, SLIDING, tiny_config, tiny_model, tiny_tokenizer

from mlx_qkvshare import AgentSession, CardStore, LoadedModel, QuantSpec, SharedKVCacheManager, restore
from mlx_qkvshare.model import describe

PRESETS = {name: QuantSpec.preset(name) for name in ("safe", "balanced", "tight")}
NESTED = dataclasses.replace(PRESETS["safe"], is_nested=True)


def in_dtype(dtype: mx.Dtype) -> LoadedModel:
    model = tiny_model(fresh=True)
    model.set_dtype(dtype)
    return LoadedModel(model, tiny_tokenizer(), describe(model, tiny_config(), tiny_tokenizer()))


def plain() -> LoadedModel:
    return T


KINDS: dict[str, tuple[Callable[[], LoadedModel], QuantSpec]] = {
    **{name: (plain, quant) for name, quant in PRESETS.items()},
    "plain": (plain, QuantSpec(8, 4, 32)),
    "full": (plain, FULL),
    "factors": (plain, PRESETS["tight"]),
    "rotated factors": (plain, QuantSpec(6, 6, 64, is_rotated=True)),
    "adaptive": (plain, dataclasses.replace(PRESETS["tight"], is_adaptive=True)),
    "layer bits": (plain, QuantSpec(4, 4, 32, layer_bits=((-1, 8, 16),))),
    "nested": (plain, NESTED),
    "nested, dropped": (plain, NESTED),
    "sliding": (lambda: loaded(**SLIDING), PRESETS["safe"]),
    "recurrent": (lambda: loaded(**RECURRENT), PRESETS["balanced"]),
    "one head": (lambda: loaded(kv_heads=1), PRESETS["safe"]),
    "padded": (lambda: loaded(head_dim=72), dataclasses.replace(PRESETS["balanced"], group_size=64)),
    "bfloat16": (lambda: in_dtype(mx.bfloat16), PRESETS["safe"]),
    "float16": (lambda: in_dtype(mx.float16), PRESETS["tight"]),
}


def manager_for(kind: str) -> tuple[LoadedModel, SharedKVCacheManager]:
    make, quant = KINDS[kind]
    model = make()
    factors = [mx.arange(1, 129).reshape(1, 2, 1, 64) / 40, None] if "factors" in kind else None
    return model, SharedKVCacheManager(model.spec, quant, key_factors=factors, allow_unsafe=True)


def conversation(kind: str) -> tuple[LoadedModel, AgentSession]:
    """A context of several segments, the last one a turn."""
    model, manager = manager_for(kind)
    session = AgentSession("owner", model, manager)
    for count in (150, 30, 60):
        session.prefill(some_ids(count, seed=count))
        session.seal()
    session.say("What has to be done?")
    session.seal()
    if "dropped" in kind:
        manager.drop_residuals()
    return model, session


def logits(session: AgentSession, model: LoadedModel) -> np.ndarray:
    """As `probe` has them; float32 holds those of every dtype."""
    return probe(
        session, model._replace(model=lambda *args, **options: model.model(*args, **options).astype(mx.float32))
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for kind in KINDS:
        model, manager = manager_for(kind)
        session = AgentSession("owner", model, manager)
        assert restore(session, CardStore(folder / "store"), kind).computed_tokens == 0
        np.save(folder / f"{kind}.after.npy", logits(session, model))
        assert [message.content for message in session.messages] == ["What has to be done?"]
        manager.check_integrity(checksums=True)
