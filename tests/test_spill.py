"""What is evicted goes to disk, comes back when a prompt begins like it, and never takes more than it may (B52)."""

import os
import threading

import numpy as np
import pytest
from core_helpers import FULL, K8V8, flip_byte, make_manager
from core_helpers import store as store_rows
from tiny import RECURRENT, SLIDING, tiny_loaded

from mlx_qkvshare import AgentSession, CardStore, SharedKVCacheManager, SpillStore
from mlx_qkvshare.archive import export_card, import_card
from mlx_qkvshare.errors import CardError, InvalidValueError

T = tiny_loaded()
LARGE = 10**9


def ids(seed, count=24):
    return np.random.default_rng(seed).integers(10, 300, count).tolist()


def manager_of(spill, model=T, quant=K8V8, **options):
    return SharedKVCacheManager(model.spec, quant, spill=spill, **options)


def evicted(spill, *prompts, model=T, **options):
    """A manager in which all of `prompts` were sealed one behind the other, and let go of; and what the next token's
    logits were behind them."""
    manager = manager_of(spill, model, **options)
    with AgentSession("a", model, manager) as agent:
        for prompt in prompts:
            agent.prefill(prompt)
            agent.seal()
        logits = np.array(agent.fork("twin").score([5, 6]))
    manager.evict_unreferenced()
    assert manager.stats().used_bytes == 0
    return manager, logits


@pytest.mark.parametrize("kind", [{}, SLIDING, RECURRENT], ids=["full", "sliding", "recurrent"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_evicted_comes_back_bit_for_bit(tmp_path, kind, is_restarted):
    model = tiny_loaded(**kind)
    manager, logits = evicted(SpillStore(tmp_path, LARGE), ids(1), ids(2, 60), model=model)
    assert manager.stats().num_spilled >= 1
    if is_restarted:
        manager = manager_of(SpillStore(tmp_path, LARGE), model)
    agent = AgentSession("b", model, manager)
    agent.prefill(ids(1) + ids(2, 60))
    assert (agent.last_prefill.reused_tokens, agent.last_prefill.computed_tokens) == (84, 0)
    assert np.array_equal(agent.score([5, 6]), logits)
    stats = manager.stats()
    assert (stats.num_returned, stats.num_hits, stats.reused_tokens) == (1, 1, 84)
    manager.check_integrity(checksums=True)


def test_without_a_store_what_is_evicted_is_gone():
    manager, _ = evicted(None, ids(1))
    agent = AgentSession("b", T, manager)
    agent.prefill(ids(1))
    assert agent.last_prefill.reused_tokens == 0 == manager.stats().num_spilled


def test_a_prompt_that_leaves_it_half_way_gets_the_beginning(tmp_path):
    manager, _ = evicted(SpillStore(tmp_path, LARGE), ids(1), ids(2, 60))
    agent = AgentSession("b", T, manager)
    agent.prefill(ids(1) + ids(2, 60)[:30] + [7])
    assert agent.last_prefill.reused_tokens == 54
    other = AgentSession("c", T, manager)
    other.prefill(ids(1)[:10])
    assert other.last_prefill.reused_tokens == 10 and manager.stats().num_returned == 1


@pytest.mark.parametrize("kind", [SLIDING, RECURRENT], ids=["sliding", "recurrent"])
def test_it_comes_back_as_far_as_the_model_can_go_on(tmp_path, kind):
    model = tiny_loaded(**kind)
    prompt = ids(1, 60) + ids(2)[:10] + [7]
    seen = []
    for spill in (None, SpillStore(tmp_path, LARGE)):
        manager = manager_of(spill, model)
        with AgentSession("a", model, manager) as agent:
            for part in (ids(1, 60), ids(2)):
                agent.prefill(part)
                agent.seal()
        if spill:
            manager.evict_unreferenced()
        again = AgentSession("b", model, manager)
        again.prefill(prompt)
        seen.append((again.last_prefill, np.array(again.score([5, 6])).tolist()))
    assert seen[0] == seen[1] and seen[0][0].reused_tokens == 60


def test_what_stands_in_memory_is_not_read_again(tmp_path):
    manager, _ = evicted(SpillStore(tmp_path, LARGE), ids(1))
    first, second = (AgentSession(name, T, manager) for name in "bc")
    first.prefill(ids(1))
    second.prefill(ids(1))
    assert second.last_prefill.reused_tokens == 24 and manager.stats().num_returned == 1
    assert first.prefix.views[0].segment is second.prefix.views[0].segment


def test_pressure_moves_contexts_out_and_in(tmp_path):
    prompts = [ids(seed, 100) for seed in range(4)]
    spill = SpillStore(tmp_path, LARGE)
    manager = manager_of(spill, budget_bytes=T.spec.private_bytes(112) + 1000)
    for _ in range(3):
        for prompt in prompts:
            with AgentSession("a", T, manager) as agent:
                agent.prefill(prompt)
                agent.seal()
            manager.check_integrity(checksums=True)
    stats = manager.stats()
    assert stats.num_evictions == stats.num_spilled > 4 and stats.num_returned >= 4
    assert stats.num_misses == len(prompts)  # each was computed once
    assert len(list((tmp_path / "segments").iterdir())) == len(prompts)  # and written once


def test_a_segment_is_written_once_however_often_it_is_evicted(tmp_path):
    spill = SpillStore(tmp_path, LARGE)
    manager, _ = evicted(spill, ids(1, 60), ids(2))  # too unlike to be joined
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "segments").iterdir()}
    assert len(files) == 2 and len(spill.names()) == 1  # one chain, the beginning is a part of it
    for _ in range(2):
        with AgentSession("b", T, manager) as agent:
            agent.prefill(ids(1, 60) + ids(2))
        manager.evict_unreferenced()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "segments").iterdir()} == files


