"""Domains: what a session may not read it never attends; guesses tell nothing; what was revoked stays away."""

import copy
import dataclasses
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from core_helpers import FULL, K8V8, loaded, make_manager, store
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiny import RECURRENT, tiny_loaded

from mlx_qkvshare import (
    Access,
    AgentBatch,
    AgentScheduler,
    AgentSession,
    AuditLog,
    CardStore,
    HandoffCoordinator,
    QuantSpec,
    SharedKVCacheManager,
    SpillStore,
    private,
    restore,
)
from mlx_qkvshare.card import decode
from mlx_qkvshare.errors import (
    AccessError,
    AuditError,
    BudgetExceededError,
    CardError,
    CardFormatError,
    CardWriteError,
    HandoffError,
    InvalidValueError,
    RevokedError,
)

T = tiny_loaded()
KINDS = {
    "full": {},
    "window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "state": RECURRENT | {"block_dim": 32, "block_ff_dim": 32, "block_multiple_of": 8},
}
PRIVATE = Access(private("a"), frozenset({"team"}))


def manager_of(model=T, **options):
    return SharedKVCacheManager(model.spec, FULL, **options)


def session(name, manager, access=None, **options):
    return AgentSession(name, T, manager, access=access or Access(), **options)


def ids(seed, count=24):
    return np.random.default_rng(seed).integers(10, 300, count).tolist()


# --- labels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["", "x" * 129, "a\nb", 7, None])
def test_a_domain_has_a_name(domain):
    with pytest.raises(InvalidValueError, match="domain"):
        Access(domain)
    with pytest.raises(InvalidValueError):
        Access("team", frozenset({domain}))


def test_several_domains_are_not_one_text():
    with pytest.raises(InvalidValueError, match="several"):
        Access("team", "secret")


def test_what_it_writes_and_what_is_public_it_may_read():
    assert Access("x", frozenset()).reads == {"x", "public"}
    assert not Access("x", frozenset()).may_read({"x", "team"})
    assert Access(reads=None).may_read({"anything"})


def test_what_is_private_is_for_agents_of_that_name():
    manager = manager_of()
    session("a", manager, PRIVATE)
    for access in (PRIVATE, Access("team", frozenset({private("a")}))):
        with pytest.raises(InvalidValueError, match="'private:a'"):
            session("b", manager, access)
    with pytest.raises(InvalidValueError, match="'private:b'"):
        session("a", manager, Access(reads=None)).write_in(private("b"))
    with pytest.raises(InvalidValueError, match="secret"):
        session("a", manager).write_in("secret")


def test_labels_are_inherited_and_cut_with_what_they_are_of():
    manager = manager_of()
    a = session("a", manager, Access("public", frozenset({"team", private("a")})))
    a.prefill(ids(1))
    for domain in (private("a"), "team"):
        a.write_in(domain)
        a.prefill(ids(2))
    a.seal()
    labels = [(set(view.segment.own_domains), set(view.segment.domains)) for view in a.prefix.views]
    assert labels == [
        ({"public"}, {"public"}),
        ({private("a")}, {"public", private("a")}),
        ({"team"}, {"public", private("a"), "team"}),
    ]
    a.rewind(48)
    b = a.fork("b")  # nothing private is left
    assert b.access == Access("team", frozenset({"public"}))
    manager.check_integrity(checksums=True)


def test_segments_of_different_domains_are_not_joined():
    manager = manager_of()
    a = session("a", manager, Access("public", frozenset({"team"})))
    for domain in ("public", "team", "public"):
        a.write_in(domain)
        a.prefill(ids(3, 8))
    a.seal()
    assert len(a.prefix.views) == 3


def test_messages_have_the_domain_that_they_were_said_in():
    a = session("a", manager_of(), Access("team", frozenset({private("a")})), role_prompt="You are a.")
    a.reply("hello", max_tokens=2)
    a.write_in(private("a"))
    a.reply("between us", max_tokens=2)
    assert [message.domain for message in a.messages] == ["team"] * 3 + [private("a")] * 2


# --- handoffs -----------------------------------------------------------------------------------------


@pytest.fixture
def team():
    """An agent with something public, something of its own and something for the team, and one of the team."""
    manager = manager_of()
    a = session("a", manager, Access("public", frozenset({"team", private("a")})))
    a.prefill(ids(1))
    a.write_in(private("a"))
    a.prefill(ids(2))
    a.write_in("team")
    a.prefill(ids(3))
    return manager, a, session("b", manager)


def test_a_handoff_that_may_not_be_read_names_the_span_and_changes_nothing(team):
    manager, a, b = team
    b.prefill(ids(9))
    coordinator = HandoffCoordinator(manager)
    before = b.token_ids, a.token_ids, len(coordinator.records)
    with pytest.raises(AccessError, match=r"tokens 24 to 48 .*'public', 'team'.*'private:a'"):
        coordinator.request_handoff(a, b)
    with pytest.raises(AccessError):
        coordinator.deliver(a.package_state(), b)
    with pytest.raises(AccessError):
        b.receive_state(a.package_state())
    with pytest.raises(AccessError):
        a.fork("b")
    with pytest.raises(AccessError):
        a.fork("a", access=Access())
    assert (b.token_ids, a.token_ids, len(coordinator.records)) == before
    assert b.generate_token() is not None
    manager.check_integrity()


def test_redaction_gives_the_permitted_beginning_by_reference_and_computes_the_rest(team):
    manager, a, b = team
    stored = a.package_state().spans[0]
    record = HandoffCoordinator(manager).request_handoff(a, b, redact=True)
    assert b.token_ids == ids(1) + ids(3)
    assert (record.reused_tokens, record.computed_tokens, record.redacted_tokens, record.bytes_copied) == (
        24,
        24,
        24,
        0,
    )
    assert b.prefix.views[0].segment.slot == stored.slot and a.num_tokens == 0
    cold = session("cold", manager_of())
    cold.prefill(ids(1))
    cold.seal()
    cold.prefill(ids(3))
    cold.seal()
    assert np.allclose(b.score([5, 6]), cold.score([5, 6]), atol=1e-4)  # its segments were joined


