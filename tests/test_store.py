"""Cards: whole or not there, named by what they are, proved before they are counted, bit-equal when they come back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import store_work
from reference import FULL, T, active_bytes, assert_consistent, assert_warm_is_cold, decode, pair, probe, some_ids
from reference import store as store_rows
from small_disk import run_on_small_disk
from store_kinds import KINDS, NESTED, conversation, logits
from store_work import (
    LARGE,
    LARGE_TOKENS,
    SAFE,
    fill,
    make_manager,
    number_in,
    package_of,
    python_path,
    save,
    whole_number,
)
from tiny import tiny_config, tiny_loaded

from mlx_qkvshare import AgentSession, CardStore, HandoffCoordinator, QuantSpec, SharedKVCacheManager, restore
from mlx_qkvshare.card import decode as decode_card
from mlx_qkvshare.card import hidden_ids, tokens_digest
from mlx_qkvshare.digest import digest_bytes
from mlx_qkvshare.errors import (
    BudgetExceededError,
    CardCorruptError,
    CardError,
    CardFormatError,
    CardNotFoundError,
    CardWriteError,
    ContextLimitError,
    FingerprintMismatchError,
    HandoffError,
    IntegrityError,
    InvalidValueError,
)
from mlx_qkvshare.model import describe
from mlx_qkvshare.segment_file import read_arrays

LONG = 2000
TESTS = Path(__file__).resolve().parent


@pytest.fixture
def store(tmp_path):
    return CardStore(tmp_path / "store")


def files(store: CardStore) -> list[Path]:
    return sorted(path for path in store.folder.rglob("*") if path.is_file() and path.name != ".lock")


def segments(store: CardStore) -> list[Path]:
    return [path for path in files(store) if path.suffix == ".safetensors"]


def card_file(store: CardStore) -> Path:
    (path,) = (store.folder / "cards").glob("*.json")
    return path


def resumed(store: CardStore, name: str, model=T, quant=None, agent="owner", **options) -> AgentSession:
    session = AgentSession(agent, model, SharedKVCacheManager(model.spec, quant, **options))
    restore(session, store, name)
    return session


# --- there and back ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """Every kind saved here, and its logits before; and after, in a new process."""
    folder, before = tmp_path_factory.mktemp("kinds"), {}
    store = CardStore(folder / "store")
    for kind in KINDS:
        model, session = conversation(kind)
        session.manager.save_card(store, kind, session)
        before[kind] = logits(session, model)
    subprocess.run(
        [sys.executable, TESTS / "store_kinds.py", folder], check=True, env=os.environ | {"PYTHONPATH": python_path()}
    )
    return before, {kind: np.load(folder / f"{kind}.after.npy") for kind in KINDS}, store


@pytest.mark.parametrize("kind", KINDS)
def test_b51_logits_after_a_restart_are_bit_equal(restarted, kind):
    before, after, store = restarted
    assert np.array_equal(before[kind], after[kind])
    assert store.verify(kind).quant == KINDS[kind][1]


def test_every_file_is_a_plain_safetensors_file(restarted):
    found = set()
    for file in segments(restarted[2]):
        arrays = mx.load(str(file))
        found |= {str(array.dtype) for array in arrays.values()}
        assert sum(array.nbytes for array in arrays.values()) < file.stat().st_size
    assert {"mlx.core.bfloat16", "mlx.core.float16", "mlx.core.uint32"} <= found


def test_a_restored_session_goes_on_as_the_first_one_would(store):
    manager, owner = pair(tokens=60)
    owner.say("Who writes the answer?")
    manager.save_card(store, "plan", owner)
    with owner.manager.load_card(store, "plan"):
        pass
    back = resumed(store, "plan")
    assert back.messages == owner.messages and back.token_ids == owner.token_ids
    assert np.array_equal(decode(back, [50, 60, 70]), decode(owner, [50, 60, 70]))
    for session in (owner, back):
        session.say("And then?")
    assert back.token_ids == owner.token_ids
    back.seal()
    assert_warm_is_cold(back)


def test_a_card_grows_joins_and_is_saved_again_by_whoever_loaded_it(store):
    manager, owner = pair(tokens=100)
    owner.prefill(some_ids(30, seed=2))
    owner.seal()
    assert len(manager.save_card(store, "c", owner).segments) == 2
    back = resumed(store, "c")
    for session in (owner, back):
        session.prefill(some_ids(40, seed=3))
        session.seal()
    assert len(back.prefix.views) == len(owner.prefix.views) == 1, "the centre taken over is the parent's"
    assert np.array_equal(probe(back), probe(owner))
    manager.save_card(store, "here", owner)
    back.manager.save_card(store, "there", back)
    store.rm("c")
    store.gc()
    assert len(segments(store)) == 1, "the same bytes, the same file"


def test_role_and_hops_come_back(store):
    manager, owner = pair(tokens=20)
    owner.role_prompt = "You plan."
    owner.say("Begin.")
    other = AgentSession("other", T, manager, role_prompt="You write.")
    HandoffCoordinator(manager).request_handoff(owner, other)
    assert manager.save_card(store, "c", other).hops == 1
    same, third = (resumed(store, "c", agent=name) for name in ("other", "third"))
    assert same.package_state().hops == 1 and third.package_state().hops == 2
    assert same.package_state().is_role_due and store.inspect("c").agent == "other"
    other.role_prompt = None
    other.say("Go on.")
    manager.save_card(store, "c", other)
    assert not resumed(store, "c", agent="other").package_state().is_role_due


def test_a_loaded_package_can_be_delivered(store):
    manager, owner = pair()
    manager.save_card(store, "c", owner)
    session = AgentSession("b", T, SharedKVCacheManager(T.spec))
    with session.manager.load_card(store, "c") as loaded:
        assert HandoffCoordinator(session.manager).deliver(loaded.package, session, verify=True).bytes_copied == 0
    assert np.array_equal(probe(session), probe(owner))


def test_an_empty_context_and_a_cut_one(store):
    manager, owner = pair(tokens=40)
    manager.save_card(store, "empty", AgentSession("e", T, manager))
    assert resumed(store, "empty").num_tokens == 0
    owner.rewind(7)
    manager.save_card(store, "cut", owner)
    back = resumed(store, "cut")
    assert back.token_ids == owner.token_ids and np.array_equal(probe(back), probe(owner))


def test_what_is_loaded_is_evaluated_and_costs_what_it_says(store):
    manager, owner = pair(tokens=400)
    manager.save_card(store, "c", owner)
    fresh = SharedKVCacheManager(T.spec)
    before = active_bytes()
    with fresh.load_card(store, "c") as loaded:
        used = active_bytes() - before
        assert fresh.stats().used_bytes == loaded.card.packed_bytes == owner.prefix.shared_bytes
        assert used <= loaded.card.packed_bytes + 16 * 1024
        shutil.rmtree(store.folder)
        fresh.check_integrity(checksums=True)


@pytest.mark.parametrize("quant", ["safe", "balanced", QuantSpec(8, 8, 32)])
def test_a_card_is_hardly_larger_than_what_it_holds(store, quant):
    manager, owner = pair(tokens=510, quant=quant)
    card = manager.save_card(store, "c", owner)
    assert store.stored_bytes("c") == sum(file.stat().st_size for file in files(store)) <= 1.02 * card.packed_bytes


# --- one segment, one file ---------------------------------------------------------------------------


def test_cards_share_their_segments(store):
    manager, owner = pair(tokens=200)
    manager.save_card(store, "a", owner)
    first = segments(store)
    fork = owner.fork("fork")
    fork.prefill(some_ids(9, seed=5))
    manager.save_card(store, "b", fork)
    manager.save_card(store, "c", owner)
    assert len(segments(store)) == 2 and set(first) < set(segments(store))
    parent, child = store.inspect("b").segments
    assert child.parent == parent.digest == store.inspect("a").segments[0].digest and parent.parent is None
    assert store.names() == ["a", "b", "c"]
    store.rm("a")
    assert store.gc() == 0
    store.rm("b")
    assert store.gc() > 0 and segments(store) == first
    assert store.verify("c").num_tokens == 200


def test_what_stands_in_the_manager_is_linked(store):
    manager, owner = pair(tokens=200)
    manager.save_card(store, "a", owner)
    fork = owner.fork("fork")
    fork.prefill(some_ids(9, seed=5))
    manager.save_card(store, "b", fork)
    used = manager.stats().used_bytes
    with manager.load_card(store, "b") as loaded:
        assert loaded.linked_tokens == 209 and manager.stats().used_bytes == used
        assert [view.segment for view in loaded.prefix.views] == [view.segment for view in fork.prefix.views]
    fresh = SharedKVCacheManager(T.spec)
    with fresh.load_card(store, "a") as first, fresh.load_card(store, "b") as second:
        assert second.linked_tokens == 200 and second.prefix.views[0].segment is first.prefix.views[0].segment
        assert fresh.stats().used_bytes == second.card.packed_bytes
        fresh.check_integrity(checksums=True)


def test_dropped_residuals_are_not_those_that_are_there(store):
    manager, owner = pair(tokens=100, quant=NESTED)
    manager.save_card(store, "both", owner)
    manager.drop_residuals()
    manager.save_card(store, "base", owner)
    assert len(segments(store)) == 2
    fresh = SharedKVCacheManager(T.spec, NESTED)
    with fresh.load_card(store, "both") as both, fresh.load_card(store, "base") as base:
        assert base.linked_tokens == 0 and base.prefix.shared_bytes < both.prefix.shared_bytes
        fresh.drop_residuals()
        fresh.check_integrity(checksums=True)


def test_a_damaged_segment_is_written_anew_by_the_next_save(store):
    manager, owner = pair()
    manager.save_card(store, "c", owner)
    (file,) = segments(store)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CardCorruptError):
        store.verify("c")
    manager.save_card(store, "c", owner)
    store.verify("c")


def test_bytes_that_changed_since_the_seal_are_not_saved(store):
    manager = make_manager()
    prefix = fill(manager, 1, 30)
    array = prefix.views[0].segment.layers[0].keys.packed
    np.array(array, copy=False).reshape(-1)[3] ^= 1
    with pytest.raises(IntegrityError, match="checksum"):
        manager.save_card(store, "c", package_of(manager, prefix))
    assert files(store) == []


# --- tokens that are not kept ------------------------------------------------------------------------


def test_a_card_without_tokens_can_be_gone_on_from_and_tells_none(store):
    manager, owner = pair(tokens=120)
    owner.say("the secret word")
    manager.save_card(store, "c", owner, keep_tokens=False)
    for file in files(store):
        assert b"secret" not in file.read_bytes()
    card = store.inspect("c")
    assert card.token_ids is None and card.messages == () and card.base_tokens == card.num_tokens
    back = resumed(store, "c")
    assert all(token < 0 for token in back.token_ids)
    assert np.array_equal(probe(back), probe(owner))
    for session in (owner, back):
        session.messages, session._base_tokens = [], session.num_tokens
        session.say("and then?")
    assert np.array_equal(probe(back), probe(owner))
    assert_consistent(back)
    with pytest.raises(InvalidValueError, match="did not keep"):
        resumed(store, "c").generate_token()
    with pytest.raises(CardError, match="expected token ids"):
        restore(AgentSession("x", T, SharedKVCacheManager(T.spec, FULL)), store, "c", rebuild=True)


def test_hidden_tokens_stay_hidden_and_match_nothing_else(store):
    manager, owner = pair(tokens=60)
    manager.save_card(store, "c", owner, keep_tokens=False)
    back = resumed(store, "c")
    back.manager.save_card(store, "again", back)
    assert len(segments(store)) == 1 and store.inspect("again").token_ids is None
    assert back.manager.match_prefix(owner.token_ids).num_tokens == 0
    digest = tokens_digest(owner.token_ids)
    assert tokens_digest(hidden_ids(digest, 60)) == digest
    assert not set(hidden_ids(digest, 60)) & set(hidden_ids(tokens_digest([1]), 60))


# --- refusals ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def unchanged(manager: SharedKVCacheManager):
    before = manager.stats()
    yield
    assert manager.stats() == before
    manager.check_integrity(checksums=True)


OTHERS = {
    "layers": {"layers": 4},
    "n_kv_heads of layer 0": {"kv_heads": 4},
    "k_head_dim of layer 0": {"head_dim": 128},
    "architecture": {"model_type": "qwen3"},
    "weights": {"seed": 1},
    "rope": {"rope_theta": 500.0},
}


@pytest.mark.parametrize("field", OTHERS)
def test_b47_another_model_is_refused_by_the_field(store, field):
    manager, owner = pair()
    manager.save_card(store, "c", owner)
    other = tiny_loaded(**OTHERS[field])
    session = AgentSession("x", other, SharedKVCacheManager(other.spec))
    session.prefill([5, 6, 7])
    with unchanged(session.manager), pytest.raises(FingerprintMismatchError, match=rf"\[load_card\] {field}: expected"):
        restore(session, store, "c")
    assert session.token_ids == [5, 6, 7]
    done = restore(session, store, "c", rebuild=True)
    assert done.computed_tokens == 40 and field in done.rebuilt_because
    assert session.token_ids == owner.token_ids
    assert_warm_is_cold(session, other)


def test_b78_an_adapter_is_another_model(store):
    adapted = tiny_loaded(fresh=True)
    manager, owner = pair(loaded=adapted)
    manager.save_card(store, "c", owner)
    layer = adapted.model.layers[0].self_attn.k_proj
    layer.weight = layer.weight + 0.01
    again = describe(adapted.model, tiny_config(), adapted.tokenizer)
    with pytest.raises(FingerprintMismatchError, match="weights"):
        SharedKVCacheManager(again).load_card(store, "c")


def test_another_tokenizer_is_never_rebuilt_for(store):
    manager, owner = pair()
    manager.save_card(store, "c", owner)
    other = tiny_loaded(chat_template="{{ messages }}")
    session = AgentSession("x", other, SharedKVCacheManager(other.spec))
    with pytest.raises(FingerprintMismatchError, match="tokenizer"):
        restore(session, store, "c", rebuild=True)
    assert session.num_tokens == 0


@pytest.mark.parametrize("quant", [QuantSpec(4, 4, 32), QuantSpec(8, 8, 64), NESTED])
def test_b49_other_bits_are_refused_or_computed_anew(store, quant):
    manager, owner = pair()
    manager.save_card(store, "c", owner)
    session = AgentSession("x", T, SharedKVCacheManager(T.spec, quant))
    with unchanged(session.manager), pytest.raises(FingerprintMismatchError, match="quant: expected"):
        restore(session, store, "c")
    assert restore(session, store, "c", rebuild=True).computed_tokens == 40
    assert session.prefix.views[0].segment.quant == quant


def test_other_key_factors_are_refused(store):
    factors = [mx.full((1, 2, 1, 64), 2.0), None]
    manager, owner = pair(quant="tight", key_factors=factors)
    manager.save_card(store, "c", owner)
    for others in (None, [None, factors[0]], [factors[0] * 2, None]):
        fresh = SharedKVCacheManager(T.spec, "tight", key_factors=others)
        with unchanged(fresh), pytest.raises(FingerprintMismatchError, match="key_factors of layer 0"):
            fresh.load_card(store, "c")


def test_a_budget_that_is_too_small_is_told_before_anything_is_read(store, monkeypatch):
    manager, owner = pair(tokens=100)
    card = manager.save_card(store, "c", owner)
    fresh = SharedKVCacheManager(T.spec, budget_bytes=card.packed_bytes - 1)
    monkeypatch.setattr("mlx_qkvshare.store.read_arrays", lambda *_: pytest.fail("read"))
    with unchanged(fresh), pytest.raises(BudgetExceededError, match=f"a card needs {card.packed_bytes} bytes"):
        fresh.load_card(store, "c")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_loading_leaves_all_as_it_was(small, monkeypatch, error):
    manager, calls = small_manager(), []

    def read(*args):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return read_arrays(*args)

    monkeypatch.setattr("mlx_qkvshare.store.read_arrays", read)
    with unchanged(manager), pytest.raises(error):
        manager.load_card(small, "card")


def test_two_loads_at_once_end_with_one_copy(small, monkeypatch):
    manager, others = small_manager(), []

    def read(*args):
        if not others:
            others.append(None)
            others[0] = manager.load_card(small, "card")
        return read_arrays(*args)

    monkeypatch.setattr("mlx_qkvshare.store.read_arrays", read)
    with manager.load_card(small, "card") as loaded, others[0] as other:
        assert loaded.prefix.views == other.prefix.views
        assert manager.stats().used_bytes == loaded.card.packed_bytes
        manager.check_integrity(checksums=True)


def test_nobody_is_evicted_for_damaged_bytes(store):
    manager, owner = pair(tokens=100)
    card = manager.save_card(store, "c", owner)
    full = SharedKVCacheManager(T.spec, budget_bytes=card.packed_bytes + 40_000)
    for seed in range(3):
        store_rows(full, some_ids(40, seed=seed)).release()
    (file,) = segments(store)
    good = file.read_bytes()
    file.write_bytes(good[:-5] + b"0" + good[-4:])
    assert full.stats().evictable_bytes > 0 and full.stats().free_bytes < card.packed_bytes
    with unchanged(full), pytest.raises(CardCorruptError):
        full.load_card(store, "c")
    file.write_bytes(good)
    with full.load_card(store, "c"):
        assert full.stats().num_evictions > 0
        full.check_integrity(checksums=True)


def test_more_tokens_than_the_model_has_positions(store):
    manager, owner = pair()
    manager.save_card(store, "c", owner)
    short = dataclasses.replace(T.spec, max_context_tokens=39)
    with pytest.raises(ContextLimitError):
        SharedKVCacheManager(short).load_card(store, "c")


def test_another_managers_package_and_a_stale_one(store):
    manager, owner = pair()
    package = owner.package_state()
    with pytest.raises(HandoffError, match="manager"):
        SharedKVCacheManager(T.spec).save_card(store, "c", package)
    owner.close()
    manager.evict_unreferenced()
    with pytest.raises(HandoffError, match="slot"):
        manager.save_card(store, "c", package)
    assert files(store) == [] and store.names() == []


# --- names, folders, leftovers -----------------------------------------------------------------------

NAMES = ["../../x", "/etc/x", "a/b", "..", ".", "", "n" * 5000, "con", "nul\0byte", "new\nline", "日本🎉", "A", "a"]
NAMES += ["e\u0301", "\u00e9", "\ud800", "a.b", "0", "01"]


def test_b53_b81_names_are_no_paths_and_come_back_as_they_were(tmp_path):
    store, manager = CardStore(tmp_path / "a folder 🎉" / "cards.v1"), make_manager()
    for number, name in enumerate(NAMES):
        prefix = fill(manager, number, 5)
        manager.save_card(store, name, package_of(manager, prefix, number=number, sender=name))
    assert store.names() == sorted(NAMES)
    for number, name in enumerate(NAMES):
        assert whole_number(store, name) == number and store.verify(name).agent == name
    assert [path.name for path in tmp_path.iterdir()] == ["a folder 🎉"]
    assert sorted(path.name for path in store.folder.iterdir()) == [".lock", "cards", "segments"]
    for name in NAMES:
        store.rm(name)
    store.gc()
    assert files(store) == []
    for wrong in (None, 3, b"x"):
        with pytest.raises(InvalidValueError, match="name: expected a str"):
            store.inspect(wrong)


def test_only_the_owner_may_look(tmp_path):
    before = os.umask(0)
    try:
        store = CardStore(tmp_path / "deep" / "store")
        save(make_manager(), store, 1, 10)
    finally:
        os.umask(before)
    folders = [store.folder, *(path for path in store.folder.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    everything = [path for path in store.folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in everything} == {0o600}


def test_links_and_pipes_are_not_followed(store, tmp_path):
    save(make_manager(), store, 1, 10)
    outside = tmp_path / "outside"
    outside.write_bytes(segments(store)[0].read_bytes())
    segments(store)[0].unlink()
    (store.folder / "segments" / f"{store.inspect('card').segments[0].digest}.safetensors").symlink_to(outside)
    with pytest.raises(CardCorruptError):
        store.verify("card")
    save(make_manager(), store, 1, 10)
    assert whole_number(store) == 1 and not segments(store)[0].is_symlink()
    card_file(store).unlink()
    os.mkfifo(store.folder / "cards" / f"{store._card_path('card').name}")
    with pytest.raises(CardCorruptError, match="plain file"):
        store.inspect("card")
    shutil.rmtree(store.folder / "cards")
    (store.folder / "cards").symlink_to(tmp_path)
    with pytest.raises(CardError, match="link"):
        CardStore(store.folder)


def test_leftovers_are_swept_and_what_is_not_ours_stays(store):
    save(make_manager(), store, 1, 10)
    kept = files(store)
    leftovers = [path.with_name(f".{path.stem}.abc{path.suffix}") for path in kept]
    foreign = [store.folder / "cards" / ".hidden.json", store.folder / "segments" / "notes.txt", store.folder / "x"]
    for path in (*leftovers, *foreign):
        path.write_bytes(b"half")
    assert store.names() == ["card"] and whole_number(store) == 1
    assert store.sweep() == 4 * len(leftovers) and store.gc() == 0
    assert files(store) == sorted([*kept, *foreign])


def test_missing_cards_and_folders(store, tmp_path):
    for verb in (store.inspect, store.verify, store.rm, functools.partial(make_manager().load_card, store)):
        with pytest.raises(CardNotFoundError, match="named 'none'"):
            verb("none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CardError, match="expected a folder"):
        CardStore(tmp_path / "file")
    shutil.rmtree(store.folder)
    with pytest.raises(CardError, match="expected a folder"):
        store.names()


def test_gc_keeps_all_while_a_card_cannot_be_read(store):
    save(make_manager(), store, 1, 10)
    good = card_file(store).read_bytes()
    card_file(store).write_bytes(good[:-3])
    with pytest.raises(CardCorruptError):
        store.gc()
    assert len(segments(store)) == 1 and store.names() == []
    card_file(store).write_bytes(good)
    assert whole_number(store) == 1


def test_b44_a_loaded_card_never_shows_what_came_after_it(store):
    manager = make_manager()
    save(manager, store, 1, 30)
    (file,) = segments(store)
    loaded = manager.load_card(store, "card")
    save(make_manager(), store, 2, 30)
    other = next(path for path in segments(store) if path != file)
    file.write_bytes(other.read_bytes())
    manager.check_integrity(checksums=True)
    assert set(loaded.prefix.token_ids) == {1}


# --- damage ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A store of two nested segments with sinks, centres and residuals, small enough to be read a thousand times."""
    store, manager = CardStore(tmp_path_factory.mktemp("small")), small_manager()
    prefix = fill(manager, 7, 12)
    fill(manager, 8, 5, prefix)
    manager.save_card(store, "card", package_of(manager, prefix))
    return store


