"""Moves a consumer's checkpoint by hand: back to apply records again, or forward, past records.

From then on the operator is responsible for exactly-once effects: a record that was applied and is
delivered again is applied again.  Of a damaged Ick, repairs the keys, and has members that may be
lost marked again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal

import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.ick.ick_repair import repair
from penstock.channels.routing import ick_shard_keys
from penstock.channels.server import redis_errors
from penstock.database.connections import Connection
from penstock.database.registry import registered_channels
from penstock.database.store import Store
from penstock.declaring.kinds import get_traits
from penstock.errors import Refused, Unknown
from penstock.journal.journal_reader import Since, known_shards, offsets_since
from penstock.operating.channels import unknown_channel
from penstock.operating.consumers import lock_consumer, unknown_consumer
from penstock.pipeline import Pipeline, get_scope
from penstock.records import Moment, Offset, Place, Scope, Shard, ShardName

log = structlog.get_logger("penstock.operator")

_IMMOVABLE = {
    "queue": (
        "a queue has no checkpoint to move, and finished jobs cannot be done again. Dead letters "
        "can be retried: penstock dead-letters retry"
    ),
    "ick": (
        "an Ick has no checkpoint to move: its dirty members are processed. To have members "
        "processed again, mark them: penstock replay LOG --to {channel}, or mark_dirty in a "
        "transaction"
    ),
    "source": (
        "its journal is in the source's database: penstock reset source {consumer} {source} "
        "compares the two and moves the checkpoint"
    ),
    "reported": (
        "the consumer has its checkpoint in another database, and reports it here. Move it there"
    ),
}
"""Reasons that a checkpoint cannot be moved here, by the kind of its channel or reader."""

CheckpointTarget = Offset | Place | Moment | Literal["earliest", "latest"] | None
"""The offset, or the place, after which the consumer continues; a time, before whose first record
each shard continues; ``earliest`` and ``latest`` are the ends of the journal; None does not move
the checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointMove:
    """Move of one checkpoint."""

    consumer: str
    channel: str
    shard: int
    before: int
    after: int
    again: int  # records that will be applied again
    passed_over: int  # records that will never be applied
    dead_letters: int  # dead letters that are removed, because their records are delivered again
    resumes: bool  # true if the shard was halted and will continue
    # for a time: records before ``after`` that retention has removed, if some of them may have been
    # staged since then
    removed: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    consumer: str
    to: CheckpointTarget
    shard: int | None
    resume: bool
    channel: str | None = None
    since: Mapping[ShardName, Since] = field(default_factory=dict)


def reset_checkpoint(
    store: Store,
    consumer: str,
    to: CheckpointTarget = None,
    *,
    shard: int | None = None,
    resume: bool = False,
    apply: bool = False,
) -> tuple[CheckpointMove, ...]:
    """Plans the moves of a consumer's checkpoints; with ``apply``, carries them out.

    ``to`` is the last offset that counts as applied.  With a time, every record that was staged
    then or later is applied again; so are older ones between them, of transactions that committed
    late.  A running worker notices the move with the next record that arrives, or within two
    seconds.
    """
    request = _Request(consumer, to, shard, resume)
    if isinstance(to, Place):
        if shard not in {None, to.shard.shard}:
            raise Unknown(f"{to} is not in shard {shard}")
        request = _Request(consumer, to.offset, to.shard.shard, resume, to.shard.channel)
    elif isinstance(to, datetime | timedelta):  # before any lock: it may take seconds
        rows = store.rows(
            "checkpoint_bounds", {"consumer": consumer}, doing=f"moving checkpoints of {consumer}"
        )
        shards = [ShardName(channel, Shard(number)) for channel, number, *_ in rows]
        request = replace(request, since=offsets_since(store, shards, to))
    with store.transaction(f"moving checkpoints of {consumer}"):
        if apply:
            lock_consumer(store, consumer)
        rows = store.rows("checkpoint_bounds", {"consumer": consumer})
        if not rows:
            raise unknown_consumer(store, consumer)
        moves = _plan(rows, request)
        for move in moves if apply else ():
            values = {"consumer": consumer, "channel": move.channel, "shard": move.shard}
            store.execute("move_checkpoint", {**values, "offset": move.after, "resume": resume})
    for move in moves if apply else ():
        log.warning(
            "checkpoint moved",
            consumer=move.consumer,
            shard=f"{move.channel}/{move.shard}",
            before=move.before,
            after=move.after,
            resumed=move.resumes,
            dead_letters_removed=move.dead_letters,
        )
    return moves