def test_redaction_does_not_widen_who_may_read(team):
    manager, a, _ = team
    teller = session("teller", manager, Access("public", frozenset({"team"})))
    HandoffCoordinator(manager).request_handoff(a, teller, redact=True)
    assert teller.token_ids == ids(1) + ids(3)
    with pytest.raises(AccessError):
        session("all", manager, Access("public", frozenset())).receive_state(teller.package_state())


@pytest.mark.parametrize("kind", [KINDS["window"], RECURRENT])
def test_what_a_rewind_computes_again_stays_what_it_was(kind):
    model = tiny_loaded(**kind)
    manager = SharedKVCacheManager(model.spec, FULL)
    a = AgentSession("a", model, manager, access=Access("team", frozenset({private("a")})))
    a.prefill(ids(1))
    a.write_in(private("a"))
    a.prefill(ids(2))
    a.write_in("team")
    a.rewind(3)  # where such a layer cannot be cut
    a.seal()
    assert a.token_ids == ids(1) + ids(2)[:-3] and a.prefix.views[-1].segment.own_domains == {"team", private("a")}
    with pytest.raises(AccessError):
        a.fork("b")


def test_redaction_of_what_may_be_read_is_a_handoff(team):
    manager, a, _ = team
    c = session("a", manager, Access("team", frozenset({private("a")})))
    record = HandoffCoordinator(manager).request_handoff(a, c, redact=True)
    assert (record.computed_tokens, record.redacted_tokens, c.num_tokens) == (0, 0, 72)


def test_redaction_that_fails_leaves_both_as_they_were(team):
    manager, a, b = team
    a.seal()
    before = a.token_ids
    blocker = manager.allocate_shared_slot(400)
    manager.budget_bytes -= manager.stats().free_bytes
    manager._free_bytes = 0
    with pytest.raises(BudgetExceededError):
        HandoffCoordinator(manager).request_handoff(a, b, redact=True)
    assert a.token_ids == before and b.num_tokens == 0
    manager.free_slot(blocker)


def test_private_messages_stay_out_of_a_redacted_conversation():
    manager = manager_of()
    a = session("a", manager, Access("team", frozenset({private("a")})))
    a.reply("what all may know", max_tokens=2)
    a.write_in(private("a"))
    a.reply("the word is xylophone", max_tokens=2)
    a.write_in("team")
    a.reply("go on then", max_tokens=2)
    b = session("b", manager)
    HandoffCoordinator(manager).request_handoff(a, b, redact=True, keep_sender=True)
    assert [message.content for message in b.messages if message.role == "user"] == ["what all may know", "go on then"]
    text = T.tokenizer.decode(b.token_ids)
    assert "xylophone" not in text and "go on then" in text
    b.reply("and now?", max_tokens=2)
    assert "xylophone" not in T.tokenizer.decode(b.token_ids)


def test_messages_that_were_rewound_are_not_handed_over_as_text():
    manager = manager_of()
    a = session("a", manager, Access("team", frozenset({private("a")})))
    a.say("for all")
    shared = a.num_tokens
    a.write_in(private("a"))
    a.say("the word is xylophone")
    a.rewind(a.num_tokens - shared)
    for give in (lambda: HandoffCoordinator(manager).request_handoff(a, session("b", manager)), lambda: a.fork("b")):
        with pytest.raises(AccessError, match="message 1"):
            give()


def test_what_is_computed_again_stays_what_it_was():
    """A turn that renders private messages anew must not write them into the domain that is written now."""
    manager = manager_of()
    a = session("a", manager, Access("team", frozenset({private("a")})))
    a.say("for all")
    shared = a.num_tokens
    a.write_in(private("a"))
    a.say("the word is xylophone")
    a.write_in("team")
    a.rewind(a.num_tokens - shared)
    a.say("go on")
    a.seal()
    assert "xylophone" in T.tokenizer.decode(a.token_ids)
    assert private("a") in a.prefix.views[-1].segment.own_domains
    with pytest.raises(AccessError):
        a.fork("b")


def test_a_card_keeps_its_domains_and_a_rebuilt_one_too(team, tmp_path):
    manager, a, b = team
    cards = CardStore(tmp_path)
    manager.save_card(cards, "c", a)
    for target in (b, session("b", manager_of(), Access("public"))):
        for rebuild in (False, True):
            with pytest.raises(AccessError, match="tokens 24 to 48"):
                restore(target, cards, "c", rebuild=rebuild)
    other = SharedKVCacheManager(T.spec, K8V8)
    again = session("a", other, Access("team", frozenset({private("a")})))
    assert restore(again, cards, "c", rebuild=True).computed_tokens == 72
    with pytest.raises(AccessError):
        again.fork("b")
    again = session("a", manager_of(), Access("team", frozenset({private("a")})))
    restore(again, cards, "c")
    assert [view.segment.domains for view in again.prefix.views] == [s.domains for s in a.package_state().spans]


def test_equal_bytes_of_two_domains_are_two_files(tmp_path):
    cards = CardStore(tmp_path)
    for index, domain in enumerate(("team", "secret")):
        agent = session("a", manager_of(), Access(domain))
        agent.prefill(ids(1))
        agent.manager.save_card(cards, domain, agent)
        assert len(list((tmp_path / "segments").iterdir())) == index + 1


# --- guesses (B75) ------------------------------------------------------------------------------------

SECRET = ids(50, 40)


def figures(owner_access, guesser_access, guess, tmp_path=None):
    """All that a guesser can see after it said `guess`, where an agent of another domain has said `SECRET`."""
    spill = SpillStore(tmp_path, 10**8) if tmp_path else None
    manager = manager_of(spill=spill)
    owner = session("a", manager, owner_access)
    owner.prefill(SECRET)
    owner.seal()
    if spill:
        owner.close()
        manager.evict_unreferenced()
    guesser = session("g", manager, guesser_access)
    guesser.prefill(guess)
    seen = [guesser.last_prefill]
    guesser.seal()
    seen += [manager.stats(), manager.stats(guesser_access)]
    twin = session("g", manager, guesser_access)
    twin.prefill(guess)
    seen += [twin.last_prefill, manager.stats()]
    record = HandoffCoordinator(manager).request_handoff(guesser, session("h", manager, guesser_access))
    seen += [record.reused_tokens, record.bytes_referenced, record.bytes_copied]
    if tmp_path:
        cards = CardStore(tmp_path / "cards")
        manager.save_card(cards, "g", twin)
        seen += [cards.stored_bytes("g"), sum(f.stat().st_size for f in cards.folder.rglob("*") if f.is_file())]
    return seen


