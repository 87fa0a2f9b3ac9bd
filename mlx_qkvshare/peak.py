"""What a step of a prefill needs at once, read off its graph, which is made from shapes and never evaluated."""

from __future__ import annotations

import collections
import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_map

from .attention import quantized_attention
from .context import chunk_size
from .errors import UnsupportedModelError
from .manager import SharedKVCacheManager
from .quantize import Basis, QuantizedTensor
from .segment import KVBlock, LayerKV, LayerState, SegmentView, SharedSegment
from .spec import CacheSpec, LayerPlan, LayerSpec, QuantSpec, StateSpec, TensorPlan, full_precision
from .state_cache import leaves

if TYPE_CHECKING:
    from .model import Outline

STEP_TOKENS = 512
"""Tokens of a prefill step, a session's default."""


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


def logits_bytes(model: Outline) -> int:
    """Of one token."""
    manager: Any = SharedKVCacheManager(model.spec, QuantSpec(), allow_unsafe=True)
    return model.model(mx.array([[0]]), cache=manager.make_caches(_Prefix())).nbytes


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
