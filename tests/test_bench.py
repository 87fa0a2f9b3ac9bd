"""The benchmarks on tiny models of every kind of layer: what they count, and what mlx-lm refuses beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from cli_run import run, save_tiny
from core_helpers import K8V8, loaded
from reference import T
from test_windows import RECURRENT, SLIDING

from mlx_qkvshare import bench_attention as bench_attention_module
from mlx_qkvshare import bench_prefill as bench_prefill_module
from mlx_qkvshare.bench import bench_handoff, bench_memory
from mlx_qkvshare.bench_attention import AttentionShape, bench_attention
from mlx_qkvshare.bench_decode import bench_decode
from mlx_qkvshare.bench_latency import bench_latency
from mlx_qkvshare.bench_prefill import PrefillRow, bench_prefill
from mlx_qkvshare.bench_restore import RestoreRow, bench_restore
from mlx_qkvshare.bench_stock import StockCache
from mlx_qkvshare.errors import IntegrityError
from mlx_qkvshare.measure import sample_tokens
from mlx_qkvshare.segment_file import read_arrays

KINDS = {"full": {}, "sliding": SLIDING, "recurrent": RECURRENT}
TOKENS = 40  # beyond the window of 16


@pytest.fixture(params=KINDS)
def lm(request):
    return loaded(**KINDS[request.param])


def test_memory_is_counted_for_every_kind(lm):
    one, two = bench_memory(lm, agents=(1, 2), tokens=(TOKENS,), private_tokens=16, quant=K8V8)
    packed, own = K8V8.packed_bytes(lm.spec, TOKENS), lm.spec.context_bytes(16)
    assert (one.floor_bytes, two.floor_bytes) == (packed + own, packed + 2 * own)
    spare = lm.spec.private_bytes(16) - own  # a recurrent layer keeps the state to go back to as well
    assert one.floor_bytes <= one.ours_bytes <= one.floor_bytes + spare
    assert two.ours_bytes - one.ours_bytes <= own + spare < two.stock_bytes - one.stock_bytes
    assert (one.stock_quantized_bytes is None) == bool(lm.spec.windows)


def test_handoff_copies_nothing_for_any_kind(lm):
    (row,) = bench_handoff(lm, tokens=(TOKENS,), turn_tokens=4, decode_tokens=2, repeats=1, quant=K8V8)
    assert row.bytes_copied == 0 and row.bytes_referenced == K8V8.packed_bytes(lm.spec, TOKENS)
    assert (row.decode_stock_quantized_seconds_per_token is None) == bool(lm.spec.windows)
    assert row.decode_stock_seconds_per_token > 0


def test_decode_is_counted_for_every_kind(lm):
    (row,) = bench_decode(lm, agents=(2,), tokens=(TOKENS,), private_tokens=4, steps=2, repeats=1, quant=K8V8)
    private = row.private_tokens
    assert row.floor_bytes == K8V8.packed_bytes(lm.spec, TOKENS) + 2 * lm.spec.context_bytes(private)
    assert row.kv_bytes_read_per_step_stock == 2 * lm.spec.context_bytes(TOKENS + private)
    assert row.ours_live_bytes >= row.floor_bytes and row.stock_batch_tokens_per_second > 0
    assert (row.stock_quantized_tokens_per_second is None) == bool(lm.spec.windows)


def test_bytes_of_decoding_do_not_depend_on_how_many_rounds_are_timed():
    one, three = (
        bench_decode(T, agents=(2,), tokens=(TOKENS,), private_tokens=4, steps=2, repeats=repeats, quant=K8V8)[0]
        for repeats in (1, 3)
    )
    for name, value in vars(one).items():
        assert "second" in name or name.startswith("speedup") or value == getattr(three, name), name


def test_restore_is_measured_for_every_kind(lm, tmp_path):
    (row,) = bench_restore(lm, tokens=(TOKENS,), turn_tokens=4, repeats=1, quant=K8V8, folder=tmp_path)
    assert (row.tokens, row.packed_bytes) == (TOKENS, K8V8.packed_bytes(lm.spec, TOKENS))
    assert row.card_bytes > row.packed_bytes and row.stock_file_bytes > lm.spec.context_bytes(TOKENS)
    quantized = {name: value for name, value in vars(row).items() if "quantized" in name}
    assert {value is None for value in quantized.values()} == {bool(lm.spec.windows)}
    assert all(value > 0 for value in vars(row).values() if value is not None)
    assert list(tmp_path.iterdir()) == []


def test_restore_has_the_fields_that_are_promised():
    promised = (
        "tokens, card_bytes, packed_bytes, save_seconds, load_seconds, verify_seconds, ttft_restore_seconds, "
        "ttft_reprefill_seconds, stock_save_seconds, stock_load_seconds, stock_file_bytes"
    )
    assert list(RestoreRow.__annotations__)[:11] == promised.split(", ")


def test_restore_raises_where_logits_differ(monkeypatch):
    """Every byte was verified, and then one is another: no checksum sees it, the logits do."""

    def read(*args):
        arrays = read_arrays(*args)
        name = next(name for name in arrays if name.endswith("k.scales"))
        return arrays | {name: arrays[name] * 1.001}

    monkeypatch.setattr("mlx_qkvshare.store.read_arrays", read)
    with pytest.raises(IntegrityError, match="logits"):
        bench_restore(T, tokens=(TOKENS,), turn_tokens=4, repeats=1, quant=K8V8)


def test_a_card_is_hardly_larger_than_what_it_holds(tmp_path):
    """Its header and tokens are a few kB, so of a context of sensible size."""
    (row,) = bench_restore(loaded(layers=4), tokens=(400,), turn_tokens=4, repeats=1, quant=K8V8, folder=tmp_path)
    assert 1 < row.card_ratio <= 1.02


def test_mlx_lms_cache_is_as_before_after_a_timed_run(lm):
    """A window that has moved cannot be cut: it must come back whole."""
    ids = sample_tokens(lm.tokenizer, TOKENS)
    stock = StockCache(lm, ids)

    def answer():
        return lm.model(mx.array([[9, 31]]), cache=stock.copied().layers)

    before = answer()
    for timed in (lambda: stock.first_token([7, 8, 9]), lambda: stock.decode(3), lambda: stock.copied().decode(3)):
        assert timed() > 0 and mx.array_equal(answer(), before)


def test_peaks_of_a_prefill_are_counted_for_every_kind(lm):
    small, large = bench_prefill(lm, tokens=(TOKENS, 8 * TOKENS), repeats=2, quant=K8V8)
    for row in (small, large):
        assert row.ours_peak_bytes >= lm.spec.context_bytes(row.tokens), (
            "the tail is in full precision until it is sealed"
        )
        assert row.stock_peak_bytes > 0 and row.ratio == row.ours_peak_bytes / row.stock_peak_bytes
        refused = {row.stock_quantized_peak_bytes is None, row.stock_quantized_seconds is None}
        assert refused == {bool(lm.spec.windows)}
        assert min(row.ours_seconds, row.stock_seconds) > 0 and row.time_ratio == row.ours_seconds / row.stock_seconds
    assert large.ours_peak_bytes > 2 * small.ours_peak_bytes


def test_prefills_go_in_turn_behind_a_warm_up(monkeypatch):
    notes, lengths = [], []
    monkeypatch.setattr(bench_prefill_module, "prefill_and_seal", lambda lm, ids, quant: lengths.append(len(ids)))
    bench_prefill(T, tokens=(80,), repeats=2, quant=K8V8, note=notes.append)
    assert notes == ["warm-up", *[f"80 tokens: {it}" for it in ("ours", "mlx-lm", "mlx-lm, 8 bits")] * 2]
    assert lengths == [64, 80, 80]
    promised = (
        "tokens, ours_peak_bytes, stock_peak_bytes, stock_quantized_peak_bytes, ours_seconds, stock_seconds, ratio"
    )
    assert list(PrefillRow.__annotations__)[:7] == promised.split(", ")


def test_latencies_go_in_turn_behind_a_warm_up_and_are_held_against_mlx_lms():
    notes: list[str] = []
    options = {"prompt_tokens": 96, "shared_tokens": 64, "step_tokens": (32,), "repeats": 2}
    rows = bench_latency(T, **options, quant=K8V8, note=notes.append)
    ways = ["alone", "interleaved, 32 tokens a step", "not interleaved"]
    ways += ["mlx-lm, 32 tokens a step", "mlx-lm, 2048 tokens a step"]
    assert notes == [*(f"warm-up: {way}" for way in ways), *ways * 2]
    by_way = {(row.way, row.step_tokens): row for row in rows}
    ours, stock = by_way["interleaved", 32], by_way["mlx-lm", 32]
    assert ours.p95_ratio == ours.p95_seconds / stock.p95_seconds
    assert {row.way for row in rows if row.p95_ratio is not None} == {"interleaved"}


def test_the_command_prints_the_ratio_of_latencies(monkeypatch, tmp_path):
    sizes = ["--tokens", 64, "--shared", 64, "--step-tokens", 32]
    result = run(monkeypatch, "bench", "latency", "--model", save_tiny(tmp_path), *sizes)
    assert result.code == 0, result.err
    assert "p95, interleaved / mlx-lm, 32 tokens a step: " in result.out
    assert json.loads(result.out.splitlines()[-1])["machine"]["cpu"] != ""


def test_other_memory_is_read_before_cold_memory_is_timed(monkeypatch):
    class Other:
        reads = 0

        def sum(self) -> mx.array:
            self.reads += 1
            return mx.zeros(1)

    other = Other()
    monkeypatch.setattr(bench_attention_module, "_other_memory", lambda: other)
    sizes = {"bits": [8], "tokens": [64], "queries": [1], "sessions": [1], "layers": 1, "repeats": 1}
    one, batch = bench_attention(AttentionShape(4, 2, 64), **sizes)
    ways = sum(time is not None for row in (one, batch) for time in row.cold_milliseconds.values())
    assert other.reads == 2 * ways, "of the warm-up, too"


def test_one_token_is_told_from_a_batch_of_one(monkeypatch):
    sizes = ["--heads", 4, "--kv-heads", 2, "--head-dim", 64, "--tokens", 64, "--bits", 8]
    result = run(monkeypatch, "bench", "attention", *sizes, "--queries", 1, "--agents", 1, "--repeats", 1)
    assert result.code == 0, result.err
    names = [re.split(r"\s{2,}", line.strip())[0] for line in result.out.splitlines()]
    assert names.count("1") == names.count("batch of 1") == 2, "milliseconds and GB/s"


@pytest.mark.parametrize("command", ["memory", "handoff", "decode", "prefill", "restore"])
def test_the_command_says_that_mlx_lm_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    folder = save_tiny(tmp_path, **SLIDING)
    turn = ["--repeats", 1, "--turn", 4]
    few = {"memory": ["--agents", 1], "decode": ["--agents", 1], "prefill": ["--repeats", 1]}
    options = few.get(command, turn)
    if command == "decode":
        options += ["--repeats", 1, "--steps", 1]
    result = run(monkeypatch, "bench", command, "--model", folder, "--tokens", TOKENS, *options)
    assert result.code == 0, result.err
    table, line = result.out.rsplit("\n", 2)[:2]
    assert "refused" in table
    (row,) = json.loads(line)["results"]
    assert {value for name, value in row.items() if "quantized" in name} == {None}
