"""Rows for queues: the tenant takes the place of the key, the headers hold the options.

    key                 the tenant: it decides the shard
    headers.penstock    key, delay_ms, due, deadline (milliseconds since 1970), unique, priority;
                        each only if it was given

A message's times are compared by Redis' clock; ``delay_ms`` counts from ``created_at``, which
Postgres sets.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

from penstock.declaring.kinds import Channel, Queue
from penstock.declaring.outcomes import RESERVED
from penstock.declaring.schedules import ScheduleSpec
from penstock.declaring.unique import (
    MAX_DELAY_S,
    Priority,
    Unique,
    check_priority,
    check_times,
    check_unique,
    checked_duration,
    checked_text,
)
from penstock.errors import DeclarationError, InvalidMessage, InvalidRecord
from penstock.parsing import Duration, parse_duration
from penstock.staging.payload import as_plain, key_text
from penstock.staging.payload_models import TypedPayload
from penstock.staging.rows import Row, make_row

SCHEDULED = "scheduled"
"""The action of the records that schedules stage."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class MessageOptions(TypedDict, total=False):
    """Arguments of ``stage`` for a queue, besides the parts of every record.

    due       the moment from which it may be handed over
    delay     time from staging until it may be, instead of ``due``: seconds, a ``timedelta``, or a
              text such as ``"10m"``
    deadline  the moment from which it is dead-lettered instead of handed over
    unique    a name that no other message may have at the same time
    priority  within the tenant: ``high``, ``normal`` or ``low``
    """

    due: datetime | None
    delay: Duration | None
    deadline: datetime | None
    unique: Unique | None
    priority: Priority


def make_message(  # noqa: PLR0913  a row has this many columns
    channel: Queue,
    action: object,
    object: object,  # noqa: A002  the name of the record's field
    data: Any,
    headers: object,
    options: Mapping[str, Any],
    *,
    key: object = None,
    field: str = "",
    typed: TypedPayload | None = None,
) -> Row:
    """Checks the fields of a message and returns them as a row."""
    if unknown := options.keys() - MessageOptions.__optional_keys__ - {"tenant"}:
        raise InvalidRecord(
            f"{field}{min(unknown)}",
            f"is unknown; a message takes {', '.join(sorted(MessageOptions.__optional_keys__))}",
        )
    if options.get("tenant") is None:
        raise InvalidRecord(
            f"{field}tenant",
            f"is missing: {channel.name} is a queue, and each message needs a tenant",
        )
    tenant = _checked(options["tenant"], "tenant", field)
    header = _make_own(options, None if key is None else _checked(key, "key", field), field)
    return make_row(
        channel, tenant, action, object, data, _add(headers, header, field), field, typed
    )


def make_scheduled(spec: ScheduleSpec, slot: datetime = _EPOCH, model: Any = None) -> Row:
    """Checks the job of a slot against the worker's payload model; returns it as a row."""
    options: dict[str, Any] = {
        "tenant": spec.name if spec.tenant is None else spec.tenant,
        "unique": spec.unique,
        "deadline": None
        if spec.deadline is None
        else slot + timedelta(seconds=parse_duration(spec.deadline)),
        "priority": spec.priority,
    }
    headers = {"slot": slot.isoformat()}
    data, typed = as_plain(spec.data, "data"), model and TypedPayload(model, spec.data)
    return make_message(
        spec.queue, SCHEDULED, spec.name, data, headers, options, key=spec.key, typed=typed
    )


def check_scheduled(spec: ScheduleSpec, model: Any) -> None:
    """Checks the jobs of a schedule.  Raises ``DeclarationError``."""
    try:
        make_scheduled(spec, model=model)
    except InvalidRecord as error:
        raise DeclarationError(f"schedule {spec.name}: {error}") from None


def refuse_options(channel: Channel, options: Iterable[str], field: str = "") -> None:
    """Refuses options that only queues take."""
    for name in options:
        raise InvalidRecord(
            f"{field}{name}", f"is for queues, and channel {channel.name} is a {channel.kind}"
        )


def refuse_reserved(headers: object, field: str = "") -> None:
    """Refuses headers that contain Penstock's reserved one."""
    if isinstance(headers, dict) and RESERVED in headers:
        raise InvalidRecord(
            f"{field}headers.{RESERVED}", "is Penstock's own; give the header another name"
        )


def _checked(value: object, name: str, field: str) -> str:
    text = key_text(value, f"{field}{name}")
    try:
        return checked_text(name, text)
    except InvalidMessage as error:
        raise _translate(error, field) from error


def _make_own(options: Mapping[str, Any], key: str | None, field: str) -> dict[str, Any]:
    """Makes the value of the reserved header."""
    due, delay, deadline = options.get("due"), options.get("delay"), options.get("deadline")
    unique = options.get("unique")
    try:
        delay_s = 0.0 if delay is None else checked_duration("delay", delay, MAX_DELAY_S)
        check_times(0 if due is None else delay_s, due, deadline)
        if unique is not None:
            check_unique(unique)
        check_priority(priority := options.get("priority", "normal"))
    except InvalidMessage as error:
        raise _translate(error, field) from error
    header: dict[str, Any] = {} if key is None else {"key": key}
    if delay_s:
        header["delay_ms"] = round(delay_s * 1000)
    for name, moment in (("due", due), ("deadline", deadline)):
        if moment is not None:
            # before 1970 it has passed as well
            header[name] = max(1, (moment - _EPOCH) // timedelta(milliseconds=1))
    if priority != "normal":
        header["priority"] = priority
    if unique is not None:
        header["unique"] = {
            "name": unique.name,
            "until": unique.held_until,
            "for_s": unique.window_s,
        }
        if unique.within != "queue":
            header["unique"]["within"] = unique.within
    return header


def _translate(error: InvalidMessage, field: str) -> InvalidRecord:
    return InvalidRecord(f"{field}{error.field}", str(error).removeprefix(f"{error.field} "))


def _add(headers: object, header: dict[str, Any], field: str) -> object:
    """Adds the reserved header."""
    refuse_reserved(headers, field)
    if isinstance(headers, dict):
        return {**headers, RESERVED: header} if header else headers
    return {RESERVED: header} if header and headers is None else headers
