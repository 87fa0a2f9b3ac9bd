"""The fixture that can be wrong: a tiny Llama that recalls records from its context, and a bias that breaks 4-bit keys.

The random model of `tiny` has logits, but no task that a bad cache could fail. This one is trained, see
data/kv-tiny/README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from mlx_qkvshare import AgentSession, QuantSpec, SharedKVCacheManager
from mlx_qkvshare.model import LoadedModel, describe

FOLDER = Path(__file__).parent / "data" / "kv-tiny"
BEGIN, SEPARATOR = 0, 1
KEYS, VALUES = range(4, 68), range(68, 132)
BIASED_PAIR = 31
"""The slowest rotary pair: it turns by 0.0001 a token, so a bias there adds nearly the same to all of a query's scores,
which softmax ignores: in full precision the model stays what it was. On pairs that turn, 24 and below, it does not."""
BREAKING_BIAS = 300.0
"""A key bias with which 4 bits destroy the model."""


class Records(NamedTuple):
    """A context of records, and what may be asked of it: after `questions[i]` come the two values `answers[i]`."""

    prompt: list[int]
    questions: list[int]
    answers: list[tuple[int, int]]


def records(num_records: int = 16, seed: int = 0) -> Records:
    """Records with different keys: `BEGIN, (key, value, value) × n, SEPARATOR`."""
    rng = np.random.default_rng(seed)
    keys = rng.permutation(KEYS)[:num_records].tolist()
    values = [(first, second) for first, second in rng.integers(VALUES.start, VALUES.stop, (num_records, 2)).tolist()]
    body = [token for key, pair in zip(keys, values, strict=True) for token in (key, *pair)]
    return Records([BEGIN, *body, SEPARATOR], keys, values)


@functools.cache
def load_recall_model(key_bias: float = 0.0, pair: int = BIASED_PAIR) -> LoadedModel:
    """The trained model in float32, without a tokenizer; one object for equal arguments.

    `key_bias` is added to `k_proj.bias` of every layer and KV head, on one channel of rotary pair `pair`: as in
    Qwen2.5, whose few huge biases stretch the range of every group that they are in (transformers#35185).
    """
    model, config = load_model(FOLDER)
    model.eval()
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    bias = mx.where(mx.arange(dim) == pair, key_bias, 0.0)
    for layer in model.layers:
        layer.self_attn.k_proj.bias = layer.self_attn.k_proj.bias + mx.tile(bias, heads)
    mx.eval(model.parameters())
    return LoadedModel(model, None, describe(model, config))


def recall(
    lm: LoadedModel,
    how: QuantSpec | SharedKVCacheManager,
    *,
    num_values: int = 1,
    num_records: int = 16,
    num_contexts: int = 16,
    seed: int = 0,
) -> float:
    """The share of all questions about `num_contexts` contexts that are answered rightly, up to the value asked for.

    Every context is sealed once; its questions then read the sealed rows, as they are unpacked, in one batch. A
    `QuantSpec` is tried as it is, without the guard. Of 16 records × 16 contexts the standard error is 2 to 3 points,
    and that of a difference on the same contexts less.
    """
    manager = how if isinstance(how, SharedKVCacheManager) else SharedKVCacheManager(lm.spec, how, guard=None)
    found = []
    for index in range(num_contexts):
        asked = records(num_records, seed=1000 * seed + index)
        with AgentSession("reader", lm, manager) as session:
            session.prefill(asked.prompt)
            session.seal()
            picked = np.array(mx.argmax(ask(lm, session, asked), axis=-1))
        is_right = picked == np.array(asked.answers)
        found.append(is_right[:, :num_values].all(axis=1).mean())
    return float(np.mean(found))


def ask(lm: LoadedModel, session: AgentSession, asked: Records) -> mx.array:
    """Logits [N, 2, V] of all N questions, each right behind what `session` holds; the second behind the right first
    value, which is the greedy answer wherever the first one counts."""
    caches = []
    for layer in session.caches:
        rows = layer.keys_and_values()
        caches.append(KVCache())
        caches[-1].update_and_fetch(*(mx.repeat(array, len(asked.questions), axis=0) for array in rows))
    tokens = [(key, first) for key, (first, _) in zip(asked.questions, asked.answers, strict=True)]
    return lm.model(mx.array(tokens), cache=caches)


def calibration_ids(num_contexts: int = 8) -> Sequence[int]:
    """Records for `calibrate`, none of which `recall` asks about."""
    return [token for index in range(num_contexts) for token in records(seed=10**6 + index).prompt]
