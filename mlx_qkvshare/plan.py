"""`qkvshare plan`: how much memory N agents on one context will need, before anything is loaded.

What a step of a prefill needs is read off its graph, which is made from shapes and never evaluated.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_map

from .attention import quantized_attention
from .context import chunk_size
from .errors import InvalidValueError, UnsupportedModelError
from .layer_cache import tail_capacity
from .manager import SharedKVCacheManager
from .quantize import Basis, QuantizedTensor
from .segment import KVBlock, LayerKV, LayerState, SegmentView, SharedSegment
from .spec import PRESETS, CacheSpec, LayerPlan, LayerSpec, QuantSpec, StateSpec, TensorPlan, full_precision
from .state_cache import leaves

if TYPE_CHECKING:
    from .model import Outline

STEP_TOKENS = 512
"""Tokens of a prefill step, a session's default."""
# Float32 copies of one layer's keys that packing needs beside them.
_PACKING_COPIES, _FITTING_COPIES = 3, 12


@dataclass(frozen=True)
class LayerBytes:
    """Layers that are packed alike, `count` of them: each has `rows` packed rows of `num_heads` heads, of `row_bytes`
    each, and `other_bytes` in full precision (first tokens, means of keys, states)."""

    count: int
    name: str
    rows: int
    num_heads: int
    row_bytes: int
    other_bytes: int

    @property
    def nbytes(self) -> int:
        return self.count * (self.rows * self.num_heads * self.row_bytes + self.other_bytes)


@dataclass(frozen=True)
class Plan:
    """Bytes of `agents` agents with `private_tokens` tokens each behind `shared_tokens` shared ones.

    shared_bytes: the packed prefix, held once. private_bytes: one agent's tail, in full precision, as it is budgeted (a
    state twice). live_bytes: weights, shared and all private. prefill_tail_bytes and prefill_step_bytes: what
    prefilling and sealing the shared tokens needs at once beside the weights. turn_step_bytes: what the last agent's
    prefill of its private tokens needs beside all that lives: a step, and a row of logits that each of the others may
    hold until it decodes. `is_bound`: no more than that; else about so much.
    separate_bytes: what a full-precision cache for each agent holds, at its exact length and without weights.
    preset: the first one that fits, in the order of their bytes, or None.
    """

    dtype: str
    quant: str
    agents: int
    shared_tokens: int
    private_tokens: int
    weights_bytes: int
    shared_bytes: int
    private_bytes: int
    live_bytes: int
    prefill_tail_bytes: int
    prefill_step_bytes: int
    turn_step_bytes: int
    is_bound: bool
    separate_bytes: int
    available_bytes: int
    needed_bytes: int
    fits: bool
    separate_fits: bool
    preset: str | None
    layers: tuple[LayerBytes, ...]

    @property
    def prefill_peak_bytes(self) -> int:
        """While the shared tokens are prefilled and sealed."""
        return self.weights_bytes + self.prefill_tail_bytes + self.prefill_step_bytes

    @property
    def turn_peak_bytes(self) -> int:
        """While the last agent prefills its private tokens and all others are there."""
        return self.live_bytes + self.turn_step_bytes


