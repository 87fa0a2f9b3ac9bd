"""The router's table: nearest point, printing, saving, and what a damaged or foreign file does."""

from __future__ import annotations

import json

import cli_run
import mlx.core as mx
import pytest
from core_helpers import make_manager, normal, store

from mlx_qkvshare import QuantizedAttention, QuantSpec, Route, RouteTable, routes
from mlx_qkvshare.batch_cache import BatchLayerCache
from mlx_qkvshare.bench_attention import (
    AttentionRow,
    AttentionShape,
    bench_attention,
    choose,
    crossovers,
    table_of,
)
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.routes import RoutePoint, of_device, shipped

PACKED, DEQUANTIZE, KERNEL = Route.PACKED, Route.DEQUANTIZE, Route.KERNEL
POINTS = (
    RoutePoint("one", 8, 4, 512, PACKED),
    RoutePoint("one", 8, 4, 8192, KERNEL),
    RoutePoint("one", 8, 64, 512, DEQUANTIZE),
    RoutePoint("one", 4, 4, 512, DEQUANTIZE),
    RoutePoint("batch", 8, 32, 512, KERNEL),
)
TABLE = RouteTable("a device", POINTS)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(routes, "default_cache_dir", lambda: tmp_path)
    of_device.cache_clear()
    yield tmp_path
    of_device.cache_clear()


@pytest.mark.parametrize(
    ("bits", "rows", "tokens", "route"),
    [
        (8, 1, 1, PACKED),
        (8, 4, 2000, PACKED),  # 2,048 is the middle: ratios count, not differences
        (8, 4, 2100, KERNEL),
        (8, 15, 512, PACKED),
        (8, 17, 512, DEQUANTIZE),
        (6, 4, 512, PACKED),  # 6 is nearer to 8 than to 4
        (4, 64, 8192, DEQUANTIZE),  # the bits come first
        (16, 4, 512, PACKED),
    ],
)
def test_the_nearest_point_decides(bits, rows, tokens, route):
    assert QuantizedAttention(table=TABLE).decide(rows, 1, num_tokens=tokens, bits=bits).route is route


def test_sessions_that_decode_together_have_points_of_their_own_and_a_decision_says_why():
    decision = QuantizedAttention(table=TABLE).decide_batch(2, 2, num_tokens=512)
    assert decision.route is KERNEL
    expected = "kernel: 4 rows per KV head, 512 shared tokens, 8 bits; nearest point (a device, measured here): 32 rows"
    assert str(decision) == f"{expected}, 512 tokens, 8 bits"


def test_a_table_can_be_printed():
    lines = str(TABLE).splitlines()
    assert lines[0] == "a device, measured here" and len(lines) == 2 + len(POINTS)
    assert lines[3].split() == ["one", "8", "4", "8192", "kernel"]
    timed = RoutePoint("one", 8, 4, 512, PACKED, {"packed": 1.25})
    assert str(RouteTable("x", (timed, POINTS[-1]))).splitlines()[2].endswith("(ms: packed 1.25)")


def test_what_was_saved_for_a_device_is_taken_for_it(home):
    assert of_device("a device").source == shipped("a device").source == "assumed, not measured"
    path = TABLE.save()
    assert path.parent == home and [f.name for f in home.iterdir()] == ["routes-a-device.json"]
    assert of_device("a device").points == POINTS
    assert of_device("another").points == shipped("another").points
    assert RouteTable.load(path).points == POINTS


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"device": "a device", "points": []}', '{"device": "a device", "points": [{"kind": "one"}]}',
     '{"device": "a device", "points": [{"kind": "no", "bits": 8, "rows": 1, "tokens": 1, "route": "packed"}]}',
     '{"device": "a device", "points": [{"kind": "one", "bits": 8, "rows": 1, "tokens": 1, "route": "fast"}]}',
     '{"device": "a device", "points": [{"kind": "one", "bits": 0, "rows": 1, "tokens": 1, "route": "packed"}]}'],
)  # fmt: skip
def test_a_file_that_holds_no_table_is_named_and_the_router_goes_on_without(home, text):
    path = home / "routes-a-device.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"routes-a-device\.json"):
        RouteTable.load(path)
    assert of_device("a device").source == "assumed, not measured"


def test_another_devices_file_under_this_ones_name_is_not_taken(home):
    path = TABLE.save()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "A device"}))
    of_device.cache_clear()
    assert of_device("a device").source == "assumed, not measured"


def test_no_kernel_is_taken_where_none_was_measured():
    for device in ("CPU x86_64", "CPU arm64", "Apple M9 Ultra"):
        assert KERNEL not in {point.route for point in shipped(device).points}
        decode = shipped(device).decide("one", bits=8, rows=3, tokens=4096)
        assert decode.route is PACKED
        assert shipped(device).decide("one", bits=8, rows=1536, tokens=4096).route is DEQUANTIZE


def test_the_fastest_route_is_chosen_and_noise_goes_to_the_leanest():
    assert choose({"packed": 1.0, "dequantize": 0.9, "kernel": None}, PACKED) is DEQUANTIZE
    assert choose({"packed": 1.0, "dequantize": 0.97, "kernel": None}, PACKED) is PACKED
    assert choose({"packed": 1.0, "dequantize": 1.03, "kernel": 2.0}, DEQUANTIZE) is DEQUANTIZE
    assert choose({"packed": 1.0, "dequantize": 2.0, "kernel": 0.5, "full_precision": 0.1}, PACKED) is KERNEL


