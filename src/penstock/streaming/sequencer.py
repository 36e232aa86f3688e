"""The sequencer gives every committed staged record its place.

Ids are drawn before commit, so a smaller id can appear after a larger one.  What is committed between two looks is
therefore not a range of ids but the difference of two snapshots:

    tick(n) = visible in snapshot(n) and not visible in snapshot(n - 1)

A tick writes ids to the journal and stores its snapshot, in one statement that is a transaction of its own: Postgres
commits it before it answers, and a sequencer that is suspended holds nothing.  Two sequencers are slow, never wrong: the
primary key of ``ticks`` lets one of them through.  Nothing that matters is held in memory between ticks, and a long
transaction delays nobody's records but its own.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import psycopg

from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import UnsafeSetting
from penstock.records import Epoch, Offset, Shard, ShardName
from penstock.streaming.portion import PORTION_BYTES, Portion

JOURNAL_CHUNK = 200
"""Most records a journal row: a row is what retention removes at a time, and is read whole.  With the longest name of a
channel it stays below 2 kB, from where Postgres compresses it, which takes more time than all the rest of a large tick."""

LITTLE = 100
"""Most records of a tick that come along with it, so that the publisher need not read them."""

NO_TICK = "{schema}.ticks is empty: the place where sequencing stopped is lost; see penstock doctor"

_LIMITS = {"chunk": JOURNAL_CHUNK, "little": LITTLE, "bytes": PORTION_BYTES}

_ANOTHERS_SESSION = (
    psycopg.errors.InvalidSqlStatementName,
    psycopg.errors.DuplicatePreparedStatement,
)
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
        epoch: The epoch in which it ran.
        tails: The new last offset of each shard that got some.
        portions: The first of these records, where they are few.
    """

    number: int
    sequenced: int
    epoch: Epoch
    tails: Mapping[ShardName, Offset] = field(default_factory=dict)
    portions: list[Portion] = field(default_factory=list)


class Sequencer:
    """Ticks, on a connection of its own."""

    def __init__(
        self, connection: Connection, schema: str = DEFAULT_SCHEMA, *, prepare: bool = False
    ) -> None:
        """Sets up; nothing is sent yet.

        Args:
            connection: In autocommit mode, to a primary whose past has been checked (``check_lineage``).
            schema: The Penstock schema.
            prepare: Whether to keep prepared statements, which pay for more than a few ticks; they are given up where a
                pooler stands between.
        """
        self._connection, self._schema = connection, schema
        self._sql = statements("penstock.streaming", schema)
        # Limits are written in, since a message of several statements takes no parameters.
        binding = psycopg.ClientCursor(connection)
        self._sequencing = binding.mogrify(self._sql["sequence_committed"], _LIMITS).encode()
        self._prepare, self._prepared = prepare, dict[bytes, bytes]()
        self._expects_some = False

    def tick(self) -> Tick:
        """Sequences every record that has been committed since the last tick.

        Raises:
            ServerUnavailable: The connection failed; the tick may have been committed, which the next round will see.
            SchemaMissing: The tables are not there.
            UnsafeSetting: The place where sequencing stopped is lost.
        """
        # Where there was something, there is more, most likely: it is not asked first.
        ticked, found = (None, True) if self._expects_some else self._look()
        if found:
            crashpoint("sequencer.before_tick")
            try:
                ticked = self._sequence()
            except _LOST_THE_RACE:
                ticked, _ = self._look()
            crashpoint("sequencer.after_tick")
        assert ticked is not None
        self._expects_some = ticked.sequenced > 0
        return ticked

    def _look(self) -> tuple[Tick, bool]:
        """The last tick, and whether there is something that it did not show."""
        with postgres_errors("looking for records"):
            rows = self._alone(self._sql["look"])
        if not rows:
            raise UnsafeSetting(NO_TICK.format(schema=self._schema))
        [(number, epoch, found)] = rows
        return Tick(number, 0, epoch), found

    def _sequence(self) -> Tick:
        with postgres_errors("sequencing"):
            rows = self._alone(self._sequencing, self._sql["prepare_tick"])
        return _tick_of(rows, self._schema)

    def _alone(self, statement: bytes, *before: bytes) -> list[tuple[Any, ...]]:
        """What a statement gives, in a transaction of its own, with what goes before it: all of it is one message."""
        if self._prepare:
            try:
                return self._sent(*self._isolated, *before, self._execution(statement))
            except _ANOTHERS_SESSION:
                # A pooler has changed our session for another's, in which nothing has been done.
                self._prepare = False
        return self._sent(*self._isolated, *before, statement)

    @cached_property
    def _isolated(self) -> tuple[bytes, ...]:
        """What our transactions have to begin with: nothing, where the server's default is what they want."""
        default = self._connection.execute("SHOW default_transaction_isolation").fetchone()
        return () if default == ("read committed",) else (self._sql["isolate"],)

    def _execution(self, statement: bytes) -> bytes:
        """What runs a statement that the session has prepared."""
        if statement not in self._prepared:
            # By its text: another version's, in the same session of a pooler, has another name.
            name = hashlib.sha256(statement).hexdigest()[:16]
            self._sent(f'PREPARE "penstock {name}" AS '.encode() + statement)
            self._prepared[statement] = f'EXECUTE "penstock {name}"'.encode()
        return self._prepared[statement]

    def _sent(self, *parts: bytes) -> list[tuple[Any, ...]]:
        """The rows of the last part."""
        results = self._connection.execute(b"; ".join(parts), prepare=False)
        for _ in parts[1:]:
            results.nextset()
        return results.fetchall() if results.description else []