def small_manager() -> SharedKVCacheManager:
    return make_manager(dataclasses.replace(SAFE, is_nested=True), layers=1, heads=1)


def assert_refused(store: CardStore, manager: SharedKVCacheManager, *kinds: type[Exception]) -> None:
    for verb in (store.verify, functools.partial(manager.load_card, store)):
        with pytest.raises(kinds or (CardCorruptError, CardFormatError)):
            verb("card")


@contextlib.contextmanager
def damaged(file: Path, data: bytes):
    good = file.read_bytes()
    assert data != good
    file.write_bytes(data)
    try:
        yield
    finally:
        file.write_bytes(good)


def regions(file: Path) -> list[tuple[int, int]]:
    """Length, header, and every array of a segment; the whole of a card."""
    data = file.read_bytes()
    if file.suffix == ".json":
        return [(0, len(data))]
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    arrays = [it["data_offsets"] for name, it in header.items() if name != "__metadata__"]
    return [(0, 8), (8, start), *((start + a, start + b) for a, b in arrays)]


def test_every_flipped_byte_is_seen(small):
    rng, manager, count = random.Random(0), small_manager(), 0
    places = [(file, region) for file in files(small) for region in regions(file)]
    assert len(places) > 20
    with unchanged(manager):
        for number in range(max(600, len(places) * 12)):
            file, (start, stop) = places[number % len(places)]
            data = bytearray(file.read_bytes())
            data[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
            with damaged(file, bytes(data)):
                assert_refused(small, manager)
            count += 1
    assert count >= 500
    small.verify("card")


def test_every_truncation_is_seen_and_so_is_what_is_added(small):
    rng, manager = random.Random(1), small_manager()
    with unchanged(manager):
        for file in files(small):
            data = file.read_bytes()
            lengths = {0, 1, 7, 8, 9, len(data) - 1, *rng.sample(range(len(data)), 25)}
            for length in lengths:
                with damaged(file, data[:length]):
                    assert_refused(small, manager)
            for added in (b"\0", b" ", b"\n", data):
                with damaged(file, data + added):
                    assert_refused(small, manager)


def test_b54_swapped_missing_and_foreign_files_are_seen(small, tmp_path):
    manager, marker = small_manager(), tmp_path / "marker"
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.ones(3)})
    foreign = [
        (tmp_path / "weights.safetensors").read_bytes(),
        pickle.dumps(_Marks(str(marker))),
        b"[" * 100_000,
        b'{"card":{"a":' + b"[" * 900 + b"]" * 900 + b'},"digest":"","format":2}',
        b'{"card": {}, "format": 2}',
        b'{"__class__": "os"}',
        b"\xff" * 64,
        os.urandom(4096),
    ]
    contents = {file: file.read_bytes() for file in files(small)}
    with unchanged(manager):
        for file, own in contents.items():
            for data in (*foreign, *(other for other in contents.values() if other != own)):
                with damaged(file, data):
                    assert_refused(small, manager)
            file.unlink()
            assert_refused(small, manager, CardCorruptError, CardNotFoundError)
            file.mkdir()
            assert_refused(small, manager, CardCorruptError)
            file.rmdir()
            file.write_bytes(own)
    assert not marker.exists()
    small.verify("card")


