"""Inspects the shards of queues for reports; writes nothing, not even a repair."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.channels.commands import RedisClient, RedisCommands
from penstock.channels.driving import Steps, drive
from penstock.channels.queue.shard import read_facts
from penstock.channels.queue.stats import (
    Explanation,
    QueueStats,
    explanation,
    parse_stats,
    sum_stats,
)
from penstock.channels.routing import QueueKeys, log_keys, queue_keys
from penstock.channels.scripts import Call, as_text, script
from penstock.channels.server import REDIS_ERRORS, pipelined, redis_errors, translate_error
from penstock.declaring.kinds import MAX_STREAMS
from penstock.errors import ForeignLog, ForeignQueue
from penstock.records import HeldItem, RecordId, ShardName, to_time

SAMPLE = 20
"""Approximate number of values of a key that a check reads."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Contents of one shard of a queue."""

    waiting: int = 0  # messages that may be handed over
    leased: int = 0
    delayed: int = 0
    dead: int = 0
    # age of the oldest that is not done, in seconds by Redis' clock, from its first writing or when
    # it was due; None if there is none
    oldest_s: float | None = None
    # description of a damage, and then the numbers are 0; None if there is none
    damage: str | None = None
    # all its numbers: dwell times, tenants, and the counts of its life; None with a damage
    stats: QueueStats | None = None


def inspect_queues(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], _: float = 0.0
) -> dict[ShardName, QueueStatus]:
    """Returns the contents of each shard, in one round trip.  Raises ``ServerUnavailable``."""
    calls = [Call(queue_keys(namespace, shard).all(MAX_STREAMS), ("",)) for shard in shards]
    with redis_errors("inspecting queues"):
        replies = script("queue/stats").call_each(client, calls)
    return {shard: _inspected(shard, reply) for shard, reply in zip(shards, replies, strict=True)}


@dataclass(frozen=True, slots=True)
class CheckedShard:
    """Consistency of the parts of a shard."""

    apart: tuple[str, ...] = ()  # the parts that do not; the next sweep rebuilds them
    is_rebuilding: bool = False  # whether they are being rebuilt
    # a key with values that Penstock did not write; None if none was seen
    foreign: str | None = None
    # the time of its Redis, in seconds since 1970; None if it was not asked
    server_s: float | None = None
    ahead_s: float = 0.0  # how far the queue's clock is ahead of that, in seconds


def check_queues(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> dict[ShardName, CheckedShard]:
    """Returns the consistency of each shard, by the sizes of its parts and a sample.

    Takes one round trip.  A shard whose keys hold other types has no check: see
    ``find_foreign_keys``.  Raises ``ServerUnavailable``.
    """
    calls = [Call(queue_keys(namespace, shard).all(MAX_STREAMS), (SAMPLE,)) for shard in shards]
    with redis_errors("checking queues"):
        replies = script("queue/check").call_each(client, calls)
    return {
        shard: _checked(reply)
        for shard, reply in zip(shards, replies, strict=True)
        if not isinstance(reply, REDIS_ERRORS)
    }


def _checked(reply: Sequence[Any]) -> CheckedShard:
    match reply[0]:
        case b"checked":
            apart = tuple(map(as_text, reply[4:]))
            times = {"server_s": reply[2] / 1000, "ahead_s": reply[3] / 1000}
            return CheckedShard(apart, bool(reply[1]), **times)
        case b"garbage" | b"foreign":
            return CheckedShard(foreign=as_text(reply[1]))
        case _:  # what else there is, `inspect_queues` says
            return CheckedShard()


def _inspected(shard: ShardName, reply: Any) -> QueueStatus:
    if isinstance(reply, REDIS_ERRORS):
        error = translate_error(reply, f"inspecting {shard}")
        if not isinstance(error, (ForeignLog, ForeignQueue)):
            raise error from reply
        return QueueStatus(damage="a key of the queue holds another type: penstock doctor names it")
    match reply[0]:
        case b"stats":
            try:
                stats = sum_stats([parse_stats(reply)])
            except ForeignQueue as error:
                return QueueStatus(damage=str(error))
            return QueueStatus(
                stats.waiting, stats.leased, stats.delayed, stats.dead, stats.oldest_s, stats=stats
            )
        case b"lost":
            return QueueStatus(
                damage="the state of the queue is gone from Redis; the streamer rebuilds it"
            )
        case _:
            return QueueStatus(
                damage=f"{as_text(reply[1])} holds another format: this release reads queue.v2"
            )


def oldest_messages(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], count: int
) -> list[HeldItem]:
    """Returns the messages that are unfinished for longest, oldest first, and why they wait.

    Takes two round trips.  A message's time is when it was written, or due if later; by the queue's
    clock.  Raises ``ServerUnavailable``, ``ForeignLog`` or ``ForeignQueue``.
    """

    def ask(pipeline: Any, shard: ShardName) -> None:
        pipeline.zrange(
            f"{queue_keys(namespace, shard).root}q-ages", 0, max(0, count - 1), withscores=True
        )

    messages = sorted(
        (_require_time(shard, score / 1000), as_text(id_), shard)
        for shard, reply in pipelined(client, shards, ask, "reading queues").items()
        for id_, score in reply
    )[:count]
    explained = explain_messages(client, namespace, ((shard, id_) for _, id_, shard in messages))
    return [
        _item(shard, since, message)
        for since, id_, shard in messages
        if (message := explained[id_]) is not None
    ]