def tick(connection: Connection, schema: str = DEFAULT_SCHEMA) -> Tick:
    """A single tick: see ``Sequencer.tick``."""
    return Sequencer(connection, schema).tick()


def tick_within(connection: Connection, schema: str = DEFAULT_SCHEMA) -> Tick:
    """The tick itself, in a REPEATABLE READ transaction that the caller has opened, and will commit.

    It makes a tick even if there is nothing to sequence: its snapshot is then the same past, told anew.

    Raises:
        UnsafeSetting: The place where sequencing stopped is lost.
        psycopg.Error: Another sequencer came first, or the connection failed.
    """
    sql = statements("penstock.streaming", schema)
    connection.execute(sql["prepare_tick"])
    rows = connection.execute(sql["sequence_committed"], _LIMITS).fetchall()
    done = _tick_of(rows, schema)
    if done.sequenced:
        return done
    [(number,)] = connection.execute(sql["tick_anew"]).fetchall()
    return Tick(number, 0, done.epoch)


def _tick_of(rows: list[tuple[Any, ...]], schema: str) -> Tick:
    if not rows:
        raise UnsafeSetting(NO_TICK.format(schema=schema))
    number, epoch = rows[0][:2]
    sequenced = 0
    tails: dict[ShardName, Offset] = {}
    portions: list[Portion] = []
    for (channel, shard, tail, count), group in groupby(rows, key=lambda row: row[2:6]):
        if channel is None:
            continue
        name = ShardName(channel, Shard(shard))
        sequenced += count
        tails[name] = tail
        # In order, so that what is left out because it is too much is at the end.
        if little := [row[6:] for row in group if row[6] is not None]:
            portions.append(Portion(name, little[0][0], False, [record[1:] for record in little]))
    return Tick(number, sequenced, epoch, tails, portions)


def check_identity_cache(connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Makes sure that ids are drawn one at a time: the order of records leans on it.

    Raises:
        UnsafeSetting: The sequence hands out ids in advance.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    sql = statements("penstock.streaming", schema)
    with postgres_errors("looking at the sequence of staged_records"):
        row = connection.execute(
            sql["identity_cache"], {"table": f'"{schema}".staged_records'}
        ).fetchone()
    if row is None or row[0] != 1:
        raise UnsafeSetting(
            f"the sequence of {schema}.staged_records hands out ids in advance (CACHE {row and row[0]}), which puts "
            f"changes of one key out of order. ALTER TABLE {schema}.staged_records ALTER COLUMN id SET CACHE 1"
        )
