"""A new epoch: the operator's decision after ``HistoryDiverged`` that Postgres is right, whatever Redis has seen.

Postgres has lost commits that were published, or its records carry transaction ids of another cluster.  In one
transaction, while nobody can stage, sequence, retain or apply:

    look      one snapshot, taken when no transaction has staged anything and is not finished
    mark      records of transactions that this cluster has not begun lie in the past from now on
    sequence  every record that no journal row names gets its offset, at the end of its shard
    go on     the next tick takes what the snapshot does not show: nothing twice, nothing missed
    rewind    checkpoints that have passed records which the journal does not know go back to its end
    fence     every shard in Redis is told the new epoch; the streams that disagree with the journal are deleted

and commit.  The publisher then replays the journal.  Redis is changed before the commit: a crash between the two is
seen as ``HistoryDiverged`` once more (the log's epoch is newer than Postgres'), and the reset is done again.

The journal is dense, so the offsets of records that were lost are given out again, in the new epoch: the pair of epoch
and offset is what never comes back.  Consumers in this Postgres were rolled back with it.  A reader elsewhere that has
seen the lost records has to be told; it sees the epoch in the shard's epoch key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import structlog

from penstock.channels.log import Extent, extents, read_newest
from penstock.channels.routing import log_keys
from penstock.channels.server import RedisClient, redis_errors
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection, postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import HistoryDiverged, Refused
from penstock.journal.lineage import (
    ServerIdentity,
    examine_lineage,
    log_epochs,
    server_identity,
)
from penstock.journal.reading import journal_tails, known_shards, records_at
from penstock.pipeline import Pipeline
from penstock.records import Epoch, Offset, Record, RecordId, ShardName
from penstock.streaming.sequencer import JOURNAL_CHUNK

log = structlog.get_logger("penstock.operator")

LOCK_TIMEOUT_S = 30
"""How long transactions that have staged something are waited for."""

LOOKED_AT = 1000
"""Entries at the end of a lost log whose numbers are looked at, so that they are not given out again."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """A checkpoint that has passed records which the journal does not know.

    Attributes:
        consumer: The consumer.
        shard: The shard.
        offset: Its checkpoint.
        journal: The journal's end, where it goes back to.
        dead_letters: Dead letters beyond, which are removed.
    """

    consumer: str
    shard: str
    offset: int
    journal: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A stream that is deleted, and replayed from the journal.

    Attributes:
        shard: The shard.
        log: Offset at the end of the stream.
        journal: Offset at the end of the journal.
        why: In what they disagree.
    """

    shard: str
    log: int
    journal: int
    why: str


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What opening an epoch does.

    Attributes:
        reason: Why it is due; None if the past is as it is remembered, and nothing is to be done.
        epoch: The epoch that Postgres knows.
        following: The one to open: beyond all that Postgres and Redis know.
        marked: Records with transaction ids of another cluster.
        unsequenced: Records that get their offset, by shard.
        rewound: Checkpoints that go back.
        deleted: Streams that are deleted and replayed.
        gone: Records that the journal names and Postgres does not have: these cannot be replayed.
        applied: It was carried out.
    """

    reason: str | None
    epoch: int
    following: int
    marked: int = 0
    unsequenced: Mapping[str, int] | None = None
    rewound: tuple[Beyond, ...] = ()
    deleted: tuple[Disagreement, ...] = ()
    gone: int = 0
    applied: bool = False


@dataclass(frozen=True, slots=True)
class _Log:
    """What Redis holds."""

    extents: Mapping[ShardName, Extent]
    ends: Mapping[ShardName, Sequence[Record]]
    epoch: Epoch


def reset_epoch(
    connection: Connection,
    client: RedisClient,
    pipeline: Pipeline | None = None,
    *,
    apply: bool = False,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
) -> EpochPlan:
    """Plans a new epoch; with ``apply``, opens it.

    Stop the streamers and consumers first, or they stop by themselves: those of the old epoch are shut out.

    Args:
        connection: In autocommit mode; as the owner of the tables.
        client: The Redis that holds the log.
        pipeline: Gives schema and namespace, and shards that Postgres may have forgotten.
        apply: Carry the plan out.
        schema: The Penstock schema, if there is no pipeline.
        namespace: First part of the keys, if there is no pipeline.

    Raises:
        Refused: Transactions that have staged something do not end.
        ReadOnlyPostgres: A standby, or a server that takes no writes.
        ServerUnavailable: Postgres or Redis does not answer; the reset may have to be done again.
        AppendRefused: Redis takes no writes.
        ForeignLog: A key of ours holds something else; it is not ours to delete.
    """
    if pipeline is not None:
        schema, namespace = pipeline.schema, pipeline.namespace
    sql = statements("penstock.operating", schema)
    identity = server_identity(connection, schema)
    reason = _reason(connection, client, schema, namespace)
    shards = known_shards(connection, schema, pipeline.shard_names if pipeline else ())
    with postgres_errors("planning an epoch"), connection.transaction():
        if apply and reason is not None:
            _lock(connection, sql)
        [(snapshot,)] = connection.execute(sql["current_snapshot"]).fetchall()
        held = _look_at_log(client, namespace, shards)
        plan = _plan(connection, schema, snapshot, held, reason)
        if apply and reason is not None:
            _write(connection, sql, schema, snapshot, plan, identity, held)
            crashpoint("reset.before_redis")
            _begin_anew(client, namespace, shards, plan)
            crashpoint("reset.before_commit")
    if not apply or reason is None:
        return plan
    crashpoint("reset.after_commit")
    log.warning(
        "epoch opened",
        epoch=plan.following,
        reason=reason,
        marked=plan.marked,
        sequenced=sum((plan.unsequenced or {}).values()),
        rewound=[
            f"{beyond.consumer} {beyond.shard} {beyond.offset} to {beyond.journal}"
            for beyond in plan.rewound
        ],
        deleted=[each.shard for each in plan.deleted],
    )
    return replace(plan, applied=True)


def _reason(connection: Connection, client: RedisClient, schema: str, namespace: str) -> str | None:
    """Why a new epoch is due."""
    try:
        past = examine_lineage(connection, client, schema=schema, namespace=namespace)
    except HistoryDiverged as error:
        return str(error)
    return (
        "the server has been promoted or replaced; nothing published was lost"
        if past.has_moved
        else None
    )


def _lock(connection: Connection, sql: dict[str, bytes]) -> None:
    connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'".encode())
    try:
        connection.execute(sql["lock_pipeline"])
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        raise Refused(
            f"transactions that have staged records did not end within {LOCK_TIMEOUT_S} s, and nothing was changed. "
            "penstock doctor names them; end them, prepared ones too, and repeat"
        ) from error


def _look_at_log(client: RedisClient, namespace: str, shards: Sequence[ShardName]) -> _Log:
    ends = {shard: read_newest(client, namespace, shard, LOOKED_AT) for shard in shards}
    epoch = max(log_epochs(client, namespace, shards).values(), default=Epoch(0))
    return _Log(extents(client, namespace, shards), ends, epoch)


def _plan(
    connection: Connection, schema: str, snapshot: str, held: _Log, reason: str | None
) -> EpochPlan:
    sql = statements("penstock.operating", schema)
    [(epoch,)] = connection.execute(sql["newest_epoch"]).fetchall()
    if reason is None:
        return EpochPlan(None, epoch, epoch)
    [(marked,)] = connection.execute(
        sql["of_other_transactions"], {"snapshot": snapshot}
    ).fetchall()
    [(gone,)] = connection.execute(sql["gone"]).fetchall()
    unnamed = connection.execute(sql["unnamed"]).fetchall()
    beyond = connection.execute(sql["checkpoints_beyond"]).fetchall()
    return EpochPlan(
        reason,
        epoch,
        max(epoch, held.epoch) + 1,
        marked,
        {str(ShardName(channel, shard)): count for channel, shard, count in unnamed},
        tuple(
            Beyond(consumer, str(ShardName(channel, shard)), offset, journal, letters)
            for consumer, channel, shard, offset, journal, letters in beyond
        ),
        _disagreements(connection, schema, held),
        gone,
    )


def _disagreements(connection: Connection, schema: str, held: _Log) -> tuple[Disagreement, ...]:
    """The streams that go beyond the journal, or whose last record is another than the journal's."""
    journal = journal_tails(connection, schema)
    lasts = {shard: records[-1] for shard, records in held.ends.items() if records}
    journaled = records_at(
        connection, schema, {shard: record.offset for shard, record in lasts.items()}
    )
    found = []
    for shard, extent in held.extents.items():
        end = journal.get(shard, Offset(0))
        last = lasts.get(shard)
        if extent.tail > end:
            why = "the log is ahead"
        elif last is not None and shard in journaled and not journaled[shard].is_same_as(last):
            why = f"another record at {last.offset}"
        else:
            continue
        found.append(Disagreement(str(shard), extent.tail, end, why))
    return tuple(found)