@pytest.mark.parametrize("is_spilled", [False, True])
@pytest.mark.parametrize(
    ("owner", "guesser"),
    [
        (Access("x", frozenset()), Access("y", frozenset())),
        (PRIVATE, Access("team")),
        (Access("team"), Access("y", frozenset({"team"}))),  # may read it, when it is handed over
        (Access("x", frozenset()), Access("public", frozenset())),
        (Access("x", frozenset()), Access(reads=None)),
    ],
)
def test_b75_right_and_wrong_guesses_look_alike(owner, guesser, is_spilled, tmp_path):
    wrong = [*SECRET[:-1], 5]
    seen = [figures(owner, guesser, guess, tmp_path / name if is_spilled else None) for name, guess in
            (("right", SECRET), ("wrong", wrong))]  # fmt: skip
    assert seen[0] == seen[1]
    assert seen[0][0].reused_tokens == 0


def test_b75_what_is_shared_on_purpose_is_found():
    seen = figures(Access("public", frozenset()), Access("y", frozenset()), SECRET)
    assert seen[0].reused_tokens == len(SECRET)
    assert figures(Access("x"), Access("x"), SECRET)[0].reused_tokens == len(SECRET)


def test_b75_the_owner_does_not_stand_on_a_guess_either():
    """What somebody stored beforehand is no answer to what an agent says in private later."""

    def after(guess):
        manager = manager_of()
        guesser = session("g", manager)
        guesser.prefill(guess)
        guesser.seal()
        owner = session("a", manager, PRIVATE)
        owner.prefill(SECRET)
        owner.seal()
        return owner.last_prefill, manager.stats()

    assert after(SECRET) == after([*SECRET[:-1], 5])


def test_a_view_of_a_segment_is_not_longer_for_who_may_not_find_it():
    manager = manager_of()
    owner = session("b", manager)
    owner.prefill(SECRET)
    package = owner.package_state()
    guesser = session("a", manager, PRIVATE)
    guesser.receive_state(package)
    guesser.rewind(20)
    hits = manager.stats().num_hits
    guesser.prefill(SECRET[20:])
    guesser.seal()
    assert manager.stats().num_hits == hits and guesser.prefix.views[-1].segment.own_domains == {private("a")}


# --- revocation ---------------------------------------------------------------------------------------


def test_what_was_revoked_is_read_by_nobody_and_others_never_notice(tmp_path):
    cards = CardStore(tmp_path)
    manager = manager_of()
    a = session("a", manager)
    a.prefill(ids(1))
    a.seal()
    other = a.fork("other")
    a.prefill(ids(2, 60))
    a.seal()
    reader, holder = a.fork("reader"), a.fork("holder")
    manager.save_card(cards, "whole", a)
    manager.save_card(cards, "beginning", other)
    reader.prefill(ids(3))
    reader.seal()
    manager.save_card(cards, "further", reader)
    expected = session("cold", manager_of())
    expected.prefill(ids(1))
    expected.seal()
    expected = expected.score([5, 6])
    package = a.package_state()

    victim = a.prefix.views[1].segment
    stream = holder.stream(ids(4, 4), max_tokens=8, ignore_eos=True)
    next(stream)
    receipt = manager.revoke(victim.slot, stores=[cards])
    assert receipt.slots == (victim.slot, reader.prefix.holding.revoked_from and receipt.slots[1])
    assert (receipt.num_tokens, receipt.num_holders) == (84, 3)
    assert receipt.cards == ("further", "whole") and receipt.disk_bytes > receipt.nbytes
    with pytest.raises(RevokedError):
        next(stream)
    for gone in (a, reader, holder):
        for use in (
            lambda: gone.generate_token(),  # noqa: B023
            lambda: gone.prefill([5]),  # noqa: B023
            lambda: gone.score([5]),  # noqa: B023
            lambda: gone.package_state(),  # noqa: B023
            lambda: gone.fork("f"),  # noqa: B023
            lambda: gone.token_ids,  # noqa: B023
            lambda: copy.deepcopy(gone.caches),  # noqa: B023
            lambda: gone.reply("x"),  # noqa: B023
        ):
            with pytest.raises(RevokedError):
                use()
    with pytest.raises(HandoffError):
        other.receive_state(package)
    assert np.array_equal(other.score([5, 6]), expected)
    a.reset()
    a.prefill(ids(7))
    for name in ("whole", "further"):
        assert name not in cards.names()
    with CardStore(tmp_path).load(manager_of(), "beginning") as card:
        assert card.package.num_tokens == 24
    for it in (a, reader, holder, other):
        it.close()
    manager.check_integrity(checksums=True)
    manager.evict_unreferenced()
    assert manager.stats().used_bytes == 0


def test_a_copy_of_a_revoked_card_is_refused_and_cannot_be_kept_again(tmp_path):
    cards = CardStore(tmp_path / "cards")
    manager, elsewhere = manager_of(), manager_of()
    a, twin = session("a", manager), session("a", elsewhere)
    for agent in (a, twin):  # the same bytes, in another process perhaps
        agent.prefill(ids(1))
        agent.seal()
    manager.save_card(cards, "c", a)
    shutil.copytree(tmp_path / "cards", tmp_path / "copy")
    manager.revoke(a.prefix.views[0].segment.slot, stores=[cards])
    for folder in ("cards", "segments"):
        shutil.copytree(tmp_path / "copy" / folder, tmp_path / "cards" / folder, dirs_exist_ok=True)
    for use in (
        lambda: cards.load(manager_of(), "c"),
        lambda: cards.verify("c"),
        lambda: restore(session("a", manager_of()), cards, "c", rebuild=True),
        lambda: elsewhere.save_card(cards, "again", twin),
    ):
        with pytest.raises(RevokedError):
            use()
    assert cards.names() == []


