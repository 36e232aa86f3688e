"""Registers a worker at its channel's journal, and reads there what the log has lost.

The journal is in the consumer's own database, or in that of a source.  A worker registers there, so
that retention waits for it, and reads the records that the log has lost.  A source may be restored
under a consumer that goes on: its journal is asked whether it still has what was applied, and what
comes next.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable
from penstock.channels.log.log_reader import MAX_BYTES
from penstock.consuming.transaction import HandlerTransaction, Result, TransactionPlan
from penstock.database.executor import Executor
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.display import format_count
from penstock.errors import Gap
from penstock.journal.journal_records import read_records
from penstock.journal.lineage import check_tails
from penstock.records import Offset, OffsetRange, Record, ShardName

Read = Callable[[Callable[[Store[Executor]], Any]], Any]
"""Calls a function that reads from the consumer's own database, in a transaction, and returns its
result."""


def within(store: Store[Executor]) -> Read:
    """Reads in a transaction that goes on."""
    return lambda function: function(store)


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of one read: records, and bytes of their payloads."""

    records: int
    bytes: int = MAX_BYTES  # as Postgres stores them; by default as many as a read of Redis


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says of a shard that was compared whether its records may be applied."""

    rest_s: float = 0.0  # seconds for which the shard is left alone; 0 if they may
    reason: str | None = None  # why it waits, for `penstock status`; None if that says so already


Verdicts = Mapping[ShardName, Verdict]
Errors = tuple[type[Exception], ...]

ShardRecords = Mapping[ShardName, Sequence[Any]]
"""Records, or places, of some shards."""


class Journal(Protocol):
    """A journal, and the registration there."""

    in_source: bool  # whether it is in another database than the checkpoints
    away: Errors  # those by which one in another database says that it cannot be read now

    def register(self, store: Store, /) -> tuple[list[ShardName], frozenset[ShardName]]:
        """Registers the consumer, so that retention waits for it.

        Returns the worker's shards, and the channel's.  ``store`` is the consumer's own database.
        """

    def open(
        self,
        store: Store,
        client: RedisClient,
        shards: Sequence[ShardName],
        on_unusable: OnUnusable,
        /,
    ) -> None:
        """Compares the logs of shards with it, or gets ready to."""

    def report_if_due(self, transaction: HandlerTransaction, /) -> Verdicts:
        """Calls ``report`` now and then; passes over a server that is away."""

    def report(self, transaction: HandlerTransaction, /) -> Verdicts:
        """Reports the checkpoints, and compares the histories.

        Returns verdicts about the shards that have diverged.
        """

    def confirm(
        self, transaction: HandlerTransaction, records: ShardRecords, on_unusable: OnUnusable, /
    ) -> Verdicts:
        """Returns verdicts about shards whose records are of an epoch that was not accepted before.

        All of these records are read by now.
        """

    def backfill(
        self, read: Read, shard: ShardName, position: Offset, end: Offset, limit: Limit, /
    ) -> Sequence[Record]:
        """Reads the first records between two offsets, both excluded.

        Raises ``Gap`` if the journal lacks the first of them.
        """

    def note_reached(
        self, plan: TransactionPlan[Result], records: ShardRecords, /
    ) -> TransactionPlan[Result]:
        """Returns the plan, which also writes the record that each checkpoint moves to."""

    def warn_away(self, error: Exception, /) -> None:
        """Logs that the journal is away, and its shards wait."""

    def close(self) -> None:
        """Closes its connection."""


class LocalJournal:
    """The journal in the consumer's own database, which is as far as the checkpoints.

    There is nothing to ask or to report.
    """

    in_source = False
    away: Errors = ()

    def __init__(self, consumer: ConsumerSpec, chosen: Collection[int] | None = None) -> None:
        """Sets up; ``chosen`` are the declared shards to work on, None takes all.

        See ``WorkerSetup``.
        """
        self._consumer, self._chosen = consumer, chosen

    def register(self, store: Store) -> tuple[list[ShardName], frozenset[ShardName]]:
        """Chooses shards of every generation."""
        channel = register_consumer(store, self._consumer)
        declared, names, chosen = self._consumer.channel.shards, channel.shard_names, self._chosen
        shards = [
            names[number]
            for generation in channel.every_generation
            for number in generation.numbers
            if chosen is None or (number - generation.first) % declared in chosen
        ]
        return shards, frozenset(names)

    def open(
        self,
        store: Store,
        client: RedisClient,
        shards: Sequence[ShardName],
        on_unusable: OnUnusable,
    ) -> None:
        """Compares the shards.

        One that cannot be compared is skipped by the first round that cannot read it.
        """
        check_tails(store, client, shards, on_unusable)

    def confirm(self, *_: object) -> Verdicts:
        """Returns no verdicts: nothing is doubted, nor is there anything to report."""
        return {}

    report = report_if_due = confirm

    def backfill(
        self, read: Read, shard: ShardName, position: Offset, end: Offset, limit: Limit
    ) -> Sequence[Record]:
        """Reads from the own database alone."""
        records: list[Record] = read(lambda store: backfill(store, shard, position, end, limit))
        return records

    def note_reached(
        self, plan: TransactionPlan[Result], _: ShardRecords
    ) -> TransactionPlan[Result]:
        """Returns the plan as it is."""
        return plan

    def warn_away(self, error: Exception) -> None:
        """Does nothing: it is never called."""

    def close(self) -> None:
        """Does nothing."""


def backfill(
    store: Store[Executor], shard: ShardName, position: Offset, end: Offset, limit: Limit
) -> list[Record]:
    """Returns the first records between two offsets, both excluded, from the journal.

    Raises ``Gap`` if it lacks the first of them.  At least one, and no more once their payloads
    exceed ``max_bytes``.
    """
    last = Offset(min(end - 1, position + limit.records))
    range_ = OffsetRange(shard, Offset(position + 1), last)
    records = read_records(store, range_, max_bytes=limit.bytes).records
    if not records or records[0].offset != position + 1:
        values = {"channel": shard.channel, "shard": shard.shard, "after": position}
        [(begin, goes_on)] = store.rows("journal_begins", values)
        gap = Gap(
            f"{shard}: the checkpoint is at offset {position}, the log continues at {end}, and the "
            f"journal begins at {begin}. Records in between were removed before this consumer had "
            f"passed them ({format_count(end - position - 1, 'record')}). Start the consumer from "
            "the tables, or accept the loss"
        )
        candidates = (end, goes_on or end, records[0].offset if records else end)
        gap.last = min(candidates) - 1
        raise gap
    return [record for i, record in enumerate(records) if record.offset == position + 1 + i]
