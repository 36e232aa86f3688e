"""Opens a new epoch: after ``HistoryDiverged``, the operator decides that Postgres is right.

Postgres has lost commits that were published, or its records carry transaction ids of another
cluster.  In one transaction, while nothing can be staged, sequenced, retained or applied:

    snapshot  taken when every transaction that has staged a record is finished
    freeze    records with transaction ids that this cluster has not assigned get an id before every
              snapshot
    cut       the journal of a shard ends before a hole, or a record that is gone, if nobody has
              read that far
    sequence  every record that no journal row names gets an offset at the end of its shard
    tick      the next tick takes what the snapshot does not show: nothing twice, nothing missed
    rewind    checkpoints beyond the end of the journal go back to its end
    fence     the new epoch is written to every shard in Redis; streams that disagree with the
              journal are deleted

The publisher then replays the journal.  Redis is changed before the commit: a crash between the two
shows as ``HistoryDiverged`` again (the epoch of the log is newer than that of Postgres), and the
reset is repeated.

The journal is dense, so the offsets of lost records are given out again in the new epoch: only the
pair of epoch and offset is unique.  Consumers in this Postgres were rolled back with it.  A reader
elsewhere that has seen the lost records must be informed; it can read the epoch from the shard's
epoch key.  The plan names these offsets (``doubt``).  What a log has of them may be the only copy
of what was committed: it stays in Redis, under another name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg
import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.log.streams import Extent, extents, read_newest
from penstock.channels.queue.inspection import keys_to_delete
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.crash_points import crashpoint
from penstock.database.connections import Connection
from penstock.database.statements import name_shards, quote
from penstock.database.store import Store
from penstock.errors import DamagedJournal, HistoryDiverged, Refused
from penstock.journal.journal_reader import (
    journal_bounds,
    log_epochs,
    missed_records,
    records_at,
    shards_to_compare,
)
from penstock.journal.lineage import ServerIdentity, examine_lineage, server_identity
from penstock.operating.consumers import ReaderKind, find_kind
from penstock.operating.reset.doubt import LogComparison, OffsetsInDoubt
from penstock.pipeline import Pipeline, get_scope
from penstock.records import Epoch, Record, RecordId, ShardName
from penstock.streaming.sequencer import JOURNAL_CHUNK

log = structlog.get_logger("penstock.operator")

LOCK_TIMEOUT_S = 30
"""Seconds to wait for transactions that have staged records."""

LAST_ENTRIES = 1000
"""Entries at the end of a log whose record ids are read, so that these ids are not given out
again."""


@dataclass(frozen=True, slots=True)
class RewoundCheckpoint:
    """A checkpoint beyond the end of the journal, to which it goes back."""

    consumer: str
    shard: str
    offset: int
    journal: int
    dead_letters: int  # dead letters beyond it, which are removed
    # ``reported``: its effects and its checkpoint are in another database, and this is what it had
    # reported
    kind: ReaderKind = "consumer"


@dataclass(frozen=True, slots=True)
class DeletedStream:
    """A stream that is deleted and replayed from the journal, and the last offset in either."""

    shard: str
    log: int
    journal: int
    why: str


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The plan of a new epoch."""

    reason: str | None  # reason for it; None if history has not diverged and there is nothing to do
    epoch: int
    new_epoch: int  # the epoch to open: higher than any in Postgres and Redis
    foreign: int = 0  # records with transaction ids of another cluster
    unsequenced: Mapping[str, int] | None = None  # records that get an offset, by shard
    rewound: tuple[RewoundCheckpoint, ...] = ()
    deleted: tuple[DeletedStream, ...] = ()  # streams that are deleted and replayed
    # offsets at which a log has records that Postgres has lost, or has others
    in_doubt: tuple[OffsetsInDoubt, ...] = ()
    # records that the journal names and Postgres does not have: these cannot be replayed
    missing: int = 0
    applied: bool = False


@dataclass(frozen=True, slots=True)
class _RedisLogs:
    """The logs in Redis: their extents, last records, and newest epoch."""

    extents: Mapping[ShardName, Extent]
    last_records: Mapping[ShardName, Sequence[Record]]
    epoch: Epoch


def reset_epoch(
    connection: Connection,
    client: RedisClient,
    pipeline: Pipeline | None = None,
    *,
    apply: bool = False,
    on_lost: Callable[[Record], None] | None = None,
) -> EpochPlan:
    """Plans a new epoch; with ``apply``, opens it.

    ``on_lost`` is called with each record that a log still has and Postgres no longer does.  Stop
    streamers and consumers first.  Those still running stop by themselves, because the old epoch is
    fenced.
    """
    declared = pipeline.shard_names if pipeline else ()
    return _Opening(Store(connection, get_scope(pipeline)), client).run(
        declared, apply=apply, on_lost=on_lost
    )