def test_the_benchmark_fills_a_table_of_this_device():
    shape = AttentionShape(4, 2, 32)
    rows = bench_attention(shape, bits=[4], tokens=[64], queries=[1, 3], sessions=[2], group_size=32, layers=2)
    assert [(row.kind, row.rows, row.tokens) for row in rows] == [("one", 2, 64), ("one", 6, 64), ("batch", 4, 64)]
    for row in rows:
        speeds = (row.cold_gigabytes_per_second, row.warm_gigabytes_per_second)
        for times in (row.cold_milliseconds, row.warm_milliseconds, *speeds):
            assert {name for name, value in times.items() if value is None} == (
                set() if mx.metal.is_available() else {"kernel"}
            )
            assert all(value > 0 for value in times.values() if value is not None)
    table = table_of(rows)
    assert table.device == routes.device_name()
    table.save()
    found = QuantizedAttention().decide(1, 2, num_tokens=64, bits=4)
    assert found.route.value == rows[0].route and "measured here" in found.reason


def row_of(kind: str, rows: int, route: Route, bits: int = 8) -> AttentionRow:
    return AttentionRow(kind, bits, 1, rows, rows, 512, {}, {}, {}, {}, route.value)


def test_crossovers_are_where_the_route_changes():
    rows = [
        *(row_of("one", count, route) for count, route in ((64, DEQUANTIZE), (4, PACKED), (16, PACKED))),
        *(row_of("one", count, DEQUANTIZE, bits=4) for count in (4, 16)),
        *(row_of("batch", count, route) for count, route in ((1, PACKED), (2, KERNEL), (4, DEQUANTIZE))),
    ]
    assert [str(it) for it in crossovers(rows)] == [
        "one session, 8 bits, 512 tokens: packed up to 16 rows, dequantize from 64",
        "one session, 4 bits, 512 tokens: dequantize throughout",
        "sessions together, 8 bits, 512 tokens: packed up to 1 rows, kernel from 2",
        "sessions together, 8 bits, 512 tokens: kernel up to 2 rows, dequantize from 4",
    ]


def test_a_shape_whose_heads_do_not_divide_is_refused():
    with pytest.raises(InvalidValueError, match="3, num_kv_heads=2"):
        AttentionShape(3, 2)


class Asked(RouteTable):
    """A table that notes what it is asked."""

    def decide(self, kind, *, bits, rows, tokens):
        asked.append((kind, bits, rows, tokens))
        return super().decide(kind, bits=bits, rows=rows, tokens=tokens)


asked: list[tuple] = []


def test_attention_asks_by_rows_length_and_bits():
    manager = make_manager(QuantSpec(4, 8, 32), heads=2)
    root = store(manager, range(40))
    longer = store(manager, range(100, 120), root.fork(), seed=3)
    caches = [manager.make_caches(prefix)[0] for prefix in (root, longer)]
    for cache in caches:
        cache.append(normal(1, 2, 3, 32), normal(1, 2, 3, 32))
    attention = QuantizedAttention(table=Asked("a device", POINTS))
    asked.clear()
    mx.eval(attention.attend(normal(1, 6, 3, 32), caches[1], scale=1.0, mask="causal"))
    batch = BatchLayerCache(caches, {}, mx.array([c.offset for c in caches]))
    table = Asked("a device", (*POINTS[:4], RoutePoint("batch", 8, 8, 512, PACKED)))
    mx.eval(QuantizedAttention(table=table).attend(normal(2, 6, 1, 32), batch, scale=1.0))
    assert asked == [("one", 8, 9, 60), ("batch", 8, 6, 60)]


def test_the_command_measures_saves_and_prints(home, monkeypatch):
    before = cli_run.run(monkeypatch, "bench", "attention", "--table")
    assert before.code == 0 and before.out.startswith(f"{routes.device_name()}, ")
    sizes = ["--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--group-size", "32", "--tokens", "64"]
    options = [*sizes, "--queries", "1", "--agents", "2", "--bits", "4", "--repeats", "1"]
    found = cli_run.run(monkeypatch, "bench", "attention", *options, "--save")
    assert found.code == 0, found.err
    result = json.loads(found.out.splitlines()[-1])
    assert result["bench"] == "attention" and [row["rows"] for row in result["results"]] == [2, 4]
    assert "…" not in found.out, "fits 80 columns"
    assert "ms, cold / warm" in found.out and "GB/s, cold / warm" in found.out and "GB/s here" in found.out
    assert ("no Metal device" in found.err) != mx.metal.is_available()
    assert result["ceiling_gigabytes_per_second"] > 0
    assert [(it["kind"], it["bits"], it["tokens"]) for it in result["crossovers"]] == [("one", 4, 64), ("batch", 4, 64)]
    (path,) = home.iterdir()
    assert str(path) in found.err.replace("\n", "")
    assert cli_run.run(monkeypatch, "bench", "attention", "--table").out.startswith(
        f"{routes.device_name()}, measured here"
    )
    refused = cli_run.run(monkeypatch, "bench", "attention", "--heads", "3", "--kv-heads", "2")
    assert refused.code == 2 and "num_kv_heads=2" in refused.err and "Traceback" not in refused.err