def _write(  # noqa: PLR0913, PLR0917  all of it belongs to one transaction
    connection: Connection,
    sql: dict[str, bytes],
    schema: str,
    snapshot: str,
    plan: EpochPlan,
    identity: ServerIdentity,
    held: _Log,
) -> None:
    connection.execute("SET LOCAL synchronous_commit = on")
    connection.execute(
        statements("penstock.journal", schema)["open_epoch"],
        {
            "epoch": plan.following,
            "system_identifier": identity.system_identifier,
            "timeline": identity.timeline,
            "reason": f"penstock reset epoch: {plan.reason}",
        },
    )
    # Before anything is added to the journal: its end is what the consumers have really passed.
    for beyond in plan.rewound:
        channel, _, shard = beyond.shard.rpartition("/")
        where = {"consumer": beyond.consumer, "channel": channel, "shard": int(shard)}
        connection.execute(
            sql["move_checkpoint"], {**where, "offset": beyond.journal, "resume": False}
        )
    if plan.marked:
        connection.execute(sql["mark_as_past"], {"snapshot": snapshot})
    connection.execute(sql["sequence_unnamed"], {"epoch": plan.following, "chunk": JOURNAL_CHUNK})
    connection.execute(sql["store_snapshot"], {"snapshot": snapshot, "epoch": plan.following})
    connection.execute(sql["checkpoints_in_epoch"], {"epoch": plan.following})
    _skip_ids(connection, sql, schema, held)


def _skip_ids(connection: Connection, sql: dict[str, bytes], schema: str, held: _Log) -> None:
    """New records get numbers that no lost record had: some readers tell records apart by them."""
    highest = max(
        (record.id for records in held.ends.values() for record in records), default=RecordId(0)
    )
    [(sequence,)] = connection.execute(
        sql["sequence_of"], {"table": f'"{schema}".staged_records'}
    ).fetchall()
    connection.execute(sql["skip_ids"], {"table": sequence, "least": highest})


def _begin_anew(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], plan: EpochPlan
) -> None:
    """Shuts out publishers of older epochs, and deletes the streams that disagree."""
    disagreeing = {each.shard for each in plan.deleted}
    for shard in shards:
        keys = log_keys(namespace, shard)
        with redis_errors(f"opening epoch {plan.following} in {shard}"):
            together: Any = client.pipeline(transaction=True)
            together.set(keys.epoch, plan.following)
            if str(shard) in disagreeing:
                together.delete(keys.stream)
            together.execute()
        crashpoint("reset.between_shards")
