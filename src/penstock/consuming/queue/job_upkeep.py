"""Upkeep of a queue's worker: writes its counts, and dead-letters messages that died in Redis in Postgres."""

from collections.abc import Sequence
from contextlib import suppress

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import UNUSABLE
from penstock.channels.queue.shard import QueueShape, run
from penstock.consuming.failures import NotApplied
from penstock.consuming.queue.in_flight import InFlight
from penstock.consuming.queue.job_dead_letters import JobDeadLetters
from penstock.consuming.transaction import HandlerTransaction
from penstock.declaring.outcomes import read_identity
from penstock.records import ShardName

MAX_EXPIRED = 100
"""Limit of the messages of a shard that are dead-lettered at once after they died in Redis."""


class JobUpkeep:
    """Counts and dead letters of one worker, on its own connections."""

    def __init__(
        self,
        transaction: HandlerTransaction,
        client: RedisClient,
        shape: QueueShape,
        letters: JobDeadLetters,
        jobs: InFlight,
    ) -> None:
        self._transaction, self._client, self._shape = transaction, client, shape
        self._letters, self._jobs = letters, jobs

    def write_counts(self, shards: Sequence[ShardName]) -> None:
        """Writes counts since the last time; those that cannot be written now are written later."""
        counts = self._jobs.uncounted()
        try:
            for shard in shards:
                plan = self._letters.count(shard, counts[shard, "applied"], counts[shard, "skipped"])
                with suppress(NotApplied):
                    if self._transaction.apply([shard], plan):
                        del counts[shard, "applied"], counts[shard, "skipped"]
        finally:
            self._jobs.count_again(counts)

    def dead_letter_expired(self, shards: Sequence[ShardName]) -> None:
        """Makes messages that died in Redis, at their deadline, dead letters in Postgres."""
        for name in shards:
            with suppress(*UNUSABLE):  # the reader leaves the shard out, and reports it
                self._dead_letter_shard(name)

    def _dead_letter_shard(self, name: ShardName) -> None:
        shard, what = self._shape.shards[name.shard], f"moving dead letters of queue {name}"
        written = []
        for dead in run(self._client, shard.dead(MAX_EXPIRED), what):
            message = dead.message
            if (identity := read_identity(message.id, message.headers)) is None:
                continue
            plan = self._letters.dead_letter(name, *identity, dead.reason, message.attempts, lambda: True)
            with suppress(NotApplied):  # it is tried again
                self._transaction.apply([name], plan)
                written.append(message.id)
        if written:
            run(self._client, shard.delete(written), what)
