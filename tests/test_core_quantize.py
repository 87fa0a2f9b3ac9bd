"""Packing: which plan is chosen, how many bytes it takes, how far a row is off, and that words only ever move."""

import dataclasses
import itertools
import json

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import FINGERPRINT, flip_byte, make_spec, no_collector, normal, store
from oracle import rows, to_numpy, unpack

from mlx_qkvshare import CacheSpec, QuantSpec, SharedKVCacheManager
from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.quantize import checksum, dequantize, join, quantize
from mlx_qkvshare.spec import ITEM_BYTES, SUPPORTED_GROUP_SIZES, LayerSpec

HEAD_DIMS = (48, 64, 72, 80, 96, 112, 128, 256)
LOW_BITS = (2, 3, 4, 5, 6, 8)
EPSILON = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}


def packed(x: mx.array, bits: int = 8, group_size: int = 64):
    plan = QuantSpec(group_size=group_size).resolve_tensor(x.shape[-1], bits, x.dtype.size)
    tensor = quantize(x, plan)
    mx.eval(tensor.arrays)
    return tensor


# --- validation and resolution ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k_bits", "v_bits", "group_size"])
@pytest.mark.parametrize("value", [0, 1, 7, 15, -8, 48, 256, 8.0, 64.0, True, None, "8"])
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(InvalidValueError, match=rf"\[QuantSpec\] {name}: expected one of"):
        QuantSpec(**{name: value})


def test_the_default_is_k8_v8_in_groups_of_64():
    assert (QuantSpec().k_bits, QuantSpec().v_bits, QuantSpec().group_size) == (8, 8, 64)
    assert str(QuantSpec(8, 4, 32)) == "K8V4 g32"


@pytest.mark.parametrize(
    "arguments",
    [
        {"layers": ()},
        {"dtype": "float64"},
        {"max_context_tokens": 0},
        {"max_context_tokens": True},
    ],
)
def test_a_cache_spec_is_validated(arguments):
    good = {"layers": (LayerSpec(1, 64, 64),), "dtype": "float32", "max_context_tokens": 8, "fingerprint": FINGERPRINT}
    CacheSpec(**good)
    with pytest.raises(InvalidValueError, match=next(iter(arguments))):
        CacheSpec(**good | arguments)


@pytest.mark.parametrize("arguments", [(0, 64, 64), (1, -1, 64), (1, 64, 1.5)])
def test_a_layer_spec_is_validated(arguments):
    with pytest.raises(InvalidValueError, match=r"\[LayerSpec\]"):
        LayerSpec(*arguments)


@pytest.mark.parametrize("bits", LOW_BITS)
def test_the_documented_choices(bits):
    chosen = {dim: QuantSpec().resolve_tensor(dim, bits, 4) for dim in HEAD_DIMS}
    assert {dim: (plan.group_size, plan.padded_dim) for dim, plan in chosen.items()} == {
        48: (64, 64), 64: (64, 64), 72: (32, 96), 80: (32, 96), 96: (32, 96), 112: (64, 128), 128: (64, 128),
        256: (64, 256),
    }  # fmt: skip