class _Marks:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("version", [0, 1, 999, None, "1.x", "2", True, 2.0])
def test_b50_another_format_is_named(small, version):
    file = card_file(small)
    plain = json.loads(file.read_bytes())
    plain["format"] = version
    with damaged(file, json.dumps(plain).encode()), pytest.raises(CardFormatError, match=r"found .*readable are \[2\]"):
        small.inspect("card")
    del plain["format"]
    with (
        damaged(file, json.dumps(plain).encode()),
        pytest.raises(CardFormatError, match=r"format: .*readable are \[2\]"),
    ):
        small.inspect("card")


def forged(small: CardStore, **changes) -> bytes:
    """A card in the right form, with a digest that holds."""
    card = decode_card(card_file(small).read_bytes(), "x")
    return dataclasses.replace(card, **changes).encoded()


def test_a_card_that_speaks_of_other_segments_than_it_names(small):
    card, manager = small.inspect("card"), small_manager()
    first, second = card.segments
    wrong = {
        "checksum": {"segments": (dataclasses.replace(first, checksum=second.checksum), second)},
        "nbytes": {"segments": (dataclasses.replace(first, nbytes=5), second)},
        "digest": {"segments": (dataclasses.replace(first, digest=second.digest), second)},
        "quant": {"quant": QuantSpec(8, 8)},
        "order": {"segments": (second, first)},
        "length": {"segments": (dataclasses.replace(first, length=99), second)},
        "ids": {"segments": (dataclasses.replace(first, token_ids=(1,) * 12), second)},
        "path": {"segments": (dataclasses.replace(first, digest="../" * 8 + "x" * 8), second)},
        "type": {"segments": (dataclasses.replace(first, start=0.0), second)},
        "name": {"name": "other"},
        "hops": {"hops": -1},
        "base": {"base_tokens": 10**6},
    }
    for changes in wrong.values():
        with unchanged(manager), damaged(card_file(small), forged(small, **changes)):
            assert_refused(small, manager, CardCorruptError, CardFormatError, FingerprintMismatchError)


