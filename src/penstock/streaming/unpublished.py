"""Reads what the journal has and a log lacks: batches, one shard after the other.

Postgres works ahead: it is asked for a shard's next batch as soon as the previous one has arrived, before that is
published.
"""

from collections import deque
from collections.abc import Container, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import monotonic
from typing import Any, TypeVar

import psycopg

from penstock.channels.ick import MarkBatch, coalesce
from penstock.channels.isolation import OnUnusable, isolated
from penstock.channels.log import FIELDS, Batch
from penstock.database.connections import Connection, pipelined
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import DamagedJournal
from penstock.records import BEGINNING, Epoch, Offset, Record, Scope, ShardName

BATCH_RECORDS = 500
"""Most records per batch: appending that many keeps Redis busy for about 2 ms."""

BATCH_BYTES = 512 * 1024
"""A batch ends early once its payloads, as Postgres stores them, exceed this many bytes."""

READ_AHEAD = 4
"""Most batches requested before the first has arrived.  Bounds what is held in memory."""

_DATA = 4
"""Position of the payload among the ``FIELDS`` values of a record."""

_Item = TypeVar("_Item")

Cursor = psycopg.Cursor[tuple[Any, ...]]


def unpublished(  # noqa: PLR0913  where to begin, where to end, how much
    connection: Connection,
    scope: Scope,
    target: Mapping[ShardName, Offset],
    tails: Mapping[ShardName, Offset],
    *,
    epoch: Epoch,
    until: float,
    most: int = BATCH_RECORDS,
    queues: Container[str] = (),
    on_unusable: OnUnusable | None = None,
) -> Generator[Batch, None, None]:
    """Yields the journal's batches after ``tails``, up to ``target``.  Close it unless you exhaust it.

    Args:
        connection: In autocommit mode, and not used for anything else until the end.
        scope: Of the pipeline.
        target: Last offset of each shard in the journal.
        tails: Last offset of each shard in its log; a shard that is not named is empty.
        epoch: The epoch of the batches.
        until: Deadline by the monotonic clock.  Every shard gets at least one batch, however many shards there are;
            otherwise the first ones, if busy, would starve the others.
        most: Most records per batch.
        queues: Names of the channels whose records are gone once they are done.  Such a one has an id, and None for the rest.
        on_unusable: Called with a shard whose journal is damaged; None raises.

    Raises:
        ServerUnavailable: Postgres does not answer.
        DamagedJournal: The journal names records that Postgres no longer has, or has a hole, and there is no ``on_unusable``.
        psycopg.Error: Postgres cannot write a record as text.
    """
    statement = statements("penstock.streaming", scope.schema)["unpublished"]

    def request(shard: ShardName, after: Offset) -> tuple[ShardName, Offset, Cursor]:
        arguments = {"channel": shard.channel, "shard": shard.shard, "tail": after}
        limits = {"records": min(most, target[shard] - after), "bytes": BATCH_BYTES}
        return shard, after, connection.execute(statement, {**arguments, **limits})

    lacking = deque(
        (shard, tails.get(shard, BEGINNING))
        for shard, tail in target.items()
        if tail > tails.get(shard, BEGINNING)
    )
    if not lacking:
        return
    first_requests_left = len(lacking)
    requested: deque[tuple[ShardName, Offset, Cursor]] = deque()

    def request_ahead() -> None:
        nonlocal first_requests_left
        while (
            lacking
            and len(requested) < READ_AHEAD
            and (first_requests_left > 0 or monotonic() < until)
        ):
            first_requests_left -= 1
            requested.append(request(*lacking.popleft()))

    with postgres_errors("reading unpublished records"), pipelined(connection):
        request_ahead()
        while requested:
            shard, after, cursor = requested.popleft()
            rows = cursor.fetchall()
            found: list[Batch] = []
            with isolated(shard, on_unusable):
                if shard.channel in queues:
                    rows = [
                        row if row[2] is not None else (*row[:2], row[1], *row[3:]) for row in rows
                    ]
                found.append(_make_batch(shard, after, rows, epoch, target[shard]))
            lacking.extend((shard, batch.last) for batch in found if batch.last < target[shard])
            request_ahead()
            yield from found


def _make_batch(
    shard: ShardName, after: Offset, rows: list[tuple[Any, ...]], epoch: Epoch, target: Offset
) -> Batch:
    """A batch of rows: offset, id in the journal, and the record's values, all null if it is gone."""
    if not rows:
        raise DamagedJournal(
            f"{shard} offset {after + 1}…{target}: these rows of the journal are gone. They were deleted by something other "
            "than Penstock; the records that they named are not published. See penstock doctor; then: penstock reset epoch"
        )
    first, last = Offset(rows[0][0]), rows[-1][0]
    gone = [journaled_id for _, journaled_id, record_id, *_ in rows if record_id is None]
    if gone:
        raise DamagedJournal(
            f"{shard} offset {first}…{last}: the journal names records that are gone from staged_records "
            f"({len(gone)}, the first is {gone[0]}). They were deleted by something other than Penstock, or Postgres was "
            "restored in part; nothing after them in this shard can be published in order. See penstock doctor"
        )
    if last - first + 1 != len(rows):
        raise DamagedJournal(
            f"{shard} offset {first}…{last}: the journal has only {len(rows)} records there. Rows of it were deleted by "
            f"something other than Penstock, before offset {_after_hole(rows)}; nothing after the hole can be published. See penstock doctor"
        )
    # The journal has no holes: if the first record is beyond after + 1, the journal begins there.
    arguments = [value for row in rows for value in row[2:]]
    return Batch(shard, epoch, first, begins=first > after + 1, arguments=arguments)


def _after_hole(rows: list[tuple[Any, ...]]) -> Offset:
    """The first offset of ``rows`` that does not follow the one before."""
    return next(Offset(after[0]) for before, after in pairwise(rows) if after[0] != before[0] + 1)


def count_missing(target: Mapping[ShardName, Offset], tails: Mapping[ShardName, Offset]) -> int:
    """Number of records between ``tails`` and ``target``."""
    return sum(max(0, tail - tails.get(shard, BEGINNING)) for shard, tail in target.items())


def coalesce_batch(batch: Batch) -> MarkBatch:
    """The marks of a batch's records, for an Ick."""
    name, values = batch.shard, batch.arguments
    records = [
        Record(
            name.channel,
            name.shard,
            Offset(batch.first + number),
            *values[number * FIELDS : (number + 1) * FIELDS],  # type: ignore[arg-type]  # as Postgres returned them
        )
        for number in range(batch.count)
    ]
    return coalesce(records, batch.epoch, begins=batch.begins)


def group_batches(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    """Batches that go to Redis in one call: their payloads, without the last batch's, are below ``BATCH_BYTES``."""
    group: list[Batch] = []
    characters = 0
    for batch in batches:
        group.append(batch)
        characters += sum(len(str(data)) for data in batch.arguments[_DATA::FIELDS])
        if characters >= BATCH_BYTES:
            yield group
            group, characters = [], 0
    if group:
        yield group


def read_ahead(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    """Takes the next item, in a thread, while the caller works on this one."""
    with ThreadPoolExecutor(1, "penstock-read") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
