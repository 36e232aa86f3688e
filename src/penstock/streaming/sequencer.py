"""The sequencer gives every committed staged record its offset.

Ids are drawn before commit, so a smaller id can appear after a larger one.  What was committed
between two rounds is therefore not a range of ids but the difference of two snapshots:

    tick(n) = visible in snapshot(n) and not visible in snapshot(n - 1)

A tick writes ids to the journal and stores its snapshot, in one statement that is its own
transaction: Postgres commits before it answers, and a suspended sequencer holds nothing.  Two
sequencers are slow, never wrong: the primary key of ``ticks`` lets only one through.  Nothing that
matters stays in memory between ticks, and a long transaction delays no records but its own.

If a tick fails because it is too large, it is divided: see ``tick_slices``.
"""

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import psycopg

from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Batch
from penstock.crash_points import crashpoint
from penstock.database.connections import BoundedConnection, silent_for, transaction_settings
from penstock.database.driver_errors import ErrorKind, classify, postgres_errors
from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.database.transactions import set_local_in_one
from penstock.errors import UnsafeSetting
from penstock.records import Epoch, Offset, Scope, Shard, ShardName
from penstock.streaming.tick_slices import Slices
from penstock.streaming.unpublished import BATCH_BYTES

JOURNAL_CHUNK = 200
"""Most records per journal row.  Retention removes, and readers read, whole rows.  With the longest
channel name a row of this size stays below 2 kB, from where Postgres compresses it, which takes
more time than the rest of a large tick."""

FIRST_TICK = 5
"""Factor for the silence of Postgres that the first tick may last."""

MAX_INLINE_RECORDS = 100
"""Limit up to which a tick returns its records, so that the publisher need not read them again."""

_NO_TICK = (
    "{schema}.ticks is empty: the place where sequencing stopped is lost; see penstock doctor"
)

_LIMITS = {
    "chunk": JOURNAL_CHUNK,
    "max_inline_records": MAX_INLINE_RECORDS,
    "max_inline_bytes": BATCH_BYTES,
    "target": None,
    "after": None,
}

_NO_PAYLOADS = {**_LIMITS, "max_inline_records": -1}

