"""A session goes on from a card, by reference or, on another model, by computing it again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .card import Card
from .context import Progress
from .errors import CardCorruptError, CardError, FingerprintMismatchError
from .package import HandoffPackage
from .session import AgentSession
from .store import CardStore


@dataclass(frozen=True)
class Restored:
    """`reused_tokens` came with the card, `computed_tokens` were prefilled; then `rebuilt_because` says why."""

    card: Card
    reused_tokens: int
    computed_tokens: int
    rebuilt_because: str | None = None


def restore(
    session: AgentSession, store: CardStore, name: str, *, rebuild: bool = False, progress: Progress | None = None
) -> Restored:
    """Let `session` hold the context of a card, in place of its own, and go on with its conversation.

    With `rebuild`, a card that does not fit this model or this setting, or has lost a segment, is prefilled from its
    token ids instead; `progress` is then called with (tokens done, tokens in all). The own context is let go of only
    when all is there.

    Raises as `CardStore.load`, `AccessError` for a card that the session may not read, and `CardError` for one to
    rebuild that keeps no token ids.
    """
    with session.refusing(None):  # one that was revoked
        card = store.inspect(name)
    with session.refusing(card.agent):
        card.require_readable(session.access)
    try:
        with session.manager.load_card(store, name) as loaded:
            return _received(session, loaded.package, Restored(loaded.card, loaded.card.num_tokens, 0))
    except (FingerprintMismatchError, CardCorruptError) as error:
        if not rebuild:
            raise
        return _rebuild(session, card, error, progress)


def _rebuild(
    session: AgentSession, card: Card, reason: FingerprintMismatchError | CardCorruptError, progress: Progress | None
) -> Restored:
    ids, ours = card.token_ids, session.manager.spec.fingerprint.tokenizer
    if ids is None:
        raise CardError(f"[restore] {card.name!r}: expected token ids to compute it from, got their digest") from reason
    if card.spec.fingerprint.tokenizer != ours:
        raise FingerprintMismatchError(
            f"[restore] tokenizer: expected {ours}, the card has the token ids of {card.spec.fingerprint.tokenizer}"
        ) from reason
    with session.beside() as twin:  # the session keeps what it has until this one is ready
        report = twin.sync(ids, progress=progress, domains=card.domains)
        package = dataclasses.replace(
            twin.package_state(),
            sender=card.agent,
            base_tokens=card.base_tokens,
            messages=card.messages,
            hops=card.hops,
            is_role_due=card.is_role_due,
        )
        restored = Restored(card, report.reused_tokens, report.computed_tokens, str(reason))
        return _received(session, package, restored)


def _received(session: AgentSession, package: HandoffPackage, restored: Restored) -> Restored:
    agent = restored.card.agent
    session.take_over(package, is_own=agent == session.name)
    session.note_taken("restored", agent, package.num_tokens, computed_tokens=restored.computed_tokens)
    return restored
