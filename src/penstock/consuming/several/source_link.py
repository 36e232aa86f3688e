"""Uses a source's database for a consumer elsewhere: on a connection of its own, in one thread.

Only ``register`` connects, after a pause that grows while the source is away; everything else fails
at once without a connection.  A role with the rights of a consumer suffices: ``penstock init
--roles`` at the source.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

import structlog

from penstock.channels.commands import RedisClient
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.journals import Limit, backfill
from penstock.consuming.several.source_positions import SourcePosition
from penstock.database.connections import WorkerConnection, connect_postgres
from penstock.database.driver_errors import postgres_errors
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.database.transactions import WORKER_SILENCE_S
from penstock.errors import (
    DamagedJournal,
    DeclarationError,
    ForeignLog,
    HistoryDiverged,
    ServerUnavailable,
)
from penstock.journal.journal_reader import JournaledRecord, journal_bounds, records_at
from penstock.journal.lineage import check_tails
from penstock.records import Epoch, Offset, Record, Shard, ShardName
from penstock.schema.revisions import check_revision
from penstock.schema.roles import check_privileges

log = structlog.get_logger("penstock.consumer")

PAUSES = 10
"""A failed attempt to connect is followed by a pause so many times as long: rounds wait for
neither."""

MIN_PAUSE_S = 1.0

WAY_OUT = (
    "Once its streamer runs again (penstock reset epoch, there): penstock reset source {consumer} "
    "{source}, which lists the offsets in doubt"
)


def read_database(store: Store[Executor]) -> str:
    """Identifies the database of a connection, and the Penstock schema in it."""
    database = store.value("database")
    return f"{database}/{store.scope.schema}"


class SourceLink:
    """A source's database."""

    def __init__(self, url: str, setup: WorkerSetup) -> None:
        """Sets up; ``register`` connects.

        Sources use the schema and namespace of the consumer's pipeline.
        """
        consumer = setup.consumer
        self.source = consumer.channel.name.partition("@")[2]
        self._url, self._setup, self._consumer = url, setup, consumer
        self._channel = consumer.channel.name
        self._where = {"consumer": consumer.name, "channel": self._channel}
        self._connection: WorkerConnection | None = None
        self._next_at = 0.0
        self._database = ""
        self._is_retired = False

    @property
    def is_open(self) -> bool:
        """Returns whether there is a connection."""
        return self._connection is not None

    def close(self) -> None:
        """Closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def register(
        self, database: str, positions: Mapping[ShardName, SourcePosition]
    ) -> dict[ShardName, SourcePosition]:
        """Connects, and registers the consumer, so that the source's retention waits for it.

        Returns where it may begin.  ``database`` identifies the consumer's own; ``positions`` are
        empty if it is new.
        """
        begun_at = monotonic()
        if begun_at < self._next_at:
            raise ServerUnavailable(f"source {self.source} is away")
        self.close()
        try:
            self._connect()
            with self._connected() as store:
                check_revision(store)
                check_privileges(store, "consumer")
                return self._register(store, database, positions)
        except BaseException:
            self.close()
            spent = monotonic() - begun_at
            self._next_at = monotonic() + max(MIN_PAUSE_S, PAUSES * spent)
            raise

    def _connect(self) -> None:
        """Connects; an error says to which source."""
        setup = self._setup
        try:
            self._connection = connect_postgres(
                self._url,
                application=setup.application,
                prepare=setup.prepare,
                silence_s=WORKER_SILENCE_S,
            )
        except ServerUnavailable as error:
            raise ServerUnavailable(f"source {self.source}: {error}") from error

    def _register(
        self, store: Store, database: str, positions: Mapping[ShardName, SourcePosition]
    ) -> dict[ShardName, SourcePosition]:
        if read_database(store) == database:
            raise DeclarationError(
                f"consumer {self._consumer.name}: source {self.source} is the consumer's own "
                f"database; have it read Log(…, source={self.source!r}) itself, and leave "
                f"{self.source} out of sources"
            )
        self._database, self._is_retired = database, False
        with store.connection.transaction():
            # Retention takes the same lock, so it does not remove what is begun with; and so does a
            # change of the number of shards.
            store.execute("lock_channel", self._where)
            shards = self._registered_shards(store)
            ordered = [positions.get(shard) for shard in shards]
            values = {
                **self._where,
                "shards": [shard.shard for shard in shards],
                "offsets": [position and position.offset for position in ordered],
                "latest": self._consumer.start == "latest",
                "database": database,
            }
            store.execute("register", values)
            offsets = {shard: offset for shard, (offset, _) in self._reported(store).items()}
        records = records_at(store, offsets)
        return {
            shard: SourcePosition(shard, offset, Epoch(0), records.get(shard))
            for shard, offset in offsets.items()
        }

    def _registered_shards(self, store: Store) -> list[ShardName]:
        row = store.row("registered_log", self._where)
        if row is None:
            raise ServerUnavailable(
                f"source {self.source} has no log {self._channel} yet: its streamer has not run "
                f"with Log(…, source={self.source!r})"
            )
        kind, shards, was_resharded = row
        if kind != "log":
            raise DeclarationError(
                f"consumer {self._consumer.name}: {self._channel} of source {self.source} is a "
                f"{kind}, not a log"
            )
        if was_resharded:
            raise DeclarationError(
                f"consumer {self._consumer.name}: the number of shards of {self._channel} was "
                "changed, which a consumer of several sources does not follow: the order of a key "
                "would be lost. Stage into a log of another name there"
            )
        return [ShardName(self._channel, Shard(number)) for number in range(shards)]

    def _reported(self, store: Store) -> dict[ShardName, tuple[Offset, Epoch]]:
        """Returns the source's copy of the consumer's checkpoints, with the epoch of each row."""
        rows = store.rows("reported", self._where)
        if any(database != self._database for *_, database in rows):
            raise DeclarationError(
                f"consumer {self._consumer.name}: source {self.source} has a consumer of this name "
                "that belongs to another database, and retention would wait for only one of the "
                "two. Give this one another name; or, if its database was moved: penstock reset "
                f"source {self._consumer.name} {self.source}"
            )
        return {
            ShardName(self._channel, Shard(shard)): (Offset(offset), Epoch(epoch))
            for shard, offset, epoch, _ in rows
        }

    def report(
        self, client: RedisClient, positions: Mapping[ShardName, SourcePosition]
    ) -> dict[ShardName, str]:
        """Compares the histories, and reports the checkpoints.

        Returns the shards whose history has diverged, and how.
        """
        with self._connected() as store:
            reported = self._reported(store)
            diverged = self._compare_tails(store, client, list(positions))
            bounds = journal_bounds(store, positions)
            offsets = {
                s: position.offset
                for s, position in positions.items()
                if position.record is not None
            }
            records = records_at(store, offsets)
            for shard, position in positions.items():
                reason = self._explain(position, bounds[shard][1], records.get(shard))
                diverged |= {shard: reason} if reason else {}
            sound = {s: position for s, position in positions.items() if s not in diverged}
            retired = sorted(sound.keys() - reported.keys())
            if retired and not self._is_retired:
                self._is_retired = True
                log.error(
                    "consumer retired at source",
                    **self._where,
                    shards=[str(shard) for shard in retired],
                )
            self._write(store, sound, reported)
            return diverged

    def _write(
        self,
        store: Store,
        positions: Mapping[ShardName, SourcePosition],
        reported: Mapping[ShardName, tuple[Offset, Epoch]],
    ) -> None:
        shards = [
            s
            for s, (offset, _) in reported.items()
            if s in positions and positions[s].offset > offset
        ]
        if shards:
            values = {
                **self._where,
                "shards": [shard.shard for shard in shards],
                "offsets": [positions[shard].offset for shard in shards],
                "epochs": [reported[shard][1] for shard in shards],
                "database": self._database,
            }
            store.execute("report", values)

    def _compare_tails(
        self, store: Store, client: RedisClient, shards: list[ShardName]
    ) -> dict[ShardName, str]:
        """Returns the shards whose log has records that the source has lost.

        Those are not to be applied any more.
        """

        def leave(_shard: ShardName, _error: Exception) -> None:
            """Ignores it: the follower reports what it cannot read."""

        try:
            check_tails(store, client, shards, leave)
        except HistoryDiverged:
            if len(shards) > 1:  # which of them?
                parts = (self._compare_tails(store, client, [shard]) for shard in shards)
                return {shard: reason for part in parts for shard, reason in part.items()}
            return {
                shards[0]: self._diverged(
                    f"{shards[0]}: the log has records that the source has lost"
                )
            }
        return {}

    def confirm(self, position: SourcePosition, last: Record | None = None) -> bool:
        """Returns whether the source's journal has ``last``, a later record of the log.

        If not, the log is not the source's yet.  Raises ``HistoryDiverged`` if the source has lost
        the record at the checkpoint.
        """
        with self._connected() as store:
            [(_, tail)] = journal_bounds(store, [position.shard]).values()
            records = records_at(store, {position.shard: position.offset})
            if reason := self._explain(position, tail, records.get(position.shard)):
                raise HistoryDiverged(reason)
            if last is None or last.offset <= position.offset:
                return True
            records = records_at(store, {position.shard: last.offset})
            return position.shard in records and records[position.shard].is_same_as(last)

    def backfill(self, position: SourcePosition, end: Offset, limit: Limit) -> list[Record]:
        """Returns the first records behind a checkpoint that the log has lost, from the journal."""
        self.confirm(position)
        with self._connected() as store:
            shard, offset = position.shard, position.offset
            return backfill(store, shard, offset, end, limit)

    def _explain(
        self, position: SourcePosition, tail: Offset, journaled: JournaledRecord | None
    ) -> str | None:
        """Returns text about a source's history that has diverged from the applied records.

        None if it has not.
        """
        place = f"{position.shard} offset {position.offset}"
        if position.offset > tail:
            return self._diverged(
                f"{place} is applied, and the journal of source {self.source} ends at {tail}"
            )
        applied = position.record
        if applied is None or journaled is None or journaled.is_same_as(applied):
            return None
        return self._diverged(
            f"{place}: record {applied.id} is applied, and source {self.source} has record "
            f"{journaled.id} there"
        )

    def _diverged(self, text: str) -> str:
        way_out = WAY_OUT.format(consumer=self._consumer.name, source=self.source)
        return f"{text}: that database has lost commits that were published. {way_out}"

    @contextmanager
    def _connected(self) -> Iterator[Store]:
        if self._connection is None:
            raise ServerUnavailable(f"source {self.source} is away")
        try:
            with postgres_errors(f"asking source {self.source}"):
                yield Store(self._connection, self._setup.scope)
        except (HistoryDiverged, ForeignLog, DamagedJournal):
            raise
        except Exception:
            self.close()
            raise
