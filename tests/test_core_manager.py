"""The manager's bookkeeping: bytes, matching, eviction, compaction, holders, and a check that finds faults."""

import dataclasses
import gc
import itertools
import random
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import K8V8, flip_byte, make_manager, no_collector, random_layers, store, words

from mlx_qkvshare import QuantSpec, SharedKVCacheManager
from mlx_qkvshare.errors import (
    BudgetExceededError,
    ContextLimitError,
    HandoffError,
    IntegrityError,
    InvalidValueError,
    NonFiniteError,
    SessionClosedError,
)

PACKED, PRIVATE = 2 * (32 + 8), 2 * 32 * 4  # bytes of one token: 1 layer, 1 head, dim 32, K8V8 in float32


@pytest.fixture
def manager():
    return make_manager()


def budgeted(num_packed_tokens: int) -> SharedKVCacheManager:
    return make_manager(budget_bytes=num_packed_tokens * PACKED)


def slots(prefix):
    return [view.segment.slot for view in prefix.views]


def spans(prefix):
    return [(view.segment.slot, view.length) for view in prefix.views]


def snapshot(manager):
    """All that a failing call must leave as it was."""
    return manager.stats(), [(s.slot, s.start, s.token_ids, s.compute_checksum()) for s in manager.segments()]


# --- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [K8V8, QuantSpec(8, 4, 64), QuantSpec(16, 3, 32), QuantSpec(16, 16)], ids=str)
def test_used_bytes_are_the_arrays_bytes(quant):
    manager = make_manager(quant, layers=3, heads=2, k_dim=96, v_dim=80)
    held = [store(manager, range(7)), store(manager, range(100, 111))]
    expected = sum(a.nbytes for prefix in held for segment in words(prefix) for a in segment)
    stats = manager.stats()
    assert stats.used_bytes == expected == 18 * manager.packed_token_bytes == sum(p.shared_bytes for p in held)
    assert stats.free_bytes == manager.budget_bytes - expected
    assert (stats.protected_bytes, stats.evictable_bytes, stats.num_segments) == (expected, 0, 2)
    held.pop().release()
    assert manager.stats().evictable_bytes == 11 * manager.packed_token_bytes
    manager.check_integrity(checksums=True)


@pytest.mark.parametrize("budget", [0, -1, 1.5, None])
def test_the_budget_is_validated(budget):
    with pytest.raises(InvalidValueError, match="budget_bytes"):
        make_manager(budget_bytes=budget)


def test_an_allocation_is_budgeted_until_it_is_stored_or_given_back(manager):
    slot = manager.allocate_shared_slot(10)
    assert slot.nbytes == manager.stats().used_bytes == manager.stats().protected_bytes == 10 * PACKED
    manager.free_slot(slot)
    manager.free_slot(slot)
    assert manager.stats().used_bytes == 0
    prefix = store(manager, range(10))
    manager.free_slot(dataclasses.replace(slot, slot=slots(prefix)[0]))
    assert prefix.num_tokens == 10 and len(manager.segments()) == 1, "a stored slot is not given back"


