"""The brake: a consumer that dead-letters one record after the other halts, since not all of them can be poison."""

from penstock.consuming.checkpoints import Checkpoints
from penstock.database.executor import Executor
from penstock.declarations import ConsumerSpec
from penstock.records import ShardName


def brake(
    consumer: ConsumerSpec,
    checkpoints: Checkpoints,
    executor: Executor,
    shard: ShardName,
    last: str,
) -> str | None:
    """Halts the shard if this dead letter is one too many in a row; gives the reason, or None if it may go on.

    Dead letters are counted over all shards.  Each shard halts at its own next dead letter: a process holds the row of
    its own shard alone.
    """
    in_a_row = checkpoints.count_failure(executor, shard)
    if in_a_row < consumer.halt_after:
        return None
    reason = (
        f"{in_a_row} dead letters in a row, with nothing applied between them; {last}. Fix the handler, then: "
        f"penstock reset checkpoint {consumer.name} --resume --apply, and penstock dead-letters retry {consumer.name} --all"
    )
    checkpoints.halt(executor, shard, reason)
    return reason
