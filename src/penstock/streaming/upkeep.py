"""What a streamer does at intervals beside streaming: retention, budgets, and the notes about records and shards that are at fault."""

from time import monotonic

from penstock.channels.commands import RedisClient
from penstock.database.connections import Connection
from penstock.declaring.declarations import Channel
from penstock.pipeline import Pipeline
from penstock.records import ShardName
from penstock.streaming.faults import FaultLog, check_missed
from penstock.streaming.publisher import Publisher
from penstock.streaming.retention import remove_old_ticks, retain

RETAIN_EVERY_S = 5.0
RETAIN_S = 0.01
"""Time budget of retention in one round, in seconds: records staged meanwhile wait for it."""

EVERYWHERE_EVERY = 6
"""A streamer retains the shards of other shares, too, once in so many times: one of their streamers may be missing."""


class Upkeep:
    """The upkeep of one streamer.

    Attributes:
        retain_at: When the next retention is due, by the monotonic clock.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._faults = FaultLog(pipeline.scope)
        self._declared: dict[str, Channel] = {}
        self._to_retain: dict[str, tuple[ShardName, ...]] = {}
        self._retained = self._swept = 0
        self.retain_at = 0.0

    def reopen(self) -> None:
        """Begins anew on new connections."""
        self.retain_at = 0.0
        self._to_retain = {}
        self._faults.reopen()

    def note_faults(self, connection: Connection, publisher: Publisher, *, sequences: bool) -> None:
        """Notes which shards are stopped, and, if this streamer sequences, which records get no offset.

        Raises:
            ServerUnavailable: Postgres does not answer.
        """
        if sequences:
            self._faults.update(connection)
        self._faults.note_stopped(connection, publisher.unusable.errors, publisher.ends.others)

    def sweep(self, connection: Connection, publisher: Publisher) -> None:
        """As ``note_faults``, and checks the next shard for records that have lost their offsets.

        Raises:
            DamagedJournal: Some have.
            ServerUnavailable: Postgres does not answer.
        """
        self.note_faults(connection, publisher, sequences=True)
        shards = publisher.ends.known
        self._swept += 1
        if shards:
            check_missed(connection, self._pipeline.scope, shards[self._swept % len(shards)])

    def retain(self, connection: Connection, client: RedisClient, publisher: Publisher) -> int:
        """Continues retention where it stopped last, for ``RETAIN_S``; returns the number of records removed.

        Raises:
            As ``retention.retain``.
        """
        if not self._to_retain:
            publisher.keep_budgets()
            self._declared = dict(self._pipeline.channels)
            self._to_retain = self._choose_shards(publisher)
        removed, left = 0, {}
        for name, shards in self._to_retain.items():
            retained = retain(
                connection,
                client,
                self._pipeline.scope,
                self._declared[name],
                publisher.tails,
                shards=[shard for shard in shards if shard not in publisher.unusable],
                on_unusable=publisher.unusable.add,
                until=monotonic() + RETAIN_S / len(self._to_retain),
            )
            removed += retained.records
            if retained.left:
                left[name] = retained.left
        self._to_retain = left
        if not left:
            remove_old_ticks(connection, self._pipeline.scope)
            self._faults.forget(connection)
            self.retain_at = monotonic() + RETAIN_EVERY_S
        return removed

    def _choose_shards(self, publisher: Publisher) -> dict[str, tuple[ShardName, ...]]:
        self._retained += 1
        others = () if self._retained % EVERYWHERE_EVERY == 0 else set(publisher.ends.others)
        chosen: dict[str, list[ShardName]] = {name: [] for name in self._declared}
        for shard in publisher.ends.known:
            if shard.channel in chosen and shard not in others:
                chosen[shard.channel].append(shard)
        return {name: tuple(shards) for name, shards in chosen.items()}