def test_what_was_joined_meanwhile_is_found_on_disk(tmp_path):
    cards, manager = CardStore(tmp_path), manager_of()
    a = session("a", manager)
    a.prefill(ids(1, 8))
    a.seal()
    first = a.prefix.views[0].segment
    manager.save_card(cards, "early", a)
    a.prefill(ids(2, 8))
    a.seal()
    assert len(a.prefix.views) == 1 and a.prefix.views[0].segment is not first
    receipt = manager.revoke(first.slot, stores=[cards])  # by the slot that it had
    assert receipt.cards == ("early",) and first.checksum in receipt.seals


def test_a_revocation_in_the_middle_of_a_batch_is_one_agents_loss():
    manager = manager_of()
    a, b = session("a", manager), session("b", manager)
    for agent, seed in ((a, 1), (b, 2)):
        agent.prefill(ids(seed))
        agent.seal()
    victim = a.prefix.views[0].segment.slot
    alone = b.fork("alone")
    with AgentBatch(manager) as batch:
        for agent in (a, b):
            batch.join(agent, ids(5, 4), max_tokens=6, ignore_eos=True)
        events = batch.step()
        manager.revoke(victim)
        events += list(batch.stream())
    assert [type(event.error) for event in events if event.error] == [RevokedError]
    tokens = [event.chunk.token for event in events if event.session is b]
    assert tokens == [chunk.token for chunk in alone.stream(ids(5, 4), max_tokens=6, ignore_eos=True)]