def _plan(rows: list[tuple[Any, ...]], request: _Request) -> tuple[CheckpointMove, ...]:
    shard, consumer = request.shard, request.consumer
    if request.channel not in {None, rows[0][0]}:
        raise Unknown(f"consumer {consumer} reads {rows[0][0]}, not {request.channel}")
    chosen = [row for row in rows if shard is None or row[1] == shard]
    if not chosen:
        raise Unknown(
            f"consumer {consumer} has no checkpoint in shard {shard}; it has shards 0 to "
            f"{len(rows) - 1}"
        )
    if isinstance(request.to, int) and len(chosen) > 1:
        raise Refused(
            f"consumer {consumer} has {len(chosen)} shards, each with its own offsets: name one "
            "with --shard, "
            "or give 'earliest' or 'latest'"
        )
    return tuple(
        _plan_move(row, request)
        for row in chosen
        if request.to is not None or (request.resume and row[3] is not None)
    )


def _plan_move(row: tuple[Any, ...], request: _Request) -> CheckpointMove:
    channel, shard, current, halted, earliest, latest, letters, kind = row
    if kind in _IMMOVABLE and request.to is not None:
        name, (base, _, source) = ShardName(channel, Shard(shard)), channel.partition("@")
        why = _IMMOVABLE[kind].format(consumer=request.consumer, channel=base, source=source)
        raise Refused(f"{name}: {why}. Halted shards resume without --to")
    target, removed = _find_target(
        request, ShardName(channel, Shard(shard)), current, earliest, latest
    )
    if not earliest <= target <= latest and target != current:
        raise Refused(
            f"{ShardName(channel, Shard(shard))}: a checkpoint can be at {earliest} (before the "
            "oldest record that is kept) "
            f"to {latest} (after the newest), not at {target}"
        )
    return CheckpointMove(
        request.consumer,
        channel,
        shard,
        current,
        target,
        again=max(0, current - target),
        passed_over=max(0, target - current),
        dead_letters=sum(offset > target for offset in letters)
        if get_traits(kind).keeps_records
        else 0,
        resumes=request.resume and halted is not None,
        removed=removed,
    )


def _find_target(
    request: _Request, shard: ShardName, current: int, earliest: int, latest: int
) -> tuple[int, int]:
    """Returns the new offset of a checkpoint, and the number of records missing before it."""
    offsets = {None: current, "earliest": earliest, "latest": latest}
    if request.to is None or isinstance(request.to, int | str):
        return (request.to if isinstance(request.to, int) else offsets[request.to]), 0
    if (since := request.since.get(shard)) is None:
        raise Refused(f"{shard} got its checkpoint at this moment: try again")
    # Retention may have been at work meanwhile.
    return (earliest, earliest) if since.before < earliest else (since.before, since.removed)


@dataclass(frozen=True, slots=True)
class IckRepair:
    """One damage of an Ick's shard, and its repair."""

    shard: ShardName
    key: str
    found: str  # a type, or the beginning of a text
    # New key of the content; None if nothing has to move.  Without ``apply`` it is an example: each
    # repair moves to keys of its own.
    moved_to: str | None
    # true if members may be lost: the streamer then marks again what was not processed
    marked_again: bool


def reset_ick(
    connection: Connection,
    client: RedisClient,
    channel: str,
    pipeline: Pipeline | None = None,
    *,
    apply: bool = False,
) -> tuple[IckRepair, ...]:
    """Plans the repair of an Ick; with ``apply``, carries it out.

    Deletes only a position, which the streamer restores.
    """
    scope, declared = get_scope(pipeline), () if pipeline is None else pipeline.shard_names
    shards = [s for s in known_shards(Store(connection, scope), declared) if s.channel == channel]
    if not shards:
        raise unknown_channel(Store(connection, scope), channel)
    declared_channel = None if pipeline is None else pipeline.channels.get(channel)
    registered = registered_channels(Store(connection, scope)).get(channel) or declared_channel
    if registered is None or registered.kind != "ick":
        raise Unknown(f"{channel} is not an Ick; see penstock channels list")
    return tuple(
        ick_repair for shard in shards for ick_repair in _repair(client, scope, shard, apply=apply)
    )


def _repair(client: RedisClient, scope: Scope, shard: ShardName, *, apply: bool) -> list[IckRepair]:
    keys = ick_shard_keys(scope.namespace, shard)
    damages = repair(client, keys.name, dry_run=True)
    lossy = any(damage.may_have_lost for damage in damages)
    if apply and damages:
        if lossy:
            # First: if this process dies here, the damage is found again and the repair starts
            # over.
            with redis_errors(f"repairing {shard}"):
                client.delete(keys.log.stream)
        damages = repair(client, keys.name)
        log.warning("ick repaired", shard=str(shard), damages=len(damages), marked_again=lossy)
    return [IckRepair(shard, d.key, d.found, d.moved_to, lossy) for d in damages]