def test_another_model_or_setting_does_not_get_it(tmp_path):
    spill = SpillStore(tmp_path, LARGE)
    evicted(spill, ids(1))
    for manager, model in (
        (manager_of(spill, quant=FULL), T),
        (manager_of(spill, other := tiny_loaded(seed=1)), other),
    ):
        agent = AgentSession("b", model, manager)
        agent.prefill(ids(1))
        assert agent.last_prefill.reused_tokens == 0


def test_a_longer_one_of_another_model_does_not_hide_ours(tmp_path):
    spill, other = SpillStore(tmp_path, LARGE), tiny_loaded(seed=1)
    evicted(spill, ids(1))
    evicted(spill, ids(1), ids(2), model=other)
    agent = AgentSession("b", T, manager_of(spill))
    agent.prefill(ids(1) + ids(2))
    assert agent.last_prefill.reused_tokens == 24


def test_what_was_damaged_since_it_came_back_is_written_again(tmp_path):
    spill = SpillStore(tmp_path, LARGE)
    manager, _ = evicted(spill, ids(1))
    found = manager.match_prefix(ids(1))
    (path,) = (tmp_path / "segments").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    found.release()
    manager.evict_unreferenced()
    assert spill.verify(*spill.names())


def test_what_is_damaged_is_dropped_and_computed_again(tmp_path):
    spill = SpillStore(tmp_path, LARGE)
    manager, logits = evicted(spill, ids(1))
    (path,) = (tmp_path / "segments").iterdir()
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    agent = AgentSession("b", T, manager)
    agent.prefill(ids(1))
    agent.seal()
    assert agent.last_prefill.reused_tokens == 0 and np.array_equal(agent.fork("f").score([5, 6]), logits)
    assert spill.names() == []
    agent.close()
    manager.evict_unreferenced()  # written anew, in the place of what was damaged
    assert spill.verify(*spill.names())


