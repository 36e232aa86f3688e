"""The publisher replays the journal into Redis, from wherever Redis' own tail is.

It keeps no position of its own that could be wrong: what it believes about a shard's tail is compared by the script
that appends, and the script's answer is what it believes next.  So a lost reply, a second publisher, a publisher that
slept for an hour, a Redis that came back empty or older all end in the same log.

Where there is much to send, Redis appends one batch while the next is made ready, and Postgres reads those after it.
What is little goes in one call, so that consumers find all of it at once.

What goes to an Ick is folded on the way: a member is named once a batch, since the first of its records.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from time import monotonic
from typing import TypeVar, assert_never

from penstock.channels.ick import MarkBatch, coalesce, mark_shards
from penstock.channels.log import (
    Appended,
    Batch,
    Behind,
    FencedOff,
    Foreign,
    Reply,
    append_ahead,
    append_together,
    extents,
)
from penstock.channels.server import RedisClient
from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import Fenced, HistoryDiverged
from penstock.journal import journal_tails
from penstock.records import BEGINNING, Epoch, Offset, Record, RecordId, ShardName
from penstock.streaming.portion import PORTION_BYTES, PORTION_RECORDS, Portion
from penstock.streaming.unpublished import unpublished

PASS_S = 0.25
"""How long a pass reads on, in seconds: so that the streamer ticks, retains and hears of a stop several times a second.
Between two passes Redis has nothing to do."""

_Item = TypeVar("_Item")


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
        self.want(journal_tails(self._connection, self._schema))
        with postgres_errors("reading which channels are Icks"):
            rows = self._connection.execute(self._sql["icks"]).fetchall()
        self._icks = frozenset(channel for (channel,) in rows)
        found = extents(self._client, self._namespace, list(self._wanted))
        self.tails.update({shard: extent.tail for shard, extent in found.items()})

    @property
    def backlog(self) -> int:
        """Records that the journal has and the log, as last heard, has not."""
        return _behind(self._wanted, self.tails)

    def publish(self, at_hand: Sequence[Portion] = ()) -> Published:
        """Sends what the shards lack, in turn, for about ``PASS_S`` to logs and as long to Icks.

        Args:
            at_hand: What need not be read from the journal: portions of the last tick.

        Raises:
            ServerUnavailable: Postgres or Redis does not answer; whatever was sent may be sent again.
            AppendRefused: Redis takes no writes now.
            HistoryDiverged: The journal names records that Postgres no longer has.
            ForeignLog: The log holds what is not ours.
            DamagedIck: An Ick is not whole.
            Fenced: A newer epoch has taken over.
        """
        return self._send(self.tails, at_hand)

    def resend(self, records: int) -> Published:
        """Sends again up to ``records`` of the last records of each shard, as after a lost reply: the log must not change.

        Raises:
            As ``publish``.
        """
        earlier = {shard: Offset(max(0, tail - records)) for shard, tail in self.tails.items()}
        crashpoint("publisher.before_resend")
        return self._send(earlier, may_begin=False)

    def _send(
        self,
        tails: Mapping[ShardName, Offset],
        at_hand: Sequence[Portion] = (),
        *,
        may_begin: bool = True,
    ) -> Published:
        """Sends what lies behind ``tails``.

        Args:
            tails: Where to go on from.
            at_hand: What need not be read.
            may_begin: Whether a shard that has less than the journal may begin where the journal does.
        """
        done = Published()
        for replies in (
            self._append(tails, at_hand, may_begin=may_begin),
            self._tell(tails, at_hand, may_begin=may_begin),
        ):
            with closing(replies):
                for batch, reply in replies:
                    crashpoint("publisher.after_append")
                    done = self._noted(done, batch, reply)
        return done

    def _append(
        self, tails: Mapping[ShardName, Offset], at_hand: Sequence[Portion], *, may_begin: bool
    ) -> Generator[tuple[Batch, Reply], None, None]:
        """Appends to logs; a batch behind one that was refused is refused too, so all of them may be under way."""
        wanted = self._of(icks=False)
        with closing(self._portions(wanted, tails, at_hand, may_begin=may_begin)) as portions:
            if _behind(wanted, tails) <= PORTION_RECORDS:
                for group in _groups(portions):
                    batches = [self._batch(portion) for portion in group]
                    yield from append_together(self._client, self._namespace, batches)
                return
            with (
                closing(_ahead(map(self._batch, portions))) as ahead,
                closing(append_ahead(self._client, self._namespace, ahead)) as replies,
            ):
                yield from replies

    def _tell(
        self, tails: Mapping[ShardName, Offset], at_hand: Sequence[Portion], *, may_begin: bool
    ) -> Generator[tuple[MarkBatch, Reply], None, None]:
        """Marks in Icks, one call after the other."""
        wanted = self._of(icks=True)
        with closing(self._portions(wanted, tails, at_hand, may_begin=may_begin)) as portions:
            for folded in map(self._fold, portions):
                [reply] = mark_shards(self._client, self._namespace, [folded])
                yield folded, reply

    def _portions(
        self,
        wanted: Mapping[ShardName, Offset],
        tails: Mapping[ShardName, Offset],
        at_hand: Sequence[Portion],
        *,
        may_begin: bool,
    ) -> Generator[Portion, None, None]:
        following = [
            portion
            for portion in at_hand
            if portion.shard in wanted and portion.first == tails.get(portion.shard, BEGINNING) + 1
        ]
        tails = {**tails, **{portion.shard: portion.last for portion in following}}
        until = monotonic() + PASS_S
        reading = unpublished(self._connection, wanted, tails, until=until, schema=self._schema)
        with closing(reading):
            for portion in chain(following, reading):
                if may_begin or not portion.begins:
                    crashpoint("publisher.before_append")
                    yield portion

    def _of(self, *, icks: bool) -> dict[ShardName, Offset]:
        """How far the journal goes, of Icks or of logs."""
        return {s: tail for s, tail in self._wanted.items() if (s.channel in self._icks) == icks}

    def _batch(self, portion: Portion) -> Batch:
        values = [value for record in portion.records for value in record]
        return Batch(portion.shard, self._epoch, portion.first, portion.begins, values)

    def _fold(self, portion: Portion) -> MarkBatch:
        name = portion.shard
        records = [
            Record(name.channel, name.shard, Offset(offset), RecordId(record_id), *rest)
            for offset, (record_id, *rest) in enumerate(portion.records, portion.first)
        ]
        return coalesce(records, self._epoch, begins=portion.begins)

    def _noted(self, done: Published, batch: Batch | MarkBatch, reply: Reply) -> Published:
        match reply:
            case Appended(tail, added):
                self.tails[batch.shard] = tail
                known = done.known + batch.count - added
                return replace(done, added=done.added + added, known=known)
            case Behind(tail):
                self.tails[batch.shard] = tail
                # An Ick that is ahead of us was told by another publisher, in batches that began elsewhere.
                if tail >= batch.first or batch.shard in done.healed:
                    return done
                return replace(done, healed=(*done.healed, batch.shard))
            case FencedOff() | Foreign():
                raise _refusal(batch, reply)
            case _:
                assert_never(reply)


def _behind(wanted: Mapping[ShardName, Offset], tails: Mapping[ShardName, Offset]) -> int:
    """Records between what the shards have and how far the journal goes."""
    return sum(max(0, tail - tails.get(shard, BEGINNING)) for shard, tail in wanted.items())


def _groups(portions: Iterator[Portion]) -> Iterator[list[Portion]]:
    """Portions that go to Redis together: the texts of their payloads, without the last one's, are less than a portion's."""
    group: list[Portion] = []
    weight = 0
    for portion in portions:
        group.append(portion)
        weight += portion.length
        if weight >= PORTION_BYTES:
            yield group
            group, weight = [], 0
    if group:
        yield group


def _ahead(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    """Takes the next item, in a thread, while this one is worked on."""
    with ThreadPoolExecutor(1, "penstock-read") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def _refusal(batch: Batch | MarkBatch, reply: FencedOff | Foreign) -> HistoryDiverged | Fenced:
    if isinstance(reply, FencedOff):
        return Fenced(
            f"{batch.shard}: the log is in epoch {reply.epoch}, this streamer in {batch.epoch}: it belongs to a past that "
            "Postgres has left. Start it again"
        )
    return HistoryDiverged(
        f"{batch.shard} offset {reply.offset}: the log holds record {reply.id}, the journal has another there. Either "
        "Postgres has lost commits that were published, or two databases write to one namespace. "
        "See docs: errors#historydiverged; then: penstock reset epoch"
    )
