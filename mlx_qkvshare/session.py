"""`AgentSession`: one agent's place in the shared context: converse, stream, seal, fork, hand over."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .attention import QuantizedAttention
from .chat import ChatFormat, Message
from .context import PrefillReport, Progress, Sampler, TokenContext
from .errors import HandoffError, InvalidValueError
from .layer_cache import LayerCache
from .manager import SharedKVCacheManager
from .package import HandoffPackage, Span
from .sampling import Sampling

if TYPE_CHECKING:
    from .model import LoadedModel


class StreamChunk(NamedTuple):
    """One generated token. `text` may be empty; `finish_reason` is None, "stop" or "length"."""

    text: str
    token: int
    finish_reason: str | None


class Turn:
    """The text side of one generation: whole characters out of tokens, and when to stop."""

    def __init__(self, tokenizer: Any, max_tokens: int, ignore_eos: bool):
        self._detokenizer = tokenizer.detokenizer
        self._ends = () if ignore_eos else tokenizer.eos_token_ids
        self._max_tokens, self._num_shown = max_tokens, 0
        self.text, self.is_done = "", False
        self.token_ids: list[int] = []  # without the end-of-turn token

    def show(self, token: int) -> StreamChunk:
        self._num_shown += 1
        reason = "stop" if token in self._ends else "length" if self._num_shown == self._max_tokens else None
        if reason != "stop":
            self._detokenizer.add_token(token)
            self.token_ids.append(token)
        if reason:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        self.text, self.is_done = self.text + text, reason is not None
        return StreamChunk(text, token, reason)


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

    A session runs one call at a time (`SessionBusyError` otherwise); sessions run beside each other on
    any threads. A failure in the middle of a call leaves it at its last consistent length. A worker
    thread should end with `mx.clear_streams()`, see the README.
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
    ):
        super().__init__(
            name,
            model,
            manager,
            sampling=sampling,
            sampler=sampler,
            max_context_tokens=max_context_tokens,
            prefill_step_tokens=prefill_step_tokens,
            attention=attention,
        )
        self.role_prompt = role_prompt
        self.messages: list[Message] = []
        self._format: ChatFormat | None = None
        self._id, self._sequence, self._num_forks = secrets.token_hex(8), 0, 0
        self._role_is_due = True
        self._base_tokens = 0  # tokens in front of the conversation that came as ids, not as messages
        self._num_unanswered = 0  # messages that a failed turn takes back

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    # --- tokens ------------------------------------------------------------------------------------

    def prefill(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> PrefillReport:
        """Append `token_ids`, all or none; a fresh session first takes what the manager holds of them.

        Args:
            progress: called with (tokens done, tokens in all) after every chunk.

        Raises:
            ContextLimitError, BudgetExceededError: before any token is computed.
        """
        with self._working():
            return self._prefill_raw(token_ids, progress)

    def generate_kv_cache(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> list[LayerCache]:
        """`prefill`, returning the caches."""
        self.prefill(token_ids, progress=progress)
        return self.caches

    def sync(self, token_ids: Sequence[int], *, progress: Progress | None = None) -> PrefillReport:
        """Make the session hold exactly `token_ids`: keep the longest common token prefix, compute the rest."""
        with self._working():
            try:
                return self._prefill(list(token_ids), progress)
            finally:  # also after a failure, which leaves the part that was computed
                self._start_conversation_here()

    def score(self, token_ids: Sequence[int]) -> mx.array:
        """Append `token_ids` [L] in one step and return their next-token logits [L, V]."""
        with self._working():
            self._check_room(self.num_tokens + len(token_ids))
            self._make_room(len(token_ids))
            logits = self._run(mx.array(list(token_ids)))
            mx.eval(logits, [cache.state for cache in self._caches])
            self._tail_ids.extend(token_ids)
            self._start_conversation_here()
            return logits

    def generate_token(self) -> int:
        """Sample one token behind all that is held, append it, and return its id."""
        with self._working():
            self._check_room(self.num_tokens + 1)
            (token,) = self._tokens(1)
            self._start_conversation_here()
            return token

    def _prefill_raw(
        self, token_ids: Sequence[int], progress: Progress | None = None, *, reserve: int = 0
    ) -> PrefillReport:
        start = self.num_tokens
        try:
            report = self._prefill([*self.token_ids, *token_ids], progress, reserve=reserve)
        except BaseException:  # a retry must not append the first chunks twice
            self._roll_back()
            self._rewind(max(0, self.num_tokens - start))
            raise
        self._start_conversation_here()
        return report

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
        progress: Progress | None = None,
    ) -> Generator[StreamChunk]:
        """Generate until the end of the turn (unless `ignore_eos`) or `max_tokens`, a `StreamChunk` per token.

        `prompt` is the user's next message (str), token ids to append, or None to go on from what is held.
        The reply joins `messages` when it answers a message, also when the iterator is dropped half-way.
        """
        with self._working(), self._turn(prompt, max_tokens, ignore_eos, progress) as turn:
            for token in self._tokens(max_tokens):
                yield turn.show(token)
                if turn.is_done:
                    return

    def reply(self, prompt: str | Sequence[int] | None = None, *, max_tokens: int = 256) -> str:
        """The whole text of `stream`."""
        return "".join(chunk.text for chunk in self.stream(prompt, max_tokens=max_tokens))

    @contextlib.contextmanager
    def _turn(
        self, prompt: str | Sequence[int] | None, max_tokens: int, ignore_eos: bool, progress: Progress | None = None
    ) -> Iterator[Turn]:
        """Prefill what `prompt` adds; inside, tokens are shown through the turn; after, the conversation has it."""
        if max_tokens <= 0:
            raise InvalidValueError(f"[AgentSession {self.name}] max_tokens: expected > 0, got {max_tokens}")
        self._num_unanswered = 0
        if isinstance(prompt, str):
            self._say(prompt, progress, reserve=max_tokens)
        elif prompt is not None:
            self._prefill_raw(prompt, progress, reserve=max_tokens)
        else:
            self._check_room(self.num_tokens + max_tokens)
        is_answer = bool(self.messages) and self.messages[-1].role == "user"
        turn = Turn(self._model.tokenizer, max_tokens, ignore_eos)
        try:
            yield turn
        finally:
            self._logits = None  # 4 bytes a word of the vocabulary: too much to keep for every idle agent
            if not is_answer:
                self._start_conversation_here()
            elif turn.token_ids or turn.is_done:
                self.messages.append(Message("assistant", turn.text, self.name, tuple(turn.token_ids)))
            else:  # failed before the first token: a retry finds the conversation as it was
                del self.messages[len(self.messages) - self._num_unanswered :]

    # --- the conversation --------------------------------------------------------------------------

    def say(self, text: str, *, progress: Progress | None = None) -> PrefillReport:
        """Add a user message and prefill it, without answering."""
        with self._working():
            return self._say(text, progress)

    def _say(self, text: str, progress: Progress | None, *, reserve: int = 0) -> PrefillReport:
        added = [Message("user", text)]
        if self._role_is_due and self.role_prompt:
            if self.num_tokens:  # behind a shared context a system message would have to move it
                added = [Message("user", f"{self.role_prompt}\n\n{text}")]
            else:
                added.insert(0, Message("system", self.role_prompt, self.name))
        messages = [*self.messages, *added]
        turns = self._chat_format().render(messages, is_start=self._base_tokens == 0)
        report = self._prefill([*self.token_ids[: self._base_tokens], *turns], progress, reserve=reserve)
        self.messages, self._num_unanswered, self._role_is_due = messages, len(added), False
        return report

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = ChatFormat(self._model.tokenizer)
        return self._format

    # --- seal, fork, rewind, hand over -------------------------------------------------------------

    def seal(self) -> int:
        """Quantize the private tail once into a shared segment; the number of tokens sealed, 0 if there were none.

        Raises `NonFiniteError` or `BudgetExceededError`; the tail is kept as it is.
        """
        with self._working():
            return self._seal()

    def fork(self, name: str) -> AgentSession:
        """A new session on the same context: seals first, then shares every byte.

        With a seed, every fork draws a sequence of its own that follows from the seed and the fork's number.
        """
        with self._working():
            self._seal()
            twin = AgentSession(
                name,
                self._model,
                self.manager,
                role_prompt=self.role_prompt,
                sampling=self.sampling,
                sampler=self._sampler,
                max_context_tokens=self.max_context_tokens,
                prefill_step_tokens=self._step,
                attention=self._attention,
            )
            twin._adopt(self._prefix.fork())
            twin.messages, twin._base_tokens = list(self.messages), self._base_tokens
            twin._role_is_due = self._role_is_due
            if self.sampling.seed is not None:  # reproducible, but not its parent's draws once more
                self._num_forks += 1
                twin._seed = random.Random(f"{self._seed}/{self._num_forks}").getrandbits(32)
            return twin

    def rewind(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens: the private tail's, then by a shorter view of the shared ones.

        Other holders never notice. `messages` stay: the next turn computes again what it needs of them.
        """
        with self._working():
            if not 0 <= num_tokens <= self.num_tokens:
                raise InvalidValueError(f"[AgentSession.rewind] expected 0..{self.num_tokens}, got {num_tokens}")
            self._rewind(num_tokens)
            self._base_tokens = min(self._base_tokens, self.num_tokens)

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
        )

    def receive_state(self, package: HandoffPackage) -> None:
        """Take over the context of `package`, by reference, in place of the own one.

        Raises `HandoffError` if a slot is gone; the session is then as it was. `HandoffCoordinator`
        checks the rest of a package.
        """
        with self._working():
            if package.manager != self.manager.id:
                raise HandoffError(f"[receive_state] manager: expected {self.manager.id}, got {package.manager}")
            prefix = self.manager.get_shared_kv_cache(package.slots)
            self._adopt(prefix)
            self.messages, self._base_tokens = list(package.messages), package.base_tokens
            self._role_is_due = True

    def reset(self) -> None:
        """Let go of the whole context and conversation; the session may begin anew."""
        with self._working():
            self._reset()

    def _reset(self) -> None:
        self._adopt(self.manager.get_shared_kv_cache(()))
        self.messages, self._base_tokens, self._role_is_due = [], 0, True
