"""Reads the journal: its shards, their ends, and the record at an offset.

And the state of these shards in Redis.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, ask_each
from penstock.channels.routing import log_keys, next_shards
from penstock.channels.server import pipelined
from penstock.database.registry import registered_channels
from penstock.database.statements import name_shards
from penstock.database.store import Store
from penstock.errors import ForeignLog
from penstock.records import (
    Epoch,
    LastRecord,
    Moment,
    Offset,
    Record,
    RecordId,
    Scope,
    Shard,
    ShardName,
)

CLOCK_MARGIN = timedelta(minutes=10)
"""Limit by which a server's clock may be set back while a record waits for its tick.

A search by time then still finds it.
"""


@dataclass(frozen=True, slots=True)
class JournaledRecord:
    """The record that the journal has at an offset.

    Ids of lost commits are given out again: ``staged_us`` differs between two records of one id.
    It is None if the row is gone.
    """

    id: RecordId
    staged_us: int | None

    def is_same_as(self, record: "JournaledRecord | LastRecord | Record | None") -> bool:
        """True if both are the same record, as far as is known.

        None, an unknown record, counts as the same.
        """
        if record is None:
            return True
        times = {self.staged_us, record.staged_us}
        return self.id == record.id and (None in times or len(times) == 1)


@dataclass(frozen=True, slots=True)
class MissedRecords:
    """Records of a shard that the last tick saw but no tick gave an offset.

    Nothing will publish them.
    """

    shard: ShardName  # the shard they were staged for
    count: int  # number of records
    first: RecordId  # the lowest of their ids
    # whether they are isolated: no tick can give them an offset until their rows are corrected
    is_isolated: bool


@dataclass(frozen=True, slots=True)
class Since:
    """Beginning of the records of a shard since a time."""

    before: Offset  # the offset before the first of them; the shard's last one if there is none
    # records that retention has removed, if some of them may have been staged since then; else 0
    removed: int
    at: datetime  # the time


def offsets_since(
    store: Store, shards: Iterable[ShardName], moment: Moment
) -> dict[ShardName, Since]:
    """Finds, in each shard, the first record that was staged at a time or later.

    Later ones may be older: a shard is in the order of commits, and a long transaction stages early
    and commits late.
    """
    is_ago = isinstance(moment, timedelta)
    since = {
        "at": None if is_ago else moment,
        "ago": moment if is_ago else None,
        "margin": CLOCK_MARGIN,
    }
    doing, values = "looking for a time in the journal", {**name_shards(shards), **since}
    rows = store.rows("offsets_since", values, doing=doing, binary=True)
    return {
        ShardName(channel, Shard(shard)): Since(Offset(previous), removed, staged_at)
        for channel, shard, previous, removed, staged_at in rows
    }


def missed_records(store: Store) -> list[MissedRecords]:
    """Returns the records that the last tick saw and gave no offset."""
    rows = store.rows("missed_records", doing="looking for missed records")
    return [
        MissedRecords(ShardName(channel, Shard(shard)), count, first, is_isolated)
        for channel, shard, count, first, is_isolated in rows
    ]


def journal_bounds(
    store: Store, shards: Iterable[ShardName] | None = None
) -> dict[ShardName, tuple[Offset, Offset]]:
    """Returns the first and last offset of shards in the journal; (1, 0) for an empty shard.

    Two index probes for each of ``shards``; None takes all that the journal has, with one more
    probe for each.
    """
    doing = "reading the ends of the journal"
    if shards is None:
        rows = store.rows("every_bounds", doing=doing)
    else:
        rows = store.rows("bounds", name_shards(shards), doing=doing)
    return {
        ShardName(channel, Shard(shard)): (Offset(first), Offset(last))
        for channel, shard, first, last in rows
    }


def journal_tails(store: Store) -> dict[ShardName, Offset]:
    """Returns the last offset of every shard in the journal."""
    return {shard: last for shard, (_, last) in journal_bounds(store).items()}


def registered_tails(store: Store) -> dict[ShardName, Offset]:
    """Returns the last offset of every shard of a registered channel; others are not published."""
    rows = store.rows("registered_tails", doing="reading the journal's tails")
    return {ShardName(channel, Shard(shard)): Offset(last) for channel, shard, last in rows}


def has_record(store: Store, record: LastRecord) -> bool:
    """True if Postgres has a record with this id and time of staging."""
    values = {"id": record.id, "staged_us": record.staged_us}
    exists = store.value("staged_at", values, doing="looking for a record")
    return bool(exists)


def known_shards(store: Store, declared: Iterable[ShardName] = ()) -> list[ShardName]:
    """Returns every shard that is registered or ``declared``."""
    channels = registered_channels(store).values()
    registered = (shard for channel in channels for shard in channel.shard_names)
    return sorted({*registered, *declared})


def records_at(
    store: Store, offsets: Mapping[ShardName, Offset]
) -> dict[ShardName, JournaledRecord]:
    """Returns the journal's record at one offset of each shard; leaves out shards without one."""
    values = {**name_shards(offsets), "offsets": list(offsets.values())}
    rows = store.rows("records_at", values, doing="reading the journal")
    return {
        ShardName(channel, Shard(shard)): JournaledRecord(record_id, staged_us)
        for channel, shard, record_id, staged_us in rows
        if record_id
    }


_EPOCH = re.compile(r"[0-9]{1,10}")
"""Epochs that ``append.lua`` accepts."""


def shards_to_compare(
    store: Store,
    client: RedisClient,
    declared: Iterable[ShardName] = (),
    on_unusable: OnUnusable | None = None,
) -> list[ShardName]:
    """Returns registered and ``declared`` shards, and those in Redis that Postgres does not know.

    Postgres has lost them if it was restored to a time before the number of shards was changed.
    """
    channels = registered_channels(store).values()
    beyond = [
        shard
        for channel in channels
        if channel.traits.keeps_records
        for shard in next_shards(channel.name, channel.total_shards)
    ]
    written = ask_each(partial(log_epochs, client, store.scope), beyond, on_unusable)
    registered = (shard for channel in channels for shard in channel.shard_names)
    return sorted({*registered, *declared, *written})


def log_epochs(
    client: RedisClient, scope: Scope, shards: Sequence[ShardName]
) -> dict[ShardName, Epoch]:
    """Returns the epoch in which each shard was last written; leaves out shards that never were."""

    def ask(pipeline: Any, shard: ShardName) -> None:
        pipeline.get(log_keys(scope.namespace, shard).epoch)

    replies = pipelined(client, shards, ask, "reading the log's epochs")
    return {
        shard: _parse_epoch(shard, reply) for shard, reply in replies.items() if reply is not None
    }


def _parse_epoch(shard: ShardName, reply: bytes | str) -> Epoch:
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else reply
    if not _EPOCH.fullmatch(text):
        raise ForeignLog(
            f"{shard}: the key of its epoch holds no number; something else uses Penstock's names"
        )
    return Epoch(int(text))