def plan(
    model: Outline, *, agents: int, shared_tokens: int, private_tokens: int, quant: QuantSpec, available_bytes: int
) -> Plan:
    """What is needed, from shapes alone; nothing is allocated.

    Raises:
        InvalidValueError: a count is not above 0, or an agent's tokens are more than the model's context.
        UnsupportedModelError: the model computes on values, not on shapes alone (dbrx).
    """
    spec = model.spec
    for name, value in (("agents", agents), ("shared", shared_tokens), ("private", private_tokens)):
        if value <= 0:
            raise InvalidValueError(f"[plan] {name}: expected a number above 0, got {value}")
    if (total := shared_tokens + private_tokens) > spec.max_context_tokens:
        raise InvalidValueError(f"[plan] tokens: expected at most {spec.max_context_tokens} of an agent, got {total}")

    weights, private = model.weights_bytes, spec.private_bytes(tail_capacity(private_tokens))
    tail, separate = spec.private_bytes(tail_capacity(shared_tokens)), agents * spec.context_bytes(total)

    prefilled, logits = step_bytes(model, quant, 0, shared_tokens), (agents - 1) * _logits_bytes(model)

    @functools.cache
    def needs(quant: QuantSpec) -> tuple[int, int, int]:
        """Bytes of all that stays, and of the steps of both prefills."""
        live = weights + quant.packed_bytes(spec, shared_tokens) + agents * private
        prefill = max(prefilled, _packing(spec, shared_tokens, quant))
        return live, prefill, logits + step_bytes(model, quant, shared_tokens, private_tokens)

    def needed(quant: QuantSpec) -> int:
        live, prefill, turn = needs(quant)
        return max(weights + tail + prefill, live + turn)

    live, prefill, turn = needs(quant)
    return Plan(
        dtype=spec.dtype,
        quant=str(quant),
        agents=agents,
        shared_tokens=shared_tokens,
        private_tokens=private_tokens,
        weights_bytes=weights,
        shared_bytes=quant.packed_bytes(spec, shared_tokens),
        private_bytes=private,
        live_bytes=live,
        prefill_tail_bytes=tail,
        prefill_step_bytes=prefill,
        turn_step_bytes=turn,
        # Held against peaks on a CPU; a state may be a view that holds a whole step's buffer.
        is_bound=mx.default_device().type == mx.cpu and not spec.has_state,
        separate_bytes=separate,
        available_bytes=available_bytes,
        needed_bytes=needed(quant),
        fits=needed(quant) <= available_bytes,
        separate_fits=weights + separate <= available_bytes,
        preset=next((name for name, it in PRESETS.items() if needed(it) <= available_bytes), None),
        layers=tuple(layer_bytes(spec, quant, shared_tokens)),
    )


def query_heads(spec: CacheSpec, config: Mapping[str, Any]) -> int:
    """Those of a layer, by the config; where it is silent as many as KV heads."""
    nested = [config.get(key) for key in ("text_config", "llm_config", "language_config")]
    parts = [*(it for it in nested if isinstance(it, Mapping)), config]
    names = ("num_attention_heads", "n_heads", "n_head")
    found = (part.get(name) for part in parts for name in names)
    heads = next((it for it in found if isinstance(it, int) and it > 0), 0)
    return max([heads, *(it.n_kv_heads for it in spec.attention)])


def layer_bytes(spec: CacheSpec, quant: QuantSpec, num_tokens: int) -> list[LayerBytes]:
    """The terms of `quant.packed_bytes(spec, num_tokens)`, equal layers together."""
    found: dict[LayerBytes, int] = {}
    for layer, plan in zip(spec.layers, quant.resolve(spec), strict=True):
        if not isinstance(layer, LayerSpec) or plan is None:
            term = LayerBytes(0, "state", 0, 0, 0, layer.nbytes if not isinstance(layer, LayerSpec) else 0)
        else:
            term = _rows_of(spec, quant, layer, plan, num_tokens)
        found[term] = found.get(term, 0) + 1
    return [dataclasses.replace(term, count=count) for term, count in found.items()]


def _rows_of(spec: CacheSpec, quant: QuantSpec, layer: LayerSpec, plan: LayerPlan, num_tokens: int) -> LayerBytes:
    sinks = quant.sinks_of(layer, 0, num_tokens)
    rows, item = layer.sealed_rows(num_tokens) - sinks, spec.item_bytes
    has_centre = quant.is_centred and plan.keys.is_quantized and rows
    centre = layer.n_kv_heads * layer.k_head_dim * item if has_centre else 0
    name = layer.kind if layer.kind == "full" else f"{layer.kind} of {layer.window}"
    row = plan.keys.row_bytes(item) + plan.values.row_bytes(item)
    return LayerBytes(0, name, rows, layer.n_kv_heads, row, sinks * layer.row_bytes(item) + centre)


# --- the peak of a prefill ------------------------------------------------------------------------


def step_bytes(model: Outline, quant: QuantSpec, shared_tokens: int, num_tokens: int) -> int:
    """Bytes that the largest step of prefilling `num_tokens` tokens behind `shared_tokens` sealed ones needs at once,
    beside the weights and all that stays: the packed prefix and the private tail."""
    return max(_most_alive(_graph(model, quant, shared_tokens, *step)) for step in _steps(num_tokens))


