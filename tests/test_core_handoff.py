"""Handoff: what a package says, what is refused, and that no byte moves however often a context changes hands."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from core_helpers import addresses, flip_byte, loaded, logits_behind, no_collector, words

from mlx_qkvshare import AgentSession, HandoffCoordinator, HandoffPackage, QuantSpec, SharedKVCacheManager
from mlx_qkvshare.errors import (
    FingerprintMismatchError,
    HandoffError,
    IntegrityError,
    SessionBusyError,
    SessionClosedError,
)
from mlx_qkvshare.spec import Fingerprint

CONTEXT = [0, *range(40, 140)]


class Team:
    """Three agents of one manager; the first holds CONTEXT in two segments."""

    def __init__(self, quant: QuantSpec | None = None, **manager):
        self.model = loaded()
        self.manager = SharedKVCacheManager(self.model.spec, quant or QuantSpec(), **manager)
        self.coordinator = HandoffCoordinator(self.manager)
        self.planner, self.researcher, self.writer = self.agents = [
            AgentSession(name, self.model, self.manager) for name in ("planner", "researcher", "writer")
        ]
        for tokens in (CONTEXT[:80], CONTEXT[80:]):
            self.planner.prefill(tokens)
            self.planner.seal()
        assert len(self.planner.prefix.views) == 2

    def logits(self, agent: AgentSession) -> np.ndarray:
        """Of the same next tokens, by both routes of attention (few and many rows)."""
        many = [5, *range(200, 216)]
        return np.concatenate([logits_behind(self.model.model, agent.caches, ids) for ids in ([5], [5, 6], many)])

    def state(self):
        """All that a refused handoff must leave as it was."""
        agents = [(a.token_ids, a.messages, [v.segment.slot for v in a.prefix.views]) for a in self.agents]
        return self.manager.stats(), agents, list(self.coordinator.records)


@pytest.fixture
def team():
    team = Team()
    yield team
    team.manager.check_integrity()


def test_generate_kv_cache_is_a_prefill_that_gives_the_caches(team):
    caches = team.writer.generate_kv_cache([*CONTEXT, 5])
    assert caches is team.writer.caches and {cache.offset for cache in caches} == {len(CONTEXT) + 1}
    assert team.writer.last_prefill.reused_tokens == len(CONTEXT), "the planner's segments, by reference"


# --- the package -----------------------------------------------------------------------------------


def arrays_in(value) -> bool:
    if isinstance(value, mx.array):
        return True
    if dataclasses.is_dataclass(value):
        return any(arrays_in(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, tuple | list) and any(map(arrays_in, value))


def test_a_package_describes_the_whole_context_by_reference(team):
    package, again = team.planner.package_state(), team.planner.package_state()
    views = team.planner.prefix.views
    assert (package.manager, package.sender) == (team.manager.id, "planner")
    assert (package.fingerprint, package.quant) == (team.model.spec.fingerprint, team.manager.quant)
    assert [(s.slot, s.start, s.length) for s in package.spans] == [(1, 0, 80), (2, 80, 21)]
    assert all(s.token_ids is v.segment.token_ids for s, v in zip(package.spans, views, strict=True))
    assert [s.checksum for s in package.spans] == [v.segment.compute_checksum() for v in views]
    assert package.token_ids == CONTEXT and package.num_tokens == len(CONTEXT)
    assert not arrays_in(package), "references and numbers only"
    with pytest.raises(dataclasses.FrozenInstanceError):
        package.sequence = 9
    assert again.sequence == package.sequence + 1 and again.sender_id == package.sender_id
    assert dataclasses.replace(again, sequence=package.sequence) == package
    assert team.researcher.package_state().sender_id != package.sender_id


def test_the_packages_checksum_is_that_of_its_spans(team):
    package = team.planner.package_state()
    assert team.planner.package_state().checksum == package.checksum
    team.planner.rewind(1)
    assert team.planner.package_state().checksum != package.checksum
    shorter = dataclasses.replace(package, spans=package.spans[:1])
    assert len({package.checksum, shorter.checksum, dataclasses.replace(package, spans=()).checksum}) == 3


def test_an_unsealed_tail_is_sealed_first(team):
    team.planner.prefill([17, 18, 19])
    package = team.planner.package_state()
    assert package.token_ids == [*CONTEXT, 17, 18, 19] and team.planner.private_bytes == 0


# --- what is refused -------------------------------------------------------------------------------


def with_span(index, **changes):
    def change(package):
        spans = list(package.spans)
        spans[index] = dataclasses.replace(spans[index], **changes)
        return {"spans": tuple(spans)}

    return change


TAMPERED = {
    "another manager": (lambda p: {"manager": "0" * 16}, HandoffError, "manager: expected"),
    "no sequence": (lambda p: {"sequence": 0}, HandoffError, r"sequence: .* \(a replay\)"),
    "another quant": (lambda p: {"quant": QuantSpec(4, 4)}, FingerprintMismatchError, "quant: .*K8V8.*K4V4"),
    "a gap in front": (lambda p: {"spans": p.spans[1:]}, HandoffError, "from token 0, got 80"),
    "a gap between": (with_span(0, length=79), HandoffError, "from token 79, got 80"),
    "out of order": (lambda p: {"spans": p.spans[::-1]}, HandoffError, "from token 0"),
    "twice": (lambda p: {"spans": (p.spans[0], *p.spans)}, HandoffError, "from token 80"),
    "an empty span": (with_span(1, length=0), HandoffError, "span"),
    "too long a span": (with_span(1, length=22), HandoffError, "span"),
    "an unknown slot": (with_span(1, slot=999), HandoffError, "slot 999: .*freed"),
    "another slot": (with_span(1, slot=1), HandoffError, "slot 1"),
    "other tokens": (with_span(1, token_ids=tuple(range(21))), HandoffError, "token_ids"),
    "another checksum": (with_span(1, checksum="0" * 32), HandoffError, "checksum"),
} | {
    f"another {field.name}": (
        lambda p, name=field.name: {"fingerprint": dataclasses.replace(p.fingerprint, **{name: "other"})},
        FingerprintMismatchError,
        rf"\[validate\] {field.name}:",
    )
    for field in dataclasses.fields(Fingerprint)
}


@pytest.mark.parametrize(("change", "error", "named"), TAMPERED.values(), ids=TAMPERED)
def test_a_package_that_does_not_fit_is_refused_by_name(team, change, error, named):
    package = team.planner.package_state()
    before = team.state()
    with pytest.raises(error, match=named):
        team.coordinator.deliver(dataclasses.replace(package, **change(package)), team.writer)
    assert team.state() == before
    team.coordinator.deliver(package, team.writer)  # the true one is still good
    assert team.writer.token_ids == CONTEXT


def test_a_package_is_delivered_once_and_never_behind_a_later_one(team):
    first, second, third = (team.planner.package_state() for _ in range(3))
    team.coordinator.deliver(second, team.writer)
    for package in (second, first):
        with pytest.raises(HandoffError, match=rf"sequence: expected more than 2, got {package.sequence}"):
            team.coordinator.deliver(package, team.researcher)
    assert team.researcher.num_tokens == 0
    team.coordinator.deliver(third, team.researcher)


def test_validate_alone_uses_nothing_up(team):
    package = team.planner.package_state()
    before = team.state()
    for _ in range(2):
        team.coordinator.validate(package, verify=True)
    assert team.state() == before


@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("name", ["packed", "scales", "biases"])
@pytest.mark.parametrize("index", [0, 1], ids=["first segment", "second segment"])
def test_a_changed_byte_is_found_when_asked_for(team, index, name, role):
    view = team.planner.prefix.views[index]
    damaged = getattr(getattr(view.segment.layers[1], role), name)
    flip_byte(damaged, -1)
    before = team.state()
    with pytest.raises(IntegrityError, match="checksum: expected"):
        team.coordinator.request_handoff(team.planner, team.writer, verify=True)
    assert team.state() == before
    team.coordinator.request_handoff(team.planner, team.writer)  # not asked for: not looked at
    flip_byte(damaged, -1)
    team.coordinator.request_handoff(team.writer, team.planner, verify=True)


def test_a_context_that_was_let_go_is_refused(team):
    package = team.planner.package_state()
    team.planner.reset()
    team.coordinator.validate(package)  # nobody holds it, but it is there
    team.manager.evict_unreferenced()
    before = team.state()
    with pytest.raises(HandoffError, match="slot 1: expected a live segment, got a freed slot"):
        team.coordinator.deliver(package, team.writer)
    assert team.state() == before


def test_a_busy_receiver_refuses_and_the_sender_keeps_all(team):
    stream = team.writer.stream([0, 50, 51], max_tokens=5)
    next(stream)
    before = team.planner.token_ids
    with pytest.raises(SessionBusyError, match="writer"):
        team.coordinator.request_handoff(team.planner, team.writer)
    assert team.planner.token_ids == before and not team.coordinator.records
    stream.close()
    assert team.writer.token_ids[:3] == [0, 50, 51]
    team.coordinator.request_handoff(team.planner, team.writer)
    assert team.writer.token_ids == CONTEXT


def test_a_busy_sender_refuses(team):
    stream = team.planner.stream(max_tokens=5)
    next(stream)
    with pytest.raises(SessionBusyError, match="planner"):
        team.coordinator.request_handoff(team.planner, team.writer)
    stream.close()
    assert team.writer.num_tokens == 0 and team.planner.token_ids[: len(CONTEXT)] == CONTEXT


def test_closed_sessions_and_oneself_are_refused(team):
    team.writer.close()
    for sender, receiver, error, named in (
        (team.planner, team.writer, SessionClosedError, "writer"),
        (team.writer, team.planner, SessionClosedError, "writer"),
        (team.planner, team.planner, HandoffError, "'planner' twice"),
    ):
        with pytest.raises(error, match=named):
            team.coordinator.request_handoff(sender, receiver)
    assert team.planner.token_ids == CONTEXT and not team.coordinator.records


# --- what is done ----------------------------------------------------------------------------------


def test_the_record_says_what_happened(team):
    team.planner.prefill([17, 18, 19])
    used = team.manager.stats().used_bytes
    record = team.coordinator.request_handoff(team.planner, team.writer)
    assert (record.sender, record.receiver, record.sequence) == ("planner", "writer", 1)
    assert record.reused_tokens == team.writer.num_tokens == len(CONTEXT) + 3
    assert record.bytes_copied == 0
    expected = (len(CONTEXT) + 3) * team.manager.packed_token_bytes
    assert record.bytes_referenced == expected == sum(a.nbytes for s in words(team.writer.prefix) for a in s)
    assert record.seal_seconds > 0 and record.handoff_seconds > 0
    assert team.manager.stats().used_bytes == expected < used
    assert list(team.coordinator.records) == [record] and team.planner.num_tokens == 0
    kept = team.coordinator.request_handoff(team.writer, team.researcher, keep_sender=True)
    assert team.writer.token_ids == team.researcher.token_ids and kept.reused_tokens == record.reused_tokens
    assert list(team.coordinator.records) == [record, kept] and kept.sender == "writer"


def test_a_short_handoff_references_whole_segments_but_reuses_its_tokens(team):
    team.planner.rewind(41)  # into the first segment
    record = team.coordinator.request_handoff(team.planner, team.writer)
    assert record.reused_tokens == 60 and record.bytes_referenced == 80 * team.manager.packed_token_bytes
    assert team.writer.token_ids == CONTEXT[:60]


def test_the_conversation_goes_along(team):
    team.planner.reset()
    team.planner.say("What is due?")
    team.coordinator.request_handoff(team.planner, team.writer)
    assert [m.content for m in team.writer.messages] == ["What is due?"] and not team.planner.messages
    held = team.writer.num_tokens
    assert team.writer.say("And then?").reused_tokens > held // 2
    assert team.writer.prefix.num_tokens <= held


def test_a_failed_reply_behind_a_handoff_raises_its_own_error_and_can_be_repeated(team, monkeypatch):
    team.planner.reset()
    team.planner.say("What is due?")
    team.coordinator.request_handoff(team.planner, team.writer)
    held = team.writer.token_ids

    def broken(*arguments, **options):
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no luck"):
        patch.setattr(type(team.model.model), "__call__", broken)
        team.writer.reply(max_tokens=2)
    assert [m.content for m in team.writer.messages] == ["What is due?"] and team.writer.token_ids == held
    assert team.writer.reply(max_tokens=2) is not None and len(team.writer.messages) == 2


def test_an_empty_context_can_be_handed_over(team):
    record = team.coordinator.request_handoff(team.researcher, team.planner)
    assert (record.reused_tokens, record.bytes_referenced) == (0, 0) and team.planner.num_tokens == 0


def test_the_receiver_retains_before_the_sender_releases(team, monkeypatch):
    slots = [view.segment.slot for view in team.planner.prefix.views]
    lowest = []
    original = team.manager.release_prefix

    def watch(holder):
        original(holder)
        lowest.append(min(team.manager.ref_count(slot) for slot in slots))

    monkeypatch.setattr(team.manager, "release_prefix", watch)
    team.coordinator.request_handoff(team.planner, team.writer)
    assert len(lowest) >= 2 and min(lowest) >= 1, "there was a moment in which nobody held a segment"
    assert [team.manager.ref_count(slot) for slot in slots] == [1, 1]


def test_a_package_made_before_a_compaction_still_arrives(team):
    package = team.planner.package_state()
    team.planner.prefill(range(200, 221))
    team.planner.seal()
    team.planner.prefill(range(250, 300))
    team.planner.seal()
    assert team.manager.stats().num_compactions > 0
    before = words(team.planner.prefix)
    team.coordinator.deliver(package, team.writer, verify=True)
    assert team.writer.token_ids == CONTEXT
    assert all(map(np.array_equal, itertools.chain(*before), itertools.chain(*words(team.planner.prefix))))


def test_a_package_is_delivered_once_whatever_the_coordinator(team):
    package = team.planner.package_state()
    HandoffCoordinator(team.manager).deliver(package, team.writer)
    with pytest.raises(HandoffError, match="a replay"):
        HandoffCoordinator(team.manager).deliver(package, team.researcher)


def test_a_session_takes_no_package_of_another_manager(team):
    stranger = Team().planner.package_state()
    with pytest.raises(HandoffError, match="manager"):
        team.writer.receive_state(stranger)
    assert team.writer.num_tokens == 0


def test_nobody_uses_the_sender_while_it_hands_over(team, monkeypatch):
    receive = team.writer.take_over

    def meanwhile(package):
        with pytest.raises(SessionBusyError):
            team.planner.prefill([7])
        receive(package)

    monkeypatch.setattr(team.writer, "receive_state", meanwhile)
    team.coordinator.request_handoff(team.planner, team.writer)
    assert team.writer.token_ids == CONTEXT and team.planner.num_tokens == 0


def test_bytes_copied_counts_what_a_copying_handoff_would_copy(team, monkeypatch):
    """The record is a measurement: a receiver that reads other arrays than the stored ones is found out."""
    receive = team.writer.take_over

    def copying(package):
        receive(package)
        views = team.writer.prefix.views
        twin = dataclasses.replace(views[0].segment, layers=tuple(map(copied, views[0].segment.layers)))
        team.writer.prefix.holding.views = (dataclasses.replace(views[0], segment=twin), *views[1:])

    def copied(kv):
        return dataclasses.replace(kv, blocks=tuple(map(copied_block, kv.blocks)))

    def copied_block(block):
        copy = {name: dataclasses.replace(t, packed=t.packed + 0) for name, t in vars(block).items()}
        return dataclasses.replace(block, **copy)

    monkeypatch.setattr(team.writer, "take_over", copying)
    record = team.coordinator.request_handoff(team.planner, team.writer, keep_sender=True)
    first = team.planner.prefix.views[0].segment
    assert record.bytes_copied == sum(t.packed.nbytes for kv in first.layers for t in (kv.keys, kv.values))
    team.writer.prefix.holding.views = team.planner.prefix.views


# --- hop after hop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [QuantSpec(), QuantSpec(4, 3, 32), QuantSpec(16, 16)], ids=str)
def test_hop_20_equals_hop_1_and_no_byte_moves(quant):
    team = Team(quant)
    coordinator, expected = team.coordinator, team.logits(team.planner)
    checksums = [s.checksum for s in team.manager.segments()]
    held, used = addresses(team.planner.prefix), team.manager.stats().used_bytes
    with no_collector():
        for sender, receiver in itertools.islice(itertools.pairwise(itertools.cycle(team.agents)), 20):
            active = mx.get_active_memory()
            record = coordinator.request_handoff(sender, receiver)
            assert mx.get_active_memory() <= active and record.bytes_copied == 0
            assert addresses(receiver.prefix) == held
            baseline = mx.get_active_memory()
            assert len(list(receiver.stream([5], max_tokens=1))) == 1  # the first token: here every peer copies
            mx.synchronize()  # the step behind the token is still on its way
            written = mx.get_active_memory() - baseline
            tail = 16 * team.manager.spec.private_token_bytes
            assert receiver.private_bytes == tail
            assert tail <= written <= tail + 4 * 343 + 4096, "the receiver's tail, and the logits"
            assert addresses(receiver.prefix) == held
            receiver.rewind(2)
            assert np.array_equal(team.logits(receiver), expected), "not bit-equal to hop 1"
    assert len(coordinator.records) == 20 and {r.reused_tokens for r in coordinator.records} == {len(CONTEXT)}
    assert [s.compute_checksum() for s in team.manager.segments()] == checksums
    receiver.reset()
    assert team.manager.stats().used_bytes == used
    team.manager.check_integrity(checksums=True)


def test_any_agent_to_any_other(team):
    expected, holder = team.logits(team.planner), team.planner
    for sender, receiver in itertools.permutations(team.agents, 2):
        if holder is not sender:
            team.coordinator.request_handoff(holder, sender, verify=True)
        team.coordinator.request_handoff(sender, receiver, verify=True)
        holder = receiver
        assert [a.num_tokens for a in team.agents] == [len(CONTEXT) * (a is holder) for a in team.agents]
    assert np.array_equal(team.logits(holder), expected)


THREADS = """
import itertools, queue, threading
import mlx.core as mx
from core_helpers import loaded
from mlx_qkvshare import AgentSession, HandoffCoordinator, SharedKVCacheManager

