"""The sequencer gives every committed staged record its place.

Ids are drawn before commit, so a smaller id can appear after a larger one.  What is committed between two looks is
therefore not a range of ids but the difference of two snapshots:

    tick(n) = visible in snapshot(n) and not visible in snapshot(n - 1)

A tick writes ids to the journal, stores its snapshot, commits.  Two sequencers are slow, never wrong: the primary key
of ``ticks`` lets one of them through.  Nothing is held in memory between ticks, and a long transaction delays nobody's
records but its own.
"""

from contextlib import suppress
from dataclasses import dataclass, field

import psycopg

from penstock.errors import UnsafeSetting
from penstock.postgres import Connection, answering
from penstock.records import Epoch, Offset, Shard, ShardName
from penstock.statements import DEFAULT_SCHEMA, statements
from penstock.telemetry import crashpoint

JOURNAL_CHUNK = 1000
"""Most records a journal row: a row is what retention removes at a time, and is read whole."""

NO_TICK = "{schema}.ticks is empty: the place where sequencing stopped is lost; see penstock doctor"

_LOST_THE_RACE = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.UniqueViolation,
    psycopg.errors.DeadlockDetected,
)


@dataclass(frozen=True, slots=True)
class Tick:
    """What one round of the sequencer did.

    Attributes:
        number: Number of the newest tick; a round that finds nothing does not make one.
        sequenced: Records that got their offset.
        tails: The new last offset of each shard that got some.
        epoch: The epoch in which it ran.
        contended: Another sequencer came first, and this round did nothing.
    """

    number: int
    sequenced: int
    epoch: Epoch
    tails: dict[ShardName, Offset] = field(default_factory=dict)
    contended: bool = False


def tick(connection: Connection, schema: str = DEFAULT_SCHEMA) -> Tick:
    """Sequences every record that has been committed since the last tick.

    Args:
        connection: In autocommit mode, to a primary whose past has been checked (``check_past``).
        schema: The Penstock schema.

    Raises:
        ServerUnavailable: The connection failed; the tick may have been committed, which the next round will see.
        SchemaMissing: The tables are not there.
    """
    with answering("looking for records"):
        row = connection.execute(statements("penstock.streaming", schema)["look"]).fetchone()
    if row is None:
        raise UnsafeSetting(NO_TICK.format(schema=schema))
    number, epoch, found = row
    if not found:
        return Tick(number, 0, epoch)
    try:
        with answering("sequencing"):
            return _tick(connection, schema)
    except _LOST_THE_RACE:
        return Tick(number, 0, epoch, contended=True)


def _tick(connection: Connection, schema: str) -> Tick:
    prepare_tick = statements("penstock.streaming", schema)["prepare_tick"]
    try:
        # In one message.  Not in a pipeline: after one the server was seen to let a transaction idle for ever, and a
        # sequencer that is suspended would hold up the others for as long as it sleeps.
        connection.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ; " + prepare_tick, prepare=False)
        done = _sequence(connection, schema)
        crashpoint("sequencer.before_commit")
        connection.execute("COMMIT")
    except BaseException:
        # If the connection broke, the transaction went with it.
        with suppress(psycopg.OperationalError):
            connection.rollback()
        raise
    crashpoint("sequencer.after_commit")
    return done


def tick_within(connection: Connection, schema: str = DEFAULT_SCHEMA) -> Tick:
    """The tick itself, in a REPEATABLE READ transaction that the caller has opened, and will commit.

    It makes a tick even if there is nothing to sequence: its snapshot is then the same past, told anew.

    Raises:
        UnsafeSetting: The place where sequencing stopped is lost.
        psycopg.Error: Another sequencer came first, or the connection failed.
    """
    connection.execute(statements("penstock.streaming", schema)["prepare_tick"])
    return _sequence(connection, schema)


def _sequence(connection: Connection, schema: str) -> Tick:
    statement = statements("penstock.streaming", schema)["sequence_committed"]
    rows = connection.execute(statement, {"chunk": JOURNAL_CHUNK}).fetchall()
    if not rows:
        raise UnsafeSetting(NO_TICK.format(schema=schema))
    tails: dict[ShardName, Offset] = {}
    for _, _, channel, shard, last_offset, _ in rows:
        if channel is not None:
            name = ShardName(channel, Shard(shard))
            tails[name] = max(tails.get(name, Offset(0)), last_offset)
    number, epoch = rows[0][:2]
    return Tick(number, sum(row[5] or 0 for row in rows), epoch, tails)


def check_identity_cache(connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Makes sure that ids are drawn one at a time: the order of records leans on it.

    Raises:
        UnsafeSetting: The sequence hands out ids in advance.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.streaming", schema)
    with answering("looking at the sequence of staged_records"):
        row = connection.execute(
            sql["identity_cache"], {"table": f'"{schema}".staged_records'}
        ).fetchone()
    if row is None or row[0] != 1:
        raise UnsafeSetting(
            f"the sequence of {schema}.staged_records hands out ids in advance (CACHE {row and row[0]}), which puts "
            f"changes of one key out of order. ALTER TABLE {schema}.staged_records ALTER COLUMN id SET CACHE 1"
        )