def test_bytes_that_changed_in_memory_are_not_kept(tmp_path):
    spill = SpillStore(tmp_path, LARGE)
    manager = manager_of(spill)
    with AgentSession("a", T, manager) as agent:
        agent.prefill(ids(1))
        agent.seal()
        flip_byte(agent.prefix.views[0].segment.layers[0].keys.packed)
    manager.evict_unreferenced()
    assert (manager.stats().num_spilled, spill.names(), manager.stats().used_bytes) == (0, [], 0)


def test_a_disk_that_is_full_costs_the_context_and_nothing_else(tmp_path, monkeypatch):
    spill = SpillStore(tmp_path, LARGE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    manager, _ = evicted(spill, ids(1))
    assert manager.stats().num_spilled == 0 == spill.used_bytes


@pytest.mark.parametrize("limit", [0, -1, 1.5, None])
def test_a_cap_is_a_number_of_bytes(tmp_path, limit):
    with pytest.raises(InvalidValueError, match="max_bytes"):
        SpillStore(tmp_path, limit)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CardError):
        SpillStore(tmp_path / "file", LARGE)


# --- the cap (B52) ------------------------------------------------------------------------------------


def chains(manager, seeds, num_tokens=200):
    """Evict a context for every seed; how many of them are kept after each."""
    for seed in seeds:
        store_rows(manager, range(1000 * seed, 1000 * seed + num_tokens), seed=seed).release()
        manager.evict_unreferenced()
        yield seed


def one_size(tmp_path):
    spill = SpillStore(tmp_path / "size", LARGE)
    manager = make_manager()
    manager.spill = spill
    list(chains(manager, [1]))
    return spill.used_bytes


