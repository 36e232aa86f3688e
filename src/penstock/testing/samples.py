"""Records for the unit tests of handlers."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.declaring.kinds import LARGEST_MAX_BYTES, Channel
from penstock.declaring.outcomes import RESERVED, Job
from penstock.errors import InvalidRecord
from penstock.parsing import InvalidPayload, make_model_decoder
from penstock.records import Offset, Payload, Record, RecordId, Shard, set_payload
from penstock.staging.payload import as_plain, headers_text, json_text, key_text, label_text

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STAGED_AT = datetime(2026, 1, 1, tzinfo=UTC)
_NO_DATA: Mapping[str, Any] = {}


def make_record(  # noqa: PLR0913  a record has this many parts; all have defaults
    data: Any = _NO_DATA,
    *,
    channel: Channel | str = "records",
    key: object = "1",
    action: str = "insert",
    object: str = "object",  # noqa: A002  the word of the record
    headers: Mapping[str, Any] | None = None,
    offset: int = 1,
    shard: int | None = None,
    id: int | None = None,  # noqa: A002  the word of the record
    staged_at: datetime = _STAGED_AT,
    payload: type[Payload] | None = None,
) -> Record[Payload]:
    """Makes a record as a consumer gets it, with defaults for what the test does not care about.

        handler(session, [make_record({"fare": n}, offset=n) for n in (1, 2, 3)])

    Args:
        data: The payload, as ``stage`` takes it: what the handler reads has been through the same
            JSON.
        channel: The channel or its name.
        key: A str, int or UUID, or a tuple of them.
        action: What happened.
        object: What it happened to.
        headers: Beside the payload.
        offset: Position in the shard, from 1.
        shard: Number of the shard; by default the key's shard if ``channel`` is a channel, or else
            0.
        id: Number of the staged record; by default the offset.
        staged_at: When it was staged; an aware datetime.
        payload: As the consumer declares it, for a handler that reads ``record.payload``.

    Raises:
        InvalidRecord: The application could not have staged such a record, or ``data`` does not fit
            ``payload``: the consumer would dead-letter it.
        DeclarationError: ``payload`` is no model.
    """
    text = key_text(key)
    if isinstance(channel, str):
        name, of_key, limit = channel, Shard(0), LARGEST_MAX_BYTES
    else:
        name, of_key, limit = channel.name, channel.shard_for(text), channel.max_bytes
    record = Record[Payload](
        name,
        of_key if shard is None else Shard(shard),
        Offset(offset),
        RecordId(offset if id is None else id),
        text,
        label_text(action, "action"),
        label_text(object, "object"),
        json_text(as_plain(data, "data"), "data", limit),
        headers_text(None if headers is None else dict(headers)) or "",
        (staged_at - _EPOCH) // timedelta(microseconds=1),
    )
    _validate(record, payload or getattr(channel, "payload", None))
    return record


def make_job(  # noqa: PLR0913  a job has this many parts; all have defaults
    data: Any = _NO_DATA,
    *,
    channel: Channel | str = "jobs",
    tenant: object = "tenant",
    key: str = "",
    attempts: int = 1,
    action: str = "insert",
    object: str = "object",  # noqa: A002  the word of the record
    headers: Mapping[str, Any] | None = None,
    id: int = 1,  # noqa: A002  the word of the record
    staged_at: datetime = _STAGED_AT,
    payload: type[Payload] | None = None,
) -> Job[Payload]:
    """Makes a job as a worker's handler gets it, with defaults for all that the test ignores.

        assert isinstance(handler(session, make_job({"to": "ann"}, attempts=3)), Snooze)

    Args:
        data: The payload, as ``stage`` takes it: what the handler reads has been through the same
            JSON.
        channel: The queue or its name.
        tenant: Whose it is.
        key: Its key within the tenant.
        attempts: How many times it was handed over, this time included.
        action: What happened.
        object: What it happened to.
        headers: Beside the payload.
        id: Number of the staged record.
        staged_at: When it was staged; an aware datetime.
        payload: As the worker declares it, for a handler that reads ``job.payload``.

    Raises:
        InvalidRecord: As of ``make_record``.
        DeclarationError: ``payload`` is no model.
    """
    record: Record = make_record(
        data,
        channel=channel,
        key=tenant,
        action=action,
        object=object,
        headers=headers,
        id=id,
        staged_at=staged_at,
    )
    header = {name: getattr(record, name) for name in ("action", "object", "staged_us")}
    job = Job[Payload](
        *(record.channel, record.shard, record.id, record.key, key, attempts, record.data_json),
        json.dumps({**json.loads(record.headers_json or "{}"), RESERVED: header}),
        record.staged_us // 1000,
        staged_us=record.staged_us,
    )
    _validate(job, payload)
    return job


def _validate(item: Record[Any] | Job[Any], model: type[Any] | None) -> None:
    """Sets the validated payload, as a consumer does before it calls the handler."""
    if model is None:
        return
    decode = make_model_decoder(model, "this test")
    try:
        set_payload(item, decode(item.data_json))
    except InvalidPayload as error:
        raise InvalidRecord("data", f"does not fit {model.__name__}: {error}") from error
