"""Several LLM agents share one quantized KV cache: held once, handed over by reference."""

from typing import TYPE_CHECKING, Any

from .archive import export_card, import_card
from .attention import QuantizedAttention, quantized_attention
from .batch import AgentBatch, BatchEvent
from .card import Card
from .chat import Message
from .errors import QKVShareError
from .handoff import HandoffCoordinator, HandoffRecord
from .layer_cache import LayerCache
from .manager import SharedKVCacheManager
from .package import HandoffPackage
from .policy import Access, AuditLog, Receipt, private
from .prefix import SharedPrefix
from .restore import Restored, restore
from .routes import Route, RouteTable
from .sampling import Sampling
from .schedule import SchedulerStats
from .scheduler import AgentScheduler
from .segment import SegmentView, SharedSegment
from .session import AgentSession, StreamChunk
from .spec import CacheSpec, QuantSpec
from .spill import SpillStore
from .store import CardStore
from .task import AgentTask, Priority, Task

if TYPE_CHECKING:
    from .model import LoadedModel, load

__version__ = "0.1.0"

__all__ = [
    "Access",
    "AgentBatch",
    "AgentScheduler",
    "AgentSession",
    "AgentTask",
    "AuditLog",
    "BatchEvent",
    "CacheSpec",
    "Card",
    "CardStore",
    "HandoffCoordinator",
    "HandoffPackage",
    "HandoffRecord",
    "LayerCache",
    "LoadedModel",
    "Message",
    "Priority",
    "QKVShareError",
    "QuantSpec",
    "QuantizedAttention",
    "Receipt",
    "Restored",
    "Route",
    "RouteTable",
    "Sampling",
    "SchedulerStats",
    "SegmentView",
    "SharedKVCacheManager",
    "SharedPrefix",
    "SharedSegment",
    "SpillStore",
    "StreamChunk",
    "Task",
    "export_card",
    "import_card",
    "load",
    "private",
    "quantized_attention",
    "restore",
]


def __getattr__(name: str) -> Any:
    # Loading needs mlx-lm and its tokenizers; the rest runs where only MLX does (an iPad, say).
    if name in ("LoadedModel", "load"):
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