def test_no_code_comes_from_a_file():
    for name in ("store", "card", "segment_file", "segment_layout", "restore"):
        text = (TESTS.parent / "mlx_qkvshare" / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"import pickle|(?<!mx\.)\beval\(|exec\(|np\.load|importlib|globals\(", text)


# --- processes ---------------------------------------------------------------------------------------


def test_b42_killed_at_any_moment_a_save_leaves_the_old_or_the_new(store, processes):
    rng, numbers, partial, source = random.Random(2), [], 0, CardStore(store.folder / "source")
    for number in (2, 1):
        save(make_manager(), source, number, LONG, name=str(number))
        save(make_manager(), store, number, LONG)
    for _ in range(24):
        is_ready = processes.Event()
        child = processes.Process(target=store_work.save_in_turns, args=(str(store.folder), is_ready))
        child.start()
        assert is_ready.wait(30)
        child.join(0.2 * rng.random())
        child.kill()
        child.join()
        assert child.exitcode == -9
        partial += any(path.name.startswith(".") for path in files(store))
        numbers.append(whole_number(store))
    assert set(numbers) == {1, 2} and partial > 0, "some were killed while they wrote"
    shutil.rmtree(source.folder)
    store.gc()
    assert len(files(store)) == 2 and whole_number(store) == numbers[-1]


