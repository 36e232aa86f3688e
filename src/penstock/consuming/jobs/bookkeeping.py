"""What a worker of a queue writes to Postgres now and then: its counts, and messages that died in Redis."""

from collections.abc import Sequence
from contextlib import suppress

from penstock.channels.queue.running import run
from penstock.channels.queue.shape import QueueShape
from penstock.channels.server import RedisClient
from penstock.consuming.failures import NotApplied
from penstock.consuming.jobs.book import JobBook
from penstock.consuming.jobs.letters import JobLetters
from penstock.consuming.transaction import HandlerTransaction
from penstock.records import RecordId, ShardName

MOST_BURIED = 100
"""Most messages of a shard that are buried at once."""


def write_counts(
    book: JobBook,
    letters: JobLetters,
    transaction: HandlerTransaction,
    shards: Sequence[ShardName],
) -> None:
    """Writes what was done since the last time; what cannot be written now is written later.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    counts = book.uncounted()
    try:
        for shard in shards:
            plan = letters.count(shard, counts[shard, "applied"], counts[shard, "skipped"])
            with suppress(NotApplied):
                if transaction.apply([shard], plan):
                    del counts[shard, "applied"], counts[shard, "skipped"]
    finally:
        book.count_again(counts)


def bury_dead(
    client: RedisClient,
    shape: QueueShape,
    letters: JobLetters,
    transaction: HandlerTransaction,
    shards: Sequence[ShardName],
) -> None:
    """Makes messages that died in Redis dead letters in Postgres.

    Raises:
        ServerUnavailable: A server does not answer.
    """
    for name in shards:
        shard = shape.shards[name.shard]
        what = f"burying dead letters of queue {name}"
        buried = []
        for dead in run(client, shard.dead(MOST_BURIED), what):
            message = dead.message
            if not message.id.isascii() or not message.id.isdigit():
                continue
            plan = letters.dead_letter(
                name, RecordId(int(message.id)), dead.reason, message.attempts, lambda: True
            )
            with suppress(NotApplied):  # it is tried again
                transaction.apply([name], plan)
                buried.append(message.id)
        if buried:
            run(client, shard.delete(buried), what)
