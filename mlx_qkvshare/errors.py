"""Every error that the package raises on purpose. Catch `QKVShareError` to catch them all."""


class QKVShareError(Exception):
    """Base class: the message says what was expected and what came."""


class InvalidValueError(QKVShareError, ValueError):
    """An argument or setting is out of its documented range."""


class UnsafeQuantError(QKVShareError, ValueError):
    """The doctor measured that these bits damage this model; the message says what to take instead."""


class ModelLoadError(QKVShareError):
    """The model cannot be found, downloaded, converted or read."""


class UnsupportedModelError(QKVShareError):
    """The model's layers, or what it does with K and V, cannot be shared; the message names them."""


class BudgetExceededError(QKVShareError):
    """The manager's byte budget does not hold what was asked for; nothing was changed."""


class ContextLimitError(QKVShareError):
    """The tokens do not fit the model's context; raised before any of them is computed."""


class NonFiniteError(QKVShareError, ValueError):
    """Keys, values or logits hold NaN or infinity; nothing was stored."""


class ChatTemplateError(QKVShareError):
    """The tokenizer has no usable chat template for this conversation."""


class SessionBusyError(QKVShareError):
    """Another call on the same session is still running."""


class SessionClosedError(QKVShareError):
    """The session was closed, or lost its cache in a failure, and takes no more work."""


class HandoffError(QKVShareError):
    """A package failed validation; sender and receiver are as they were."""


class FingerprintMismatchError(HandoffError):
    """The package was made by another model, adapter, tokenizer or cache layout; names the field."""


class AccessError(QKVShareError):
    """A session may not read what it was to be given; names the span and its domain. Nothing was changed."""


class RevokedError(AccessError):
    """What the session held, or the card, was revoked. `reset` or another context lets the session go on."""


class AuditError(QKVShareError):
    """The audit log cannot be written."""


class CardError(QKVShareError):
    """A card cannot be used as asked; manager and session are as they were."""


class CardNotFoundError(CardError):
    """The store has no card of this name."""


class CardFormatError(CardError):
    """The file is none of ours, or of a format that this version does not read; names the version that was found."""


class CardCorruptError(CardError):
    """Bytes of a card or of a segment changed, or are gone; names the file and the field."""


class CardWriteError(CardError):
    """The card could not be written, for want of space perhaps; what was kept under its name before is whole."""


class IntegrityError(QKVShareError):
    """A checksum or an accounting equation does not hold; the message states both sides."""


class KernelBuildError(QKVShareError):
    """Metal cannot build a kernel; the message names the kernel, its variant and the compiler's first error."""


class TaskCancelledError(QKVShareError):
    """The task was cancelled, or its scheduler closed; what was generated before stays in the conversation."""


class DeadlineExceededError(QKVShareError):
    """The task's deadline passed; what was generated before stays in the conversation."""


class DependencyError(QKVShareError):
    """A task that this one was to come after did not succeed; nothing of this one was run."""


class TaskFailedError(QKVShareError):
    """The model, a sampler or a callback raised; the cause is chained. The session is at its last consistent length."""


class QueueFullError(QKVShareError):
    """As many tasks are waiting as the scheduler takes; try again later."""


class SchedulerClosedError(QKVShareError):
    """The scheduler was closed and takes no more work."""


def typed_error(error: BaseException, what: str) -> QKVShareError:
    """`error` itself if it is one of ours, else one of ours with it as its cause; `what` failed."""
    if isinstance(error, QKVShareError):
        return error
    typed = TaskFailedError(f"{what}: {type(error).__name__}: {error}")
    typed.__cause__ = error
    return typed
