"""Attention over packed segments and a private tail against the oracle; the seam; mlx-lm's own tools."""

import contextlib
import copy
import dataclasses
import importlib
import sys
import threading
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from core_helpers import FULL, K8V8, loaded, logits_behind, make_manager, no_collector, normal, stock_logits, store
from mlx_lm import stream_generate
from mlx_lm.models import base
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from oracle import attention as truth
from oracle import rows, to_numpy

from mlx_qkvshare import (
    AgentSession,
    HandoffCoordinator,
    QuantizedAttention,
    QuantSpec,
    SharedKVCacheManager,
    quantized_attention,
)
from mlx_qkvshare.attention import Route
from mlx_qkvshare.errors import InvalidValueError, UnsupportedModelError
from mlx_qkvshare.layer_cache import KVArray
from mlx_qkvshare.quantize import dequantize

PACKED, DEQUANTIZE = QuantizedAttention(route=Route.PACKED), QuantizedAttention(route=Route.DEQUANTIZE)
PROMPT = [0, *range(40, 90), *range(300, 340)]


@dataclass(frozen=True)
class Case:
    """`segments` are (stored, viewed) lengths; `tail` and L are private tokens and queries."""

    segments: tuple[tuple[int, int], ...]
    tail: int
    L: int = 1
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 64
    v_dim: int = 64
    quant: QuantSpec = K8V8
    dtype: str = "float32"

    def build(self):
        """The layer cache, and the oracle's keys and values part by part."""
        manager = make_manager(self.quant, heads=self.kv_heads, k_dim=self.k_dim, v_dim=self.v_dim, dtype=self.dtype)
        prefix = None
        for i, (stored, viewed) in enumerate(self.segments):
            prefix = store(manager, range(1000 * i, 1000 * i + stored), prefix, seed=10 * i)
            prefix.truncate(prefix.num_tokens - stored + viewed)
        prefix = prefix or manager.get_shared_kv_cache(())
        (cache,) = manager.make_caches(prefix)
        keys = [rows(v.segment.layers[0].keys, v.length) for v in prefix.views]
        values = [rows(v.segment.layers[0].values, v.length) for v in prefix.views]
        if self.tail:
            shape, dtype = (1, self.kv_heads, self.tail), getattr(mx, self.dtype)
            tail = [normal(*shape, dim, seed=77 + dim, dtype=dtype) for dim in (self.k_dim, self.v_dim + 1)]
            tail[1] = tail[1][..., :-1]
            cache.update_and_fetch(*tail)
            keys, values = [*keys, to_numpy(tail[0])], [*values, to_numpy(tail[1])]
        return cache, keys, values


# One list drives the oracle test over both routes and all masks.
CASES = {
    "tail only": Case((), 7, 5),
    "one segment": Case(((20, 20),), 0),
    "one segment and tail": Case(((20, 20),), 5, 2),
    "two segments": Case(((33, 33), (18, 18)), 3, 2),
    "three segments": Case(((16, 16), (5, 5), (40, 40)), 9, 5),
    "empty tail, two queries": Case(((24, 24), (9, 9)), 0, 2),
    "a longer view": Case(((40, 25),), 4, 2),
    "a view of one token": Case(((100, 1),), 1),
    "short views in the middle": Case(((40, 11), (64, 1), (30, 29)), 3, 2),
    "a view under half, no tail": Case(((64, 20), (50, 30)), 0),
    "33 queries": Case(((50, 50), (20, 9)), 33, 33),
    "mha": Case(((20, 20),), 3, 2, heads=3, kv_heads=3),
    "gqa 3": Case(((20, 20),), 3, 2, heads=6, kv_heads=2),
    "gqa 8": Case(((20, 13),), 3, 5, heads=8, kv_heads=1),
    "dims 80 and 96": Case(((20, 17),), 3, 2, k_dim=80, v_dim=96),
    "dims 128 and 64": Case(((20, 17),), 3, 2, k_dim=128, v_dim=64),
    "dims 96 and 128, group 64": Case(((20, 9),), 3, 5, k_dim=96, v_dim=128, quant=QuantSpec(8, 8, 64)),
    "K8 V4": Case(((20, 17), (6, 6)), 3, 2, quant=QuantSpec(8, 4, 32)),
    "K4 V8, group 64": Case(((20, 17), (6, 6)), 3, 2, quant=QuantSpec(4, 8, 64)),
    "K3 V16": Case(((20, 7), (6, 6)), 3, 2, quant=QuantSpec(3, 16, 32)),
    "K16 V3": Case(((20, 7), (6, 6)), 3, 2, k_dim=80, quant=QuantSpec(16, 3, 32)),
    "16 bits": Case(((20, 17), (6, 6)), 3, 5, quant=FULL),
    **{f"{n} tokens": Case(((n, n), (n - 1, n - 1)), 2) for n in (63, 64, 65, 127, 128, 129)},
    # P @ V beyond 1,024 tokens with a width that 64 does not divide: a kernel of its own on Metal (mlx#4250)
    "1100 tokens, width 96": Case(((1100, 1100),), 1, heads=2, kv_heads=2, k_dim=96, v_dim=96),
    "1100 tokens, width 32": Case(((1100, 1050),), 1, heads=2, kv_heads=1, v_dim=32),
    "a tail of 65": Case(((128, 65),), 65, 2),
}
MASKS = ("none", "causal", "bool 2-D", "bool per head", "additive 2-D", "additive per head")


