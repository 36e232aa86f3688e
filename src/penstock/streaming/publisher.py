"""The publisher replays the journal into Redis, from wherever Redis' own tail is.

It keeps no position of its own that could be wrong: what it believes about a shard's tail is compared by the script
that appends, and the script's answer is what it believes next.  So a lost reply, a second publisher, a publisher that
slept for an hour, a Redis that came back empty or older all end in the same log.

What goes to an Ick is folded on the way: a member is named once a batch, since the first of its records.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, assert_never

from penstock.channels.ick import Fold, fold, tell_each
from penstock.channels.log import Appended, Batch, Behind, FencedOff, Foreign, append_each, extents
from penstock.channels.server import RedisClient
from penstock.errors import ChangedPast, Fenced
from penstock.journal import tails_of
from penstock.postgres import Connection, answering
from penstock.records import BEGINNING, Epoch, Offset, Record, RecordId, Shard, ShardName
from penstock.statements import DEFAULT_SCHEMA, statements
from penstock.telemetry import crashpoint

BATCH_RECORDS = 1000
"""Most records a shard and call: a script of so many keeps Redis busy for about 3 ms."""

PASS_BYTES = 4 * 1024 * 1024
"""Weight of payloads a shard and pass, as Postgres stores them, after which a batch ends early."""

SHARDS_A_PASS = 8
"""Shards read in one statement: bounds what a pass holds in memory."""


@dataclass(frozen=True, slots=True)
class Published:
    """What one pass of the publisher did.

    Attributes:
        added: Records that were new to the log.
        known: Records that the log had already: sent again, or by another publisher before.
        healed: Shards whose log had less than was believed, and are being replayed.
    """

    added: int = 0
    known: int = 0
    healed: tuple[ShardName, ...] = ()


class Publisher:
    """Publishes from the journal to Redis; one for a connection to each.

    Attributes:
        tails: What the log of each shard ends with, as last heard.
    """

    def __init__(
        self,
        connection: Connection,
        client: RedisClient,
        *,
        epoch: Epoch,
        schema: str = DEFAULT_SCHEMA,
        namespace: str = "penstock",
    ) -> None:
        self._connection = connection
        self._client = client
        self._schema, self._sql = schema, statements("penstock.streaming", schema)
        self._namespace = namespace
        self._epoch = epoch
        self._wanted: dict[ShardName, Offset] = {}
        self._icks: frozenset[str] = frozenset()
        self.tails: dict[ShardName, Offset] = {}

    def want(self, tails: Mapping[ShardName, Offset]) -> None:
        """Tells how far the journal goes: what ``tick`` returned, or ``refresh`` found."""
        for shard, tail in tails.items():
            self._wanted[shard] = max(tail, self._wanted.get(shard, BEGINNING))

    def refresh(self) -> None:
        """Looks how far the journal and the log really go: at the start, now and then, and after any doubt.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer.
            ForeignLog: A key of ours holds something else.
        """
        self.want(tails_of(self._connection, self._schema))
        with answering("reading which channels are Icks"):
            rows = self._connection.execute(self._sql["icks"]).fetchall()
        self._icks = frozenset(channel for (channel,) in rows)
        found = extents(self._client, self._namespace, list(self._wanted))
        self.tails.update({shard: extent.tail for shard, extent in found.items()})

    @property
    def backlog(self) -> int:
        """Records that the journal has and the log, as last heard, has not."""
        return sum(
            max(0, tail - self.tails.get(shard, BEGINNING)) for shard, tail in self._wanted.items()
        )

    def publish(self) -> Published:
        """Sends the next batch of every shard that lacks some; one reading, one round trip to Redis.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer; whatever was sent may be sent again.
            AppendRefused: Redis takes no writes now.
            ChangedPast: The journal names records that Postgres no longer has.
            ForeignLog: The log holds what is not ours.
            DamagedIck: An Ick is not whole.
            Fenced: A newer epoch has taken over.
        """
        return self._send(self._unpublished())

    def resend(self, records: int) -> Published:
        """Sends again up to ``records`` of the last records of each shard, as after a lost reply: the log must not change.

        Raises:
            As ``publish``.
        """
        believed = dict(self.tails)
        self.tails = {shard: Offset(max(0, tail - records)) for shard, tail in believed.items()}
        try:
            batches = self._unpublished()
        finally:
            self.tails = believed
        crashpoint("publisher.before_resend")
        return self._send([batch for batch in batches if not batch.begins])

    def _unpublished(self) -> list[Batch | Fold]:
        lacking = [s for s, tail in self._wanted.items() if tail > self.tails.get(s, BEGINNING)][
            :SHARDS_A_PASS
        ]
        if not lacking:
            return []
        with answering("reading unpublished records"):
            rows = self._connection.execute(
                self._sql["unpublished"],
                {
                    "channels": [shard.channel for shard in lacking],
                    "shards": [shard.shard for shard in lacking],
                    "tails": [self.tails.get(shard, BEGINNING) for shard in lacking],
                    "records": BATCH_RECORDS,
                    "bytes": PASS_BYTES,
                },
            ).fetchall()
        return [
            self._batch(ShardName(channel, Shard(shard)), list(found))
            for (channel, shard), found in groupby(rows, key=itemgetter(0, 1))
        ]

    def _batch(self, shard: ShardName, rows: list[tuple[Any, ...]]) -> Batch | Fold:
        lost = [row[3] for row in rows if row[4] is None]
        if lost:
            raise ChangedPast(
                f"{shard} offset {rows[0][2]}…{rows[-1][2]}: the journal names records that are gone from staged_records "
                f"({len(lost)}, the first is {lost[0]}). They were deleted by something other than Penstock, or Postgres was "
                "restored in part; nothing after them can be published in order. See penstock doctor"
            )
        first = Offset(rows[0][2])
        # The journal has no holes: a first record beyond tail + 1 is where it begins.
        begins = first > self.tails.get(shard, BEGINNING) + 1
        if shard.channel in self._icks:
            records = [
                Record(shard.channel, shard.shard, Offset(row[2]), RecordId(row[4]), *row[5:])
                for row in rows
            ]
            return fold(records, self._epoch, begins=begins)
        return Batch(
            shard, self._epoch, first, begins, [value for row in rows for value in row[4:]]
        )

    def _send(self, batches: list[Batch | Fold]) -> Published:
        if not batches:
            return Published()
        crashpoint("publisher.before_append")
        logs = [batch for batch in batches if isinstance(batch, Batch)]
        folds = [batch for batch in batches if isinstance(batch, Fold)]
        both: list[Batch | Fold] = [*logs, *folds]
        replies = append_each(self._client, self._namespace, logs) if logs else []
        if folds:
            replies += tell_each(self._client, self._namespace, folds)
        crashpoint("publisher.after_append")
        added, known, healed = 0, 0, []
        for batch, reply in zip(both, replies, strict=True):
            match reply:
                case Appended():
                    added += reply.added
                    known += batch.count - reply.added
                    self.tails[batch.shard] = reply.tail
                case Behind():
                    # An Ick that is ahead of us was told by another publisher, in batches that began elsewhere.
                    if reply.tail < batch.first:
                        healed.append(batch.shard)
                    self.tails[batch.shard] = reply.tail
                case FencedOff() | Foreign():
                    raise _refusal(batch, reply)
                case _:
                    assert_never(reply)
        return Published(added, known, tuple(healed))


def _refusal(batch: Batch | Fold, reply: FencedOff | Foreign) -> ChangedPast | Fenced:
    if isinstance(reply, FencedOff):
        return Fenced(
            f"{batch.shard}: the log is in epoch {reply.epoch}, this streamer in {batch.epoch}: it belongs to a past that "
            "Postgres has left. Start it again"
        )
    return ChangedPast(
        f"{batch.shard} offset {reply.offset}: the log holds record {reply.id}, the journal has another there. Either "
        "Postgres has lost commits that were published, or two databases write to one namespace. "
        "See docs: errors#changedpast; then: penstock reset epoch"
    )
