"""What a session must equal: stock mlx-lm without any reuse, or stock mlx-lm behind the same packed bytes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from tiny import tiny_loaded

from mlx_qkvshare import (
    AgentSession,
    CacheSpec,
    LoadedModel,
    QuantSpec,
    SharedKVCacheManager,
    SharedPrefix,
    quantized_attention,
)
from mlx_qkvshare.spec import LayerSpec

FULL = QuantSpec(k_bits=16, v_bits=16)
T = tiny_loaded()
NEXT = (31, 99, 250)  # what `probe` feeds: three rows, so that the packed route answers


def some_ids(count: int, seed: int = 0) -> list[int]:
    """Ordinary token ids: no BOS, no end of turn."""
    return np.random.default_rng(seed).integers(10, 343, count).tolist()


def pair(seed: int = 0, quant: QuantSpec | None = None, *, tokens: int = 40, loaded: LoadedModel = T, **options: Any):
    """A manager, and a session that has sealed `tokens` tokens in it."""
    manager = SharedKVCacheManager(loaded.spec, quant, **options)
    owner = AgentSession("owner", loaded, manager)
    owner.prefill(some_ids(tokens, seed))
    owner.seal()
    return manager, owner


class Forced:
    """A sampler that plays `ids`, then the most likely token, and keeps the logits of every step."""

    def __init__(self, ids: Sequence[int] = ()):
        self.ids, self.logits = list(ids), []

    def __call__(self, logits: mx.array) -> mx.array:
        self.logits.append(logits)
        step = len(self.logits) - 1
        return mx.array(self.ids[step]) if step < len(self.ids) else mx.argmax(logits)


class Counted:
    """A model that counts the tokens it is run on, so that no statistic of ours has to be believed."""

    def __init__(self, loaded: LoadedModel):
        self._model, self.num_tokens = loaded.model, 0

    def __call__(self, token_ids: mx.array, **options: Any) -> mx.array:
        self.num_tokens += token_ids.shape[1]
        return self._model(token_ids, **options)


def counted(loaded: LoadedModel = T) -> tuple[LoadedModel, Counted]:
    model = Counted(loaded)
    return loaded._replace(model=model), model


def cold(token_ids: Sequence[int], loaded: LoadedModel = T, caches: list[Any] | None = None) -> np.ndarray:
    """Stock mlx-lm's logits [L, V] after each of `token_ids`."""
    caches = make_prompt_cache(loaded.model) if caches is None else caches
    return np.array(loaded.model(mx.array([list(token_ids)]), cache=caches)[0])


def unpacked(tensor: Any) -> mx.array:
    plan, basis = tensor.plan, tensor.basis
    if not plan.is_quantized:
        return tensor.packed
    words = (tensor.packed, tensor.scales, tensor.biases)
    full = mx.dequantize(*words, group_size=plan.group_size, bits=plan.bits)[..., : plan.head_dim]
    if basis is None:
        return full
    full = full @ walsh_hadamard(plan.head_dim) if basis.is_rotated else full
    full = full if basis.scale is None else full / basis.scale
    return full if basis.centre is None else full + basis.centre


def walsh_hadamard(width: int) -> mx.array:
    """By Sylvester's construction, for powers of two."""
    found = np.ones((1, 1), np.float32)
    while len(found) < width:
        found = np.block([[found, found], [found, -found]])
    return mx.array(found / np.float32(np.sqrt(width)))


def all_unpacked(kv: Any, role: str, num_rows: int) -> mx.array:
    return mx.concatenate([unpacked(getattr(block, role)) for block in kv.blocks], axis=2)[:, :, :num_rows]


def cold_behind(session: AgentSession, token_ids: Sequence[int], loaded: LoadedModel = T) -> np.ndarray:
    """Stock mlx-lm's logits for `token_ids` behind the session's shared prefix, unpacked into plain caches."""
    caches = make_prompt_cache(loaded.model)
    for view in session.prefix.views:
        for cache, kv in zip(caches, view.segment.layers, strict=True):
            cut = view.segment.num_tokens - view.length
            if isinstance(cache, RotatingKVCache):
                cache.offset = view.stop - (kv.num_rows - cut)  # the rows before are gone, and seen by nobody
            rows = kv.num_rows - cut
            cache.update_and_fetch(all_unpacked(kv, "keys", rows), all_unpacked(kv, "values", rows))
    return cold(token_ids, loaded, caches)


def probe(session: AgentSession, loaded: LoadedModel = T, token_ids: Sequence[int] = NEXT) -> np.ndarray:
    """Logits after each of `token_ids` behind all that the session holds, on a fork: the session does not change."""
    twin = copy.deepcopy(session.caches)
    try:
        with quantized_attention():
            return np.array(loaded.model(mx.array([list(token_ids)]), cache=twin)[0])
    finally:
        twin[0].prefix.release()


def decode(session: AgentSession, token_ids: Sequence[int]) -> np.ndarray:
    """Logits before each of `token_ids`, forced through the session's own stream: [L, V]."""
    before, session._sampler = session._sampler, Forced(token_ids)
    try:
        assert [chunk.token for chunk in session.stream(max_tokens=len(token_ids))] == list(token_ids)
        return np.array(mx.stack(session._sampler.logits))
    finally:
        session._sampler = before


def assert_consistent(session: AgentSession) -> None:
    """Every layer is as long as the token list, and the manager's equations hold."""
    assert {cache.offset for cache in session.caches} == {len(session.token_ids)} == {session.num_tokens}
    session.manager.check_integrity(checksums=True)


def assert_warm_is_cold(session: AgentSession, loaded: LoadedModel = T, atol: float = 1e-4) -> None:
    """The session's state gives the logits of a run without reuse (behind the same packed bytes, if quantized)."""
    assert_consistent(session)
    if session.manager.quant == FULL:
        expected = cold([*session.token_ids, *NEXT], loaded)
    else:
        expected = cold_behind(session, [*session.token_ids[session.prefix.num_tokens :], *NEXT], loaded)
    np.testing.assert_allclose(probe(session, loaded), expected[-len(NEXT) :], rtol=0, atol=atol)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def mean_kl(expected: np.ndarray, got: np.ndarray) -> float:
    """Mean KL divergence (nats) of next-token distributions given as logits [L, V]."""
    p, q = _log_softmax(expected), _log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def random_layers(spec: CacheSpec, num_tokens: int, seed: int = 0) -> list[tuple[mx.array, mx.array]]:
    """Keys and values [1, Hk, num_tokens, D] per layer, for what needs no model."""
    rng = np.random.default_rng(seed)

    def rows(layer: LayerSpec, head_dim: int) -> mx.array:
        return mx.array(rng.standard_normal((1, layer.n_kv_heads, num_tokens, head_dim)).astype(np.float32))

    return [(rows(layer, layer.k_head_dim), rows(layer, layer.v_head_dim)) for layer in spec.layers]


def store(manager: SharedKVCacheManager, token_ids: Sequence[int]) -> SharedPrefix:
    """A holder of a new segment with random K/V."""
    slot = manager.allocate_shared_slot(len(token_ids))
    return manager.quantize_and_store(slot, token_ids, random_layers(manager.spec, len(token_ids)))


def active_bytes() -> int:
    """Live MLX memory: garbage and MLX's own buffer cache do not count."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def address(array: mx.array) -> int:
    return np.array(array, copy=False).__array_interface__["data"][0]