def _item(shard: ShardName, since: datetime, message: Explanation) -> HeldItem:
    tenant, key = message.facts["tenant"], message.facts["key"]
    facts = {
        "id": message.id,
        "tenant": tenant,
        "key": key,
        "state": message.state,
        "since": since,
        "why": message.text,
    }
    text = f"{since:%Y-%m-%d %H:%M:%S}  {message.id} {tenant}  {message.text}"
    return HeldItem(shard, f"{shard} {message.id}", key, message.state, since, facts, text)


MAX_TENANTS = 20_000
"""Limit of the tenants that ``busiest_tenants`` reads."""

TENANTS_A_CALL = 1_000


@dataclass(frozen=True, slots=True)
class BusyTenant:
    """A tenant with messages in a queue."""

    shard: ShardName
    tenant: str
    waiting: int  # its messages that wait
    in_flight: int  # those that a worker has
    # ``ready`` to be served; ``over`` its share; ``blocked`` by a limit; ``idle``: all that it has
    # is in flight; or ``paused`` by a limit of its own, or of all
    state: str


def busiest_tenants(
    client: RedisClient, namespace: str, shards: Sequence[ShardName], count: int
) -> tuple[list[BusyTenant], bool]:
    """Returns the tenants with the most messages, and whether all were read.

    At most ``MAX_TENANTS`` are read.  Raises ``ServerUnavailable`` or ``ForeignQueue``.
    """
    tenants: dict[tuple[ShardName, str], BusyTenant] = {}
    cursors = dict.fromkeys(shards, "0")
    while cursors and len(tenants) < MAX_TENANTS:
        calls = [
            Call(queue_keys(namespace, shard).all(MAX_STREAMS), (cursor, TENANTS_A_CALL))
            for shard, cursor in cursors.items()
        ]
        with redis_errors("reading tenants"):
            replies = dict(
                zip(cursors, script("queue/tenants").call_each(client, calls), strict=True)
            )
        cursors = {}
        for shard, reply in replies.items():
            if isinstance(reply, REDIS_ERRORS):
                raise translate_error(reply, f"reading {shard}") from reply
            if reply[0] != b"tenants":  # what it is, the status says
                continue
            for tenant, waiting, in_flight, state in reply[2:]:
                name = as_text(tenant)
                tenants[shard, name] = BusyTenant(shard, name, waiting, in_flight, as_text(state))
            if (cursor := as_text(reply[1])) != "0":
                cursors[shard] = cursor
    busiest = sorted(
        tenants.values(), key=lambda busy: (-busy.waiting - busy.in_flight, busy.tenant)
    )
    return busiest[:count], not cursors


MAX_LEASES = 10_000
"""Limit of the leases that ``count_leases`` reads, in all shards together."""

LEASES_A_CALL = 1_000


