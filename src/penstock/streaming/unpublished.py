"""Reads what the journal has and a log lacks: batches, one shard after the other.

Postgres works ahead: it is asked for a shard's next batch as soon as the previous one has arrived, before that is
published.
"""

from collections import deque
from collections.abc import Generator, Mapping
from time import monotonic
from typing import Any

import psycopg

from penstock.channels.log import Batch
from penstock.database.connections import Connection, pipelined
from penstock.database.errors import postgres_errors
from penstock.database.statements import statements
from penstock.errors import HistoryDiverged
from penstock.records import BEGINNING, Epoch, Offset, Scope, ShardName

BATCH_RECORDS = 500
"""Most records per batch: appending that many keeps Redis busy for about 2 ms."""

BATCH_BYTES = 512 * 1024
"""A batch ends early once its payloads, as Postgres stores them, exceed this many bytes."""

READ_AHEAD = 4
"""Most batches requested before the first has arrived.  Bounds what is held in memory."""

Cursor = psycopg.Cursor[tuple[Any, ...]]


def unpublished(
    connection: Connection,
    scope: Scope,
    target: Mapping[ShardName, Offset],
    tails: Mapping[ShardName, Offset],
    *,
    epoch: Epoch,
    until: float,
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

    Raises:
        ServerUnavailable: Postgres does not answer.
        HistoryDiverged: The journal names records that Postgres no longer has, or has a hole.
    """
    statement = statements("penstock.streaming", scope.schema)["unpublished"]

    def request(shard: ShardName, after: Offset) -> tuple[ShardName, Offset, Cursor]:
        arguments = {"channel": shard.channel, "shard": shard.shard, "tail": after}
        limits = {"records": BATCH_RECORDS, "bytes": BATCH_BYTES}
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
            if rows and rows[-1][0] < target[shard]:
                lacking.append((shard, Offset(rows[-1][0])))
            request_ahead()
            if rows:
                yield _make_batch(shard, after, rows, epoch)


def _make_batch(
    shard: ShardName, after: Offset, rows: list[tuple[Any, ...]], epoch: Epoch
) -> Batch:
    """A batch of rows: offset, id in the journal, and the record's values, all null if it is gone."""
    first, last = Offset(rows[0][0]), rows[-1][0]
    gone = [journaled_id for _, journaled_id, record_id, *_ in rows if record_id is None]
    if gone:
        raise HistoryDiverged(
            f"{shard} offset {first}…{last}: the journal names records that are gone from staged_records "
            f"({len(gone)}, the first is {gone[0]}). They were deleted by something other than Penstock, or Postgres was "
            "restored in part; nothing after them can be published in order. See penstock doctor"
        )
    if last - first + 1 != len(rows):
        raise HistoryDiverged(
            f"{shard} offset {first}…{last}: the journal has only {len(rows)} records there. Rows of it were deleted by "
            "something other than Penstock; nothing after the hole can be published. See penstock doctor"
        )
    # The journal has no holes: if the first record is beyond after + 1, the journal begins there.
    arguments = [value for row in rows for value in row[2:]]
    return Batch(shard, epoch, first, begins=first > after + 1, arguments=arguments)
