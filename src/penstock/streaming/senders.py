"""Senders of the journal's batches to each kind of channel.

A kind that needs Postgres has its sender beside its statements: ``queues``.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Protocol

from penstock.channels.batch_outcomes import Batch, Reply
from penstock.channels.commands import RedisClient
from penstock.channels.ick.marking import mark, update_progress
from penstock.channels.isolation import leaving_out
from penstock.channels.log.appending import append_ahead, append_together
from penstock.records import Scope, ShardName
from penstock.streaming.memory_budgets import MemoryBudgets
from penstock.streaming.tails import Tails
from penstock.streaming.unpublished import BATCH_RECORDS, group_batches, read_ahead

Replies = Generator[tuple[Batch, Reply], None, None]
"""Each sent batch, with the reply to it."""


class Sender(Protocol):
    """Sends batches to the shards of one kind of channel; sending twice must change nothing."""

    reads_once: bool
    """Whether a round reads one batch of each shard, and no more."""

    def send(self, batch: Batch) -> Reply:
        """Sends one batch in a separate call."""

    def send_all(self, batches: Iterator[Batch], records: int) -> Replies:
        """Sends batches as they are read; ``records`` is their approximate number of records."""

    def check(self, shard: ShardName) -> None:
        """Raises the error of a shard whose keys cannot be used."""


class LogSender:
    """Appends to logs, each batch as its channel stores it."""

    reads_once = False

    def __init__(
        self, client: RedisClient, scope: Scope, tails: Tails, budgets: MemoryBudgets
    ) -> None:
        self._client, self._namespace = client, scope.namespace
        self._ends, self._budgets = tails, budgets

    def send(self, batch: Batch) -> Reply:
        """Makes room, and appends."""
        [(_, reply)] = append_together(self._client, self._namespace, [self._form(batch)])
        return reply

    def send_all(self, batches: Iterable[Batch], records: int) -> Replies:
        """Appends a few batches in one call, and many with several under way.

        A batch that follows a refused one is refused, too.
        """
        formed = self._form_all(batches)
        if records <= BATCH_RECORDS:
            for group in group_batches(formed):
                yield from append_together(self._client, self._namespace, group)
            return
        with (
            closing(read_ahead(formed)) as ahead,
            closing(append_ahead(self._client, self._namespace, ahead)) as replies,
        ):
            yield from replies

    def _form_all(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches, without those of shards that cannot be used here."""
        for batch in batches:
            with leaving_out(batch.shard, self._ends.unusable.add):
                yield self._form(batch)

    def _form(self, batch: Batch) -> Batch:
        """Returns the batch as its channel stores it, and makes room for it."""
        formed = batch.stored_as(self._ends.entries(batch.shard))
        self._budgets.make_room(formed)
        return formed

    def check(self, shard: ShardName) -> None:
        """Does nothing: readers of the log's end check it."""


class IckSender:
    """Marks in Icks."""

    reads_once = False

    def __init__(self, client: RedisClient, scope: Scope) -> None:
        self._client, self._namespace = client, scope.namespace

    def send(self, batch: Batch) -> Reply:
        """Returns marks each member once."""
        return mark(self._client, self._namespace, batch)

    def send_all(self, batches: Iterable[Batch], _: int) -> Replies:
        """Returns marks one batch after the other."""
        for batch in batches:
            yield batch, self.send(batch)

    def check(self, shard: ShardName) -> None:
        """Reads the Ick's progress, with a script that reads all of its keys."""
        update_progress(self._client, self._namespace, [shard])
