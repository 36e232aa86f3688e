"""What the journal has and a shard has not: read in portions, the shards in turn.

Postgres works ahead: it is asked for a shard's next portion as soon as the last one has come, before that is worked on.
"""

from collections import deque
from collections.abc import Generator, Mapping
from time import monotonic
from typing import Any

import psycopg

from penstock.database.connections import Connection, pipelined
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import HistoryDiverged
from penstock.records import BEGINNING, Offset, ShardName
from penstock.streaming.portion import PORTION_BYTES, PORTION_RECORDS, Portion

READ_AHEAD = 4
"""Most portions that are asked for before the first of them has come: bounds what is held in memory."""

Cursor = psycopg.Cursor[tuple[Any, ...]]


def unpublished(
    connection: Connection,
    wanted: Mapping[ShardName, Offset],
    tails: Mapping[ShardName, Offset],
    *,
    until: float,
    schema: str = DEFAULT_SCHEMA,
) -> Generator[Portion, None, None]:
    """Portions of what lies behind ``tails``; whoever does not take them all closes it.

    Args:
        connection: In autocommit mode, and not used for anything else until the end.
        wanted: How far the journal goes.
        tails: How far the shards go; those that are not named are empty.
        until: When it ends, by the monotonic clock; but every shard has its turn, however many there are: or the first
            ones, if busy, would starve the others.
        schema: Of Penstock's tables.

    Raises:
        ServerUnavailable: Postgres does not answer.
        HistoryDiverged: The journal names records that Postgres no longer has, or has a hole.
    """
    statement = statements("penstock.streaming", schema)["unpublished"]

    def ask(shard: ShardName, after: Offset) -> tuple[ShardName, Offset, Cursor]:
        arguments = {"channel": shard.channel, "shard": shard.shard, "tail": after}
        limits = {"records": PORTION_RECORDS, "bytes": PORTION_BYTES}
        return shard, after, connection.execute(statement, {**arguments, **limits})

    lacking = deque(
        (shard, tails.get(shard, BEGINNING))
        for shard, tail in wanted.items()
        if tail > tails.get(shard, BEGINNING)
    )
    if not lacking:
        return
    in_turn = len(lacking)
    asked: deque[tuple[ShardName, Offset, Cursor]] = deque()

    def ask_ahead() -> None:
        nonlocal in_turn
        while lacking and len(asked) < READ_AHEAD and (in_turn > 0 or monotonic() < until):
            in_turn -= 1
            asked.append(ask(*lacking.popleft()))

    with postgres_errors("reading unpublished records"), pipelined(connection):
        ask_ahead()
        while asked:
            shard, after, cursor = asked.popleft()
            rows = cursor.fetchall()
            if rows and rows[-1][0] < wanted[shard]:
                lacking.append((shard, Offset(rows[-1][0])))
            ask_ahead()
            if rows:
                yield _portion(shard, after, rows)


def _portion(shard: ShardName, after: Offset, rows: list[tuple[Any, ...]]) -> Portion:
    first, last = Offset(rows[0][0]), rows[-1][0]
    lost = [row[1] for row in rows if row[2] is None]
    if lost:
        raise HistoryDiverged(
            f"{shard} offset {first}…{last}: the journal names records that are gone from staged_records "
            f"({len(lost)}, the first is {lost[0]}). They were deleted by something other than Penstock, or Postgres was "
            "restored in part; nothing after them can be published in order. See penstock doctor"
        )
    if last - first + 1 != len(rows):
        raise HistoryDiverged(
            f"{shard} offset {first}…{last}: the journal has only {len(rows)} records there. Rows of it were deleted by "
            "something other than Penstock; nothing after the hole can be published. See penstock doctor"
        )
    # The journal has no holes: a first record beyond tail + 1 is where it begins.
    return Portion(shard, first, first > after + 1, [row[2:] for row in rows])