@pytest.mark.parametrize(
    "ask",
    [
        lambda manager, held: manager.allocate_shared_slot(7),
        lambda manager, held: manager.allocate_shared_slot(7, replacing=held),
        lambda manager, held: held.reserve_tail(6 * PACKED // PRIVATE + 1),
        lambda manager, held: store(manager, range(100, 107), held),
    ],
    ids=["allocate", "allocate behind", "tail", "store"],
)
def test_budget_exceeded_leaves_everything_as_it_was(ask):
    manager = budgeted(16)
    held, _ = store(manager, range(10)), store(manager, range(50, 54)).release()
    before = snapshot(manager)
    with pytest.raises(BudgetExceededError, match=rf"needs \d+ bytes; of the budget of {16 * PACKED} bytes"):
        ask(manager, held)
    assert snapshot(manager) == before, "4 tokens could have been evicted, which was not enough"
    manager.check_integrity(checksums=True)
    manager.allocate_shared_slot(6)


def test_private_tails_are_charged():
    manager = make_manager(budget_bytes=20 * PRIVATE)
    one, two = manager.get_shared_kv_cache(()), manager.get_shared_kv_cache(())
    one.reserve_tail(10)
    one.reserve_tail(3)  # a smaller need changes nothing
    assert one.private_bytes == manager.stats().private_bytes == manager.stats().protected_bytes == 10 * PRIVATE
    with pytest.raises(BudgetExceededError, match="a private tail of 11 tokens"):
        two.reserve_tail(11)
    assert two.private_bytes == 0
    two.reserve_tail(10)
    one.release_tail()
    two.release()
    assert manager.stats().used_bytes == 0
    with pytest.raises(SessionClosedError):
        two.reserve_tail(1)
    manager.check_integrity()


def test_a_tail_makes_room_for_its_own_segment():
    manager = make_manager(budget_bytes=10 * PRIVATE)
    prefix = manager.get_shared_kv_cache(())
    prefix.reserve_tail(10)
    store(manager, range(10), prefix)  # no free byte is left, and none is needed
    assert manager.stats().used_bytes == 10 * PACKED and prefix.private_bytes == 0
    manager.check_integrity()


# --- store -----------------------------------------------------------------------------------------


def nan_in(layer, index):
    def damage(layers):
        rows = np.array(layers[layer][index])
        rows[..., -1, -1] = np.nan if index else np.inf
        layers[layer] = tuple(mx.array(rows) if i == index else x for i, x in enumerate(layers[layer]))

    return damage


def cut(layers):
    layers[1] = (layers[1][0][:, :, :-1], layers[1][1])


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (nan_in(0, 0), NonFiniteError, "layer 0 keys"),
        (nan_in(2, 1), NonFiniteError, "layer 2 values"),
        (cut, InvalidValueError, "layer 1 keys: expected shape"),
        (list.pop, InvalidValueError, "layers: expected 3, got 2"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_changes(damage, error, named, consume):
    manager = make_manager(layers=3)
    prefix, before = store(manager, range(4)), None
    before = snapshot(manager)
    layers = random_layers(manager.spec, 5)
    damage(layers)
    kept = list(layers)
    slot = manager.allocate_shared_slot(5)
    with pytest.raises(error, match=named):
        manager.quantize_and_store(slot, range(5), layers, prefix=prefix, consume=consume)
    assert snapshot(manager) == before and prefix.num_tokens == 4
    assert all(a is b for a, b in zip(layers, kept, strict=True)), "the caller's rows are still there"
    manager.check_integrity()


def test_a_slot_takes_what_it_was_allocated_for_once(manager):
    slot, layers = manager.allocate_shared_slot(5), random_layers(manager.spec, 4)
    with pytest.raises(InvalidValueError, match="expected 5 as allocated, got 4"):
        manager.quantize_and_store(slot, range(4), layers)
    assert manager.stats().used_bytes == 0
    slot = manager.allocate_shared_slot(4)
    prefix = manager.quantize_and_store(slot, range(4), layers)
    with pytest.raises(InvalidValueError, match="expected an empty slot, got a stored one"):
        manager.quantize_and_store(slot, range(4), layers)
    assert prefix.token_ids == [0, 1, 2, 3]
    manager.check_integrity(checksums=True)


def test_consumed_rows_are_let_go(manager):
    layers = random_layers(manager.spec, 4)
    manager.quantize_and_store(manager.allocate_shared_slot(4), range(4), layers, consume=True)
    assert layers == [None]


def test_more_tokens_than_positions_are_refused():
    manager = make_manager(max_tokens=10)
    prefix = store(manager, range(8))
    before = snapshot(manager)
    for arguments in ({"num_tokens": 11}, {"num_tokens": 3, "replacing": prefix}):
        with pytest.raises(ContextLimitError, match="needed 11 positions, available 10"):
            manager.allocate_shared_slot(**arguments)
    slot = manager.allocate_shared_slot(3)  # fits alone, not behind the prefix
    with pytest.raises(ContextLimitError, match="needed 11 positions, available 10"):
        manager.quantize_and_store(slot, range(3), random_layers(manager.spec, 3), prefix=prefix)
    assert snapshot(manager) == before
    with pytest.raises(InvalidValueError, match="num_tokens: expected > 0, got 0"):
        manager.allocate_shared_slot(0)
    store(manager, range(2), prefix)


# --- matching --------------------------------------------------------------------------------------


def sealed(manager, token_ids):
    """What a session does: match, then seal the rest behind it."""
    prefix = manager.match_prefix(token_ids)
    rest = list(token_ids)[prefix.num_tokens :]
    return store(manager, rest, prefix) if rest else prefix


@pytest.mark.parametrize(
    ("stored", "wanted", "num_tokens", "num_views"),
    [
        ([], "ab", 0, 0),
        (["abc"], "", 0, 0),
        (["abc"], "xabc", 0, 0),
        (["abc"], "abc", 3, 1),
        (["abc"], "abcd", 3, 1),
        (["abc"], "ab", 2, 1),
        (["abc"], "abx", 2, 1),
        (["abc", "abcdef"], "abcdef", 6, 2),
        (["abc", "abcdef"], "abcdexx", 5, 2),
        (["abcdef", "abcxyz"], "abcxyz", 6, 2),  # a child leaves its parent at token 3
        (["abcdef", "abcxyz"], "abcdef", 6, 1),
        (["abcdef", "abxyz", "abxq"], "abxq", 4, 3),
        (["abcdef", "abxyz", "abcxx"], "abcxx", 5, 2),  # two children that leave at different tokens
        (["ab", "abc", "abd", "abde"], "abdef", 4, 3),  # the longest of the siblings
        (["aaaa", "ab"], "ab", 2, 2),
        (["aab", "aaaab"], "aaaab", 5, 2),
    ],
)
def test_the_longest_stored_prefix_is_found(manager, stored, wanted, num_tokens, num_views):
    for text in stored:
        sealed(manager, text)
    found = manager.match_prefix(wanted)
    assert (found.num_tokens, len(found.views)) == (num_tokens, num_views)
    assert found.token_ids == list(wanted[:num_tokens])
    manager.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_matching_equals_brute_force(seed):
    """Also over what sessions seal that did not know of each other: the same tokens stand twice, and overlap."""
    draw, manager, held, known = random.Random(seed), make_manager(), [], []
    for _ in range(60):
        text = "".join(draw.choices("ab", k=draw.randint(1, 12)))
        expected = max((_lcp(text, other) for other in known), default=0)
        found = manager.match_prefix(text)
        assert (found.num_tokens, found.token_ids) == (expected, list(text[:expected]))
        stops = [view.stop for view in found.views]
        assert [view.start for view in found.views] == [0, *stops][: len(stops)]
        if draw.random() < 0.3:
            held.append(sealed(manager, text))
            known.append(text)
        elif draw.random() < 0.4:
            behind = draw.choice(held).fork() if held else None
            if behind is not None:
                behind.truncate(draw.randint(0, behind.num_tokens))
            held.append(store(manager, text, behind))
            known.append("".join(held[-1].token_ids))
        if held and draw.random() < 0.3:
            manager.compact(draw.choice(held))
        manager.check_integrity()


def _lcp(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_hits_and_reused_tokens_are_counted(manager):
    store(manager, range(10))
    manager.match_prefix(range(7))
    manager.match_prefix([99])
    stats = manager.stats()
    assert (stats.num_hits, stats.num_misses, stats.reused_tokens) == (1, 1, 7)


# --- dedupe ----------------------------------------------------------------------------------------


def test_what_stands_sealed_already_is_not_sealed_again(manager):
    base = store(manager, "abc")
    one, two, three = base.fork(), base.fork(), base.fork()
    store(manager, "defg", one)
    two.reserve_tail(4)
    assert manager.extend_if_sealed(two, "def")
    assert two.token_ids == list("abcdef") and slots(two) == slots(one) and two.private_bytes == 0
    three.reserve_tail(4)
    before = snapshot(manager)
    for text in ("defgh", "x", ""):
        assert not manager.extend_if_sealed(three, text)
    assert snapshot(manager) == before and three.private_bytes == 4 * PRIVATE
    assert manager.ref_count(slots(one)[1]) == 2
    manager.check_integrity()


def test_a_shorter_view_is_extended_within_its_own_segment(manager):
    prefix = store(manager, "abcdef")
    prefix.truncate(2)
    assert manager.extend_if_sealed(prefix, "cde")
    assert spans(prefix) == [(1, 5)]
    manager.check_integrity()


# --- eviction --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "victim"),
    [
        (lambda manager, held: None, 0),
        (lambda manager, held: manager.match_prefix([0]).release(), 1),
        (lambda manager, held: [manager.match_prefix([i]).release() for i in (1, 0)], 2),
        (lambda manager, held: manager.get_shared_kv_cache([(1, 2)]).release(), 1),
    ],
    ids=["order of release", "a match is a use", "two uses", "a handoff is a use"],
)
def test_the_least_recently_used_goes_first(use, victim):
    manager = budgeted(30)
    held = [store(manager, range(i, i + 10)) for i in range(3)]
    for prefix in held:
        prefix.release()
    use(manager, held)
    store(manager, range(90, 100))
    assert [manager.match_prefix([i]).num_tokens for i in range(3)] == [int(i != victim) for i in range(3)]
    assert manager.stats().num_evictions == 1
    manager.check_integrity()


@pytest.mark.parametrize("let_go", [lambda p: p.release(), lambda p: p.truncate(0)], ids=["release", "truncate"])
def test_letting_go_is_a_use(let_go):
    manager = budgeted(20)
    first, second = store(manager, range(10)), store(manager, range(50, 60))
    second.release()
    let_go(first)
    store(manager, range(90, 100))
    assert manager.match_prefix([0]).num_tokens == 1 and manager.match_prefix([50]).num_tokens == 0


def test_leaves_go_before_what_they_were_computed_behind():
    manager = budgeted(30)
    chain = store(manager, range(20, 30), store(manager, range(10)))
    chain.release()
    manager.match_prefix([*range(10), *range(20, 30)]).release()
    for num_segments in (2, 1, 0):
        assert len(manager.segments()) == num_segments
        assert [s.start for s in manager.segments()] == [0, 10][:num_segments]
        if num_segments:
            manager.allocate_shared_slot(10 if num_segments == 1 else 20)
        manager.check_integrity()


def test_what_is_held_is_never_evicted():
    manager = budgeted(30)
    child = store(manager, range(20, 30), store(manager, range(10)))
    sibling = store(manager, range(50, 60), manager.match_prefix(range(10)))
    sibling.release()
    before = words(child)
    with pytest.raises(BudgetExceededError, match=f"0 are free and {10 * PACKED} evictable"):
        manager.allocate_shared_slot(11)
    manager.allocate_shared_slot(10)
    assert manager.evict_unreferenced() == 0
    assert child.num_tokens == 20 and len(manager.segments()) == 2
    assert all(np.array_equal(a, b) for x, y in zip(words(child), before, strict=True) for a, b in zip(x, y))  # noqa: B905
    child.release()
    assert manager.evict_unreferenced() == 2 and not manager.segments()
    manager.check_integrity()


def test_a_freed_slot_is_named_and_never_used_again(manager):
    stale = spans(store(manager, range(4)))
    manager.evict_unreferenced()
    store(manager, range(4))
    with pytest.raises(HandoffError, match=f"slot {stale[0][0]}: expected a live segment, got a freed slot"):
        manager.get_shared_kv_cache(stale)
    with pytest.raises(InvalidValueError, match=f"slot {stale[0][0]}: expected a live slot"):
        manager.ref_count(stale[0][0])


# --- holders ---------------------------------------------------------------------------------------


def test_the_ref_count_is_the_number_of_holders(manager):
    prefix = store(manager, "defg", store(manager, "abc"))
    first, second = slots(prefix)
    fork, matched = prefix.fork(), manager.match_prefix("abcde")
    assert [manager.ref_count(s) for s in (first, second)] == [3, 3]
    assert slots(fork) == slots(prefix) and spans(matched)[1] == (second, 2)
    fork.truncate(3)
    assert [manager.ref_count(s) for s in (first, second)] == [3, 2]
    fork.truncate(0)
    matched.release()
    matched.release()
    assert [manager.ref_count(s) for s in (first, second)] == [1, 1]
    assert prefix.token_ids == list("abcdefg") and fork.num_tokens == matched.num_tokens == 0
    manager.check_integrity()


def test_a_fork_adds_no_bytes(manager):
    prefix = store(manager, range(100))
    with no_collector():
        used, active = manager.stats().used_bytes, mx.get_active_memory()
        forks = [prefix.fork() for _ in range(50)]
        assert (manager.stats().used_bytes, mx.get_active_memory()) == (used, active)
    assert all(fork.views[0].segment is prefix.views[0].segment for fork in forks)


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_dropped_holder_is_released(manager, in_a_cycle):
    prefix = store(manager, range(10))
    slot, fork = slots(prefix)[0], prefix.fork()
    fork.reserve_tail(5)
    if in_a_cycle:
        fork.itself = fork
    del fork
    gc.collect()
    assert manager.ref_count(slot) == 1 and manager.stats().private_bytes == 0 and manager.stats().num_holders == 1
    manager.check_integrity()


@pytest.mark.parametrize(
    "use",
    [
        lambda manager, prefix: store(manager, "xy", prefix),
        lambda manager, prefix: manager.extend_if_sealed(prefix, "abc"),
        lambda manager, prefix: prefix.fork(),
    ],
    ids=["store", "extend", "fork"],
)
def test_a_released_holder_takes_nothing_more(manager, use):
    """Else it would hold for ever: another thread may close a session in the middle of its seal."""
    keep, prefix = store(manager, "abc"), store(manager, "abd")
    prefix.release()
    before = snapshot(manager)
    with pytest.raises(SessionClosedError):
        use(manager, prefix)
    assert snapshot(manager) == before
    manager.check_integrity()
    keep.release()
    manager.evict_unreferenced()
    assert not manager.segments()


def test_a_holder_released_during_its_store_leaves_no_segment(manager, monkeypatch):
    prefix = store(manager, "abc")
    original = manager.check_storable

    def close_meanwhile(*arguments):
        prefix.release()
        return original(*arguments)

    monkeypatch.setattr(manager, "check_storable", close_meanwhile)
    with pytest.raises(SessionClosedError):
        store(manager, "def", prefix)
    manager.check_integrity()
    manager.evict_unreferenced()
    assert not manager.segments() and manager.stats().used_bytes == 0


# --- compaction ------------------------------------------------------------------------------------


def chain_of(manager, *lengths):
    prefix, ids = manager.get_shared_kv_cache(()), itertools.count()
    for i, n in enumerate(lengths):
        store(manager, itertools.islice(ids, n), prefix, seed=i)
    return prefix


@pytest.mark.parametrize("quant", [K8V8, QuantSpec(4, 16, 32)], ids=str)
def test_compaction_moves_words(quant):
    manager = make_manager(quant, layers=2, heads=2, k_dim=80)
    prefix = chain_of(manager, 5, 3)
    fork, before = prefix.fork(), words(prefix)
    fork.truncate(6)
    assert manager.compact(prefix) == 1
    (after,) = words(prefix)
    for moved, *parts in zip(after, *before, strict=True):
        assert np.array_equal(moved, np.concatenate(parts, axis=2))
    assert (prefix.token_ids, fork.token_ids) == (list(range(8)), list(range(6)))
    assert fork.views[0].segment is prefix.views[0].segment
    assert manager.stats().num_compactions == 1 and manager.stats().used_bytes == 8 * manager.packed_token_bytes
    manager.check_integrity(checksums=True)


def busy(manager, prefix):
    other = prefix.fork()
    other.is_busy = True
    return other


@pytest.mark.parametrize(
    "prevent",
    [
        busy,
        lambda manager, prefix: manager.match_prefix(range(5)),
        lambda manager, prefix: manager.match_prefix(range(2)),
        lambda manager, prefix: store(manager, [77], manager.match_prefix(range(4))).release(),
        lambda manager, prefix: store(manager, [77], manager.match_prefix(range(5))).release(),
    ],
    ids=["busy holder", "other holders", "a shorter holder", "a child before the end", "a second child"],
)
def test_neighbours_that_differ_are_not_joined(manager, prevent):
    prefix = chain_of(manager, 5, 4)
    held, before = prevent(manager, prefix), spans(prefix)
    assert manager.compact(prefix) == 0
    assert spans(prefix) == before and (held is None or held.views)
    manager.check_integrity()


def test_a_neighbour_behind_a_shorter_view_is_not_joined(manager):
    prefix = store(manager, range(5))
    prefix.truncate(3)
    store(manager, range(50, 54), prefix)
    assert manager.compact(prefix) == 0 and prefix.token_ids == [0, 1, 2, 50, 51, 52, 53]


def test_a_long_neighbour_is_left_alone(manager):
    assert manager.compact(chain_of(manager, 9, 4)) == 0
    assert manager.compact(chain_of(manager, 8, 4)) == 1


def test_ones_own_call_does_not_prevent_it(manager):
    prefix = chain_of(manager, 5, 4)
    prefix.is_busy = True
    assert manager.compact(prefix) == 1


def test_children_of_what_was_joined_stay_reachable(manager):
    prefix = chain_of(manager, 3, 3)
    child = store(manager, [77, 78], prefix.fork())
    manager.compact(prefix)
    child.release()
    assert manager.match_prefix([*range(6), 77, 78]).num_tokens == 8
    assert manager.match_prefix(range(5)).num_tokens == 5
    manager.check_integrity()


def test_packages_made_before_still_resolve(manager):
    prefix = manager.get_shared_kv_cache(())
    ids, packages = itertools.count(), []
    for n in (4, 3, 5, 2, 6, 1, 9):
        store(manager, itertools.islice(ids, n), prefix, seed=n)
        described = spans(prefix)
        packages += [[*described[:-1], (described[-1][0], length)] for length in range(1, n + 1)]
        manager.compact(prefix)
    assert manager.stats().num_compactions > 2
    for package in packages:
        resolved = manager.get_shared_kv_cache(package)
        assert resolved.token_ids == list(range(resolved.num_tokens)) and resolved.num_tokens > 0
    assert [manager.get_shared_kv_cache(p).num_tokens for p in packages] == list(range(1, 31))
    manager.check_integrity()


@pytest.mark.parametrize("change", [lambda s, n: [(s, n + 1)], lambda s, n: [(s, 0)], lambda s, n: [(s, n), (s, n)]])
def test_spans_that_misfit_are_refused(manager, change):
    (span,) = spans(chain_of(manager, 4))
    with pytest.raises(HandoffError, match="slot 1: expected"):
        manager.get_shared_kv_cache(change(*span))
    manager.check_integrity()


def test_a_conversation_of_50_turns_keeps_few_segments(manager):
    prefix, ids, most, moved = manager.get_shared_kv_cache(()), itertools.count(), 0, 0
    draw = random.Random(0)
    for turn in range(50):
        store(manager, itertools.islice(ids, draw.randint(5, 60)), prefix, seed=turn)
        joins_before = manager.stats().num_compactions
        manager.compact(prefix)
        most = max(most, len(prefix.views))
        moved += (manager.stats().num_compactions > joins_before) * prefix.views[-1].length
    total = prefix.num_tokens
    assert prefix.token_ids == list(range(total))
    assert most <= np.log2(total), f"{most} segments for {total} tokens"
    assert moved <= 2 * total * np.log2(50), "moving words costs O(n log n)"
    manager.check_integrity(checksums=True)


def test_thousands_of_dropped_holders_are_released_at_once(manager):
    prefix = chain_of(manager, 8)
    forks = [prefix.fork() for _ in range(2000)]
    assert manager.ref_count(1) == 2001
    del forks
    gc.collect()
    assert manager.ref_count(1) == 1 and manager.stats().num_holders == 1
    manager.check_integrity()


def test_neighbours_below_the_end_of_a_chain_are_joined_too(manager):
    """A sender that keeps its context holds less than the receiver seals next: the last pair never matches."""
    keeper, prefix, ids = None, manager.get_shared_kv_cache(()), itertools.count()
    for turn in range(50):
        prefix = store(manager, itertools.islice(ids, 20), prefix, seed=turn)
        manager.compact(prefix)
        keeper, prefix = prefix, prefix.fork()
    assert len(prefix.views) <= 8 and prefix.token_ids == list(range(1000))
    assert keeper.token_ids == prefix.token_ids
    manager.check_integrity(checksums=True)


def test_words_move_within_the_budget_only(manager):
    prefix = store(manager, range(8, 16), store(manager, range(8)), seed=1)
    tight = manager.stats().free_bytes
    manager._take(tight, "everything else")
    assert manager.compact(prefix) == 0
    manager._take(-tight, "everything else")


def test_a_chain_of_two_lineages_is_refused(manager):
    """Token and position fit, but the second segment was computed behind other tokens."""
    first, other = store(manager, range(5)), store(manager, range(10, 15), seed=1)
    child = store(manager, (7, 8), other, seed=2)
    with pytest.raises(HandoffError, match="computed behind"):
        manager.get_shared_kv_cache([(first.views[0].segment.slot, 5), (child.views[1].segment.slot, 2)])
    manager.check_integrity()


def test_another_dtype_is_refused_and_frees_the_slot(manager):
    slot, layers = manager.allocate_shared_slot(4), random_layers(manager.spec, 4)
    with pytest.raises(InvalidValueError, match=r"layer 0 keys: expected .*float32, got .*float16"):
        manager.quantize_and_store(slot, range(4), [(k.astype(mx.float16), v) for k, v in layers])
    assert manager.stats().used_bytes == 0


# --- check_integrity detects faults ----------------------------------------------------------------


def replace_segment(manager, slot, **changes):
    record = manager._table.records[slot]
    segment = dataclasses.replace(record.segment, **changes)
    record.segment = segment


def open_gap(manager, prefix):
    prefix.holding.views = prefix.views[1:]


def drop_record(manager, prefix):
    manager._free_bytes += manager._table.records.pop(2).counted_bytes


def miscount(manager, prefix):
    manager._table.records[1].counted_bytes += 1
    manager._free_bytes -= 1


def overspend(manager, prefix):
    prefix.holding.private_rows = manager.budget_bytes
    manager._free_bytes -= prefix.private_bytes


FAULTS = {
    "used": lambda m, p: setattr(m, "_free_bytes", m.stats().free_bytes - 1),
    "free": overspend,
    "slot 1: holders": lambda m, p: m._table.records[1].holders.add(999),
    "slot 2: holders": lambda m, p: m._table.records[2].holders.clear(),
    "view start": open_gap,
    "slots that are held or stored": drop_record,
    "slot 2: listed by its parent": lambda m, p: m._table.records[1].children.clear(),
    "slot 1: listed by its parent": lambda m, p: m._table.roots.clear(),
    "slot 1: segment bytes": miscount,
    "slot 1 layer 0: rows": lambda m, p: replace_segment(m, 1, token_ids=(1, 2)),
}


@pytest.mark.parametrize("named", FAULTS)
def test_a_planted_fault_is_found(manager, named):
    prefix = chain_of(manager, 8, 2)
    manager.check_integrity(checksums=True)
    FAULTS[named](manager, prefix)
    with pytest.raises(IntegrityError, match=rf"\[check_integrity\] (holder 1: )?{named}\b.* is .*, .* is "):
        manager.check_integrity()


@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("name", ["packed", "scales", "biases"])
def test_a_changed_byte_is_found(manager, name, role, index):
    prefix = chain_of(manager, 8, 2)
    flip_byte(getattr(getattr(prefix.views[1].segment.layers[0], role), name), index)
    manager.check_integrity()
    with pytest.raises(IntegrityError, match="slot 2: checksum is"):
        manager.check_integrity(checksums=True)


# --- threads ---------------------------------------------------------------------------------------


def test_bookkeeping_from_many_threads():
    manager = budgeted(200)
    texts = ["aabbab", "aabbba", "abab", "bbabab", "bba"]
    for text in texts:
        sealed(manager, text).release()
    stop, failures = threading.Event(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(seed):
        draw, held = random.Random(seed), []
        try:
            for _ in range(300):
                held.append(manager.match_prefix(draw.choice(texts)))
                other = draw.choice(held)
                action = draw.randrange(7)
                if action == 0:
                    held.append(other.fork())
                elif action == 1 and other.num_tokens:
                    other.truncate(draw.randrange(other.num_tokens))
                elif action == 2:
                    manager.extend_if_sealed(other, draw.choice(["a", "b", "ab"]))
                elif action == 3:
                    try:
                        other.reserve_tail(draw.randrange(8))
                    except BudgetExceededError:
                        other.release_tail()
                elif action == 4:
                    manager.get_shared_kv_cache(spans(other))
                elif action == 5:
                    manager.free_slot(manager.allocate_shared_slot(1))
                else:
                    manager.stats()
                while len(held) > 4:
                    held.pop(draw.randrange(len(held))).release()
        except BaseException as error:
            failures.append(error)
        finally:
            for prefix in held:
                prefix.release()

    def check():
        while not stop.wait(0.002):
            try:
                manager.check_integrity()
            except BaseException as error:
                failures.append(error)
                return

    checker = threading.Thread(target=check)
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in (checker, *workers):
        thread.start()
    for thread in workers:
        thread.join(60)
    stop.set()
    checker.join(60)
    sys.setswitchinterval(interval)
    assert not failures and not any(thread.is_alive() for thread in (checker, *workers))
    stats = manager.stats()
    assert (stats.protected_bytes, stats.num_holders, stats.private_bytes) == (0, 0, 0)
    manager.check_integrity(checksums=True)