def make_mask(kind: str, case: Case, num_tokens: int) -> mx.array | str | None:
    if kind in ("none", "causal"):
        return None if kind == "none" else kind
    shape = (case.L, num_tokens) if "2-D" in kind else (1, case.heads, case.L, num_tokens)
    noise = normal(*shape, seed=5)
    if kind.startswith("additive"):
        return noise
    return (noise > 0) | (mx.arange(num_tokens) == num_tokens - 1)  # no row is empty


@pytest.mark.parametrize("attention", [PACKED, DEQUANTIZE], ids=["packed", "dequantize"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_the_oracle(case, attention):
    cache, keys, values = case.build()
    queries = normal(1, case.heads, case.L, case.k_dim, seed=3)
    before, scale = np.array(queries), case.k_dim**-0.5
    for kind in MASKS:
        mask = make_mask(kind, case, cache.offset)
        for sinks in (None, normal(case.heads, seed=9)):
            found = attention.attend(queries, cache, scale=scale, mask=mask, sinks=sinks)
            expected = truth(
                to_numpy(queries), keys, values, scale=scale,
                mask=np.array(mask) if isinstance(mask, mx.array) else mask,
                sinks=None if sinks is None else to_numpy(sinks),
            )  # fmt: skip
            assert found.shape == expected.shape and found.dtype == queries.dtype
            np.testing.assert_allclose(np.array(found), expected, atol=2e-5, err_msg=f"{kind}, sinks {sinks}")
    assert np.array_equal(np.array(queries), before), "the caller's queries were changed"


@pytest.mark.parametrize("attention", [PACKED, DEQUANTIZE], ids=["packed", "dequantize"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_half_precision_caches(dtype, tolerance, attention):
    case = Case(((40, 33),), 5, 2, quant=QuantSpec(8, 4, 32), dtype=dtype)
    cache, keys, values = case.build()
    queries = normal(1, 4, 2, 64, dtype=getattr(mx, dtype))
    found = attention.attend(queries, cache, scale=0.125, mask="causal")
    assert found.dtype == queries.dtype
    expected = truth(to_numpy(queries), keys, values, scale=0.125, mask="causal")
    np.testing.assert_allclose(to_numpy(found), expected, atol=tolerance)


def test_on_the_cpu_half_precision_scores_are_summed_in_float32():
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("the GPU sums in float32 by itself")
    case = Case(((300, 300),), 0, quant=FULL, dtype="float16")
    cache, keys, values = case.build()
    queries = normal(1, 4, 1, 64, dtype=mx.float16)
    found = to_numpy(PACKED.attend(queries, cache, scale=0.125))
    expected = truth(to_numpy(queries), keys, values, scale=0.125)
    assert np.abs(found - expected).max() < 2.0**-11 * np.abs(expected).max() * 1.5, "more than one rounding to fp16"


# --- the router ------------------------------------------------------------------------------------


def test_the_packed_route_unpacks_nothing_and_the_other_one_does(monkeypatch):
    called = []
    for name in ("layer_cache.dequantize", "parts.unpack"):
        monkeypatch.setattr(f"mlx_qkvshare.{name}", lambda *a: called.append(a))
    cache, *_ = Case(((64, 64),), 0, quant=QuantSpec(4, 4, 32)).build()
    mx.eval(PACKED.attend(normal(1, 4, 1, 64), cache, scale=1.0))
    assert not called
    (view,) = cache.prefix.views
    assert not view.segment.layers[0].keys.is_cheap_to_unpack
    with pytest.raises((AttributeError, TypeError, ValueError)):
        DEQUANTIZE.attend(normal(1, 4, 1, 64), cache, scale=1.0)
    assert called


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="a rule of the CPU")
@pytest.mark.parametrize(
    ("bits", "dtype", "is_cheap"), [(8, "float32", True), (8, "float16", False), (4, "float32", False)]
)
def test_a_cpu_converts_whole_bytes(bits, dtype, is_cheap):
    case = Case(((64, 64), (40, 33)), 5, quant=QuantSpec(bits, bits, 32), dtype=dtype)
    cache = case.build()[0]
    tensor = cache.prefix.views[0].segment.layers[0].values
    assert tensor.is_cheap_to_unpack == is_cheap
    full = mx.dequantize(*tensor.arrays, group_size=32, bits=bits)
    np.testing.assert_allclose(np.array(dequantize(tensor)), np.array(full), rtol=1e-3 if dtype == "float16" else 1e-6)


# --- the seam --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spy(QuantizedAttention):
    """Counts the calls that reach it."""

    calls: list = dataclasses.field(default_factory=list)

    def attend(self, queries, cache, **kwargs):
        self.calls.append((cache, queries.shape[2]))
        return super().attend(queries, cache, **kwargs)


def call(queries, keys, values):
    """What a model does: the function is looked up at call time."""
    return base.scaled_dot_product_attention(queries, keys, values, cache=None, scale=0.125, mask=None)


@pytest.fixture
def cache():
    return Case(((20, 20),), 0).build()[0]


@pytest.fixture
def tagged(cache):
    """Keys and values as a model gets them, for a query of one token."""
    return cache.update_and_fetch(normal(1, 2, 1, 64), normal(1, 2, 1, 64, seed=1))


QUERIES = normal(1, 4, 1, 64, seed=2)


def bindings():
    return {
        name: module.scaled_dot_product_attention
        for name, module in sys.modules.items()
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention")
    }


@pytest.fixture(autouse=True)
def restored():
    """Whatever a test does, every module holds mlx-lm's own function before and after it."""
    original = base.scaled_dot_product_attention
    assert original.__module__ == "mlx_lm.models.base"
    yield
    assert set(bindings().values()) == {original}


def test_tagged_arrays_are_attended(cache, tagged):
    with quantized_attention(Spy()) as spy:
        found = call(QUERIES, *tagged)
    assert spy.calls == [(cache, 1)]
    assert mx.allclose(found, call(QUERIES, *tagged), atol=1e-5)


def test_the_tags_carry_the_true_rows(cache, tagged):
    assert all(isinstance(a, KVArray) and a.shape == (1, 2, 21, 64) for a in tagged)
    assert mx.array_equal(tagged[0], cache.materialize("k")) and mx.array_equal(tagged[1], cache.materialize("v"))


@pytest.mark.parametrize(
    "change",
    [
        lambda k, v, other: (mx.array(k), mx.array(v)),
        lambda k, v, other: (k * 1, v),
        lambda k, v, other: (k, v[:]),
        lambda k, v, other: (k, k),
        lambda k, v, other: (v, v),
        lambda k, v, other: (v, k),
        lambda k, v, other: (k, other[1]),
        lambda k, v, other: (other[0], v),
    ],
    ids=["untagged", "maths on K", "a slice of V", "K as both", "V as both", "swapped", "another's V", "another's K"],
)
def test_anything_but_both_tags_in_their_roles_passes_on(tagged, change):
    other = Case(((20, 20),), 0).build()[0].update_and_fetch(normal(1, 2, 1, 64, seed=5), normal(1, 2, 1, 64, seed=6))
    keys, values = change(*tagged, other)
    with quantized_attention(Spy()) as spy:
        found = call(QUERIES, keys, values)
    assert not spy.calls
    assert mx.array_equal(found, call(QUERIES, keys, values))


def test_names_are_restored_after_an_exception(tagged):
    before = bindings()
    with pytest.raises(RuntimeError, match="in the block"), quantized_attention():
        assert base.scaled_dot_product_attention is not before["mlx_lm.models.base"]
        assert len(set(bindings().values())) == 1, "every module is rebound, or none"
        raise RuntimeError("in the block")
    assert bindings() == before


def test_blocks_nest_and_the_innermost_decides(tagged):
    outer, inner = Spy(), Spy()
    with quantized_attention(outer):
        with pytest.raises(KeyError), quantized_attention(inner):
            call(QUERIES, *tagged)
            raise KeyError
        assert (len(outer.calls), len(inner.calls)) == (0, 1)
        call(QUERIES, *tagged)
    call(QUERIES, *tagged)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)


def test_a_module_imported_inside_the_block_is_routed_and_restored(monkeypatch):
    name = "mlx_lm.models.stablelm"
    monkeypatch.delitem(sys.modules, name, raising=False)
    before = base.scaled_dot_product_attention
    with quantized_attention():
        module = importlib.import_module(name)
        assert module.scaled_dot_product_attention is base.scaled_dot_product_attention is not before
    assert module.scaled_dot_product_attention is before


def test_a_module_that_takes_the_place_of_another_is_restored():
    """`sys.modules` is as long after the swap as it was before: its length alone must not decide."""
    name = "mlx_lm.models.stablelm"
    importlib.import_module(name)
    before = base.scaled_dot_product_attention
    with quantized_attention():
        del sys.modules[name]
        module = importlib.import_module(name)
    found = module.scaled_dot_product_attention
    module.scaled_dot_product_attention = before
    assert found is before


def test_another_packages_patch_stays(monkeypatch):
    from mlx_lm.models import llama

    def foreign(*args, **kwargs):
        raise AssertionError("not called here")

    monkeypatch.setattr(llama, "scaled_dot_product_attention", foreign)
    with quantized_attention():
        assert llama.scaled_dot_product_attention is foreign
    assert llama.scaled_dot_product_attention is foreign


def run_in_thread(target):
    """Run `target` on another thread and raise here what it raised there."""
    raised = []

    def catch():
        try:
            target()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_a_thread_outside_the_block_runs_mlx_lms_own(tagged, cache, monkeypatch):
    sentinel = object()
    monkeypatch.setattr(base, "scaled_dot_product_attention", lambda *a, **k: sentinel)
    with quantized_attention(Spy()) as spy:
        run_in_thread(lambda: call(QUERIES, *tagged) is sentinel or pytest.fail("not passed on"))
        assert not spy.calls
        call(QUERIES, *tagged)
        assert len(spy.calls) == 1


def test_a_thread_that_leaves_its_block_does_not_end_ours(tagged):
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def other():
        with quantized_attention():
            entered.set()
            assert leave.wait(30)
        left.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    with quantized_attention(Spy()) as spy:
        leave.set()
        assert left.wait(30)
        call(QUERIES, *tagged)
        assert len(spy.calls) == 1
    thread.join(30)


# --- placeholders ----------------------------------------------------------------------------------


def update(cache, num_tokens):
    return cache.update_and_fetch(normal(1, 2, num_tokens, 64), normal(1, 2, num_tokens, 64))


def has_nan(arrays) -> bool:
    return any(mx.any(mx.isnan(a)).item() for a in arrays)


@pytest.mark.parametrize(("proven", "other"), [(1, 3), (3, 1)])
def test_placeholders_only_once_this_kind_of_call_was_routed(cache, proven, other):
    with quantized_attention():
        fetched = update(cache, proven)
        assert not has_nan(fetched), "nothing is proven yet"
        call(normal(1, 4, proven, 64), *fetched)
        assert all(mx.all(mx.isnan(a)).item() for a in update(cache, proven))
        assert not has_nan(update(cache, other)), "the other kind of call is not proven"
    assert not has_nan(update(cache, proven)), "outside the block nobody attends in our place"


def test_a_placeholder_has_the_shape_and_is_routed(cache):
    with quantized_attention():
        call(QUERIES, *update(cache, 1))
        keys, values = update(cache, 1)
        assert keys.shape == values.shape == (1, 2, 22, 64) and keys.dtype == mx.float32
        assert not has_nan([call(QUERIES, keys, values)])


def test_other_threads_get_no_placeholders(cache):
    def outside():
        assert not has_nan(update(cache, 1))
        mx.clear_streams()

    with quantized_attention():
        call(QUERIES, *update(cache, 1))
        mx.eval(cache.state)
        run_in_thread(outside)


class ReadsKeys(nn.Module):
    """An attention block that also looks at the keys it fetched, beside its attention call."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x, mask=None, cache=None):
        fetched = []
        watch = type("Watch", (), {})()
        watch.offset, watch.make_mask = cache.offset, cache.make_mask
        watch.update_and_fetch = lambda k, v: fetched.extend(cache.update_and_fetch(k, v)) or tuple(fetched)
        out = self.inner(x, mask, watch)
        return out + 1e-3 * mx.mean(fetched[0])


def with_reader(model):
    model.model.layers[0].self_attn = ReadsKeys(model.model.layers[0].self_attn)


@pytest.mark.parametrize("step", [8, 512])
def test_a_model_that_reads_keys_beside_attention_fails_loudly(step):
    model = loaded(wrap=with_reader)
    manager = SharedKVCacheManager(model.spec, FULL)
    session = AgentSession("reader", model, manager, prefill_step_tokens=step)
    produced = []
    with pytest.raises(UnsupportedModelError, match="llama"):
        session.prefill(PROMPT)
        produced.extend(session.generate_token() for _ in range(4))
    reference = list(PROMPT)
    for token in produced:  # what came out before the refusal is right
        assert token == stock_logits(model.model, reference)[-1].argmax()
        reference.append(token)
    assert all(c.offset == session.num_tokens for c in session.caches)
    manager.check_integrity()


# --- whole models ----------------------------------------------------------------------------------

MLA = {
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 32, "dim_model_base": 64,
    "scale_depth": 1.4, "scale_emb": 1, "v_head_dim": 32,
}  # fmt: skip
LONGROPE = {
    "type": "longrope", "original_max_position_embeddings": 512, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0}
ARCHITECTURES = {
    "llama": {},
    "mistral": {"heads": 8, "kv_heads": 1},
    "qwen2": {"hidden": 256},
    "qwen3": {"head_dim": 96},
    "phi3": {"hidden": 320, "tie_word_embeddings": False},  # head dim 80
    "gemma2": {"query_pre_attn_scalar": 64},
    "minicpm3": {**MLA, "rope_scaling": LONGROPE},
    "deepseek_v2": {**MLA, "rope_scaling": YARN, "moe_intermediate_size": 64, "kv_heads": 4},
}
NEVER_ROUTED = {"gemma2"}  # soft-caps its scores by hand


def arch(name: str):
    return loaded(model_type=name, **ARCHITECTURES[name])


def assert_as_stock(model, session):
    probe = [5, 250]
    found = logits_behind(model.model, session.caches, probe, session._attention)
    expected = stock_logits(model.model, [*session.token_ids, *probe])[-2:]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("route", [Route.PACKED, None, Route.DEQUANTIZE])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharing_at_16_bits_equals_stock(name, route):
    model = arch(name)
    manager, spy = SharedKVCacheManager(model.spec, FULL), Spy(route)
    one, two = (AgentSession(n, model, manager, prefill_step_tokens=40, attention=spy) for n in ("one", "two"))
    one.prefill(PROMPT)
    assert_as_stock(model, one)
    first = [one.generate_token() for _ in range(3)]
    assert first[0] == stock_logits(model.model, PROMPT)[-1].argmax()
    assert_as_stock(model, one)
    fork = one.fork("fork")  # seals
    fork.prefill([7, 8, 9])
    one.prefill([11])
    for session in (one, fork):
        assert_as_stock(model, session)
    fork.rewind(30)  # below the seal: a shorter view
    fork.prefill([33] * 5)
    assert_as_stock(model, fork)
    HandoffCoordinator(manager).request_handoff(fork, two)
    assert two.token_ids == [*PROMPT, *first, 7, 8, 9][:-30] + [33] * 5 and fork.num_tokens == 0
    assert_as_stock(model, two)
    assert two.generate_token() == stock_logits(model.model, two.token_ids[:-1])[-1].argmax()
    assert_as_stock(model, one)
    manager.check_integrity(checksums=True)
    routed = {cache.layer for cache, _ in spy.calls}
    assert routed == (set() if name in NEVER_ROUTED else {0, 1})


@pytest.mark.parametrize("name", ["llama", "gemma2", "minicpm3"])
def test_both_routes_of_a_quantized_model_agree(name):
    model = arch(name)
    with AgentSession("one", model, SharedKVCacheManager(model.spec, K8V8)) as session:
        session.prefill(PROMPT)
        session.seal()
        found = [logits_behind(model.model, session.caches, [5, 6], route) for route in (PACKED, DEQUANTIZE)]
    np.testing.assert_allclose(*found, atol=1e-4)
    assert np.abs(found[0] - stock_logits(model.model, [*PROMPT, 5, 6])[-2:]).max() < 0.05


def test_somebody_who_wrapped_the_function_inside_a_block_may_keep_it():
    from mlx_lm.models import base

    original = base.scaled_dot_product_attention
    try:
        with quantized_attention():
            inner = base.scaled_dot_product_attention
            base.scaled_dot_product_attention = lambda *args, **kwargs: inner(*args, **kwargs)
        wrapped, x = base.scaled_dot_product_attention, normal(1, 2, 3, 32)
        expected = original(x, x, x, cache=None, scale=1.0, mask=None)
        assert mx.array_equal(wrapped(x, x, x, cache=None, scale=1.0, mask=None), expected)
        with quantized_attention():
            assert mx.array_equal(wrapped(x, x, x, cache=None, scale=1.0, mask=None), expected)
    finally:
        base.scaled_dot_product_attention = original


# --- mlx-lm's own tools over our caches --------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["inside", "outside"])
def block(request):
    """Every tool works inside `quantized_attention()`, on packed bytes, and outside, on the exact fallback."""
    with quantized_attention() if request.param else contextlib.nullcontext():
        yield


@pytest.fixture
def sealed():
    """A tiny llama, its manager, and caches over PROMPT, sealed at 16 bits."""
    model = loaded()
    manager = SharedKVCacheManager(model.spec, FULL)
    with AgentSession("sealer", model, manager) as session:
        session.prefill(PROMPT)
        session.seal()
        yield model, manager, copy.deepcopy(session.caches)


def generate(model, prompt, prompt_cache):
    stream = stream_generate(model.model, model.tokenizer, prompt, max_tokens=5, prompt_cache=prompt_cache)
    return [response.token for response in stream]


def test_stream_generate(sealed, block):
    model, manager, caches = sealed
    more = [17, 18, 19]
    expected = generate(model, PROMPT + more, make_prompt_cache(model.model))
    assert generate(model, more, caches) == expected
    assert {c.offset for c in caches} == {len(PROMPT + more) + len(expected)}
    assert trim_prompt_cache(caches, len(more) + len(expected)) == len(more) + len(expected)
    assert generate(model, more, caches) == expected, "after trimming to the shared prefix"
    manager.check_integrity(checksums=True)


def test_kv_bits_do_not_replace_our_caches(sealed):
    model, _, caches = sealed
    before = list(caches)
    options = {"kv_bits": 8, "quantized_kv_start": 0, "max_tokens": 3, "prompt_cache": caches}
    assert len(list(stream_generate(model.model, model.tokenizer, [17], **options))) == 3
    assert caches == before


def test_lru_prompt_cache(sealed, block):
    model, manager, caches = sealed
    lru = LRUPromptCache()
    lru.insert_cache("model", PROMPT, caches)
    assert lru.nbytes == 0, "the shared prefix belongs to the manager"
    queries = {
        "exact": (PROMPT, len(PROMPT)),
        "shorter": ([*PROMPT, 17, 18], len(PROMPT)),
        "longer": (PROMPT[:60], 59),  # one token is left to compute
    }
    for name, (tokens, held) in queries.items():
        found, rest = lru.fetch_nearest_cache("model", tokens)
        assert {c.offset for c in found} == {held} and rest == tokens[held:], name
        if not rest:  # an exact hit: mlx-lm wants one token to go on from
            assert trim_prompt_cache(found, 1) == 1
            rest = tokens[-1:]
        expected = generate(model, tokens, make_prompt_cache(model.model))
        assert generate(model, rest, found) == expected, name
        del found
    assert {c.offset for c in caches} == {len(PROMPT)}, "the stored entry is as it was"
    manager.check_integrity(checksums=True)


def test_a_deepcopy_is_a_fork_that_adds_no_bytes(sealed):
    model, manager, caches = sealed
    slot = caches[0].prefix.views[0].segment.slot
    with no_collector():
        before, active, holders = manager.stats(), mx.get_active_memory(), manager.ref_count(slot)
        forks = [copy.deepcopy(caches) for _ in range(16)]
        assert mx.get_active_memory() == active and manager.stats().used_bytes == before.used_bytes
    assert manager.ref_count(slot) == holders + 16, "one holder for each list, not for each layer"
    assert all(fork[0].prefix is fork[1].prefix is not caches[0].prefix for fork in forks)
    generate(model, [17], forks[0])
    assert {c.offset for c in caches + forks[1]} == {len(PROMPT)}
    del forks
    assert manager.ref_count(slot) == holders


def test_forks_of_a_private_tail_do_not_see_each_other(sealed):
    model, manager, caches = sealed
    with quantized_attention():
        mx.eval(model.model(mx.array([[20, 21, 22]]), cache=caches))
        fork = copy.deepcopy(caches)
        for cache, token in ((caches, 30), (fork, 31)):
            mx.eval(model.model(mx.array([[token, 40]]), cache=cache))
    for cache, token in ((caches, 30), (fork, 31)):
        expected = stock_logits(model.model, [*PROMPT, 20, 21, 22, token, 40, 50])[-1]
        np.testing.assert_allclose(logits_behind(model.model, cache, [50])[-1], expected, atol=1e-4)
    row = manager.spec.private_token_bytes
    assert manager.stats().private_bytes == 2 * 16 * row, "each tail is charged"


def test_a_fork_with_a_private_tail_may_go_to_another_thread(sealed):
    model, _, caches = sealed
    with quantized_attention():
        mx.eval(model.model(mx.array([[20, 21, 22]]), cache=caches))
    mx.eval([cache.state for cache in caches])
    fork, found = copy.deepcopy(caches), []

    def elsewhere():
        try:
            found.append(logits_behind(model.model, fork, [50]))
        finally:
            mx.clear_streams()

    run_in_thread(elsewhere)
    assert np.array_equal(found[0], logits_behind(model.model, caches, [50]))


def test_save_prompt_cache_refuses_rather_than_write_the_tail_alone(sealed, tmp_path):
    _, _, caches = sealed
    with pytest.raises((TypeError, ValueError)):
        save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)


# --- the cache contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_masks_are_those_of_mlx_lms_cache(cache, num_rows, return_array, window):
    stock = make_prompt_cache(loaded().model)[0]
    stock.update_and_fetch(normal(1, 2, 20, 64), normal(1, 2, 20, 64))
    options = {"return_array": return_array, "window_size": window}
    found, expected = (c.make_mask(num_rows, **options) for c in (cache, stock))
    if isinstance(expected, mx.array):
        assert mx.array_equal(found, expected)
    else:
        assert found == expected


def test_what_mlx_lm_would_misread_is_not_there(cache):
    assert not any(hasattr(cache, name) for name in ("__len__", "__bool__", "to_quantized", "bits"))
    assert cache.is_trimmable() and cache.size() == cache.offset == 20 and not cache.empty()
    with pytest.raises(InvalidValueError, match="batch: expected 1 row, got 2"):
        cache.update_and_fetch(normal(2, 2, 1, 64), normal(2, 2, 1, 64))


@pytest.mark.parametrize(("n", "left"), [(0, 25), (3, 22), (5, 20), (6, 19), (25, 0), (99, 0), (-1, 25)])
def test_trim_takes_the_tail_first_and_then_the_shared_tokens(cache, n, left):
    update(cache, 5)
    full = cache.materialize("k")
    assert cache.trim(n) == 25 - left
    assert (cache.offset, cache.shared_tokens, cache.tail_tokens) == (left, min(20, left), max(0, left - 20))
    if left:
        assert mx.array_equal(cache.materialize("k"), full[:, :, :left])
    again = update(cache, 2)[0]
    assert again.shape[2] == left + 2 and mx.array_equal(again[:, :, :left], full[:, :, :left])
