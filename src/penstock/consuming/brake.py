"""The brake: a consumer that dead-letters one record after the other halts, since not all of them can be poison.

And what to type when a consumer is halted, for whatever reason: a test types all of it, literally.
"""

from penstock.consuming.checkpoints import Checkpoints
from penstock.database.executor import Executor
from penstock.declaring.declarations import ConsumerSpec
from penstock.records import Offset, Place, ShardName


def brake(
    consumer: ConsumerSpec, checkpoints: Checkpoints, executor: Executor, shard: ShardName, last: str
) -> str | None:
    """Halts the shard if this dead letter is one too many in a row; gives the reason, or None if it may go on.

    Dead letters are counted over all shards.  Those that have dead letters of late halt as well, before anything newer of
    their keys is applied; one that another process works on halts at its own next dead letter.
    """
    in_a_row = checkpoints.count_failure(executor, shard)
    if in_a_row < consumer.halt_after:
        return None
    reason = (
        f"{in_a_row} dead letters in a row, with nothing applied between them; {last}. "
        f"Fix the handler, {how_to_resume(consumer.name, shard, None, has_letters=True)}"
    )
    checkpoints.halt(executor, shard, reason)
    checkpoints.halt_failing(executor, shard, reason)
    return reason


def how_to_resume(consumer: str, shard: ShardName, reason: str | None, has_letters: bool) -> str:  # noqa: FBT001
    """What to type when the cause of a halt is removed, as the rest of a sentence.

    Args:
        consumer: Its name.
        shard: The halted shard.
        reason: Why it is halted.  It may say itself how to go on, and to resume the shard where it is may be wrong then.
        has_letters: Whether there are dead letters, which come before what is newer than they are.
    """
    said, source = reason or "", shard.channel.partition("@")[2]
    accept = f"penstock reset source {consumer} {source}"
    if f"--to '{shard} offset " in said:
        return "then type what penstock status says"
    if source and accept in said:
        return f"then: {accept}"
    resume = f"penstock reset checkpoint {consumer} --resume --apply"
    if not has_letters:
        return f"then: {resume}"
    return f"then, in this order: penstock dead-letters retry {consumer} --all, and {resume}"


def how_to_go_past(consumer: str, shard: ShardName, last: Offset, *, in_source: bool) -> str:
    """What to type when a halted shard is to go on behind a record, as if that and all before it were applied.

    Args:
        consumer: Its name.
        shard: The shard.
        last: Offset of the record.
        in_source: The shard is another source's, whose journal says whether there is such a record.
    """
    place = f"'{Place(shard, last)}'"
    if in_source:
        source = shard.channel.partition("@")[2]
        return f"penstock reset source {consumer} {source} --to {place} --apply"
    return f"penstock reset checkpoint {consumer} --to {place} --resume --apply"
