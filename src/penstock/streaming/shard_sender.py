"""Sends the next records of one shard in calls of their own: to find the record that Postgres or Redis cannot take."""

from collections.abc import Iterator
from contextlib import closing
from time import monotonic

import psycopg
import redis

from penstock.channels.commands import RedisClient
from penstock.channels.ick import MarkBatch, coalesce, mark_shards
from penstock.channels.log import Appended, Batch, Behind, Reply, Unusable, append_together
from penstock.database.connections import Connection
from penstock.database.driver_errors import ErrorKind, classify
from penstock.errors import AppendRefused, ServerUnavailable, UnpublishableRecord
from penstock.journal.journal_reader import records_at
from penstock.records import Epoch, Offset, Scope, ShardName
from penstock.streaming.memory_budgets import MemoryBudgets
from penstock.streaming.queues import Queues
from penstock.streaming.unpublished import BATCH_RECORDS, unpublished

SMALLER = 8
"""A part that fails is tried again with so many times fewer records."""

Sent = tuple[Batch | MarkBatch, Reply]


class ShardSender:
    """Sends to one shard, on the publisher's connections."""

    def __init__(
        self,
        connection: Connection,
        client: RedisClient,
        scope: Scope,
        epoch: Epoch,
        queues: Queues,
        budgets: MemoryBudgets,
    ) -> None:
        self._connection, self._client = connection, client
        self._scope, self._epoch = scope, epoch
        self._queues, self._budgets = queues, budgets

    def send(
        self, shard: ShardName, after: Offset, target: Offset, *, kind: str, entries: str, narrow: bool
    ) -> Iterator[Sent]:
        """Sends up to a batch; with ``narrow``, in smaller and smaller parts if it fails."""
        end = min(target, after + BATCH_RECORDS)
        most = end - after
        while after < end:
            try:
                sent, reply = self._send_part(shard, after, target, most, kind, entries)
            except (ServerUnavailable, UnpublishableRecord, psycopg.Error) as error:
                if not narrow or not self.is_about_a_record(error):
                    raise
                if most == 1:
                    raise self._make_error(shard, Offset(after + 1), error) from error
                most = max(1, most // SMALLER)
                continue
            yield sent, reply
            if not isinstance(reply, Appended | Behind) or reply.tail <= after:
                return
            after = reply.tail

    def is_about_a_record(self, error: Exception) -> bool:
        """True if the servers are well, so that what was read or sent is at fault.

        Redis breaks the connection on a record that is too large for it, and takes the next connection.
        """
        if isinstance(error, psycopg.Error):
            return classify(error) is ErrorKind.STATEMENT
        if isinstance(error, UnpublishableRecord):
            return True
        if isinstance(error, AppendRefused) or not isinstance(error.__cause__, redis.RedisError):
            return False
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def _send_part(self, shard: ShardName, after: Offset, target: Offset, most: int, kind: str, entries: str) -> Sent:
        reading = unpublished(
            self._connection,
            self._scope,
            {shard: target},
            {shard: after},
            epoch=self._epoch,
            until=monotonic(),
            most=most,
            queues=self._queues,
        )
        with closing(reading):
            batch = next(reading)
        sent: Batch | MarkBatch = batch
        match kind:
            case "ick":
                sent = coalesce(batch)
                [reply] = mark_shards(self._client, self._scope.namespace, [sent])
            case "queue":
                reply = self._queues.send(batch)
            case _:
                formed = batch.stored_as(entries)
                self._budgets.make_room(formed)
                [(_, reply)] = append_together(self._client, self._scope.namespace, [formed])
        if isinstance(reply, Unusable):
            raise reply.error
        return sent, reply

    def _make_error(self, shard: ShardName, offset: Offset, error: Exception) -> UnpublishableRecord:
        found = records_at(self._connection, self._scope, {shard: offset}).get(shard)
        record = f"{shard} offset {offset} (record {found.id if found else 'unknown'})"
        match error:
            case psycopg.Error():
                why = f"Postgres cannot read it: {type(error).__name__}"
            case UnpublishableRecord():
                why = str(error)
            case _:
                why = "Redis breaks the connection when it is sent. Is it larger than proto-max-bulk-len?"
        return UnpublishableRecord(f"{record}: {why} See docs: errors#unpublishablerecord")
