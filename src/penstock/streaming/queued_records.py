"""Records of queues as messages: what the reserved header says, and which of them Redis is to be given now.

A record that is due later than ``NEAR`` after it was staged waits in Postgres, where it needs no memory and outlives Redis.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import structlog

from penstock.channels.log import Batch
from penstock.channels.queue.publishing import QueueBatch, QueuedRecord
from penstock.declaring.outcomes import RESERVED
from penstock.declaring.unique import name_within
from penstock.parsing import parse_json
from penstock.records import BEGINNING, Epoch, Offset, RecordId, ShardName

log = structlog.get_logger("penstock.streamer")

NEAR = timedelta(hours=1)
"""How long before it is due Redis is given a record at the earliest."""

_NEAR_MS = NEAR // timedelta(milliseconds=1)
_MOST_MS = 1 << 52
"""Times beyond it are no times that Lua counts exactly."""

Due = tuple[RecordId, int]
"""A record, and when it is due, in milliseconds since 1970."""


def make_queue_batch(batch: Batch) -> tuple[QueueBatch, list[Due]]:
    """The messages of a batch, and the records of it that wait in Postgres until they are due."""
    near: list[QueuedRecord] = []
    far: list[Due] = []
    places: list[tuple[RecordId, int]] = []
    for offset, values in enumerate(batch.columns.rows(), batch.first):
        is_done = values[1] is None
        places.append((values[0], 0 if is_done else values[6]))
        if is_done:
            continue
        record = make_queued(Offset(offset), values)
        if record.due_ms is not None and record.due_ms - values[6] // 1000 > _NEAR_MS:
            far.append((record.id, record.due_ms))
        else:
            near.append(record)
    made = QueueBatch(batch.shard, batch.epoch, batch.first, batch.last, batch.begins, places, near)
    return made, far


def apart(shard: ShardName, epoch: Epoch, rows: Iterable[Sequence[Any]]) -> QueueBatch:
    """Records that are written apart from the order: the position does not move."""
    messages = [make_queued(BEGINNING, row) for row in rows]
    return QueueBatch(shard, epoch, BEGINNING, BEGINNING, False, (), messages)


def make_queued(offset: Offset, values: Sequence[Any]) -> QueuedRecord:
    """A record as a message.

    What names the record's action, object and time goes into the reserved header, whose last mention counts.

    Args:
        offset: Its offset.
        values: id, tenant, action, object, data, headers, and when it was staged in microseconds since 1970.
    """
    id_, tenant, action, object_, data, headers, staged_us = values
    own = _read_own(headers, id_)
    own.pop("staged_us", None)  # it comes last: see ``read_identity``
    key, unique = own.get("key"), own.get("unique")
    due = _time(own.get("due"))
    if due is None and (delay := _time(own.get("delay_ms"))):
        due = staged_us // 1000 + delay
    return QueuedRecord(
        id_,
        offset,
        tenant,
        key if isinstance(key, str) else "",
        due,
        _time(own.get("deadline")),
        _unique(unique, tenant),
        data,
        _add_own(headers, {**own, "action": action, "object": object_, "staged_us": staged_us}),
        staged_us,
    )


def _read_own(headers: str, record: RecordId) -> dict[str, Any]:
    """The reserved header, which a producer that writes SQL may have filled with anything."""
    if RESERVED not in headers:
        return {}
    try:
        parsed = parse_json(headers)
        own = parsed.get(RESERVED, {}) if isinstance(parsed, dict) else {}
    except ValueError:  # of whatever header: nested too deep, or a number with too many digits
        own = None
    if not isinstance(own, dict):
        log.warning("reserved header is no object, and ignored", record=record, header=RESERVED)
        return {}
    return own


def _add_own(headers: str, own: dict[str, Any]) -> str:
    """The headers with the reserved one at their end.  The others are not parsed, so that numbers stay as they are."""
    text = json.dumps({RESERVED: own}, ensure_ascii=False)
    if not headers.startswith("{") or headers == "{}":
        return text
    return f"{headers[:-1]}, {text[1:]}"


def _time(value: object) -> int | None:
    """A time in milliseconds; None if it is none, or out of range."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST_MS:
        return int(value)
    return None


def _unique(value: object, tenant: str) -> tuple[str, str, str]:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return "", "", ""
    name = name_within(tenant, name) if value.get("within") == "tenant" else name
    until, for_s = value.get("until"), value.get("for_s")
    if until == "window" and isinstance(for_s, (int, float)) and 0 < for_s < _MOST_MS / 1000:
        return name, "window", f"{for_s * 1000:.0f}"
    return name, "queued" if until == "queued" else "running", ""
