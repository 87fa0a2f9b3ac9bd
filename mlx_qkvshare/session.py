"""`AgentSession`: one agent's place in the shared context: converse, stream, seal, fork, hand over."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .allocate import DEFAULT_KIND
from .attention import QuantizedAttention
from .chat import ChatFormat, Message, require_readable
from .context import Prefilling, PrefillReport, Progress, Sampler, TokenContext, run_through
from .errors import AccessError, HandoffError, InvalidValueError
from .guard import Looked
from .layer_cache import LayerCache
from .manager import SharedKVCacheManager
from .package import HandoffPackage, Span
from .policy import TEAM_ACCESS, Access
from .sampling import Sampling
from .table import common_prefix

if TYPE_CHECKING:
    from .model import LoadedModel


class StreamChunk(NamedTuple):
    """One generated token. `text` may be empty; `finish_reason` is None, "stop" or "length"."""

    text: str
    token: int
    finish_reason: str | None


class Turn:
    """One generation: the prefill in front of it, whole characters out of tokens, and when to stop."""

    def __init__(self, tokenizer: Any, max_tokens: int, ignore_eos: bool, stop: Sequence[str]):
        self._detokenizer = tokenizer.detokenizer
        self._ends = () if ignore_eos else tokenizer.eos_token_ids
        self._max_tokens, self._num_shown = max_tokens, 0
        self._stop, self._held_back = stop, ""
        self.prefilling: Prefilling = _nothing()
        self.is_begun = self.is_answer = self.is_done = self.is_cut = False
        self.text = ""
        self.token_ids: list[int] = []  # without the end-of-turn token

    def show(self, token: int) -> StreamChunk:
        self._num_shown += 1
        is_end, is_last = token in self._ends, self._num_shown == self._max_tokens
        if not is_end:
            self._detokenizer.add_token(token)
            self.token_ids.append(token)
        if is_end or is_last:
            self._detokenizer.finalize()
        text = self._up_to_stop(self._held_back + self._detokenizer.last_segment, is_whole=is_end or is_last)
        reason = "stop" if is_end or self.is_cut else "length" if is_last else None
        self.text, self.is_done = self.text + text, reason is not None
        return StreamChunk(text, token, reason)

    @property
    def is_holding_back(self) -> bool:
        """Was the turn dropped between the two halves of what may be a stop string?"""
        return not self.is_done and bool(self._held_back)

    def _up_to_stop(self, text: str, *, is_whole: bool) -> str:
        """`text` in front of the first stop string; the end of it that may begin one is held back for now."""
        found = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        self.is_cut = bool(found)
        if found:  # the one that is complete first, so that it does not matter how the text is cut into tokens
            return text[: min(found)[1]]
        beginnings = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
        keep = 0 if is_whole else max((len(part) for part in beginnings if text.endswith(part)), default=0)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def _nothing() -> Prefilling:
    yield from ()


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One string, several or none, and none of them empty."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text for text in strings):
        raise InvalidValueError(f"[AgentSession] stop: expected strings that are not empty, got {stop!r}")
    return strings


class AgentSession(TokenContext):
    """One agent: a shared prefix by reference, a private tail, and the conversation so far.

    Args:
        name: shown to people and written into packages.
        model: what `load` returned.
        manager: where shared segments live; made for the same model.
        role_prompt: the agent's instructions: the system message of a fresh conversation; after a
            handoff the head of the agent's next turn, since shared keys cannot be moved.
        sampling: temperature, filters and seed; `sampler` (logits [V] -> token id array) overrides it.
        max_context_tokens: limit for shared + private + requested tokens (default: the model's).
        prefill_step_tokens: tokens per prefill chunk.
        access: the domains that it may read, and the one that it writes into: what it says and is told, until
            `write_in` names another.

    A session runs one call at a time (`SessionBusyError` otherwise); sessions run beside each other on
    any threads. A failure in the middle of a call leaves it at its last consistent length; a message that is
    stopped before the reply's first token leaves nothing. A worker thread should end with
    `mx.clear_streams()`, see the README.
    """

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        manager: SharedKVCacheManager,
        *,
        role_prompt: str | None = None,
        sampling: Sampling | None = None,
        sampler: Sampler | None = None,
        max_context_tokens: int | None = None,
        prefill_step_tokens: int = 512,
        attention: QuantizedAttention | None = None,
        access: Access = TEAM_ACCESS,
    ):
        access.check_name(name)
        super().__init__(
            name,
            model,
            manager,
            sampling=sampling,
            sampler=sampler,
            max_context_tokens=max_context_tokens,
            prefill_step_tokens=prefill_step_tokens,
            attention=attention,
            access=access,
        )
        self.role_prompt = role_prompt
        self.messages: list[Message] = []
        self._format: ChatFormat | None = None
        self._id, self._sequence, self._num_forks = secrets.token_hex(8), 0, 0
        self._role_is_due = self._role_was_due = True
        self._base_tokens = 0  # tokens in front of the conversation that came as ids, not as messages
        self._hops = 0  # handoffs that the context came through
        self._num_unanswered = 0  # messages that a failed turn takes back
        self._num_said = 0  # tokens in front of the message that is being said

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # --- tokens ------------------------------------------------------------------------------------

    def prefill(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> PrefillReport:
        """Append `token_ids`, all or none; a fresh session first takes what the manager holds of them.

        Args:
            progress: called with (tokens done, tokens in all) before the first chunk and after every one.

        Raises:
            ContextLimitError, BudgetExceededError: before any token is computed.
        """
        with self._working():
            run_through(self._appending(token_ids, progress))
            return self.last_prefill

    def generate_kv_cache(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> list[LayerCache]:
        """`prefill`, returning the caches."""
        self.prefill(token_ids, progress=progress)
        return self.caches

    def sync(
        self, token_ids: Sequence[int], *, progress: Progress | None = None, domains: Collection[str] = ()
    ) -> PrefillReport:
        """Make the session hold exactly `token_ids`: keep the longest common token prefix, compute the rest.

        `domains` are those that the tokens come from, besides the one that the session writes into.
        """
        with self._working():
            try:
                run_through(self._prefilling(list(token_ids), progress, domains=frozenset(domains)))
                return self.last_prefill
            finally:  # also after a failure, which leaves the part that was computed
                self._start_conversation_here()

    def score(self, token_ids: Sequence[int]) -> mx.array:
        """Append `token_ids` [L] in one step and return their next-token logits [L, V]."""
        with self._working():
            self._check_room(self.num_tokens + len(token_ids))
            self._make_room(len(token_ids))
            logits = self._run(mx.array(list(token_ids)))
            mx.eval(logits, [cache.state for cache in self._leaves])
            self._tail_ids.extend(token_ids)
            self._commit()
            self._start_conversation_here()
            return logits

    def generate_token(self) -> int:
        """Sample one token behind all that is held, append it, and return its id."""
        with self._working():
            self._check_room(self.num_tokens + 1)
            (token,) = self._tokens(1)
            self._start_conversation_here()
            return token

    def _appending(self, token_ids: Sequence[int], progress: Progress | None, **room: Any) -> Prefilling:
        start = self.num_tokens
        try:
            yield from self._prefilling([*self.token_ids, *token_ids], progress, **room)
        except BaseException:  # a retry must not append the first chunks twice
            self._roll_back()
            self._rewind_exactly(max(0, self.num_tokens - start))
            raise
        self._start_conversation_here()

    def _start_conversation_here(self) -> None:
        """Tokens given as ids are context that no message stands for: later turns come behind them."""
        self._base_tokens, self.messages = self.num_tokens, []

    # --- text --------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int = 256,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generator[StreamChunk]:
        """Generate until the end of the turn (unless `ignore_eos`) or `max_tokens`, a `StreamChunk` per token.

        `prompt` is the user's next message (str), token ids to append, or None to go on from what is held.
        Text ends in front of the first of the `stop` strings, of which no beginning is shown either.
        The reply joins `messages` when it answers a message, also when the iterator is dropped half-way.
        """
        with self._working(), self._turn(prompt, max_tokens, ignore_eos, stop, progress) as turn:
            run_through(turn.prefilling)
            for token in self._tokens(max_tokens):
                yield turn.show(token)
                if turn.is_done:
                    return

    def reply(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
    ) -> str:
        """The whole text of `stream`."""
        return "".join(chunk.text for chunk in self.stream(prompt, max_tokens=max_tokens, stop=stop))

    @contextlib.contextmanager
    def _turn(
        self,
        prompt: str | Sequence[int] | None,
        max_tokens: int,
        ignore_eos: bool,
        stop: str | Sequence[str],
        progress: Progress | None = None,
        *,
        is_budgeted: bool = False,
    ) -> Iterator[Turn]:
        """A turn to prefill and then to show tokens through; after the block the conversation has it.

        With `is_budgeted` the prefill takes the bytes of the whole reply into the budget as well.
        """
        if max_tokens <= 0:
            raise InvalidValueError(f"[AgentSession {self.name}] max_tokens: expected > 0, got {max_tokens}")
        self._num_unanswered, self._role_was_due = 0, self._role_is_due
        turn = Turn(self._model.tokenizer, max_tokens, ignore_eos, stop_strings(stop))
        turn.prefilling = self._beginning(turn, prompt, progress, reserve=max_tokens, is_budgeted=is_budgeted)
        try:
            yield turn
        finally:
            turn.prefilling.close()
            self._logits = None  # 4 bytes a word of the vocabulary: too much to keep for every idle agent
            if is_budgeted:
                self._prefix.trim_tail(min(cache.capacity for cache in self._leaves))
            if turn.is_begun:
                self._end(turn)

    def _beginning(
        self,
        turn: Turn,
        prompt: str | Sequence[int] | None,
        progress: Progress | None,
        *,
        reserve: int,
        is_budgeted: bool,
    ) -> Prefilling:
        room = {"reserve": reserve, "is_budgeted": is_budgeted}
        if isinstance(prompt, str):
            yield from self._saying(prompt, progress, **room)
        elif prompt is not None:
            yield from self._appending(prompt, progress, **room)
        else:
            self._check_room(self.num_tokens + reserve)
            self._make_room(0, spare_tokens=reserve if is_budgeted else 0)
        turn.is_begun = True
        turn.is_answer = bool(self.messages) and self.messages[-1].role == "user"

    def _end(self, turn: Turn) -> None:
        if not turn.is_answer:
            self._start_conversation_here()
        elif turn.token_ids or turn.is_done:
            # Where the ids say more than was shown the next turn goes on from the text.
            ids = None if turn.is_cut or turn.is_holding_back else tuple(turn.token_ids)
            self.messages.append(Message("assistant", turn.text, self.name, ids, self.access.writes))
        else:  # failed before the first token: a retry finds the conversation as it was
            if self._num_unanswered:
                del self.messages[len(self.messages) - self._num_unanswered :]
                self._roll_back()
                self._unsay(self._num_said)
            self._role_is_due = self._role_was_due

    # --- the conversation --------------------------------------------------------------------------

    def say(self, text: str, *, progress: Progress | None = None) -> PrefillReport:
        """Add a user message and prefill it, without answering."""
        with self._working():
            run_through(self._saying(text, progress))
            return self.last_prefill

    def wanted_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """All the token ids that the session will hold when it begins to answer `prompt`, without computing any."""
        with self._working():
            return self._with_message(prompt)[1] if isinstance(prompt, str) else [*self.token_ids, *prompt]

    def _saying(self, text: str, progress: Progress | None, **room: Any) -> Prefilling:
        added, wanted = self._with_message(text)
        domains = frozenset(message.domain for message in self.messages)
        held = self.token_ids
        self._num_said = common_prefix(held, wanted)
        try:
            yield from self._prefilling(wanted, progress, domains=domains, **room)
        except BaseException:
            self._roll_back()
            self._unsay(common_prefix(self.token_ids, held))  # all of it if nothing was begun
            raise
        self.messages, self._num_unanswered, self._role_is_due = [*self.messages, *added], len(added), False

    def _unsay(self, num_kept: int) -> None:
        """Behind the first `num_kept` tokens hold none of a message that was not said in the end, nor room for it."""
        self._rewind(max(0, self.num_tokens - num_kept))
        self._shrink()

    def _with_message(self, text: str) -> tuple[list[Message], list[int]]:
        """The messages that `text` adds, and the tokens of the whole conversation with them."""
        domain = self.access.writes
        added = [Message("user", text, domain=domain)]
        if self._role_is_due and self.role_prompt:
            is_fresh = self._base_tokens == 0 and all(message.role == "system" for message in self.messages)
            if not is_fresh:  # behind a shared context a system message would have to move it
                added = [Message("user", f"{self.role_prompt}\n\n{text}", domain=domain)]
            else:
                added.insert(0, Message("system", self.role_prompt, self.name, domain=domain))
        turns = self._chat_format().render([*self.messages, *added], is_start=self._base_tokens == 0)
        return added, [*self.token_ids[: self._base_tokens], *turns]

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = ChatFormat(self._model.tokenizer)
        return self._format

    # --- seal, fork, rewind, hand over -------------------------------------------------------------

    def seal(self, *, kind: str = DEFAULT_KIND) -> int:
        """Quantize the private tail once into a shared segment; the number of tokens sealed, 0 if there were none.

        `kind` says what the tokens are, one of `allocate.KINDS`: with adaptive precision some get more bits.

        Raises `NonFiniteError`, `BudgetExceededError` or `InvalidValueError`; the tail is kept as it is.
        """
        with self._working():
            return self._seal(kind)

    def write_in(self, domain: str) -> None:
        """Seal what there is, and write what follows into `domain`.

        Raises `InvalidValueError` for a domain that the session may not read, or that is another agent's own.
        """
        with self._working():
            self.access.writing(domain).check_name(self.name)
            self._seal()
            self._prefix.write_in(domain)

    def look(self, num_tokens: int) -> dict[int, Looked]:
        """What every layer's attention asks for the private tail's last `num_tokens` tokens, or fewer: queries by
        layer, none where a model's attention cannot be seen. The session stays as it is."""
        with self._working():
            return self._look(num_tokens)

    def fork(self, name: str, *, access: Access | None = None) -> AgentSession:
        """A new session on the same context: seals first, then shares every byte.

        With a seed, every fork draws a sequence of its own that follows from the seed and the fork's number. Without
        `access` it has this session's, but for what is private to an agent of another name.

        Raises `AccessError` when the context has what the fork may not read.
        """
        with self._working():
            self._seal()
            twin = self.beside(
                name, role_prompt=self.role_prompt, sampling=self.sampling, sampler=self._sampler, access=access
            )
            with twin.refusing(self.name):
                require_readable(self.messages, twin.access)
                twin._adopt(self._prefix.fork(twin.access))
            twin.messages, twin._base_tokens = list(self.messages), self._base_tokens
            twin._role_is_due, twin._hops = self._role_is_due, self._hops
            if self.sampling.seed is not None:  # reproducible, but not its parent's draws once more
                self._num_forks += 1
                twin._seed = random.Random(f"{self._seed}/{self._num_forks}").getrandbits(32)
            twin.note_taken("fork", self.name, twin.num_tokens)
            return twin

    def rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens: the private tail's, then by a shorter view of the shared ones.

        Where a sliding or recurrent layer cannot be cut there, what lies between the last place where it can and here
        is computed again. Other holders never notice. `messages` stay: the next turn computes again what it needs of
        them.
        """
        with self._working():
            if not 0 <= num_tokens <= self.num_tokens:
                raise InvalidValueError(f"[AgentSession.rewind] expected 0..{self.num_tokens}, got {num_tokens}")
            self._rewind_exactly(num_tokens)
            self._base_tokens = min(self._base_tokens, self.num_tokens)

    def take_back(self, num_turns: int = 1) -> int:
        """Forget the last `num_turns` user messages and all that came after each; the number of tokens forgotten.

        Raises `InvalidValueError` if there are fewer. What the model cannot go back to exactly is computed again.
        """
        with self._working():
            starts = [index for index, message in enumerate(self.messages) if message.role == "user"]
            if not 0 < num_turns <= len(starts):
                raise InvalidValueError(f"[AgentSession.take_back] expected 1..{len(starts)} turns, got {num_turns}")
            kept, gone = self.messages[: starts[-num_turns]], self.messages[starts[-num_turns] :]
            stays = self.token_ids[: self._base_tokens]
            if num_turns < len(starts):  # else system messages alone, which not every template takes
                is_start = self._base_tokens == 0
                stays += self._chat_format().render(kept, add_generation_prompt=False, is_start=is_start)
            before = self.num_tokens
            self._rewind_exactly(before - common_prefix(self.token_ids, stays))
            self.messages = kept
            if self.role_prompt:
                said = f"{self.role_prompt}\n\n"
                self._role_is_due |= any(it.role == "user" and it.content.startswith(said) for it in gone)
            return before - self.num_tokens

    def package_state(self) -> HandoffPackage:
        """Seal, and describe the whole context by reference. All of it is evaluated: any thread may receive it."""
        with self._working():
            return self._package()

    @contextlib.contextmanager
    def handing_over(self, *, keep: bool = False) -> Iterator[HandoffPackage]:
        """The package, while no other call may run on this session; unless `keep`, the context is let go of after."""
        with self._working():
            yield self._package()
            if not keep:
                self._reset()

    def _package(self) -> HandoffPackage:
        self._seal()
        self._sequence += 1
        return HandoffPackage(
            manager=self.manager.id,
            sender=self.name,
            sender_id=self._id,
            sequence=self._sequence,
            fingerprint=self.manager.spec.fingerprint,
            quant=self.manager.quant,
            spans=tuple(Span.of(view) for view in self._prefix.views),
            base_tokens=self._base_tokens,
            messages=tuple(self.messages),
            hops=self._hops,
            is_role_due=self._role_is_due,
        )

    def receive_state(self, package: HandoffPackage, *, is_own: bool = False) -> None:
        """Take over the context of `package`, by reference, in place of the own one.

        `is_own` says that this very agent made it, as when it comes back from a card: its role is not said again.

        Raises `HandoffError` if a slot is gone, `AccessError` for what the session may not read; it is then as it was.
        `HandoffCoordinator` checks the rest of a package.
        """
        self.take_over(package, is_own=is_own)
        self.note_taken("received", package.sender, package.num_tokens)

    def take_over(self, package: HandoffPackage, *, is_own: bool = False) -> None:
        """`receive_state`, for who writes the audit log's line himself."""
        with self._working(), self.refusing(package.sender):
            require_readable(package.messages, self.access)
            if package.manager != self.manager.id:
                raise HandoffError(f"[receive_state] manager: expected {self.manager.id}, got {package.manager}")
            prefix = self.manager.get_shared_kv_cache(package.slots, access=self.access)
            self._adopt(prefix)
            self.messages, self._base_tokens = list(package.messages), package.base_tokens
            self._role_is_due = package.is_role_due if is_own else True
            self._hops = package.hops + (not is_own)

    @contextlib.contextmanager
    def redacting(self, package: HandoffPackage) -> Iterator[tuple[HandoffPackage, PrefillReport]]:
        """What this session may read of `package`, as a package that is valid in the block, and what that took.

        The longest beginning that it may read is there by reference. Behind it come the messages, and in front of
        them the tokens that are no messages, which were written into domains that it may read; they are computed
        again, since their keys and values had what came before. Whether a writer put a secret into words for others is
        not seen here.
        """
        access = self.access
        with self.beside() as twin:
            messages = tuple(message for message in package.messages if access.may_read({message.domain}))
            domains = {message.domain for message in messages}
            base: list[int] = []
            for span in package.spans:
                if span.start < package.base_tokens and access.may_read(span.own_domains):
                    base += span.token_ids[: min(span.length, package.base_tokens - span.start)]
                    domains |= span.own_domains
            turns: list[int] = []
            if messages:
                turns = twin._chat_format().render(messages, add_generation_prompt=False, is_start=not base)
            twin._adopt(self.manager.get_shared_kv_cache(package.readable_slots(access), access=access))
            report = twin.sync([*base, *turns], domains=domains)
            part = dataclasses.replace(
                twin.package_state(),
                sender=package.sender,
                sender_id=package.sender_id,
                sequence=package.sequence,
                base_tokens=len(base),
                messages=messages,
                hops=package.hops,
            )
            yield part, report

    def note_taken(self, how: str, sender: str, num_tokens: int, **counts: int) -> None:
        """A line in the audit log: this session stands on so many tokens of `sender`'s now."""
        self.manager.note(how, sender=sender, receiver=self.name, num_tokens=num_tokens, **counts)

    @contextlib.contextmanager
    def refusing(self, sender: str | None) -> Iterator[None]:
        """A refusal in the block goes into the audit log: what `sender`, if it is known, made this session may not
        read."""
        try:
            yield
        except AccessError as error:
            self.manager.note("refusal", sender=sender, receiver=self.name, reason=str(error))
            raise

    def beside(self, name: str | None = None, *, access: Access | None = None, **options: Any) -> AgentSession:
        """A new and empty session of the same model, manager and settings, to compute something in."""
        name = name or self.name
        return AgentSession(
            name,
            self._model,
            self.manager,
            max_context_tokens=self.max_context_tokens,
            prefill_step_tokens=self._step,
            attention=self._attention,
            access=access or self.access.of_agent(name),
            **options,
        )

    def reset(self) -> None:
        """Let go of the whole context and conversation; the session may begin anew."""
        with self._working():
            self._reset()

    def _reset(self) -> None:
        self._adopt(self.manager.get_shared_kv_cache((), access=self.access))
        self.messages, self._base_tokens, self._role_is_due, self._hops = [], 0, True, 0
