"""The equations that hold after every call on the manager; each failure states both sides."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import IntegrityError
from .prefix import Holding
from .segment import LayerKV, SharedSegment
from .spec import LayerSpec
from .table import Record, SegmentTable


def require_equal(left_name: str, left: object, right_name: str, right: object) -> None:
    if left != right:
        raise IntegrityError(f"[check_integrity] {left_name} is {left}, {right_name} is {right}")


def check_table(table: SegmentTable, holdings: Iterable[Holding], *, checksums: bool) -> None:
    """Views are contiguous, holders and reference counts agree, every segment is listed and has its size.

    With `checksums` the packed bytes are hashed again and must be those of the seal.
    """
    held: dict[int, set[int]] = {slot: set() for slot in table.records}
    for holding in holdings:
        stop = 0
        for view in holding.views:
            require_equal(f"holder {holding.holder}: view start", view.start, "end of the view before", stop)
            stop = view.stop
            held.setdefault(view.segment.slot, set()).add(holding.holder)
    require_equal("slots that are held or stored", set(held), "slots in the table", set(table.records))
    for slot, record in table.records.items():
        require_equal(f"slot {slot}: holders", record.holders, "live holders", held[slot])
        if record.segment is not None:
            _check_segment(table, record, record.segment, checksums)


def _check_segment(table: SegmentTable, record: Record, segment: SharedSegment, checksums: bool) -> None:
    slot = segment.slot
    require_equal(f"slot {slot}: listed by its parent", slot in table.siblings(record), "expected", True)
    require_equal(f"slot {slot}: segment bytes", segment.nbytes, "counted bytes", record.counted_bytes)
    for index, (kv, layer) in enumerate(zip(segment.layers, table.spec.layers, strict=True)):
        if isinstance(kv, LayerKV) and isinstance(layer, LayerSpec):
            rows = layer.sealed_rows(segment.num_tokens)
            for name in ("keys", "values"):
                found = sum(getattr(block, name).num_tokens for block in kv.blocks)
                require_equal(f"slot {slot} layer {index}: rows of {name}", found, "rows of its tokens", rows)
    if checksums:
        require_equal(f"slot {slot}: checksum", segment.compute_checksum(), "checksum at seal", segment.checksum)
        found, expected = segment.compute_residual_checksum(), segment.residual_checksum
        require_equal(f"slot {slot}: checksum of residuals", found, "checksum at seal", expected)