def test_b52_the_folder_never_has_more_than_its_cap_and_the_oldest_go_first(tmp_path):
    size = one_size(tmp_path)
    cap = 5 * size
    foreign = SpillStore(tmp_path / "spill", LARGE)
    other = make_manager(k_dim=64)  # another model's
    other.spill = foreign
    list(chains(other, range(1, 4)))
    notes = tmp_path / "spill" / "segments" / "notes.safetensors"
    notes.write_bytes(b"mine")
    before = foreign.used_bytes
    assert before > 3 * size
    spill = SpillStore(tmp_path / "spill", cap)
    assert spill.used_bytes <= cap  # from the start
    manager = make_manager()
    manager.spill = spill
    for seed in chains(manager, range(1, 7)):
        assert spill.used_bytes <= cap
        assert manager.stats().num_spilled == seed
    assert notes.read_bytes() == b"mine"
    kept = [spill.inspect(name) for name in spill.names()]
    assert all(card.spec == manager.spec for card in kept)  # the other model's were older
    assert sorted(card.token_ids[0] // 1000 for card in kept) == [2, 3, 4, 5, 6]
    found = [manager.match_prefix(range(1000 * seed, 1000 * seed + 200)) for seed in (1, 2)]
    assert [prefix.num_tokens for prefix in found] == [0, 200]
    list(chains(manager, [7]))  # the second was used just now, so that the third goes
    assert sorted(spill.inspect(name).token_ids[0] // 1000 for name in spill.names()) == [2, 4, 5, 6, 7]


def test_b52_what_is_larger_than_the_cap_is_refused_before_it_is_written(tmp_path):
    spill = SpillStore(tmp_path / "spill", one_size(tmp_path) // 2)
    manager = make_manager()
    manager.spill = spill
    list(chains(manager, [1]))
    assert (manager.stats().num_spilled, manager.stats().num_evictions, spill.used_bytes) == (0, 1, 0)


def test_while_others_read_nothing_is_removed_and_the_cap_holds(tmp_path):
    size = one_size(tmp_path)
    spill = SpillStore(tmp_path / "spill", 2 * size)
    manager = make_manager()
    manager.spill = spill
    with spill._locked():
        list(chains(manager, [1, 2, 3]))
    assert (manager.stats().num_spilled, manager.stats().num_evictions, spill.used_bytes) == (2, 3, 2 * size)


def test_what_makes_room_for_what_comes_back_is_kept_itself(tmp_path):
    size = one_size(tmp_path)
    spill = SpillStore(tmp_path / "spill", 2 * size)
    manager = make_manager()
    manager.spill = spill
    list(chains(manager, [1, 2]))
    manager.budget_bytes -= manager.stats().free_bytes - manager.quant.packed_bytes(manager.spec, 200)
    manager._free_bytes = manager.budget_bytes
    store_rows(manager, range(3000, 3200), seed=3).release()
    assert manager.match_prefix(range(2000, 2200)).num_tokens == 200
    assert sorted(spill.inspect(name).token_ids[0] // 1000 for name in spill.names()) == [2, 3]


def test_a_beginning_that_others_share_stays_while_any_of_them_does(tmp_path):
    spill = SpillStore(tmp_path, LARGE)
    manager = make_manager()
    manager.spill = spill
    root = store_rows(manager, range(200))
    for seed in (1, 2):
        branch = root.fork()
        store_rows(manager, range(1000 * seed, 1000 * seed + 200), branch, seed=seed)
        branch.release()
    root.release()
    manager.evict_unreferenced()
    assert len(spill.names()) == 2 and len(list((tmp_path / "segments").iterdir())) == 3
    spill.max_bytes = spill.used_bytes - 1
    list(chains(manager, [3], num_tokens=2))  # one branch goes, the beginning stays
    branches = [manager.match_prefix([*range(200), *range(1000 * seed, 1000 * seed + 200)]) for seed in (1, 2)]
    assert sorted(found.num_tokens for found in branches) == [200, 400]


def test_what_a_crash_left_is_counted_and_goes(tmp_path):
    spill = SpillStore(tmp_path, LARGE)
    evicted(spill, ids(1))
    (path,) = (tmp_path / "segments").iterdir()
    (tmp_path / "segments" / f".{path.stem}.x.safetensors").write_bytes(b"half")
    (tmp_path / "segments" / f"{'0' * 32}.safetensors").write_bytes(b"x" * 1000)  # that no card names
    used = spill.used_bytes
    assert SpillStore(tmp_path, used - 4).used_bytes == used - 4
    assert SpillStore(tmp_path, used - 5).used_bytes == used - 1004
    manager = manager_of(SpillStore(tmp_path, LARGE))
    assert manager.match_prefix(ids(1)).num_tokens == 24


def test_two_managers_on_one_folder_find_each_others_and_keep_the_cap(tmp_path):
    cap = 6 * one_size(tmp_path)
    errors = []

    def work(offset):
        try:
            manager = make_manager()
            manager.spill = SpillStore(tmp_path / "spill", cap)
            for seed in range(8):
                list(chains(manager, [offset + seed]))
                manager.match_prefix(range(1000 * (8 + offset - seed), 1000 * (8 + offset - seed) + 200)).release()
                manager.check_integrity(checksums=True)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    spill = SpillStore(tmp_path / "spill", cap)
    assert spill.used_bytes <= cap
    for name in spill.names():
        spill.verify(name)


def test_named_cards_and_what_is_spilled_do_not_mix(tmp_path):
    cards, spill = CardStore(tmp_path / "cards"), SpillStore(tmp_path / "spill", LARGE)
    manager = manager_of(spill)
    with AgentSession("a", T, manager) as agent:
        agent.prefill(ids(1))
        manager.save_card(cards, "c", agent)
    manager.evict_unreferenced()
    assert cards.names() == ["c"] and spill.names() != ["c"]


def spilling(folder, max_bytes=LARGE):
    manager = make_manager()
    manager.spill = SpillStore(folder, max_bytes)
    return manager, manager.spill


def test_b52_two_who_write_at_once_beside_a_reader_keep_the_cap(tmp_path, monkeypatch):
    cap = 3 * one_size(tmp_path) // 2
    (one, spill), (two, _) = (spilling(tmp_path / "spill", cap) for _ in range(2))
    write, threads = spill._write_segments, [threading.Thread(target=list, args=(chains(two, [2]),))]

    def meanwhile(files):
        threads[0].start()
        threads[0].join(0.2)
        write(files)

    monkeypatch.setattr(spill, "_write_segments", meanwhile)
    with SpillStore(tmp_path / "spill", cap)._locked():  # so that nobody is alone
        list(chains(one, [1]))
    threads[0].join(60)
    assert not threads[0].is_alive() and 0 < spill.used_bytes <= cap


def test_b52_what_is_damaged_counts_as_missing(tmp_path):
    manager, spill = spilling(tmp_path)
    list(chains(manager, [1]))
    cap = spill.used_bytes
    (path,) = (tmp_path / "segments").iterdir()
    path.write_bytes(b"")
    list(chains(manager, [2], num_tokens=100))
    spill.max_bytes = cap
    list(chains(manager, [1]))
    assert manager.stats().num_spilled == 3 and spill.used_bytes <= cap


@pytest.mark.parametrize("length", [150, 200])
def test_what_others_left_half_way_comes_back_whole(tmp_path, length):
    manager, _ = spilling(tmp_path)
    root = store_rows(manager, range(200))
    branch = root.fork()
    branch.truncate(10)
    store_rows(manager, range(1000, 1200), branch, seed=4)
    for prefix in (root, branch):
        prefix.release()
    manager.evict_unreferenced()
    assert manager.match_prefix(range(length)).num_tokens == length
    assert manager.match_prefix([*range(10), *range(1000, 1200), 7]).num_tokens == 210
    manager.check_integrity(checksums=True)


def test_what_no_prompt_can_begin_like_takes_no_room(tmp_path):
    cards, (manager, spill) = CardStore(tmp_path / "cards"), (manager_of(None), SpillStore(tmp_path / "spill", LARGE))
    with AgentSession("a", T, manager) as agent:
        agent.prefill(ids(1))
        manager.save_card(cards, "c", agent, keep_tokens=False)
    other = manager_of(spill)
    other.load_card(cards, "c").prefix.release()
    other.evict_unreferenced()
    assert (other.stats().num_evictions, other.stats().num_spilled, spill.used_bytes) == (1, 0, 0)


def test_cards_are_read_once_and_files_of_others_are_left(tmp_path, monkeypatch):
    manager, spill = spilling(tmp_path)
    list(chains(manager, range(1, 6)))
    reads, read = [], spill._read_card
    monkeypatch.setattr(spill, "_read_card", lambda path: reads.append(path) or read(path))
    for _ in range(3):
        assert manager.match_prefix([5, 6]).num_tokens == 0
    assert len(reads) <= 1  # the last one was not there when cards were read for it
    for name in (f"{'0' * 32}.txt", f".{'0' * 32}.x.txt", "0.json", ".lock"):
        (tmp_path / "cards" / name).write_text("x" * 100)
    used = spill.used_bytes
    (tmp_path / "cards" / f".{'0' * 32}.x.json").write_text("x" * 100)
    assert spill.used_bytes == used + 100


def test_no_card_of_a_users_is_kept_under_a_cap(tmp_path):
    cards, spill = CardStore(tmp_path / "cards"), SpillStore(tmp_path / "spill", LARGE)
    manager = manager_of(spill)
    with AgentSession("a", T, manager) as agent:
        agent.prefill(ids(1))
        manager.save_card(cards, "c", agent)
        export_card(cards, "c", tmp_path / "c.zip")
        for keep in (lambda: manager.save_card(spill, "c", agent), lambda: import_card(spill, tmp_path / "c.zip")):
            with pytest.raises(CardError, match="SpillStore"):
                keep()
    assert spill.used_bytes == 0