_SESSION_CHANGED = (
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
    """Result of one round of the sequencer."""

    number: int  # number of the newest tick; a round that finds no new records does not make one
    sequenced: int  # number of records that got an offset
    epoch: Epoch  # the epoch of the tick
    # new last offset of each shard that got records
    tails: Mapping[ShardName, Offset] = field(default_factory=dict)
    # the first of the new offsets of each of these shards
    firsts: Mapping[ShardName, Offset] = field(default_factory=dict)
    # the first of these records, a batch per shard; empty if there are many
    inline_records: list[Batch] = field(default_factory=list)
    server_start_us: int = 0  # when the Postgres that ticked was started: microseconds since 1970


class Sequencer:
    """Runs ticks on a connection."""

    def __init__(
        self, store: Store, *, prepare: bool = False, slices: Slices | None = None
    ) -> None:
        """Sends nothing yet."""
        self._store = store
        # The limits are literals: a message of several statements takes no parameters.
        self._settings = set_local_in_one(transaction_settings(store.connection))
        self._slices = Slices() if slices is None else slices
        self._sequencing = self._bind("sequence_committed", _LIMITS)
        self._without_payloads = self._bind("sequence_committed", _NO_PAYLOADS)
        self._prepare, self._prepared = prepare, dict[bytes, bytes]()
        self._expects_records = self._has_ticked = False

    def tick(self, *, expects_records: bool = False) -> Tick:
        """Sequences every record that has been committed since the last tick.

        With ``expects_records`` it does not check first for records, which saves a round trip.

        Raises ``ServerUnavailable``, and the tick may have been committed: the next round will see
        it; ``SchemaMissing``, or ``UnsafeSetting`` if the place where sequencing stopped is lost.
        """
        # New records usually follow new records, so it sequences without checking first.
        expects_records = expects_records or self._expects_records
        ticked, has_new = (None, True) if expects_records else self.newest_tick()
        if has_new:
            crashpoint("sequencer.before_tick")
            try:
                with self._patient():
                    ticked = self._sequence()
                self._has_ticked = True
            except _LOST_THE_RACE:
                ticked, _ = self.newest_tick()
            crashpoint("sequencer.after_tick")
        assert ticked is not None
        self._expects_records = ticked.sequenced > 0
        return ticked

    def _patient(self) -> AbstractContextManager[None]:
        """Lets Postgres be silent for longer in the first tick.

        It may be of all that an outage has left.
        """
        connection = self._store.connection
        if self._has_ticked or not isinstance(connection, BoundedConnection):
            return nullcontext()
        return silent_for(connection, FIRST_TICK * connection.longest_silence_s)

    def newest_tick(self) -> tuple[Tick, bool]:
        """Returns the newest tick, and whether records were committed since."""
        with postgres_errors("looking for records"):
            rows = self._execute_alone(self._store["newest_tick"])
        if not rows:
            raise UnsafeSetting(_NO_TICK.format(schema=self._store.scope.schema))
        [(number, epoch, started, has_new)] = rows
        return Tick(number, 0, epoch, server_start_us=started), has_new

    def _sequence(self) -> Tick:
        while True:
            try:
                if self._slices.max_records is None:
                    return self._sequence_everything()
                if (ticked := self._sequence_slice()) is not None:
                    return ticked
            except psycopg.Error as error:
                with postgres_errors(self._slices.doing):
                    self._slices.failed(error)
                    if self._store.connection.closed:
                        raise

    def _sequence_everything(self) -> Tick:
        prepare = self._store["prepare_tick"]
        try:
            rows = self._execute_alone(self._sequencing, prepare)
        except psycopg.Error as error:
            # A payload may be one that Postgres can store and not write as text.  Only its shard is
            # to stop, when the publisher reads it.
            if isinstance(error, _LOST_THE_RACE) or classify(error) is not ErrorKind.STATEMENT:
                raise
            rows = self._execute_alone(self._without_payloads, prepare)
        return _parse_tick(rows, self._store.scope)

    def _sequence_slice(self) -> Tick | None:
        """Returns the tick of the next slice.

        Returns None if another sequencer's tick came before it, or nothing in it got an offset.
        """
        if (planned_slice := self._slices.next(self._plan)) is None:
            return self.newest_tick()[0]
        previous_tick, planned = planned_slice
        bounds = {**_NO_PAYLOADS, "target": planned.target, "after": previous_tick}
        statements = self._store["prepare_tick"], self._bind("sequence_committed", bounds)
        try:
            ticked = _parse_tick(
                self._send(*self._isolation, self._settings, *statements), self._store.scope
            )
        except _LOST_THE_RACE:
            ticked = None
        if ticked is None or not ticked.sequenced:
            self._slices.drop_plan()
            return None
        self._slices.succeeded(ticked.number)
        return ticked

    def _plan(self, name: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Executes a statement that plans slices, in a separate transaction."""
        settings = self._settings, self._store["prepare_plan"]
        return self._send(*self._isolation, *settings, self._bind(name, values))

    def _bind(self, name: str, values: Mapping[str, Any]) -> bytes:
        """Returns a statement with its values as literals."""
        return (
            psycopg.ClientCursor(self._store.connection).mogrify(self._store[name], values).encode()
        )

    def _execute_alone(self, statement: bytes, *preparations: bytes) -> list[tuple[Any, ...]]:
        """Executes statements in one transaction and message; returns the rows of ``statement``."""
        if self._prepare:
            try:
                calls = map(self._prepared_call, (self._settings, *preparations, statement))
                return self._send(*self._isolation, *calls)
            except _SESSION_CHANGED:
                # A pooler has given us another session, in which nothing was done.
                self._prepare = False
        return self._send(*self._isolation, self._settings, *preparations, statement)

    @cached_property
    def _isolation(self) -> tuple[bytes, ...]:
        """Returns the statement that sets the isolation level; none if the default is right."""
        default = self._store.connection.execute("SHOW default_transaction_isolation").fetchone()
        return () if default == ("read committed",) else (self._store["isolate"],)

    def _prepared_call(self, statement: bytes) -> bytes:
        """Returns the EXECUTE of a statement, which is prepared at the first use."""
        if statement not in self._prepared:
            # Named by its text: another version in the same session of a pooler has another name.
            name = hashlib.sha256(statement).hexdigest()[:16]
            prepare = f'PREPARE "penstock {name}" AS '.encode() + statement
            self._send(self._settings, prepare)
            self._prepared[statement] = f'EXECUTE "penstock {name}"'.encode()
        return self._prepared[statement]

    def _send(self, *parts: bytes) -> list[tuple[Any, ...]]:
        """Executes the parts; returns the rows of the last."""
        # Not with the connection's own cursor, which would send our settings apart.
        results = psycopg.Cursor(self._store.connection).execute(b"; ".join(parts), prepare=False)
        for _ in parts[1:]:
            results.nextset()
        # Not `description`, which makes an object of each column.
        has_rows = (
            results.pgresult is not None
            and results.pgresult.status == psycopg.pq.ExecStatus.TUPLES_OK
        )
        return results.fetchall() if has_rows else []


def tick(store: Store) -> Tick:
    """Runs a single tick: see ``Sequencer.tick``."""
    return Sequencer(store).tick()


def tick_within(store: Store) -> Tick:
    """Runs a tick in a REPEATABLE READ transaction that the caller has opened and will commit.

    It makes a tick even if there is nothing to sequence; its snapshot then shows the same state.
    """
    store.execute("prepare_tick")
    rows = store.rows("sequence_committed", _LIMITS)
    ticked = _parse_tick(rows, store.scope)
    if ticked.sequenced:
        return ticked
    number = store.value("tick_without_records")
    return Tick(number, 0, ticked.epoch, server_start_us=ticked.server_start_us)


# The columns of ``sequence_committed``: tick, epoch, server start; then of a shard: channel, shard,
# tail, number of records; then of a record that is returned inline: offset, values.
_SHARD, _OFFSET, _VALUES = itemgetter(3, 4, 5, 6), itemgetter(7), itemgetter(slice(8, None))


def _parse_tick(rows: list[tuple[Any, ...]], scope: Scope) -> Tick:
    """Reads the rows of ``sequence_committed``."""
    if not rows:
        raise UnsafeSetting(_NO_TICK.format(schema=scope.schema))
    number, epoch, started, *_ = rows[0]
    sequenced = 0
    tails: dict[ShardName, Offset] = {}
    firsts: dict[ShardName, Offset] = {}
    inline: list[Batch] = []
    for (channel, shard, tail, records), group in groupby(rows, key=_SHARD):
        if channel is None:
            continue
        name = ShardName(channel, Shard(shard))
        sequenced += records
        tails[name], firsts[name] = tail, Offset(tail - records + 1)
        # In offset order, so whatever exceeds the byte limit is missing at the end.
        if offsets := {_OFFSET(row): _VALUES(row) for row in group if _OFFSET(row) is not None}:
            columns = Columns.pack([*offsets.values()])
            inline.append(Batch(name, epoch, next(iter(offsets)), begins=False, columns=columns))
    return Tick(number, sequenced, epoch, tails, firsts, inline, started)


def check_identity_cache(store: Store) -> None:
    """Checks that ids are drawn one at a time: the order of records depends on it."""
    table = {"table": quote(store.scope.schema, "staged_records")}
    doing = "reading the id sequence of staged_records"
    rows = store.rows("identity_cache", table, doing=doing)
    cache = rows[0][0] if rows else None
    if cache != 1:
        raise UnsafeSetting(
            f"the sequence of {store.scope.schema}.staged_records hands out ids in advance (CACHE "
            f"{cache}), which puts "
            f"changes of one key out of order. ALTER TABLE {store.scope.schema}.staged_records "
            "ALTER COLUMN id SET CACHE 1"
        )