def _steps(num_tokens: int) -> list[tuple[int, int, bool]]:
    """The largest steps of a prefill, the last of every size: tokens before it, its own, and is it the last of all?"""
    done = max(0, num_tokens // STEP_TOKENS - 2) * STEP_TOKENS
    found: dict[int, tuple[int, int, bool]] = {}
    while left := num_tokens - done:
        size = chunk_size(left, STEP_TOKENS)
        found[size] = (done, size, size == left)
        done += size
    return list(found.values())


def _logits_bytes(model: Outline) -> int:
    """Of one token."""
    manager: Any = SharedKVCacheManager(model.spec, QuantSpec(), allow_unsafe=True)
    return model.model(mx.array([[0]]), cache=manager.make_caches(_Prefix())).nbytes


def _packing(spec: CacheSpec, num_tokens: int, quant: QuantSpec) -> int:
    copies = _FITTING_COPIES if quant.is_fitted else _PACKING_COPIES
    rows = (it.sealed_rows(num_tokens) * it.n_kv_heads * max(it.k_head_dim, it.v_head_dim) for it in spec.attention)
    return copies * 4 * max(rows, default=0) if quant.is_packed else 0


Node = Mapping[str, Any]
"""A call of `mx.export_function`: name, and inputs and outputs as (name, shape, dtype)."""


def _graph(model: Outline, quant: QuantSpec, shared_tokens: int, tail: int, step: int, is_last: bool) -> list[Node]:
    """The operations of a step of `step` tokens behind `shared_tokens` sealed and `tail` private ones."""
    nodes: list[Node] = []
    with _without_weights(model), quantized_attention():
        caches = _caches(model, quant, shared_tokens, tail, step)

        def run(ids: mx.array) -> list[mx.array]:
            logits = model.model(ids, cache=caches)[0][-1]  # as a session takes it, which copies
            state = [it for cache in leaves(caches) for it in cache.state if isinstance(it, mx.array)]
            return [*state, logits] if is_last else state

        _export(nodes, run, step)
    return [node for node in nodes if node["type"] in ("primitive", "outputs")]


def _export(nodes: list[Node], run: Callable[[mx.array], list[mx.array]], step: int) -> None:
    """Raises `UnsupportedModelError` for a model that looks at what it computes."""
    device = mx.default_device()
    try:
        mx.export_function(nodes.append, run, mx.zeros((1, step), mx.int32))
    except ValueError:  # perhaps a kernel of a GPU that cannot be exported: the same step as a CPU would take it
        nodes.clear()
        mx.set_default_device(mx.cpu)
        try:
            mx.export_function(nodes.append, run, mx.zeros((1, step), mx.int32))
        except ValueError as error:
            raise UnsupportedModelError(f"[plan] expected a model that runs on shapes alone, got: {error}") from error
    finally:
        mx.set_default_device(device)


@contextlib.contextmanager
def _without_weights(model: Outline) -> Iterator[None]:
    """Zeros that take no room for weights; and a copy for `mx.contiguous`, which cannot be exported."""
    weights, contiguous = model.model.parameters(), mx.contiguous
    model.model.update(tree_map(lambda it: _there(it.shape, it.dtype), weights))
    mx.contiguous = lambda a, *args, **options: a + mx.zeros((), a.dtype)
    try:
        yield
    finally:
        mx.contiguous = contiguous
        model.model.update(weights)


def _there(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An array that is counted elsewhere: a view of a single number."""
    return mx.broadcast_to(mx.array(0, dtype), shape)


@dataclass
class _Prefix:
    """A holder of `views` without a budget."""

    views: tuple[SegmentView, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(view.length for view in self.views)

    def reserve_tail(self, num_rows: int) -> None:
        """Nothing is allocated."""


def _caches(model: Outline, quant: QuantSpec, shared_tokens: int, tail: int, step: int) -> list[Any]:
    """A session's caches before that step."""
    spec, dtype = model.spec, getattr(mx, model.spec.dtype)
    manager: Any = SharedKVCacheManager(spec, quant, allow_unsafe=True)
    first = manager.make_caches(_Prefix())
    model.model(mx.array([[0, 0]]), cache=first)  # lazy: the states' shapes
    layers: list[Any] = leaves(first)
    states = {
        cache.layer: tuple(_there(it.shape, it.dtype) for it in cache.cache)
        for cache in layers
        if isinstance(cache.spec, StateSpec)
    }
    views = _sealed(spec, quant, shared_tokens, states) if shared_tokens else ()
    caches = manager.make_caches(_Prefix(views))
    model.model(mx.array([[0, 0]]), cache=caches)  # which layers' attention is routed
    standing: list[Any] = leaves(caches)
    for cache in standing:
        cache.reset_tail()
        if isinstance(cache.spec, StateSpec):
            cache.cache = list(states[cache.layer])
            cache.commit(tail)
            continue
        cache.set_length(shared_tokens, tail)
        rows = cache.spec.tail_rows(tail + step)
        is_moved = rows < tail + step  # a window's rows, to a new buffer
        shape = (1, cache.spec.n_kv_heads, min(tail, cache.spec.window) if is_moved else rows)
        buffers = [_there((*shape, dim), dtype) for dim in (cache.spec.k_head_dim, cache.spec.v_head_dim)]
        if is_moved:
            cache.put_back((buffers[0], buffers[1]))
        else:
            cache.keys, cache.values = buffers
    return caches


def _sealed(
    spec: CacheSpec, quant: QuantSpec, num_tokens: int, states: Mapping[int, tuple[mx.array, ...]]
) -> tuple[SegmentView, ...]:
    """A segment of `num_tokens` tokens, as it is packed."""
    layers: list[LayerKV | LayerState] = []
    for index, (layer, plan) in enumerate(zip(spec.layers, quant.resolve(spec), strict=True)):
        if not isinstance(layer, LayerSpec) or plan is None:
            layers.append(LayerState(states[index]))
            continue
        sinks = quant.sinks_of(layer, 0, num_tokens)
        whole = LayerPlan(full_precision(layer.k_head_dim), full_precision(layer.v_head_dim))
        parts = ((sinks, whole), (layer.sealed_rows(num_tokens) - sinks, plan))
        layers.append(LayerKV(tuple(_block(spec, quant, layer, it, rows) for rows, it in parts if rows)))
    ids: Any = range(num_tokens)
    segment = SharedSegment(0, 0, ids, tuple(layers), quant, spec.fingerprint.digest, "")
    return (SegmentView(segment, num_tokens),)


def _block(spec: CacheSpec, quant: QuantSpec, layer: LayerSpec, plan: LayerPlan, rows: int) -> KVBlock:
    dtype, shape = getattr(mx, spec.dtype), (1, layer.n_kv_heads)
    values = Basis(is_rotated=True) if quant.is_rotated else None
    centre = _there((*shape, 1, layer.k_head_dim), dtype)
    keys = Basis(quant.is_rotated, centre) if quant.is_centred else values

    def tensor(plan: TensorPlan, basis: Basis | None) -> QuantizedTensor:
        if not plan.is_quantized:
            return QuantizedTensor(plan, dtype, _there((*shape, rows, plan.head_dim), dtype))
        packed = _there((*shape, rows, plan.padded_dim * plan.bits // 32), mx.uint32)
        scales = _there((*shape, rows, plan.padded_dim // plan.group_size), dtype)
        return QuantizedTensor(plan, dtype, packed, scales, scales, basis)

    return KVBlock(tensor(plan.keys, keys), tensor(plan.values, values))


# --- what a graph holds at once -------------------------------------------------------------------

_QUEUED = 120  # dispatches that MLX's CPU backend queues: 11 tasks of 10, and one that is not full yet
_WIDTH = 20  # of the breadth-first order in which MLX evaluates
_VIEWS = {
    "Broadcast",
    "Transpose",
    "ExpandDims",
    "Squeeze",
    "Slice",
    "Split",
    "AsStrided",
    "StopGradient",
    "Copy",
    "View",
}
_STRIDED = {"Transpose", "Slice", "Split"}
_RESHAPES = {"Reshape", "Flatten", "Unflatten"}  # views, unless what they are of is strided
_IN_PLACE = {
    *("Abs", "Add", "AsType", "Cos", "Divide", "Erf", "Exp", "Log", "Maximum", "Minimum", "Multiply", "Negative"),
    *("Power", "Select", "Sigmoid", "Sin", "Softmax", "Sqrt", "Square", "Subtract", "Tanh"),
}


def _most_alive(nodes: Sequence[Node]) -> int:
    """The most bytes that the graph's arrays hold at once. An array is let go of when the last operation that reads it
    has run, and so many dispatches are queued before it that may not have."""
    nodes = _in_order(nodes)
    owners, made = _buffers(nodes)
    last = {owners[name]: place for place, node in enumerate(nodes) for name in _inputs(node) if name in owners}
    dying: dict[int, list[str]] = collections.defaultdict(list)
    for owner, place in last.items():
        dying[place].append(owner)
    sizes = {name: size for arrays, _ in made for name, size in arrays.items()}
    queue: collections.deque[tuple[int, int]] = collections.deque()
    alive = most = clock = 0
    for place, (arrays, copied) in enumerate(made):
        clock += 2 if arrays or copied else 1  # the operation, and its inputs' end
        while queue and queue[0][0] <= clock - _QUEUED:
            alive -= queue.popleft()[1]
        alive += sum(arrays.values()) + copied
        most = max(most, alive)
        unread = sum(size for name, size in arrays.items() if name not in last)
        queue.append((clock, copied + unread + sum(sizes.get(name, 0) for name in dying[place])))
    return most


def _inputs(node: Node) -> list[str]:
    """What it reads; whoever asked for the outputs reads them after all."""
    return [name for name, *_ in node["outputs" if node["type"] == "outputs" else "inputs"]]


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """The operations in the order in which MLX evaluates them, then the outputs: breadth first from these, of limited
    width, and backwards."""
    nodes = sorted(nodes, key=lambda node: node["type"] == "outputs")
    makers = {name: place for place, node in enumerate(nodes[:-1]) for name, *_ in node["outputs"]}
    inputs = [[makers[name] for name in _inputs(node) if name in makers] for node in nodes]
    readers = collections.Counter(maker for found in inputs for maker in found)
    tape, waiting, place = [len(nodes) - 1], list[tuple[int, int]](), 0
    while place < len(tape) or waiting:
        if place < len(tape):
            node, start, place = tape[place], 0, place + 1
        else:
            node, start = waiting.pop()
        for index in range(start, len(inputs[node])):
            if len(tape) - place >= _WIDTH:
                waiting.append((node, index))
                break
            readers[maker := inputs[node][index]] -= 1
            if readers[maker] == 0:
                tape.append(maker)
    return [nodes[index] for index in reversed(tape)]


def _buffers(nodes: Sequence[Node]) -> tuple[dict[str, str], list[tuple[dict[str, int], int]]]:
    """Of every array the one whose buffer it lies in; and by operation the bytes of new buffers, and of copies that
    end with it."""
    uses = collections.Counter(name for node in nodes for name in _inputs(node))
    owners: dict[str, str] = {}
    sizes: dict[str, int] = {}
    made: list[tuple[dict[str, int], int]] = []
    alone, strided, narrowed = set[str](), set[str](), set[str]()  # alone: nobody else reads the buffer
    for node in nodes[:-1]:
        kind, arrays, copied = node["name"], dict[str, int](), 0
        source = node["inputs"][0] if node["inputs"] else ("", (), mx.bool_)
        is_view = kind in _VIEWS or (kind in _RESHAPES and source[0] not in strided) or kind == "SliceUpdate"
        if kind in _IN_PLACE:
            size = _nbytes(node["outputs"][0])
            donors = [it for it in node["inputs"] if it[0] in alone and sizes.get(owners[it[0]]) == size]
            is_view, source = bool(donors), donors[0] if donors else source
        if kind == "Matmul":  # takes rows that follow each other only
            copied = sum(_nbytes(it) for it in node["inputs"] if it[0] in narrowed)
        for output in node["outputs"]:
            name = output[0]
            owners[name] = owners.get(source[0], source[0]) if is_view else name
            if not is_view:
                arrays[name] = sizes[name] = _nbytes(output)
            elif kind in _VIEWS | _RESHAPES:
                strided |= {name} if kind in _STRIDED or source[0] in strided else set()
                is_narrow = kind == "Slice" and output[1][-1:] != source[1][-1:]
                narrowed |= {name} if is_narrow or source[0] in narrowed else set()
            alone |= {name} if uses[name] == 1 and (not is_view or source[0] in alone) else set()
        made.append((arrays, copied))
    return owners, made


def _nbytes(array: tuple[str, Sequence[int], mx.Dtype]) -> int:
    size = math.prod(array[1]) * array[2].size
    return size + min(size, 2 * mmap.PAGESIZE)  # MLX hands out cached buffers up to that much too large