@pytest.mark.parametrize("group_size", SUPPORTED_GROUP_SIZES)
@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_plan_packs_to_exactly_its_row_bytes_and_none_is_cheaper(head_dim, dtype, group_size):
    item_bytes = ITEM_BYTES[dtype]
    x = normal(1, 2, 3, head_dim, dtype=getattr(mx, dtype))
    for bits in LOW_BITS:
        tensor = packed(x, bits, group_size)
        plan = tensor.plan
        assert tensor.nbytes == 2 * 3 * plan.row_bytes(item_bytes)
        assert plan.padded_dim == -(-head_dim // plan.group_size) * plan.group_size
        assert plan.group_size <= group_size
        if head_dim % group_size == 0:
            assert plan.group_size == group_size, "the asked group size is taken where it fits"
            continue
        for group in (g for g in SUPPORTED_GROUP_SIZES if g <= group_size):
            groups = -(-head_dim // group)
            assert plan.row_bytes(item_bytes) <= groups * (group * bits // 8 + 2 * item_bytes)


@pytest.mark.parametrize(("k_dim", "v_dim"), list(itertools.pairwise(HEAD_DIMS)))
@pytest.mark.parametrize(("k_bits", "v_bits"), [(8, 4), (3, 16), (16, 5)])
def test_keys_and_values_are_resolved_each_for_their_own(k_dim, v_dim, k_bits, v_bits):
    spec, quant = make_spec(layers=2, heads=3, k_dim=k_dim, v_dim=v_dim), QuantSpec(k_bits, v_bits)
    plans = quant.resolve(spec)
    assert len(plans) == 2
    tensors = [quantize(normal(1, 3, 5, p.head_dim), p) for plan in plans for p in (plan.keys, plan.values)]
    assert [t.plan.bits for t in tensors] == [k_bits, v_bits] * 2
    assert sum(t.nbytes for t in tensors) == 5 * quant.packed_token_bytes(spec)


# --- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize("head_dim", [64, 80, 112])
def test_a_row_comes_back_within_a_step_of_its_group(head_dim, bits, dtype):
    # Far from zero: a padding by zeros would widen the last group's range, and with it the step, tenfold.
    x = normal(1, 2, 9, head_dim, seed=bits, dtype=getattr(mx, dtype)) + 20
    tensor = packed(x, bits)
    plan, exact, back = tensor.plan, to_numpy(x), dequantize(tensor)
    assert back.shape == x.shape and back.dtype == x.dtype
    assert np.allclose(to_numpy(back), rows(tensor, 9), rtol=EPSILON[dtype], atol=0), "not mx.quantize's layout"
    for start in range(0, head_dim, plan.group_size):
        group = exact[..., start : start + plan.group_size]
        step = np.ptp(group, axis=-1, keepdims=True) / (2**bits - 1)
        error = np.abs(rows(tensor, 9)[..., start : start + plan.group_size] - group)
        assert (error <= step + 20 * EPSILON[dtype]).all()


@pytest.mark.parametrize("bits", LOW_BITS)
def test_the_oracle_unpacks_what_mlx_packs(bits):
    x = normal(1, 2, 3, 128)
    arrays = mx.quantize(x, group_size=32, bits=bits)
    expected = to_numpy(mx.dequantize(*arrays, group_size=32, bits=bits))
    assert np.allclose(unpack(*arrays, bits), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1e-5, 3e4])
def test_a_constant_group_comes_back_exactly(value, bits, dtype):
    x = mx.full((1, 1, 2, 80), value, getattr(mx, dtype))
    assert mx.array_equal(dequantize(packed(x, bits)), x)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_16_bits_are_the_rows_themselves(dtype, heads):
    buffer = normal(1, heads, 12, 72, dtype=getattr(mx, dtype))
    x = buffer[:, :, :7]
    tensor = packed(x, 16)
    assert not tensor.plan.is_quantized and tensor.arrays == (tensor.packed,)
    assert tensor.nbytes == heads * 7 * tensor.plan.row_bytes(ITEM_BYTES[dtype]) == heads * 7 * 72 * ITEM_BYTES[dtype]
    assert mx.array_equal(dequantize(tensor), x)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("heads", [1, 2])
def test_packed_rows_do_not_pin_the_buffer_they_came_from(heads, bits):
    buffer = normal(1, heads, 4096, 64)
    with no_collector():
        before = mx.get_active_memory()
        tensor = packed(buffer[:, :, :7], bits)
        del buffer
        assert mx.get_active_memory() - before < -(2**19) and tensor.num_tokens == 7


@pytest.mark.parametrize("bits", [3, 8, 16])
@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_the_first_rows_alone(num_tokens, bits):
    tensor = packed(normal(1, 2, 9, 96), bits)
    assert mx.array_equal(dequantize(tensor, num_tokens), dequantize(tensor)[:, :, :num_tokens])


# --- moving, watching ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [*LOW_BITS, 16])
def test_join_moves_words(bits):
    parts = [packed(normal(1, 2, n, 80, seed=n), bits) for n in (3, 1, 5)]
    joined = join(parts)
    assert joined.num_tokens == 9 and joined.plan == parts[0].plan and joined.nbytes == sum(p.nbytes for p in parts)
    for moved, *originals in zip(joined.arrays, *(p.arrays for p in parts), strict=True):
        assert mx.array_equal(moved, mx.concatenate(originals, axis=2))
    assert mx.array_equal(dequantize(joined), mx.concatenate([dequantize(p) for p in parts], axis=2))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("bits", [4, 16])
def test_the_checksum_sees_every_array_and_both_its_ends(bits, dtype):
    tensors = [packed(normal(1, 2, 5, 64, seed=s, dtype=getattr(mx, dtype)), bits) for s in range(2)]
    whole = [a for t in tensors for a in t.arrays]
    sealed = checksum(whole)
    assert checksum(whole) == sealed != checksum(whole[::-1])
    for array in whole:
        for index in (0, array.nbytes // 2, array.nbytes - 1):
            raw = array.view(mx.uint16) if dtype == "bfloat16" and array.dtype == mx.bfloat16 else array
            mx.eval(raw)  # the same bytes: bfloat16 has no buffer protocol
            flip_byte(raw, index)
            assert checksum(whole) != sealed
            flip_byte(raw, index)
    assert checksum(whole) == sealed


# --- layers that differ ---------------------------------------------------------------------------


def test_first_and_last_layers_may_have_bits_of_their_own():
    spec = make_spec(layers=4, k_dim=64)
    quant = QuantSpec(4, 4, layer_bits=((0, 8, 8), (-1, 16, 6)))
    bits = [(plan.keys.bits, plan.values.bits) for plan in quant.resolve(spec)]
    assert bits == [(8, 8), (4, 4), (4, 4), (16, 6)]
    manager = SharedKVCacheManager(spec, quant)
    prefix = store(manager, range(30))
    found = [(kv.keys.plan.bits, kv.values.plan.bits) for kv in prefix.views[0].segment.layers]
    assert found == bits
    assert prefix.shared_bytes == quant.packed_bytes(spec, 30) == manager.stats().used_bytes
    assert str(quant) == "K4V4 g64 layer0:K8V8 layer-1:K16V6"
    assert QuantSpec.from_plain(json.loads(json.dumps(dataclasses.asdict(quant)))) == quant


@pytest.mark.parametrize("entry", [(0, 8), (0, 7, 8), ("first", 8, 8)])
def test_bits_of_a_layer_are_checked(entry):
    with pytest.raises(InvalidValueError, match="layer_bits: expected"):
        QuantSpec(4, 4, layer_bits=(entry,))


@pytest.mark.parametrize("layer", [4, -5])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(InvalidValueError, match=f"layer_bits: expected one of 4 layers with rows, got {layer}"):
        SharedKVCacheManager(make_spec(layers=4), QuantSpec(4, 4, layer_bits=((layer, 8, 8),)))


def test_bits_are_raised_in_every_layer_and_never_lowered():
    quant = QuantSpec(4, 6, layer_bits=((0, 2, 16),)).raised(5)
    assert (quant.k_bits, quant.v_bits, quant.layer_bits) == (5, 6, ((0, 5, 16),))


def test_odd_fields_are_refused_by_name():
    with pytest.raises(InvalidValueError, match="expected its fields"):
        QuantSpec.from_plain({"k_bits": 4, "flavour": "best"})
