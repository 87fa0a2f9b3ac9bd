"""The scheduler, stepped by hand: who goes when, what waits for what, and how everything ends."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from reference import Forced, T, assert_consistent, some_ids
from tiny import tiny_loaded

from mlx_qkvshare import AgentScheduler, AgentSession, AgentTask, Priority, Sampling, SharedKVCacheManager
from mlx_qkvshare.errors import (
    BudgetExceededError,
    ChatTemplateError,
    DeadlineExceededError,
    DependencyError,
    InvalidValueError,
    QKVShareError,
    QueueFullError,
    SchedulerClosedError,
    SessionBusyError,
    SessionClosedError,
    TaskCancelledError,
    TaskFailedError,
)

SHARED = [0, *range(60, 140)]
BACKGROUND = Priority.BACKGROUND
TOKEN_BYTES = T.spec.private_token_bytes


def setup(count: int, *, model=T, free_rows: int | None = None, **options):
    """A scheduler and `count` sessions behind one sealed context, each with two tokens of its own (16 rows of tail)."""
    manager = SharedKVCacheManager(model.spec)
    with AgentSession("first", T, manager) as first:
        first.prefill(SHARED)
        first.seal()
    sessions = [AgentSession(f"agent {i}", model, manager) for i in range(count)]
    for i, session in enumerate(sessions):
        session.prefill([*SHARED, 150 + i, 160 + i])
    if free_rows is not None:
        leave_free(manager, free_rows)
    return AgentScheduler(manager, **options), sessions


def leave_free(manager: SharedKVCacheManager, num_rows: int) -> None:
    """Shrink the budget so that `num_rows` rows of private tails are free."""
    surplus = manager.stats().free_bytes - num_rows * TOKEN_BYTES
    manager.budget_bytes -= surplus
    manager._free_bytes -= surplus
    manager.check_integrity()


def stored(manager: SharedKVCacheManager, seed: int) -> list[int]:
    """41 tokens that are sealed, and that nobody holds. The first one differs: even one common token is reused."""
    ids = [4 + seed, *some_ids(40, seed=seed)]
    with AgentSession("owner", T, manager) as owner:
        owner.prefill(ids)
        owner.seal()
    return ids


def drive(scheduler: AgentScheduler) -> int:
    """Step until there is nothing to do; how often there was."""
    return sum(1 for _ in itertools.takewhile(lambda _: scheduler.step(), itertools.count()))


def solo(index: int, prompt=None, **options) -> list[int]:
    """The tokens of the `index`-th session alone."""
    _, sessions = setup(index + 1)
    return [chunk.token for chunk in sessions[index].stream(prompt, **options)]


def tokens(task) -> list[int]:
    return [chunk.token for chunk in task.read()]


class Failing:
    """A model that raises in the calls that `should_fail(token_ids)` picks."""

    def __init__(self, should_fail):
        self._should_fail = should_fail

    def __call__(self, token_ids, **options):
        result = T.model(token_ids, **options)
        if self._should_fail(token_ids):
            raise RuntimeError("no memory")
        return result


# --- turns ----------------------------------------------------------------------------------------


def test_turns_of_many_agents_are_those_of_each_alone():
    scheduler, sessions = setup(5, max_agents=3, step_tokens=16)
    prompts = [some_ids(4 + 9 * i, seed=i) for i in range(5)]
    tasks = [scheduler.submit(s, p, max_tokens=6 + s.num_tokens % 3) for s, p in zip(sessions, prompts, strict=True)]
    drive(scheduler)
    for i, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
        assert tokens(task) == solo(i, prompt, max_tokens=task.num_tokens)
        assert task.done() and task.error() is None and task.result(0) == task.text
        assert task.finish_reason in ("stop", "length") and task.ttft_seconds > 0
        assert_consistent(task.session)
    stats = scheduler.stats()
    assert (stats.num_finished, stats.num_failed, stats.num_waiting, stats.num_decoding) == (5, 0, 0, 0)
    assert stats.decode_tokens == sum(task.num_tokens for task in tasks)
    assert stats.prefill_tokens == sum(map(len, prompts))


def test_the_turns_of_one_session_follow_one_another():
    scheduler, (session,) = setup(1)
    tasks = [scheduler.submit(session, f"question {i}", max_tokens=4) for i in range(3)]
    drive(scheduler)
    _, (twin,) = setup(1)
    assert [task.result(0) for task in tasks] == [twin.reply(f"question {i}", max_tokens=4) for i in range(3)]
    assert [m.content for m in session.messages] == [m.content for m in twin.messages]


def test_a_session_in_the_scheduler_is_busy_for_others():
    scheduler, (session,) = setup(1)
    task = scheduler.submit(session, max_tokens=3, ignore_eos=True)
    scheduler.step()
    with pytest.raises(SessionBusyError):
        session.generate_token()
    drive(scheduler)
    assert task.num_tokens == 3 and session.generate_token() >= 0


def test_stop_strings_of_each_session():
    scheduler, sessions = setup(2)
    for session, text in zip(sessions, ["one two STOP three", "one two END three"], strict=True):
        session._sampler = Forced(T.tokenizer.encode(text, add_special_tokens=False))
    first, second = (scheduler.submit(s, "hi", max_tokens=60, stop=["STOP", "END"][i]) for i, s in enumerate(sessions))
    drive(scheduler)
    assert first.text == second.text == "one two "
    assert first.finish_reason == second.finish_reason == "stop"
    assert [s.messages[-1].content for s in sessions] == ["one two ", "one two "]


# --- order ----------------------------------------------------------------------------------------


def test_interactive_goes_before_background():
    scheduler, sessions = setup(4, max_agents=1)
    order = [BACKGROUND, BACKGROUND, Priority.INTERACTIVE, Priority.INTERACTIVE]
    tasks = [
        scheduler.submit(s, max_tokens=4, ignore_eos=True, priority=p) for s, p in zip(sessions, order, strict=True)
    ]
    finished = []
    while scheduler.step():
        finished.extend(task for task in tasks if task.done() and task not in finished)
    assert finished == [tasks[2], tasks[3], tasks[0], tasks[1]]


def test_an_interactive_prompt_is_prefilled_before_a_background_one():
    scheduler, (background, interactive) = setup(2, step_tokens=40)
    scheduler.submit(background, some_ids(300), max_tokens=1, priority=BACKGROUND)
    scheduler.step()
    quick = scheduler.submit(interactive, some_ids(60), max_tokens=1)
    steps = 0
    while not quick.done():
        scheduler.step()
        steps += 1
    assert steps <= 3 and background.num_tokens < len(SHARED) + 300
    drive(scheduler)


def test_agents_are_served_alike_however_much_one_asks_for():
    scheduler, (greedy, modest) = setup(2, max_agents=1)
    many = [scheduler.submit(greedy, max_tokens=5, ignore_eos=True) for _ in range(6)]
    few = [scheduler.submit(modest, max_tokens=5, ignore_eos=True) for _ in range(2)]
    while not all(task.done() for task in few):
        scheduler.step()
    assert sum(task.done() for task in many) <= 2, "one turn each, in turn"
    drive(scheduler)


def test_an_agent_that_was_idle_has_nothing_to_catch_up():
    scheduler, (busy, late) = setup(2, max_agents=1)
    for _ in range(6):
        scheduler.submit(busy, max_tokens=5, ignore_eos=True)
    while scheduler.stats().num_finished < 4:
        scheduler.step()
    task = [scheduler.submit(late, max_tokens=5, ignore_eos=True) for _ in range(4)][-1]
    drive(scheduler)
    assert scheduler._schedule._served[late] >= scheduler._schedule._served[busy] and task.done()


def test_a_long_prefill_never_holds_up_others_for_more_than_one_chunk():
    seen = []
    model = T._replace(model=Failing(lambda ids: seen.append(ids.shape) and False))
    scheduler, (talker, reader) = setup(2, model=model, step_tokens=33, max_agents=4)
    talk = scheduler.submit(talker, max_tokens=60, ignore_eos=True)
    scheduler.step()
    scheduler.submit(reader, some_ids(400), max_tokens=1, priority=BACKGROUND)
    seen.clear()
    steps, before = 0, talk.num_tokens
    while reader.num_tokens < len(SHARED) + 400:
        scheduler.step()
        steps += 1
        assert talk.num_tokens == before + steps, "a token in every step"
        assert sum(rows * length for rows, length in seen) <= 33, "no more than the budget of one step"
        seen.clear()
    assert steps >= 400 // 32
    drive(scheduler)
    assert tokens(talk) == solo(0, max_tokens=60, ignore_eos=True)


# --- the byte budget --------------------------------------------------------------------------------


def test_a_turn_waits_until_the_budget_holds_all_of_it():
    # A turn of 40 tokens takes a tail from 16 to 48 rows, so only one of two fits.
    scheduler, sessions = setup(2, free_rows=32 + 31)
    first, second = (scheduler.submit(s, some_ids(20), max_tokens=20, ignore_eos=True) for s in sessions)
    while not first.done():
        scheduler.step()
        assert second.num_tokens == 0 and not second.done()
        scheduler.manager.check_integrity()
    drive(scheduler)
    assert isinstance(second.error(), BudgetExceededError), "the first one's context stays where it is"

    scheduler, sessions = setup(2, free_rows=32 + 31)
    first, second = (scheduler.submit(s, some_ids(20), max_tokens=20, ignore_eos=True) for s in sessions)
    scheduler.call(sessions[0].close, sessions=[sessions[0]])
    drive(scheduler)
    assert second.error() is None and tokens(second) == solo(1, some_ids(20), max_tokens=20, ignore_eos=True)


def test_what_no_waiting_would_help_is_refused_and_changes_nothing():
    scheduler, sessions = setup(2, free_rows=20)
    before, held = scheduler.manager.stats(), sessions[0].token_ids
    large = scheduler.submit(sessions[0], some_ids(20), max_tokens=200)
    small = scheduler.submit(sessions[1], max_tokens=10, ignore_eos=True)
    drive(scheduler)
    assert isinstance(large.error(), BudgetExceededError) and small.error() is None
    with pytest.raises(BudgetExceededError):
        large.result(0)
    assert sessions[0].token_ids == held and sessions[0].messages == []
    assert scheduler.manager.stats().private_bytes == before.private_bytes, "the room of the reply is given back"


def test_a_budgeted_reply_cannot_be_taken_by_others_half_way():
    scheduler, (one, other) = setup(2, free_rows=32 + 15)
    task = scheduler.submit(one, max_tokens=40, ignore_eos=True)
    scheduler.step()
    with pytest.raises(BudgetExceededError):
        other.prefill(some_ids(20))
    drive(scheduler)
    assert task.num_tokens == 40 and task.error() is None
    assert one.prefix.private_bytes == one.private_bytes
    one.manager.check_integrity()


def test_a_turn_that_waits_for_bytes_keeps_no_others_from_being_evicted():
    scheduler, (one,) = setup(1)
    manager = scheduler.manager
    ids, waiting = stored(manager, 1), AgentSession("waiting", T, manager)
    leave_free(manager, 64)
    running = scheduler.submit(one, max_tokens=60, ignore_eos=True)
    scheduler.step()
    task = scheduler.submit(waiting, [*ids, 5, 6], max_tokens=300)
    scheduler.step()
    assert waiting.num_tokens == 0 and not task.done()
    manager.check_integrity()
    drive(scheduler)
    assert running.error() is None and isinstance(task.error(), BudgetExceededError)
    assert manager.evict_unreferenced() == 1


@pytest.mark.parametrize("has_hint", [False, True])
def test_the_agent_that_runs_next_keeps_its_segments(has_hint):
    manager = SharedKVCacheManager(T.spec)
    old, new = stored(manager, 1), stored(manager, 2)
    scheduler = AgentScheduler(manager)
    nxt, other = AgentSession("next", T, manager), AgentSession("other", T, manager)
    leave_free(manager, 40)  # a turn of 48 rows takes one of the two segments
    if has_hint:
        scheduler.runs_next(nxt, [*old, 7])
    task = scheduler.submit(other, [0, *some_ids(20, seed=3)], max_tokens=25, ignore_eos=True)
    drive(scheduler)
    assert task.error() is None and manager.stats().num_evictions == 1
    kept = [manager.match_prefix(ids).num_tokens == len(ids) for ids in (old, new)]
    assert kept == [has_hint, not has_hint], "without a hint the least recently used one goes"
    other.close()
    after = scheduler.submit(nxt, [*old, 7], max_tokens=1)
    drive(scheduler)
    assert after.error() is None and nxt.last_prefill.reused_tokens == len(old) * has_hint
    assert not scheduler._schedule._held, "held until its turn, not longer"


def test_a_hint_yields_when_nothing_else_makes_room():
    manager = SharedKVCacheManager(T.spec)
    ids, scheduler = stored(manager, 1), AgentScheduler(manager)
    leave_free(manager, 40)
    scheduler.runs_next(AgentSession("next", T, manager), [*ids, 7])
    task = scheduler.submit(AgentSession("other", T, manager), [0, 9, 8], max_tokens=45, ignore_eos=True)
    drive(scheduler)
    assert task.error() is None and task.num_tokens == 45 and manager.stats().num_evictions == 1


def test_a_turn_that_waits_keeps_what_is_stored_of_its_prompt():
    manager = SharedKVCacheManager(T.spec)
    ids, scheduler = stored(manager, 1), AgentScheduler(manager, max_agents=1)
    first, second = AgentSession("first", T, manager), AgentSession("second", T, manager)
    one = scheduler.submit(first, [0, 9], max_tokens=5, ignore_eos=True)
    two = scheduler.submit(second, [*ids, 7], max_tokens=2, ignore_eos=True)
    scheduler.step()
    assert manager.evict_unreferenced() == 0, "held for the one that waits"
    drive(scheduler)
    assert one.error() is None and two.error() is None and second.last_prefill.reused_tokens == len(ids)


def test_a_turn_that_waits_for_bytes_holds_up_only_those_behind_it():
    scheduler, (one, large, quick) = setup(3, free_rows=32 + 16)
    scheduler.submit(one, max_tokens=40, ignore_eos=True)
    scheduler.step()
    waiting = scheduler.submit(large, max_tokens=60, priority=BACKGROUND)
    scheduler.step()
    interactive = scheduler.submit(quick, max_tokens=3, ignore_eos=True)
    for _ in range(4):
        scheduler.step()
    assert interactive.done() and interactive.error() is None and not waiting.done()
    waiting.cancel()
    late = scheduler.submit(quick, max_tokens=2, ignore_eos=True, priority=BACKGROUND)
    for _ in range(3):
        scheduler.step()
    assert late.error() is None and late.done()


def test_an_agent_that_nobody_reads_stops_nobody_who_fits():
    scheduler, (paused, large, small) = setup(3, free_rows=32 + 16)
    stuck = scheduler.submit(paused, max_tokens=40, ignore_eos=True, buffer_tokens=1)
    drive(scheduler)
    waiting = scheduler.submit(large, max_tokens=200, ignore_eos=True)
    fits = scheduler.submit(small, max_tokens=5, ignore_eos=True)
    drive(scheduler)
    assert fits.done() and fits.error() is None and not waiting.done()
    stuck.cancel()
    drive(scheduler)
    assert isinstance(waiting.error(), BudgetExceededError)


def test_hints_of_sessions_that_are_gone_hold_nothing():
    manager = SharedKVCacheManager(T.spec)
    ids, scheduler = stored(manager, 1), AgentScheduler(manager)
    closed, dropped = AgentSession("closed", T, manager), AgentSession("dropped", T, manager)
    for session in (closed, dropped):
        scheduler.runs_next(session, [*ids, 7])
        drive(scheduler)
    closed.close()
    del session, dropped
    drive(scheduler)
    assert manager.evict_unreferenced() == 1


# --- endings ----------------------------------------------------------------------------------------


def reach(scheduler: AgentScheduler, stage: str) -> None:
    """Step until the only turn is where it should be."""
    for _ in range({"waiting": 0, "prefill": 1, "decode": 6}[stage]):
        scheduler.step()
    stats = scheduler.stats()
    reached = {"waiting": stats.num_waiting, "prefill": stats.num_prefilling, "decode": stats.num_decoding}
    assert reached[stage] == 1, stats


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode"])
@pytest.mark.parametrize("end", ["cancel", "deadline", "close", "session"])
def test_a_turn_ends_between_two_steps_in_any_stage(stage, end, monkeypatch):
    scheduler, (session,) = setup(1, step_tokens=40)
    before, now = session.token_ids, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    task = scheduler.submit(session, some_ids(90), max_tokens=200, ignore_eos=True, deadline_seconds=5)
    reach(scheduler, stage)
    shown = task.num_tokens
    if end == "cancel":
        task.cancel()
    elif end == "deadline":
        now[0] = 6.0
    elif end == "close":
        scheduler.close()
    else:
        session.close()
    drive(scheduler)
    kinds = {"cancel": TaskCancelledError, "deadline": DeadlineExceededError, "close": TaskCancelledError}
    assert type(task.error()) is kinds.get(end, SessionClosedError)
    assert len(tokens(task)) == shown == task.num_tokens
    with pytest.raises(QKVShareError):
        next(task)
    if end == "session":
        assert scheduler.manager.stats().private_bytes == 0
        return
    expected = [*before, *some_ids(90)] if stage == "decode" else before
    assert session.token_ids[: len(expected)] == expected and session.num_tokens == len(expected) + shown
    assert session.prefix.private_bytes == session.private_bytes
    assert_consistent(session)
    assert session.generate_token() >= 0, "free again"


def test_what_was_said_before_a_cancel_is_in_the_conversation():
    scheduler, (session,) = setup(1)
    task = scheduler.submit(session, "hello", max_tokens=100, ignore_eos=True)
    while task.num_tokens < 5:
        scheduler.step()
    task.cancel()
    drive(scheduler)
    assert [m.role for m in session.messages] == ["user", "assistant"]
    assert session.messages[-1].content == task.text and len(session.messages[-1].token_ids) == 5


def test_a_cancelled_prefill_takes_the_message_back_and_its_bytes():
    scheduler, (session,) = setup(1, step_tokens=40)
    text = "word " * 60
    task = scheduler.submit(session, text, max_tokens=5)
    before, used = session.num_tokens, session.manager.stats().used_bytes
    scheduler.step()
    assert session.num_tokens > before
    task.cancel()
    drive(scheduler)
    assert session.messages == [] and (session.num_tokens, session.manager.stats().used_bytes) == (before, used)
    again = scheduler.submit(session, text, max_tokens=5)
    drive(scheduler)
    assert again.text == setup(1)[1][0].reply(text, max_tokens=5)


@pytest.mark.parametrize("where", ["prefill", "decode", "sampler"])
def test_one_that_fails_fails_alone_and_says_why(where):
    def should_fail(ids):
        is_prefill = ids.shape[1] > 1
        if where == "prefill":
            return is_prefill and ids[0, 0].item() == 333
        return where == "decode" and not is_prefill and bool((ids == 334).any().item())

    model = T._replace(model=Failing(should_fail))
    scheduler, sessions = setup(3, model=model)
    bad = sessions[1]
    bad._sampler = Forced([200, 334, 201])
    if where == "sampler":
        bad._sampler = lambda logits: [][0]
    tasks = [scheduler.submit(s, [333 if s is bad else 20, 21], max_tokens=8, ignore_eos=True) for s in sessions]
    drive(scheduler)
    error = tasks[1].error()
    assert isinstance(error, TaskFailedError) and isinstance(error.__cause__, RuntimeError | IndexError)
    assert tasks[1].num_tokens == (1 if where == "decode" else 0)
    for i in (0, 2):
        assert tokens(tasks[i]) == solo(i, [20, 21], max_tokens=8, ignore_eos=True)
    for session in sessions:
        assert_consistent(session)
    bad._sampler = None
    retry = scheduler.submit(bad, [20], max_tokens=1)
    drive(scheduler)
    assert retry.error() is None


def test_errors_of_a_turn_are_its_own():
    manager = SharedKVCacheManager(T.spec)
    plain = T._replace(tokenizer=__import__("tiny").tiny_tokenizer(None))
    scheduler, session = AgentScheduler(manager), AgentSession("untemplated", plain, manager)
    task = scheduler.submit(session, "hello")
    empty = scheduler.submit(AgentSession("empty", T, manager))
    drive(scheduler)
    assert isinstance(task.error(), ChatTemplateError) and isinstance(empty.error(), InvalidValueError)


def test_bad_arguments_are_refused_where_they_are_given():
    scheduler, (session,) = setup(1, max_tasks=2)
    for options in (
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"buffer_tokens": 0},
        {"deadline_seconds": 0},
        {"deadline_seconds": float("inf")},
        {"stop": ""},
        {"stop": ["a", ""]},
    ):
        with pytest.raises(InvalidValueError):
            scheduler.submit(session, **options)
    for options in ({"priority": 7}, {"after": [3]}, {"after": AgentTask(session, 1, lambda: None)}):
        with pytest.raises(InvalidValueError):
            scheduler.submit(session, **options)
    with pytest.raises(InvalidValueError, match="manager"):
        scheduler.submit(setup(1)[1][0])
    for options in ({"max_agents": 0}, {"max_agents": 9, "step_tokens": 9}, {"max_tasks": 0}):
        with pytest.raises(InvalidValueError):
            AgentScheduler(scheduler.manager, **options)
    tasks = [scheduler.submit(session, max_tokens=1) for _ in range(2)]
    with pytest.raises(QueueFullError):
        scheduler.submit(session)
    drive(scheduler)
    assert all(task.error() is None for task in tasks)
    scheduler.submit(session, max_tokens=1)
    scheduler.close()
    with pytest.raises(SchedulerClosedError):
        scheduler.submit(session)
    assert session.generate_token() >= 0


def test_what_waits_for_a_turn_that_fails_in_its_prefill_goes_on():
    chunks = []
    model = T._replace(model=Failing(lambda ids: ids.shape[1] > 1 and chunks.append(1) is None and len(chunks) == 2))
    scheduler, (session, other) = setup(2)
    session._model = model
    failing = AgentScheduler(scheduler.manager, step_tokens=40)
    bad = failing.submit(session, some_ids(90), max_tokens=5)
    same = failing.submit(session, [30], max_tokens=2, ignore_eos=True)
    dependent = failing.submit(other, [30], max_tokens=2, after=[bad])
    drive(failing)
    assert isinstance(bad.error(), TaskFailedError) and len(chunks) > 1
    assert same.error() is None and same.num_tokens == 2 and isinstance(dependent.error(), DependencyError)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_sampler_that_fails_takes_no_draw_from_another(stateful):
    scheduler, (steady, shaky) = setup(2)
    _, (twin, _) = setup(2)
    calls = []

    def fails_at_the_third(logits):
        calls.append(1)
        return mx.argmax(logits) if len(calls) < 3 else [][0]

    shaky._sampler = fails_at_the_third
    for session in (steady, twin):
        if stateful:
            session._sampler = Forced([100, 101, 102, 103, 104, 105, 106, 107])
        else:
            session.sampling, session._seed = Sampling(temperature=1.0, seed=3), 3
    tasks = [scheduler.submit(session, max_tokens=8, ignore_eos=True) for session in (steady, shaky)]
    drive(scheduler)
    assert isinstance(tasks[1].error(), TaskFailedError) and tasks[1].num_tokens == 1
    assert tokens(tasks[0]) == [chunk.token for chunk in twin.stream(max_tokens=8, ignore_eos=True)]
    assert_consistent(shaky)


def test_a_token_that_the_tokenizer_does_not_know_fails_its_own_turn():
    class Odd:
        def __init__(self):
            self.eos_token_ids, self.detokenizer = T.tokenizer.eos_token_ids, self
            self.last_segment = "x"

        def add_token(self, token):
            if token == 77:
                raise IndexError(token)

        def finalize(self):
            pass

    scheduler, (one, other) = setup(2)
    one._model = one._model._replace(tokenizer=Odd())
    one._sampler = Forced([50, 77, 51])
    tasks = [scheduler.submit(session, max_tokens=5, ignore_eos=True) for session in (one, other)]
    drive(scheduler)
    assert isinstance(tasks[0].error(), TaskFailedError) and tasks[0].num_tokens == 1
    assert tokens(tasks[1]) == solo(1, max_tokens=5, ignore_eos=True)
    assert_consistent(one)


def test_a_model_of_other_weights_is_refused_whenever_it_comes():
    scheduler, (one, _) = setup(2)
    stranger = AgentSession("stranger", tiny_loaded(fresh=True), scheduler.manager)
    tasks = [scheduler.submit(one, [20, 21], max_tokens=4), scheduler.submit(stranger, [0, 21], max_tokens=4)]
    drive(scheduler)
    assert tasks[0].error() is None and isinstance(tasks[1].error(), InvalidValueError)


def test_a_paused_agent_whose_session_closes_ends_and_gives_its_bytes_back():
    scheduler, (session,) = setup(1)
    task = scheduler.submit(session, max_tokens=40, ignore_eos=True, buffer_tokens=2)
    drive(scheduler)
    session.close()
    drive(scheduler)
    assert isinstance(task.error(), SessionClosedError) and scheduler.manager.stats().private_bytes == 0


def test_ctrl_c_in_a_hand_driven_step_ends_that_turn_and_no_other():
    calls = []

    def interrupt(ids):
        calls.append(1)
        if ids.shape[1] > 1 and len(calls) == 3:
            raise KeyboardInterrupt
        return False

    scheduler, (session, other) = setup(2, step_tokens=40)
    session._model = T._replace(model=Failing(interrupt))
    before = session.num_tokens
    task = scheduler.submit(session, some_ids(100), max_tokens=5)
    with pytest.raises(KeyboardInterrupt):
        drive(scheduler)
    drive(scheduler)
    assert isinstance(task.error(), TaskFailedError) and session.num_tokens == before
    assert_consistent(session)
    again = scheduler.submit(other, [30], max_tokens=2)
    drive(scheduler)
    assert again.error() is None


# --- handoffs, calls, dependencies --------------------------------------------------------------------


def test_researcher_handoff_writer():
    scheduler, (researcher, writer) = setup(2)
    research = scheduler.submit(researcher, "what is compost?", max_tokens=9)
    handed = scheduler.handoff(researcher, writer, after=[research])
    leaflet = scheduler.submit(writer, "write a leaflet", max_tokens=9, after=[handed])
    drive(scheduler)
    record = handed.result(0)
    assert record.bytes_copied == 0 and record.sender == researcher.name and record.receiver == writer.name
    assert researcher.num_tokens == 0
    assert [m.content for m in writer.messages] == [
        "what is compost?",
        research.text,
        "write a leaflet",
        leaflet.text,
    ]
    assert_consistent(writer)


def test_what_depends_on_a_failure_fails_without_running():
    scheduler, (researcher, writer, other) = setup(3)
    before = writer.token_ids
    research = scheduler.submit(researcher, "what?", max_tokens=500)
    handed = scheduler.handoff(researcher, writer, after=[research])
    leaflet = scheduler.submit(writer, "write", after=[handed])
    unrelated = scheduler.submit(writer, [31], max_tokens=2)
    drive(scheduler)
    assert type(research.error()).__name__ == "ContextLimitError"
    for task, cause in ((handed, research), (leaflet, handed)):
        assert isinstance(task.error(), DependencyError) and task.error().__cause__ is cause.error()
        assert cause.name in str(task.error())
    assert unrelated.error() is None and writer.token_ids[: len(before)] == before
    late = scheduler.submit(other, max_tokens=1, after=[research])
    drive(scheduler)
    assert isinstance(late.error(), DependencyError), "also when it had failed long before"


def test_a_turn_behind_a_call_that_fails_in_the_same_step_is_not_begun():
    scheduler, (one,) = setup(1)
    before = one.num_tokens
    bad = scheduler.call(lambda: 1 // 0)
    task = scheduler.submit(one, [200, 201, 202], after=[bad])
    drive(scheduler)
    assert isinstance(task.error(), DependencyError) and one.num_tokens == before


def test_a_dependency_may_be_another_schedulers():
    scheduler, (one, two) = setup(2)
    other = AgentScheduler(scheduler.manager)
    first = other.submit(one, max_tokens=2, ignore_eos=True)
    second = scheduler.submit(two, max_tokens=2, ignore_eos=True, after=[first])
    scheduler._news.clear()
    drive(scheduler)
    assert not second.done()
    scheduler._news.clear()
    drive(other)
    assert scheduler._news.is_set(), "woken"
    drive(scheduler)
    assert second.error() is None


def test_an_agent_that_gets_its_context_first_has_nothing_to_catch_up():
    scheduler, (busy, late, sender) = setup(3, max_agents=1)
    for _ in range(6):
        scheduler.submit(busy, max_tokens=5, ignore_eos=True)
    while scheduler.stats().num_finished < 4:
        scheduler.step()
    scheduler.handoff(sender, late)
    scheduler.submit(late, max_tokens=5, ignore_eos=True)
    scheduler.step()
    assert scheduler._schedule._served[late] >= 20
    drive(scheduler)


def test_work_on_a_session_keeps_its_order_whatever_its_kind():
    scheduler, (one, two) = setup(2)
    events = []
    scheduler.submit(one, max_tokens=3, ignore_eos=True)
    scheduler.call(lambda: events.append(("sealed", one.seal())), sessions=[one])
    scheduler.submit(one, [50], max_tokens=2, ignore_eos=True)
    scheduler.call(lambda: events.append(("length", one.num_tokens)), sessions=[one, two])
    drive(scheduler)
    assert events == [("sealed", 2 + 3), ("length", len(SHARED) + 2 + 3 + 1 + 2)]


def test_a_call_gives_its_result_or_its_error():
    scheduler, (one,) = setup(1)
    fork = scheduler.call(lambda: one.fork("twin"), sessions=[one])
    broken = scheduler.call(lambda: 1 // 0)
    refused = scheduler.handoff(one, one)
    drive(scheduler)
    assert fork.result(0).name == "twin" and fork.result(0).num_tokens == one.num_tokens
    assert isinstance(broken.error(), TaskFailedError) and isinstance(broken.error().__cause__, ZeroDivisionError)
    assert type(refused.error()).__name__ == "HandoffError"
    assert "ZeroDivisionError" in str(broken.error()) and "failed" in repr(broken) and "finished" in repr(fork)


def test_a_cancelled_call_is_not_run():
    scheduler, (one,) = setup(1)
    scheduler.submit(one, max_tokens=3)
    call = scheduler.call(lambda: pytest.fail("was run"), sessions=[one])
    scheduler.step()
    call.cancel()
    drive(scheduler)
    assert isinstance(call.error(), TaskCancelledError)


# --- readers ------------------------------------------------------------------------------------------


def test_a_reader_that_does_not_read_pauses_its_own_agent_only():
    scheduler, sessions = setup(3, max_agents=1)
    slow = scheduler.submit(sessions[0], max_tokens=20, ignore_eos=True, buffer_tokens=4)
    others = [scheduler.submit(s, max_tokens=5, ignore_eos=True) for s in sessions[1:]]
    drive(scheduler)
    assert slow.num_tokens == 4 and scheduler.stats().num_paused == 1
    assert all(task.num_tokens == 5 for task in others), "the paused one takes no place"
    read = tokens(slow)
    drive(scheduler)
    assert slow.num_tokens == 8
    while not slow.done():
        read += tokens(slow)
        drive(scheduler)
    read += tokens(slow)
    assert read == solo(0, max_tokens=20, ignore_eos=True)


def test_waiting_for_the_result_needs_no_reader():
    scheduler, (one,) = setup(1)
    task = scheduler.submit(one, max_tokens=20, ignore_eos=True, buffer_tokens=4)
    drive(scheduler)
    with pytest.raises(TimeoutError):
        task.result(0)
    drive(scheduler)
    assert task.done() and task.result() == task.text and len(task.read()) == 20


def test_readers_that_all_come_back_share_the_places():
    scheduler, sessions = setup(3, max_agents=1)
    tasks = []
    for session in sessions:
        tasks.append(scheduler.submit(session, max_tokens=9, ignore_eos=True, buffer_tokens=3))
        drive(scheduler)
    assert scheduler.stats().num_paused == 3
    read = [tokens(task) for task in tasks]
    scheduler.step()
    assert [task.num_tokens for task in tasks].count(3) == 2, "one place, one token"
    while not all(task.done() for task in tasks):
        scheduler.step()
        read = [found + tokens(task) for found, task in zip(read, tasks, strict=True)]
    assert read == [solo(i, max_tokens=9, ignore_eos=True) for i in range(3)]


def test_a_long_prompt_may_fill_a_step_beyond_the_sessions_own_chunks():
    scheduler, (session,) = setup(1, step_tokens=300)
    session._step = 40
    scheduler.submit(session, some_ids(200), max_tokens=1)
    scheduler.step()
    assert scheduler.stats().prefill_tokens == 200


def test_the_role_is_told_again_when_the_message_was_taken_back():
    scheduler, _ = setup(0)
    session, twin = (AgentSession("agent", T, scheduler.manager, role_prompt="You are R.") for _ in range(2))
    task = scheduler.submit(session, "hello", max_tokens=9)
    scheduler.step()
    task.cancel()
    drive(scheduler)
    assert task.num_tokens == 0 and session.messages == []
    again = scheduler.submit(session, "hello", max_tokens=9)
    drive(scheduler)
    assert again.text == twin.reply("hello", max_tokens=9)
    assert [m.role for m in session.messages] == ["system", "user", "assistant"]