@pytest.mark.slow
def test_b42_killed_over_a_large_card_the_load_gives_the_old_or_the_new(tmp_path, processes):
    """50 kills, spread over the time that a save takes, of more than 100 MB: after each all is whole, and no other file
    was touched."""
    store, sources = CardStore(tmp_path / "store"), CardStore(tmp_path / "sources")
    manager, rng, numbers, partial = make_manager(**LARGE), random.Random(3), [], 0
    for number in (2, 1):
        save(manager, sources, number, LARGE_TOKENS, name=str(number))
    save(manager, store, 1, LARGE_TOKENS)
    save(make_manager(), store, 3, LONG, name="bystander")
    assert store.inspect("card").packed_bytes >= 100e6

    def child():
        is_ready, is_done = processes.Event(), processes.Event()
        started = processes.Process(
            target=store_work.save_the_other, args=(str(store.folder), str(sources.folder), is_ready, is_done)
        )
        started.start()
        assert is_ready.wait(60)
        return started, is_done

    def duration() -> float:
        saver, is_done = child()
        begun = time.perf_counter()
        assert is_done.wait(60)
        took = time.perf_counter() - begun
        saver.kill()
        saver.join()
        store.gc()
        return took

    longest = max(duration() for _ in range(3))
    for number in range(50):
        before, old = digests(store), number_in(store.inspect("card"))
        saver, _ = child()
        time.sleep((number + rng.random()) / 50 * longest)
        saver.kill()
        saver.join()
        assert saver.exitcode == -9
        after = digests(store)
        changed = {path for path in before if after.get(path) != before[path]}
        assert changed <= {store._card_path("card")}, "the old segment, too, and the other card are as they were"
        partial += bool(store_work.leftovers(store.folder))
        now = whole_number(store, **LARGE)
        assert bool(changed) == (now != old)
        numbers.append(now != old)
        store.sweep()
        assert not store_work.leftovers(store.folder)
        store.gc()
        assert len(files(store)) == 4 and store.verify("bystander").num_tokens == LONG
    assert len(numbers) == 50 and {True, False} == set(numbers) and partial > 5, (sum(numbers), partial)
    print(f"50 of 50 whole: {sum(numbers)} new, {partial} cut while they wrote; a save took {longest:.2f} s")