def count_leases(
    client: RedisClient, namespace: str, shards: Sequence[ShardName]
) -> tuple[Counter[str], bool]:
    """Returns how many messages each reader has, by its name, and whether all were counted.

    Takes one round trip.  Raises ``ServerUnavailable``.
    """
    counts, are_all = Counter[str](), True
    limit = max(1, min(LEASES_A_CALL, MAX_LEASES // max(1, len(shards))))
    calls = [Call(queue_keys(namespace, shard).all(MAX_STREAMS), (limit,)) for shard in shards]
    with redis_errors("counting leases"):
        replies = script("queue/holders").call_each(client, calls)
    for reply in replies:
        if isinstance(reply, REDIS_ERRORS) or reply[0] != b"holders":  # the status says what it is
            are_all = False
            continue
        are_all = are_all and reply[1] == 1
        for holder, messages in zip(reply[2::2], reply[3::2], strict=True):
            counts[as_text(holder)] += messages
    return counts, are_all


def _require_time(shard: ShardName, seconds: float) -> datetime:
    if (time := to_time(seconds)) is None:
        raise ForeignQueue(
            f"{shard}: a score of the queue is not a time: Penstock did not write it"
        )
    return time


def explain_job(
    client: RedisClient, namespace: str, shard: ShardName, record: RecordId, *_: object
) -> tuple[str, str] | None:
    """Returns the state of a record's message, and why it waits; None if it is gone.

    Raises as ``explain_messages``.
    """
    message = explain_messages(client, namespace, [(shard, str(record))])[str(record)]
    return (
        None
        if message is None or message.state == "finished"
        else (message.state, f"it {message.text}")
    )


def explain_messages(
    client: RedisClient, namespace: str, messages: Iterable[tuple[ShardName, str]]
) -> dict[str, Explanation | None]:
    """Returns the reasons why messages wait, by their ids; None for one that is gone.

    Takes one round trip.  Raises ``ServerUnavailable`` or ``ForeignQueue``.
    """
    ids: dict[ShardName, list[str]] = {}
    for shard, id_ in messages:
        ids.setdefault(shard, []).append(id_)
    calls = [
        Call(queue_keys(namespace, shard).all(MAX_STREAMS), message_ids)
        for shard, message_ids in ids.items()
    ]
    with redis_errors("reading queues"):
        replies = script("queue/explain").call_each(client, calls)
    explained: dict[str, Explanation | None] = {}
    for (shard, message_ids), reply in zip(ids.items(), replies, strict=True):
        if isinstance(reply, REDIS_ERRORS):
            raise translate_error(reply, f"reading {shard}") from reply
        reasons = (
            map(read_facts, reply[1:]) if reply[0] == b"explained" else [None for _ in message_ids]
        )
        for id_, facts in zip(message_ids, reasons, strict=True):
            explained[id_] = None if facts is None else explanation(id_, facts)
    return explained


def find_foreign_keys(client: RedisClient, keys: QueueKeys, streams: int) -> dict[str, str]:
    """Returns the keys of a shard that hold another type, and which.

    Raises ``ServerUnavailable``.
    """
    return drive(client, foreign_keys(keys, streams))


def foreign_keys(keys: QueueKeys, streams: int) -> Steps[dict[str, str]]:
    """Returns ``find_foreign_keys`` as an operation."""
    expected = keys.types(streams)

    def ask(client: RedisCommands) -> Any:
        pipeline = client.pipeline(transaction=False)
        for key in expected:
            pipeline.type(key)
        return pipeline.execute()

    with redis_errors("inspecting queues"):
        kinds = map(as_text, (yield ask))
    return {
        key: type_found
        for (key, kind), type_found in zip(expected.items(), kinds, strict=True)
        if type_found not in (kind, "none")
    }


def keys_to_delete(namespace: str, shard: ShardName) -> list[str]:
    """Returns the keys to delete before a queue is written again.

    These are its position, and all but the limits of tenants.
    """
    keys = queue_keys(namespace, shard)
    return [
        log_keys(namespace, shard).stream,
        *(key for key in keys.all(MAX_STREAMS) if not key.endswith(":q-limits")),
    ]
