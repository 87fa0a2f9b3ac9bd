"""Public bug reports on prefix reuse (bugs.md, section B): the right behaviour, by their numbers."""

import random

import numpy as np
import pytest
from reference import (
    FULL,
    Forced,
    T,
    assert_consistent,
    assert_warm_is_cold,
    cold,
    cold_behind,
    counted,
    decode,
    pair,
    probe,
    some_ids,
    store,
)
from tiny import BOS, CHATML, tiny_loaded, tiny_tokenizer

from mlx_qkvshare import AgentSession, HandoffCoordinator, QuantSpec, Sampling, SharedKVCacheManager
from mlx_qkvshare.errors import IntegrityError

EOS_ID = 3
THINK_STRIPPING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}",
)


def encode(text):
    return tiny_tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("quant", [FULL, QuantSpec()], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_b16_a_prompt_equal_to_a_segment_generates(num_tokens, quant):
    manager, owner = pair(quant=quant, tokens=num_tokens)
    segment = owner.prefix.views[0].segment
    session = AgentSession("a", T, manager)
    report = session.prefill(owner.token_ids)
    assert (report.reused_tokens, report.computed_tokens) == (num_tokens, 0)
    got = decode(session, [7, 8])
    # The last token's logits are not stored: it runs again, on a fork that is dropped, and stays the sealed one.
    whole, behind = owner.token_ids, cold_behind(owner, [7])
    owner.rewind(1)
    last = cold([*whole]) if quant == FULL else cold_behind(owner, whole[-1:])
    expected = np.concatenate([last[-1:], behind])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert session.num_tokens == num_tokens + 2
    assert manager.segments() == (segment,) and segment.num_tokens == num_tokens
    assert_warm_is_cold(session)


def test_b17_a_layer_that_trims_less_fails_the_whole_rewind(monkeypatch):
    _, session = pair()
    session.prefill(some_ids(10, seed=1))
    ids, before = session.token_ids, probe(session)
    lazy = session.caches[1]
    for count in (5, 12):  # within the tail, and into the shared part
        with monkeypatch.context() as patch:
            patch.setattr(lazy, "trim", lambda n: type(lazy).trim(lazy, n - 1))
            with pytest.raises(IntegrityError, match="layer 1"):
                session.rewind(count)
        assert session.token_ids == ids
        assert_consistent(session)
        assert np.array_equal(probe(session), before)
    session.rewind(5)
    assert_warm_is_cold(session)


def test_b20_the_least_recently_used_segment_is_evicted_not_the_oldest():
    segment_bytes = 10 * QuantSpec().packed_token_bytes(T.spec)
    manager = SharedKVCacheManager(T.spec, QuantSpec(), budget_bytes=2 * segment_bytes)
    x, y, z = ([letter] * 10 for letter in (11, 12, 13))
    for ids in (x, y):
        store(manager, ids).release()
    for _ in range(3):
        manager.match_prefix(x).release()
    store(manager, z).release()
    assert [len(manager.match_prefix(ids).views) for ids in (x, y, z)] == [1, 0, 1]
    manager.check_integrity()


def test_b20_a_prefix_of_one_token_is_found():
    manager = SharedKVCacheManager(T.spec)
    store(manager, [5]).release()
    assert manager.match_prefix([5, 9, 9]).num_tokens == 1


class Crowd:
    """Random sessions on one manager, each beside the plain list of the tokens that it was fed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.manager = SharedKVCacheManager(T.spec, FULL)
        self.coordinator = HandoffCoordinator(self.manager)
        self.sessions: list[tuple[AgentSession, list[int]]] = []

    def letters(self):
        return [self.random.choice((40, 41, 42)) for _ in range(self.random.randint(1, 6))]

    def step(self):
        operations = [self.open, self.extend, self.share, self.fork, self.rewind, self.hand_off, self.close]
        self.random.choice(operations if self.sessions else [self.open])()

    def pick(self):
        return self.random.choice(self.sessions)

    def open(self):
        session, ids = AgentSession("a", T, self.manager), self.letters()
        session.prefill(ids)
        self.sessions.append((session, ids))
        if len(self.sessions) > 4:
            self.close()

    def extend(self):
        session, ids = self.pick()
        more = self.letters()
        session.prefill(more)
        ids += more

    def share(self):
        self.pick()[0].seal()

    def fork(self):
        session, ids = self.pick()
        self.sessions.append((session.fork("fork"), list(ids)))

    def rewind(self):
        session, ids = self.pick()
        count = self.random.randint(0, len(ids) - 1)
        session.rewind(count)
        del ids[len(ids) - count :]

    def hand_off(self):
        (sender, ids), (receiver, replaced) = self.pick(), self.pick()
        if sender is not receiver:
            self.coordinator.request_handoff(sender, receiver, keep_sender=True)
            replaced[:] = ids

    def close(self):
        self.sessions.pop(self.random.randrange(len(self.sessions)))[0].close()


@pytest.mark.parametrize("seed", range(2))
def test_b22_no_session_ever_holds_a_token_that_it_was_not_fed(seed):
    crowd = Crowd(seed)
    for step in range(300):
        crowd.step()
        for session, ids in crowd.sessions:
            assert session.token_ids == ids
            assert {cache.offset for cache in session.caches} == {len(ids)}
        crowd.manager.check_integrity()
        if step % 30 == 29 and crowd.sessions:
            assert_warm_is_cold(crowd.pick()[0])
    stats = crowd.manager.stats()
    assert stats.num_holders == len(crowd.sessions)
    assert stats.num_hits > 10 and stats.num_compactions > 0  # the walk did meet what it is after


def test_b24_a_reply_is_shared_by_its_generated_ids():
    manager = SharedKVCacheManager(T.spec, FULL)
    model, count = counted()
    # Letter by letter, as no encoder would have it: the text of the reply encodes to fewer tokens.
    reply = [token for letter in "the planner " for token in encode(letter)]
    assert encode(tiny_tokenizer().decode(reply)) != reply
    a = AgentSession("a", T, manager, sampler=Forced([*reply, EOS_ID]))
    assert a.reply("write") == "the planner "
    b = AgentSession("b", model, manager)
    HandoffCoordinator(manager).request_handoff(a, b)
    handed = b.num_tokens
    assert b.token_ids[-len(reply) - 1 :] == [*reply, EOS_ID]
    report = b.say("and now?")
    assert b.token_ids[:handed][-len(reply) - 1 :] == [*reply, EOS_ID]
    assert report.reused_tokens == handed
    assert count.num_tokens == report.computed_tokens == b.num_tokens - handed
    assert_warm_is_cold(b)


def test_b24_sampled_replies_survive_too():
    manager = SharedKVCacheManager(T.spec, FULL)
    a = AgentSession("a", T, manager, sampling=Sampling(temperature=1.0, seed=5))
    tokens = [chunk.token for chunk in a.stream("write", max_tokens=12)]
    b = AgentSession("b", T, manager)
    HandoffCoordinator(manager).request_handoff(a, b)
    handed = b.num_tokens
    report = b.say("and now?")
    assert report.reused_tokens == handed
    assert b.token_ids[handed - len(tokens) : handed] == tokens


def test_b26_one_bos_and_it_is_the_first_token():
    manager = SharedKVCacheManager(T.spec)
    a, b = (AgentSession(name, T, manager, role_prompt=f"You are {name}.") for name in ("planner", "writer"))
    a.reply("first question", max_tokens=3)
    HandoffCoordinator(manager).request_handoff(a, b)
    b.reply("second question", max_tokens=3)
    b.say("third question")
    ids = b.token_ids
    bos = tiny_tokenizer().bos_token_id
    assert [i for i, token in enumerate(ids) if token == bos] == [0]
    text = tiny_tokenizer().decode(ids)
    assert text.count(BOS) == 1
    for part in ("You are planner.", "first question", "You are writer.", "second question", "third question"):
        assert text.count(part) == 1


def test_b26_tokens_in_front_of_a_conversation_bring_the_only_bos():
    manager = SharedKVCacheManager(T.spec)
    session = AgentSession("a", T, manager)
    session.prefill(tiny_tokenizer().encode("a shared document"))
    session.reply("a question", max_tokens=2)
    assert session.token_ids.count(0) == 1 and session.token_ids[0] == 0


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_b27_a_template_that_edits_history_costs_its_tokens_and_no_more(is_handed_over):
    loaded = tiny_loaded(chat_template=THINK_STRIPPING)
    manager = SharedKVCacheManager(loaded.spec, FULL)
    model, count = counted(loaded)
    session = AgentSession("a", model, manager, sampler=Forced([*encode("<think>hmm, well</think>yes"), EOS_ID]))
    session.say("is it so?")
    num_prompt = session.num_tokens
    session.reply()
    if is_handed_over:
        receiver = AgentSession("b", model, manager)
        HandoffCoordinator(manager).request_handoff(session, receiver)
        session = receiver
    held = session.token_ids
    count.num_tokens = 0
    report = session.say("why?")
    # The second rendering has "yes" where "<think>…" stood, so nothing behind the first prompt can be reused.
    assert session.token_ids[:num_prompt] == held[:num_prompt] and session.token_ids[num_prompt] != held[num_prompt]
    assert report.reused_tokens == num_prompt < len(held)
    assert count.num_tokens == report.computed_tokens == session.num_tokens - num_prompt
    assert tiny_tokenizer().decode(session.token_ids).count("hmm") == 0
    assert_warm_is_cold(session, loaded)


@pytest.mark.parametrize("reply", ["", "ok"])
def test_b30_the_end_of_turn_is_in_the_cache_exactly_once(reply):
    manager = SharedKVCacheManager(T.spec, FULL)
    a = AgentSession("a", T, manager, sampler=Forced([*encode(reply), EOS_ID]))
    chunks = list(a.stream("say something"))
    assert chunks[-1].token == EOS_ID and chunks[-1].finish_reason == "stop"
    assert "".join(chunk.text for chunk in chunks) == reply
    assert_consistent(a)
    b = AgentSession("b", T, manager)
    HandoffCoordinator(manager).request_handoff(a, b)
    handed = b.num_tokens
    report = b.say("go on")
    assert report.reused_tokens == handed
    turns = [{"role": m.role, "content": m.content} for m in b.messages]
    expected = tiny_tokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert tiny_tokenizer().decode(b.token_ids) == expected
    assert b.token_ids.count(EOS_ID) == len(turns) == 3
    assert_warm_is_cold(b)