def digests(store: CardStore) -> dict[Path, str]:
    return {file: digest_bytes(file.read_bytes()) for file in files(store)}


def test_b42_a_small_file_system_that_is_really_full_keeps_what_was_there(tmp_path):
    (disk := tmp_path / "disk").mkdir()
    command = [sys.executable, str(TESTS / "store_work.py"), str(disk)]
    if reason := run_on_small_disk(disk, 4 << 20, command, env=os.environ | {"PYTHONPATH": python_path()}):
        pytest.skip(f"no small file system can be made here: {reason}")


def test_b42_a_full_disk_keeps_what_was_there(store, processes):
    save(make_manager(), store, 1, 40)
    before = {file: file.read_bytes() for file in files(store)}
    largest = max(map(len, before.values()))
    for limit in (0, 100, 8192, largest // 2, largest - 1):
        child = processes.Process(target=store_work.save_under_a_limit, args=(str(store.folder), limit))
        child.start()
        child.join()
        assert child.exitcode == 0, limit
        assert {file: file.read_bytes() for file in files(store)} == before


def test_a_folder_that_cannot_be_written_to_is_told_by_type(store, monkeypatch):
    save(make_manager(), store, 1, 10)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CardWriteError, match="No space left"):
        save(make_manager(), store, 2, 10)
    monkeypatch.undo()
    assert whole_number(store) == 1 and len(files(store)) == 2


def test_writers_and_readers_at_once(store, processes):
    save(make_manager(), store, 0, 50)
    folder = str(store.folder)
    children = [
        processes.Process(target=store_work.save_in_a_loop, args=(folder, 2, 50, 25, True, 2)),
        processes.Process(target=store_work.save_in_a_loop, args=(folder, 3, 50, 25, False, 2)),
        processes.Process(target=store_work.load_in_a_loop, args=(folder, 40)),
        processes.Process(target=store_work.load_in_a_loop, args=(folder, 40)),
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert whole_number(store) in (50, 51)
    store.gc()
    assert len(files(store)) == 2