model = loaded()
manager = SharedKVCacheManager(model.spec)
coordinator = HandoffCoordinator(manager)

def relay(num_threads, start):
    # A context goes around; every agent adds two tokens of its own and one that it generates.
    agents = [AgentSession(f"{start}-{i}", model, manager) for i in range(3)]
    batons = [queue.Queue() for _ in agents]
    failures = []

    def turn(i, hop):
        agents[i].prefill([20 + hop, start])
        agents[i].generate_token()
        coordinator.request_handoff(agents[i], agents[(i + 1) % 3], verify=True)

    def work(i):
        try:
            while (hop := batons[i].get(timeout=60)) is not None:
                if hop == 12:
                    [b.put(None) for b in batons]
                    continue
                turn(i, hop)
                batons[(i + 1) % 3].put(hop + 1)
        except BaseException as error:
            failures.append(error)
            [b.put(None) for b in batons]
        finally:
            mx.clear_streams()

    agents[0].prefill([0, start, *range(40, 60)])
    if num_threads == 1:
        for hop in range(12):
            turn(hop % 3, hop)
    else:
        agents[0].seal()  # evaluated: may cross to the workers
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        [t.start() for t in threads]
        batons[0].put(0)
        [t.join() for t in threads]
    if failures:
        raise failures[0]
    return agents[0].token_ids

def both():
    found, threads = {}, []
    def one(start):
        found[start] = relay(3, start)
        mx.clear_streams()
    threads = [threading.Thread(target=one, args=(s,)) for s in (7, 8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return found

manager.check_integrity(checksums=True)
across = both()
manager.check_integrity(checksums=True)
for start, tokens in across.items():
    manager.evict_unreferenced()
    assert len(tokens) == 22 + 12 * 3, tokens
    manager = SharedKVCacheManager(model.spec)
    coordinator = HandoffCoordinator(manager)
    assert relay(1, start) == tokens, "threads changed what was generated"
print("done", len(coordinator.records))
"""


def test_handoffs_across_threads():
    """In a process of its own: two relays of three workers each, beside each other on one manager."""
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", THREADS], cwd=tests, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done 12\n"), done.stderr[-3000:]


def test_a_package_is_a_value(team):
    assert isinstance(team.planner.package_state(), HandoffPackage)
    package = team.planner.package_state()
    del team.planner, team.agents
    assert team.manager.stats().num_holders == 2 and package.token_ids == CONTEXT, "it holds nothing"
