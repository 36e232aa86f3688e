"""What a worker does now and then: writes its counts, and makes messages that died in Redis dead letters in Postgres."""

from collections.abc import Sequence
from contextlib import suppress

from penstock.channels.isolation import UNUSABLE
from penstock.channels.queue.running import run
from penstock.channels.queue.shape import QueueShape
from penstock.channels.server import RedisClient
from penstock.consuming.failures import NotApplied
from penstock.consuming.queue.book import JobBook
from penstock.consuming.queue.letters import JobLetters
from penstock.consuming.transaction import HandlerTransaction
from penstock.declaring.outcomes import read_identity
from penstock.records import ShardName

MAX_BURIED = 100
"""Most messages of a shard that are buried at once."""


class Upkeep:
    """The work of one worker beside its jobs, on its own connections."""

    def __init__(
        self,
        transaction: HandlerTransaction,
        client: RedisClient,
        shape: QueueShape,
        shards: Sequence[ShardName],
        letters: JobLetters,
        book: JobBook,
    ) -> None:
        self._transaction, self._client = transaction, client
        self._shape, self._shards = shape, shards
        self._letters, self._book = letters, book

    def write_counts(self) -> None:
        """Writes what was done since the last time; what cannot be written now is written later.

        Raises:
            ServerUnavailable: Postgres does not answer.
        """
        counts = self._book.uncounted()
        try:
            for shard in self._shards:
                plan = self._letters.count(shard, counts[shard, "applied"], counts[shard, "skipped"])
                with suppress(NotApplied):
                    if self._transaction.apply([shard], plan):
                        del counts[shard, "applied"], counts[shard, "skipped"]
        finally:
            self._book.count_again(counts)

    def bury_dead(self, shards: Sequence[ShardName]) -> None:
        """Makes messages that died in Redis dead letters in Postgres.

        Raises:
            ServerUnavailable: A server does not answer.
        """
        for name in shards:
            with suppress(*UNUSABLE):  # the reader leaves the shard out, and reports it
                self._bury_shard(name)

    def _bury_shard(self, name: ShardName) -> None:
        shard, what = self._shape.shards[name.shard], f"burying dead letters of queue {name}"
        buried = []
        for dead in run(self._client, shard.dead(MAX_BURIED), what):
            message = dead.message
            if (identity := read_identity(message.id, message.headers)) is None:
                continue
            plan = self._letters.dead_letter(name, *identity, dead.reason, message.attempts, lambda: True)
            with suppress(NotApplied):  # it is tried again
                self._transaction.apply([name], plan)
                buried.append(message.id)
        if buried:
            run(self._client, shard.delete(buried), what)