class _Opening:
    """Plans an epoch and opens it."""

    def __init__(self, store: Store, client: RedisClient) -> None:
        self._store, self._client = store, client
        self._compared = LogComparison(store, client)

    def run(
        self,
        declared: Sequence[ShardName],
        *,
        apply: bool,
        on_lost: Callable[[Record], None] | None,
    ) -> EpochPlan:
        identity = server_identity(self._store)
        reason = self._reason()
        shards = shards_to_compare(self._store, self._client, declared)
        is_applied = apply and reason is not None
        with self._store.transaction("planning an epoch"):
            if is_applied:
                self._lock()
            snapshot = self._store.value("current_snapshot")
            logs = self._read_redis(shards)
            plan = self._plan(snapshot, logs, reason)
            plan = replace(plan, in_doubt=self._find_doubt(plan, logs))
            if is_applied:
                self._write(snapshot, plan, identity, logs)
                crashpoint("reset.before_redis")
                self._fence(shards, plan)
                crashpoint("reset.before_commit")
        if is_applied:
            crashpoint("reset.after_commit")
            log.warning(
                "epoch opened",
                epoch=plan.new_epoch,
                reason=plan.reason,
                foreign=plan.foreign,
                sequenced=sum((plan.unsequenced or {}).values()),
                rewound=[
                    f"{rewound.consumer} {rewound.shard} {rewound.offset} to {rewound.journal}"
                    for rewound in plan.rewound
                ],
                deleted=[stream.shard for stream in plan.deleted],
                ranges_in_doubt=[
                    f"{doubt.shard} {doubt.first} to {doubt.last}" for doubt in plan.in_doubt
                ],
            )
        # Outside of the transaction, which keeps everybody waiting: there may be millions.
        in_doubt = tuple(
            self._compared.count(doubt, is_kept=is_applied, on_lost=on_lost)
            for doubt in plan.in_doubt
        )
        return replace(plan, in_doubt=in_doubt, applied=is_applied)

    def _reason(self) -> str | None:
        """Returns the reason for a new epoch; None if none is needed."""
        try:
            lineage = examine_lineage(self._store, self._client)
        except (HistoryDiverged, DamagedJournal) as error:
            return str(error)
        if any(not missed.is_isolated for missed in missed_records(self._store)):
            return "committed records have no offset"
        if self._store.value("count_missing"):
            return "the journal names records that are gone"
        moved_reason = "the server was promoted or replaced; no published record was lost"
        return moved_reason if lineage.has_moved else None

    def _lock(self) -> None:
        self._store.connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
        try:
            self._store.execute("lock_pipeline")
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            raise Refused(
                f"transactions that have staged records did not end within {LOCK_TIMEOUT_S} s; "
                "nothing was changed. "
                "penstock doctor names them; end them, including prepared ones, and try again"
            ) from error

    def _read_redis(self, shards: Sequence[ShardName]) -> _RedisLogs:
        client, scope = self._client, self._store.scope
        newest = {
            shard: read_newest(client, scope.namespace, shard, LAST_ENTRIES) for shard in shards
        }
        epoch = max(log_epochs(client, scope, shards).values(), default=Epoch(0))
        return _RedisLogs(extents(client, scope.namespace, shards), newest, epoch)

    def _plan(self, snapshot: str, in_redis: _RedisLogs, reason: str | None) -> EpochPlan:
        epoch = self._store.value("greatest_epoch")
        if reason is None:
            return EpochPlan(None, epoch, epoch)
        unsequenced = self._store.rows("unsequenced")
        beyond = self._store.rows("checkpoints_beyond")
        rewound = tuple(
            RewoundCheckpoint(
                name,
                f"{channel}/{shard}",
                offset,
                journal,
                letters,
                find_kind(name, is_reported=reported),
            )
            for name, channel, shard, offset, journal, letters, reported in beyond
        )
        return EpochPlan(
            reason,
            epoch,
            max(epoch, in_redis.epoch) + 1,
            self._store.value("count_foreign", {"snapshot": snapshot}),
            {f"{channel}/{shard}": count for channel, shard, count in unsequenced},
            rewound,
            self._find_disagreeing(in_redis),
            missing=self._store.value("count_missing"),
        )

    def _find_disagreeing(self, in_redis: _RedisLogs) -> tuple[DeletedStream, ...]:
        """Returns the streams that end beyond the journal, or with another record."""
        journal = journal_bounds(self._store, in_redis.extents)
        lasts = {shard: records[-1] for shard, records in in_redis.last_records.items() if records}
        journaled = records_at(
            self._store, {shard: record.offset for shard, record in lasts.items()}
        )
        disagreeing = []
        for shard, extent in in_redis.extents.items():
            end = journal[shard][1]
            last = lasts.get(shard)
            if extent.tail > end:
                why = "the log is ahead"
            elif last is not None and shard in journaled and not journaled[shard].is_same_as(last):
                why = f"another record at {last.offset}"
            else:
                continue
            disagreeing.append(DeletedStream(str(shard), extent.tail, end, why))
        return tuple(disagreeing)

    def _find_doubt(self, plan: EpochPlan, in_redis: _RedisLogs) -> tuple[OffsetsInDoubt, ...]:
        """Returns the offsets in doubt of the streams that disagree."""
        names = {stream.shard for stream in plan.deleted}
        disagreeing = [shard for shard in in_redis.extents if str(shard) in names]
        epoch = Epoch(plan.new_epoch)
        doubts = (
            self._compared.find_doubt(shard, in_redis.extents[shard], bounds, epoch)
            for shard, bounds in journal_bounds(self._store, disagreeing).items()
        )
        return tuple(doubt for doubt in doubts if doubt is not None)

    def _write(
        self, snapshot: str, plan: EpochPlan, identity: ServerIdentity, in_redis: _RedisLogs
    ) -> None:
        store = self._store
        store.connection.execute("SET LOCAL synchronous_commit = on")
        opened = {
            "epoch": plan.new_epoch,
            "reason": f"penstock reset epoch: {plan.reason}",
            **asdict(identity),
        }
        store.execute("open_epoch", opened)
        # Before anything is added to the journal: its current end is the last record that the
        # consumers have passed.
        for rewound in plan.rewound:
            channel, _, shard = rewound.shard.rpartition("/")
            values = {"consumer": rewound.consumer, "channel": channel, "shard": int(shard)}
            store.execute("move_checkpoint", {**values, "offset": rewound.journal, "resume": False})
        epoch = {"epoch": plan.new_epoch}
        store.execute("freeze_foreign", {"snapshot": snapshot})
        deleted = {stream.shard for stream in plan.deleted}
        logs = {
            **name_shards(in_redis.extents),
            "tails": [
                0 if str(shard) in deleted else extent.tail
                for shard, extent in in_redis.extents.items()
            ],
        }
        store.execute("cut_at_damage", logs)
        store.execute("sequence_remaining", {**epoch, "chunk": JOURNAL_CHUNK})
        store.execute("store_snapshot", {**epoch, "snapshot": snapshot})
        store.execute("set_checkpoint_epochs", epoch)
        # New records get ids that no lost record had: some readers identify records by them.
        highest = max(
            (record.id for records in in_redis.last_records.values() for record in records),
            default=RecordId(0),
        )
        sequence = store.value(
            "id_sequence", {"table": quote(store.scope.schema, "staged_records")}
        )
        store.execute("skip_ids", {"table": sequence, "least": highest})

    def _fence(self, shards: Sequence[ShardName], plan: EpochPlan) -> None:
        """Fences publishers of older epochs, and deletes streams that disagree with the journal.

        Of a log, the entries in doubt stay under another name.
        """
        disagreeing = {stream.shard: stream.journal for stream in plan.deleted}
        doubts = {stream.shard: stream for stream in plan.in_doubt}
        for shard in shards:
            keys = log_keys(self._store.scope.namespace, shard)
            with redis_errors(f"opening epoch {plan.new_epoch} in {shard}"):
                together: Any = self._client.pipeline(transaction=True)
                together.set(keys.epoch, plan.new_epoch)
                doubt = doubts.get(str(shard))
                if doubt is not None and doubt.kept_as is not None:
                    # Not `rename`: the client of a cluster has none in a pipeline.  The keys share
                    # a slot.
                    together.execute_command("RENAME", keys.stream, doubt.kept_as)
                    together.xtrim(doubt.kept_as, minid=f"{doubt.first}-0", approximate=False)
                if str(shard) in disagreeing:
                    # Groups of readers go back to there: the offsets behind are given out again.
                    end = doubt.first - 1 if doubt else disagreeing[str(shard)]
                    together.hset(keys.ends, str(plan.new_epoch), str(end))
                    # Of a queue, whose ids may be given out again, nothing may stay; a log or an
                    # Ick has no such keys.
                    together.delete(*keys_to_delete(self._store.scope.namespace, shard))
                together.execute()
            crashpoint("reset.between_shards")