class Hooked(nn.Module):
    """A layer's attention in which something happens."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.hook = inner, lambda: None

    def __call__(self, *args, **kwargs):
        self.hook()
        return self.inner(*args, **kwargs)


def test_a_revocation_in_the_middle_of_a_step_is_one_agents_loss():
    def wrap(model):
        model.model.layers[0].self_attn = Hooked(model.model.layers[0].self_attn)

    model = loaded(wrap=wrap)
    manager = manager_of(model)
    a, b = (AgentSession(name, model, manager) for name in "ab")
    for agent, seed in ((a, 1), (b, 2)):
        agent.prefill(ids(seed))
        agent.seal()
    victim, alone = a.prefix.views[0].segment.slot, b.fork("alone")
    expected = [chunk.token for chunk in alone.stream(ids(5, 4), max_tokens=6, ignore_eos=True)]
    attention = model.model.model.layers[0].self_attn

    def revoke():
        attention.hook = lambda: None
        manager.revoke(victim)

    with AgentBatch(manager) as batch:
        for agent in (a, b):
            batch.join(agent, ids(5, 4), max_tokens=6, ignore_eos=True)
        events = batch.step() + batch.step()
        assert batch.is_together
        attention.hook = revoke
        events += list(batch.stream())
    assert [type(event.error) for event in events if event.error] == [RevokedError]
    assert [event.chunk.token for event in events if event.session is b] == expected


def test_a_revocation_from_another_thread_ends_a_task_with_its_reason():
    manager = manager_of()
    a = session("a", manager)
    a.prefill(ids(1))
    a.seal()
    slot = a.prefix.views[0].segment.slot
    seen = threading.Event()

    def sampler(logits):
        seen.set()
        return mx.argmax(logits)

    a._sampler = sampler
    with AgentScheduler(manager) as scheduler:
        task = scheduler.submit(a, ids(2, 4), max_tokens=400, ignore_eos=True)
        assert seen.wait(30)
        manager.revoke(slot)
        with pytest.raises(RevokedError):
            task.result(timeout=30)
    manager.check_integrity()


def test_what_was_spilled_is_revoked_with_the_rest(tmp_path):
    spill = SpillStore(tmp_path, 10**8)
    manager = manager_of(spill=spill)
    a = session("a", manager)
    a.prefill(ids(1))
    a.seal()
    b = a.fork("b")
    b.prefill(ids(2, 60))
    b.seal()
    b.close()
    manager.evict_unreferenced()
    assert spill.used_bytes > 0
    assert manager.revoke(a.prefix.views[0].segment.slot).disk_bytes > 0 == spill.used_bytes
    again = session("again", manager)
    again.prefill(ids(1))
    assert again.last_prefill.reused_tokens == 0


def test_a_seal_behind_what_is_revoked_meanwhile_is_refused():
    manager = make_manager()
    prefix = store(manager, range(10))
    slot = manager.allocate_shared_slot(5, replacing=prefix)
    manager.revoke(prefix.views[0].segment.slot)
    with pytest.raises(RevokedError):
        manager.extend_if_sealed(prefix, [1])
    with pytest.raises(RevokedError):
        manager.quantize_and_store(slot, range(5), [], prefix=prefix)
    manager.free_slot(slot)
    prefix.release()
    assert manager.stats().used_bytes == 0
    with pytest.raises(InvalidValueError, match="freed"):
        manager.revoke(slot.slot)


def sealed(manager, name="a", *prompts):
    agent = session(name, manager)
    for prompt in prompts or (ids(1),):
        agent.prefill(prompt)
        agent.seal()
    return agent


def until_revoked(manager, segment, **options):
    """Revoke from another thread, and wait until nothing of it stands in memory; the thread waits for the disk."""
    thread = threading.Thread(target=manager.revoke, args=(segment,), kwargs=options)
    thread.start()
    while any(it.keys & segment.keys for it in manager.segments()):
        time.sleep(0.001)
    return thread


def test_what_was_evicted_can_still_be_revoked(tmp_path):
    spill = SpillStore(tmp_path, 10**8)
    manager = manager_of(spill=spill)
    agent = sealed(manager)
    segment = agent.prefix.views[0].segment
    agent.close()
    manager.evict_unreferenced()
    receipt = manager.revoke(segment)
    assert (receipt.slots, receipt.seals, receipt.num_tokens, spill.used_bytes) == ((), segment.seals, 0, 0)
    assert sealed(manager).last_prefill.reused_tokens == 0


def test_what_came_back_under_another_slot_is_revoked(tmp_path):
    manager = manager_of(spill=SpillStore(tmp_path, 10**8))
    agent = sealed(manager)
    segment = agent.prefix.views[0].segment
    agent.close()
    manager.evict_unreferenced()
    again = sealed(manager)
    assert again.last_prefill.reused_tokens == 24
    manager.revoke(segment)
    with pytest.raises(RevokedError):
        again.generate_token()
    manager.check_integrity(checksums=True)


def test_a_store_that_fails_keeps_no_other_from_being_told_and_is_told_again(tmp_path):
    class Failing(CardStore):
        def revoke(self, keys):
            if is_failing:
                raise CardWriteError("disk")
            return super().revoke(keys)

    is_failing, cards, spill = True, Failing(tmp_path / "cards"), SpillStore(tmp_path / "spill", 10**8)
    manager = manager_of(spill=spill, audit=AuditLog(tmp_path / "log"))
    agent = sealed(manager)
    manager.save_card(cards, "c", agent)
    segment = agent.prefix.views[0].segment
    further = agent.fork("b")
    further.prefill(ids(2, 60))
    further.seal()
    further.close()
    manager.evict_unreferenced()
    with pytest.raises(CardWriteError, match="disk"):
        manager.revoke(segment.slot, stores=[cards])
    assert spill.names() == [] and cards.names() == ["c"]
    is_failing = False
    assert manager.revoke(segment, stores=[cards]).cards == ("c",)
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [event["num_failed_stores"] for event in events if event["event"] == "revocation"] == [1, 0]


def test_a_store_that_cannot_refuse_says_so_and_gives_nothing(tmp_path):
    cards, manager = CardStore(tmp_path), manager_of()
    agent = sealed(manager)
    manager.save_card(cards, "c", agent)
    (tmp_path / "revoked").write_text("")
    with pytest.raises(CardWriteError, match="not revoked here"):
        manager.revoke(agent.prefix.views[0].segment.slot, stores=[cards])
    with pytest.raises(CardError, match="revoked"):
        cards.load(manager_of(), "c")


@pytest.mark.parametrize("is_known", [True, False])
def test_revoked_bytes_that_no_card_names_leave_the_disk(tmp_path, is_known):
    cards, manager = CardStore(tmp_path), manager_of()
    agent = sealed(manager)
    manager.save_card(cards, "c", agent)
    cards.rm("c")
    (path,) = (tmp_path / "segments").iterdir()
    (tmp_path / "segments" / f".{path.stem}.x.safetensors").write_bytes(b"half")
    if not is_known:
        (tmp_path / "cards" / f"{'0' * 32}.json").write_text('{"format": 99, "card": {}}')
    receipt = manager.revoke(agent.prefix.views[0].segment.slot, stores=[cards])
    assert list((tmp_path / "segments").iterdir()) == ([] if is_known else [path])  # it may be a newer card's
    assert receipt.disk_bytes > receipt.nbytes if is_known else receipt.disk_bytes == 4


def test_an_empty_slot_is_not_revoked():
    manager = make_manager()
    slot = manager.allocate_shared_slot(5)
    with pytest.raises(InvalidValueError, match="empty slot"):
        manager.revoke(slot.slot)
    manager.free_slot(slot)
    manager.check_integrity()


def test_a_card_that_is_revoked_while_it_is_loaded_does_not_stand_after(tmp_path, monkeypatch):
    cards, manager, threads = CardStore(tmp_path), manager_of(), []
    agent = sealed(manager)
    manager.save_card(cards, "c", agent)
    agent.close()
    manager.evict_unreferenced()
    read = cards._read_layers

    def meanwhile(*args):  # another says the same, and that is revoked
        segment = sealed(manager, "b").prefix.views[0].segment
        threads.append(until_revoked(manager, segment, stores=[cards]))
        return read(*args)

    monkeypatch.setattr(cards, "_read_layers", meanwhile)
    with pytest.raises(RevokedError):
        cards.load(manager, "c")
    threads[0].join()
    assert manager.segments() == () and cards.names() == []
    manager.check_integrity()


def test_what_is_revoked_while_it_comes_back_from_disk_is_no_error_of_who_looked(tmp_path, monkeypatch):
    spill, threads = SpillStore(tmp_path, 10**8), []
    manager = manager_of(spill=spill)
    agent = sealed(manager, "a", ids(1, 60))
    further = agent.fork("b")
    further.prefill(ids(2, 20))
    further.seal()
    further.close()
    manager.evict_unreferenced()
    read, segment = spill._read_layers, agent.prefix.views[0].segment

    def meanwhile(*args):
        threads.append(until_revoked(manager, segment))
        return read(*args)

    monkeypatch.setattr(spill, "_read_layers", meanwhile)
    looking = session("c", manager)
    looking.prefill(ids(1, 60) + ids(2, 20))
    threads[0].join()
    assert looking.last_prefill.reused_tokens == 0 and spill.used_bytes == 0
    looking.seal()
    manager.check_integrity(checksums=True)


def test_what_another_process_revokes_meanwhile_is_not_written(tmp_path, monkeypatch):
    spills = [SpillStore(tmp_path, 10**8) for _ in range(2)]
    ours, theirs = (manager_of(spill=spill) for spill in spills)
    agent, other = sealed(ours), sealed(theirs)
    segment = other.prefix.views[0].segment
    agent.close()
    locked = spills[0]._alone_if_can

    def meanwhile():
        theirs.revoke(segment)
        return locked()

    monkeypatch.setattr(spills[0], "_alone_if_can", meanwhile)
    ours.evict_unreferenced()
    assert (ours.stats().num_evictions, ours.stats().num_spilled, spills[0].used_bytes) == (1, 0, 0)


# --- the audit log ------------------------------------------------------------------------------------


def test_the_log_has_handoffs_refusals_and_revocations_and_no_text(tmp_path):
    log = tmp_path / "audit.jsonl"
    manager = manager_of(audit=AuditLog(log))
    coordinator = HandoffCoordinator(manager)
    a = session("a", manager, Access("team", frozenset({private("a")})))
    b = session("b", manager)
    a.say("the word is xylophone")
    record = coordinator.request_handoff(a, b, keep_sender=True)
    a.write_in(private("a"))
    a.say("and marimba")
    for give in (lambda: coordinator.request_handoff(a, b), lambda: a.fork("c")):
        with pytest.raises(AccessError):
            give()
    coordinator.request_handoff(a, b, redact=True, keep_sender=True)
    manager.save_card(CardStore(tmp_path / "cards"), "c", a)
    with pytest.raises(AccessError):
        restore(b, CardStore(tmp_path / "cards"), "c")
    manager.revoke(a.prefix.views[0].segment.slot)
    raw = log.read_text()
    events = [json.loads(line) for line in raw.splitlines()]
    assert [event["event"] for event in events] == ["handoff", "refusal", "refusal", "handoff", "refusal", "revocation"]
    assert (events[0]["sender"], events[0]["receiver"], events[0]["reused_tokens"]) == ("a", "b", record.reused_tokens)
    assert events[3]["redacted_tokens"] > 0 and events[5]["num_holders"] == 2
    assert "xylophone" not in raw and "marimba" not in raw and log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(AuditError, match="missing"):
        AuditLog(tmp_path / "missing" / "audit.jsonl")


# --- labels of a tail that was written elsewhere before ------------------------------------------------


@pytest.fixture
def telling():
    """An agent of the team whose tail has tokens that were private before."""
    a = session("a", manager_of(), Access("team", frozenset({private("a")})))
    a.prefill(ids(1))
    a.seal()
    a.sync(ids(1) + ids(2), domains={private("a")})
    return a


def test_an_interrupt_in_a_rewind_does_not_widen_who_may_read(telling):
    class Interrupting(list):
        def clear(self):
            raise KeyboardInterrupt

    telling._tail_ids = Interrupting(telling._tail_ids)
    with pytest.raises(KeyboardInterrupt):
        telling.rewind(30)
    telling._tail_ids = list(telling._tail_ids)
    telling.seal()
    assert telling.token_ids == ids(1) + ids(2)
    assert telling.prefix.views[-1].segment.own_domains == {"team", private("a")}


def test_a_copy_of_the_caches_keeps_the_domains_of_its_tail(telling):
    twin = copy.deepcopy(telling.caches)
    prefix = twin[0].prefix
    telling.manager.seal(prefix, twin, ids(2))
    assert prefix.views[-1].segment.own_domains == {"team", private("a")}
    assert telling.seal() == 24 and telling.prefix.views[-1].segment.own_domains == {"team", private("a")}


def test_domains_go_with_the_tokens_that_had_them(telling):
    telling.rewind(24)
    telling.prefill(ids(3))
    telling.seal()
    assert telling.prefix.views[-1].segment.own_domains == {"team"}
    telling.write_in(private("a"))
    telling.prefill(ids(4))
    telling.write_in("team")
    telling.rewind(10)
    telling.prefill(ids(5))
    telling.seal()
    assert telling.prefix.views[-1].segment.own_domains == {"team"}


def test_the_log_names_the_sender_of_what_was_redacted(team, tmp_path):
    manager, a, b = team
    manager.audit = AuditLog(tmp_path / "log")
    with a.handing_over(keep=True) as package:
        pass
    HandoffCoordinator(manager).request_handoff(a, b, redact=True, keep_sender=True)
    assert json.loads((tmp_path / "log").read_text())["sender_id"] == package.sender_id
    assert list(manager.last_sequence) == [package.sender_id]


def test_what_was_redacted_is_what_did_not_go_over():
    manager = manager_of()
    a = session("a", manager, Access("team", frozenset({private("a")})))
    a.say("what all may know")
    a.write_in(private("a"))
    a.say("the word is xylophone")
    a.write_in("team")
    a.say("go on then")
    total, b = a.num_tokens, session("b", manager)
    record = HandoffCoordinator(manager).request_handoff(a, b, redact=True)
    assert record.redacted_tokens == total - b.num_tokens > 0


def test_a_handoff_that_cannot_be_noted_has_been_done(tmp_path):
    manager = manager_of(audit=AuditLog(tmp_path / "log"))
    a, b = sealed(manager), session("b", manager)
    manager.audit.path = tmp_path
    coordinator = HandoffCoordinator(manager)
    with pytest.raises(AuditError):
        coordinator.request_handoff(a, b)
    assert (a.num_tokens, b.num_tokens, len(coordinator.records)) == (0, 24, 1)


def test_the_log_has_who_asked_for_a_revoked_card(tmp_path):
    cards, manager = CardStore(tmp_path / "cards"), manager_of(audit=AuditLog(tmp_path / "log"))
    agent = sealed(manager)
    manager.save_card(cards, "c", agent)
    shutil.copytree(tmp_path / "cards" / "cards", tmp_path / "copy")
    manager.revoke(agent.prefix.views[0].segment.slot, stores=[cards])
    shutil.copytree(tmp_path / "copy", tmp_path / "cards" / "cards", dirs_exist_ok=True)
    with pytest.raises(RevokedError):
        restore(session("b", manager), cards, "c")
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (last["event"], last["receiver"]) == ("refusal", "b")


def test_a_card_whose_domains_shrink_is_none(team, tmp_path):
    manager, a, _ = team
    card = manager.save_card(CardStore(tmp_path), "c", a)
    wider = dataclasses.replace(card.segments[-1], domains=card.segments[-1].own_domains)
    assert decode(card.encoded(), "c") == card
    with pytest.raises(CardFormatError, match="domains"):
        decode(dataclasses.replace(card, segments=(*card.segments[:-1], wider)).encoded(), "c")


def test_a_holder_that_is_refused_is_none(team):
    manager, a, b = team
    a.seal()
    before = manager.stats().num_holders
    with pytest.raises(AccessError) as kept:  # with its traceback, so that nothing is collected
        manager.get_shared_kv_cache(a.package_state().slots, access=b.access)
    assert kept.value.__traceback__ and manager.stats().num_holders == before
    with pytest.raises(AccessError):
        manager._set_views(b.prefix.holding, a.prefix.views)
    assert b.num_tokens == 0
    manager.check_integrity()


def test_the_log_has_every_way_from_agent_to_agent(tmp_path):
    cards, manager = CardStore(tmp_path / "cards"), manager_of(audit=AuditLog(tmp_path / "log"))
    a = sealed(manager)
    a.fork("b")
    session("c", manager).receive_state(a.package_state())
    manager.save_card(cards, "card", a)
    restore(session("d", manager), cards, "card")
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    found = [(event["event"], event["sender"], event["receiver"], event["num_tokens"]) for event in events]
    assert found == [("fork", "a", "b", 24), ("received", "a", "c", 24), ("restored", "a", "d", 24)]


def test_b75_the_guards_figures_do_not_tell_what_another_said():
    manager = SharedKVCacheManager(T.spec, QuantSpec(4, 4, 32))
    agent = session("a", manager, PRIVATE)
    agent.prefill(SECRET)
    agent.seal()
    assert manager.stats().worst_attention_error > 0
    for access in (Access("y"), Access("team"), Access("public", frozenset())):
        assert manager.stats(access) == SharedKVCacheManager(T.spec, QuantSpec(4, 4, 32)).stats(access)


def test_b75_a_guess_in_public_does_not_tell_what_another_said():
    def after(said):
        manager = manager_of()
        guesser = session("g", manager, Access("public", frozenset()))
        guesser.prefill(SECRET)
        guesser.seal()
        owner = session("a", manager, PRIVATE)
        owner.prefill(said)
        assert owner.last_prefill.reused_tokens == (len(SECRET) if said == SECRET else len(SECRET) - 1)
        return manager.stats(guesser.access)

    assert after(SECRET) == after([*SECRET[:-1], 5])


def test_figures_for_one_access_balance_and_add_up():
    manager = manager_of()
    a, b = session("a", manager, PRIVATE), session("b", manager)
    for agent, seed in ((a, 1), (b, 2)):
        agent.prefill(ids(seed))
        agent.seal()
        agent.prefill(ids(seed + 2))
    parts = [manager.stats(access) for access in (Access(private("a"), frozenset()), Access("team", frozenset()))]
    whole = manager.stats()
    for part in parts:
        assert part.used_bytes + part.free_bytes == part.budget_bytes
        assert part.used_bytes == part.evictable_bytes + part.protected_bytes
        assert (part.num_segments, part.num_holders, part.num_misses) == (1, 1, 1)
    for name in ("used_bytes", "private_bytes", "num_segments", "num_holders", "num_misses"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)


def test_what_was_private_does_not_become_what_the_team_said_alike(telling):
    others = session("b", telling.manager)
    others.prefill(ids(1) + ids(2))
    others.seal()
    reused = telling.manager.stats().reused_tokens
    telling.seal()
    assert telling.prefix.views[-1].segment.own_domains == {"team", private("a")}
    assert telling.manager.stats().reused_tokens == reused


def test_behind_what_only_a_handoff_gives_its_own_is_found():
    manager = manager_of()
    package = sealed(manager, "b").package_state()
    for expected in (0, 24):
        agent = session("a", manager, PRIVATE)
        agent.receive_state(package)
        agent.prefill(ids(2))
        agent.seal()
        assert manager.stats().reused_tokens == expected
    assert not Access("x", frozenset()).may_find({"x"}, {"x", "team"})


def test_redaction_says_nothing_twice():
    manager = manager_of()
    a = session("a", manager, Access("team", frozenset({private("a")})))
    a.prefill(ids(1))
    a.say("marimba")  # in one segment with the tokens before it
    a.write_in(private("a"))
    a.say("xylophone")
    b = session("b", manager)
    HandoffCoordinator(manager).request_handoff(a, b, redact=True)
    assert b.token_ids[:24] == ids(1) and T.tokenizer.decode(b.token_ids).count("marimba") == 1


def test_what_was_private_is_not_looked_for_among_what_the_team_said():
    manager = manager_of()
    sealed(manager, "b")
    a = session("a", manager, Access("team", frozenset({private("a")})))
    assert a.sync(ids(1), domains={private("a")}).reused_tokens == 0
    a.seal()
    assert a.prefix.views[-1].segment.own_domains == {"team", private("a")}


@pytest.mark.parametrize("kind", [KINDS["window"], RECURRENT])
def test_what_a_sync_computes_again_stays_what_it_was(kind):
    model = tiny_loaded(**kind)
    a = AgentSession("a", model, manager_of(model), access=Access("team", frozenset({private("a")})))
    a.write_in(private("a"))
    a.prefill(ids(1))
    a.write_in("team")
    a.sync([*ids(1)[:-3], 7, 8])  # where such a layer cannot be cut
    a.seal()
    assert a.prefix.views[-1].segment.own_domains == {"team", private("a")}


# --- every path ---------------------------------------------------------------------------------------

SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 32, "vocab_size": 64}
DOMAINS = ["public", "team", "secret", *map(private, "abcd")]
ACCESSES = [
    ("a", Access()),
    ("a", Access("public", frozenset({"team", private("a")}))),
    ("a", Access(private("a"), frozenset({"team", "secret"}))),
    ("b", Access("team", frozenset({private("b"), "secret"}))),
    ("b", Access("secret", frozenset())),
    ("c", Access("public", frozenset({"secret"}))),
    ("c", Access("team", frozenset({"secret"}))),
    ("d", Access("public", frozenset())),
]
WHICH = st.integers(0, 3)


def tokens_in(domain, picks):
    """Tokens that are written into this domain and no other, so that any that turns up elsewhere gives itself away."""
    return [10 + 6 * DOMAINS.index(domain) + pick for pick in picks]


def domain_of(token):
    return DOMAINS[(token - 10) // 6]


class Graph(RuleBasedStateMachine):
    """Random label graphs: agents write, hand over, fork, rewind, save, spill, restart and revoke.

    The truth is in the tokens: each belongs to one domain, and no agent may ever hold one of a domain that it does not
    read, nor read a slot that was revoked.
    """

    kind = "full"

    def __init__(self):
        super().__init__()
        self.model = loaded(max_position=60, **SIZES, **KINDS[self.kind])
        self.folder = tempfile.TemporaryDirectory()
        self.cards = CardStore(Path(self.folder.name, "cards"))
        self.revoked = set()
        self.refused = self.handed = 0
        self.start()

    def start(self):
        self.manager = SharedKVCacheManager(
            self.model.spec, FULL, spill=SpillStore(Path(self.folder.name, "spill"), 10**7)
        )
        self.coordinator, self.sessions = HandoffCoordinator(self.manager), []

    def teardown(self):
        for it in self.sessions:
            it.close()
        self.manager.check_integrity(checksums=True)
        self.folder.cleanup()

    def live(self, which):
        found = [it for it in self.sessions if it.prefix.holding.revoked_from is None]
        return found[which % len(found)] if found else None

    def attempt(self, do):
        """None where it was refused, or did not fit the context."""
        try:
            return do()
        except AccessError:
            self.refused += 1
        except (HandoffError, InvalidValueError):  # a slot that is gone; an empty session
            pass
        return None

    @rule(which=st.integers(0, len(ACCESSES) - 1))
    @precondition(lambda self: len(self.sessions) < 5)
    def agent(self, which):
        name, access = ACCESSES[which]

        def sampler(logits):
            return mx.array(tokens_in(made[0].access.writes, [0])[0])

        made = [AgentSession(name, self.model, self.manager, access=access, sampler=sampler)]
        self.sessions += made

    @rule(which=WHICH, picks=st.lists(st.integers(0, 2), min_size=1, max_size=5), seals=st.booleans())
    def write(self, which, picks, seals):
        it = self.live(which)
        if it and it.num_tokens + len(picks) < 50:
            it.prefill(tokens_in(it.access.writes, picks))
            if seals:
                it.seal()

    @rule(which=WHICH)
    def generate(self, which):
        it = self.live(which)
        if it and it.num_tokens < 50:
            self.attempt(it.generate_token)

    @rule(which=WHICH, domain=st.sampled_from(DOMAINS))
    def write_in(self, which, domain):
        if it := self.live(which):
            self.attempt(lambda: it.write_in(domain))

    @rule(which=WHICH, count=st.integers(0, 12))
    def rewind(self, which, count):
        if it := self.live(which):
            it.rewind(min(count, it.num_tokens))

    @rule(which=WHICH)
    def reset(self, which):
        if self.sessions:
            self.sessions[which % len(self.sessions)].reset()

    @rule(which=WHICH, name=st.sampled_from("abcd"), access=st.sampled_from([None, *(it for _, it in ACCESSES)]))
    def fork(self, which, name, access):
        if (it := self.live(which)) and len(self.sessions) < 6:
            twin = self.attempt(lambda: it.fork(name, access=access))
            if twin is not None:
                twin._sampler = lambda logits: mx.array(tokens_in(twin.access.writes, [0])[0])
                self.sessions.append(twin)

    @rule(one=WHICH, two=WHICH, keeps=st.booleans(), redact=st.booleans())
    def hand_over(self, one, two, keeps, redact):
        sender, receiver = self.live(one), self.live(two)
        if sender is not receiver:
            before = sender.token_ids
            record = self.attempt(
                lambda: self.coordinator.request_handoff(sender, receiver, keep_sender=keeps, redact=redact)
            )
            assert record is not None or sender.token_ids == before
            if record is not None:
                self.handed += 1
                if redact:
                    allowed = [t for t in before if domain_of(t) in receiver.access.reads]
                    assert receiver.token_ids == allowed
                else:
                    assert receiver.token_ids == before
            else:
                assert not redact, (sender, receiver.access)

    @rule(which=WHICH, name=st.sampled_from(["one", "two"]))
    def save(self, which, name):
        if it := self.live(which):
            self.attempt(lambda: self.manager.save_card(self.cards, name, it))

    @rule(which=WHICH, name=st.sampled_from(["one", "two"]), rebuild=st.booleans())
    def restore(self, which, name, rebuild):
        if (it := self.live(which)) and name in self.cards.names():
            self.attempt(lambda: restore(it, self.cards, name, rebuild=rebuild))

    @rule(which=WHICH)
    def find(self, which):
        """What is stored of its own domain, by its tokens."""
        if it := self.live(which):
            it.sync(tokens_in(it.access.writes, [0, 1, 2]))

    @rule()
    def evict(self):
        self.manager.evict_unreferenced()

    @rule()
    def restart(self):
        for it in self.sessions:
            it.close()
        self.manager.evict_unreferenced()
        self.revoked.clear()  # slots count anew
        self.start()

    @rule(which=st.integers(0, 20))
    def revoke(self, which):
        found = self.manager.segments()
        if found:
            segment = found[which % len(found)]
            receipt = self.manager.revoke(segment.slot, stores=[self.cards])
            self.revoked |= set(receipt.slots)
            for name in receipt.cards:
                assert name not in self.cards.names()
            for name in self.cards.names():
                assert not any(segment.keys & it.keys for it in self.cards.inspect(name).segments)

    @invariant()
    def nobody_holds_what_it_may_not_read(self):
        for it in self.sessions:
            try:
                tokens = it.token_ids
            except RevokedError:
                continue
            assert {domain_of(token) for token in tokens} <= it.access.reads, (it, tokens)
            assert not self.revoked & {view.segment.slot for view in it.prefix.views}
        self.manager.check_integrity()


WALK = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


class WindowGraph(Graph):
    kind = "window"


class StateGraph(Graph):
    kind = "state"


TestGraph, TestWindowGraph, TestStateGraph = Graph.TestCase, WindowGraph.TestCase, StateGraph.TestCase
TestGraph.settings = TestWindowGraph.settings = TestStateGraph.settings = WALK
