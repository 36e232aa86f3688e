"""Writes dead letters in the transaction that moves the checkpoint past them; breaks the circuit.

A consumer that dead-letters one record after the other halts, since not all of them can be poison.
The commands that resume a halted consumer are made here, too: a test types all of them, literally.
"""

from collections.abc import Iterable, Sequence

from penstock.consuming.checkpoints import Checkpoints
from penstock.database.executor import Executor
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec
from penstock.journal.journal_records import make_records
from penstock.records import Offset, Place, Record, ShardName


class DeadLetters:
    """Writes the dead letters of one consumer, in its own transactions."""

    def __init__(self, consumer: ConsumerSpec) -> None:
        self._consumer = consumer

    def _where(self, shard: ShardName) -> dict[str, str | int]:
        return {"consumer": self._consumer.name, "channel": shard.channel, "shard": shard.shard}

    def write(
        self,
        store: Store[Executor],
        shard: ShardName,
        records: Sequence[Record],
        *,
        reason: str,
        attempts: int,
    ) -> None:
        """Dead-letters records.

        Those without an attempt are parked behind an earlier one of their key.
        """
        values = {
            **self._where(shard),
            "reason": reason,
            "attempts": attempts,
            "parked": attempts == 0,
            "offsets": [record.offset for record in records],
            "ids": [record.id for record in records],
            "keys": [record.key for record in records],
            "actions": [record.action for record in records],
            "objects": [record.object for record in records],
            "data": [record.data_json for record in records],
            "headers": [record.headers_json for record in records],
            "staged": [record.staged_us for record in records],
        }
        store.execute("dead_letter_records", values)

    def note_later(
        self,
        store: Store[Executor],
        shard: ShardName,
        keys: Sequence[str],
        offsets: Sequence[Offset],
    ) -> None:
        """Notes at dead letters of keys that later records, at these offsets, are applied."""
        values = {**self._where(shard), "keys": [*keys], "offsets": [*offsets]}
        store.execute("note_later_records", values)

    def note_later_range(
        self, store: Store[Executor], shard: ShardName, first: Offset, last: Offset
    ) -> None:
        """Notes the same for the records from one offset to another."""
        values = {**self._where(shard), "first": first, "last": last}
        store.execute("note_later_range", values)

    def parked_keys(
        self, store: Store[Executor], shard: ShardName, keys: Iterable[str]
    ) -> set[str]:
        """Returns the keys that have a dead letter."""
        values = {**self._where(shard), "keys": [*keys]}
        rows = store.execute("parked_keys", values)
        return {key for (key,) in rows.fetchall()}

    def parked_records(
        self, store: Store[Executor], shard: ShardName, first: Offset, last: Offset
    ) -> list[Record]:
        """Returns the records from one offset to another whose keys have a dead letter."""
        values = {**self._where(shard), "first": first, "last": last}
        return make_records(shard, store.rows("parked_records", values))

    def write_member(
        self,
        store: Store[Executor],
        shard: ShardName,
        member: str,
        *,
        since_us: int,
        reason: str,
        attempts: int,
    ) -> None:
        """Dead-letters a member of an Ick; one that has a dead letter keeps it."""
        values = {"key": member, "since": since_us, "reason": reason, "attempts": attempts}
        store.execute("dead_letter_member", {**self._where(shard), **values})

    def forget_members(
        self, store: Store[Executor], shard: ShardName, members: Sequence[str]
    ) -> None:
        """Removes the dead letters of members that are done now."""
        store.execute("forget_members", {**self._where(shard), "keys": list(members)})

    def write_job(
        self,
        store: Store[Executor],
        shard: ShardName,
        record_id: int,
        staged_us: int,
        *,
        reason: str,
        attempts: int,
    ) -> bool:
        """Dead-letters a job, which is then finished; false if it was finished before."""
        values = {"id": record_id, "staged_us": staged_us, "reason": reason, "attempts": attempts}
        return store.execute("dead_letter_job", {**self._where(shard), **values}).rowcount == 1


def break_circuit(
    consumer: ConsumerSpec,
    checkpoints: Checkpoints,
    store: Store[Executor],
    shard: ShardName,
    last: str,
) -> str | None:
    """Halts the shard if this dead letter is one too many in a row.

    Returns the reason, or None if it may go on.  Dead letters are counted over all shards.  Shards
    whose last records were dead-lettered halt as well; one that another process works on halts at
    its own next dead letter.
    """
    in_a_row = checkpoints.count_failure(store, shard)
    if in_a_row < consumer.halt_after:
        return None
    reason = (
        f"{in_a_row} dead letters in a row, with nothing applied between them; {last}. "
        f"Fix the handler, {how_to_resume(consumer.name, shard, None, has_letters=True)}"
    )
    checkpoints.halt(store, shard, reason)
    checkpoints.halt_failing(store, shard, reason)
    return reason


def how_to_resume(consumer: str, shard: ShardName, reason: str | None, has_letters: bool) -> str:  # noqa: FBT001
    """Returns the commands that resume a halted shard, as the rest of a sentence.

    They are to be run once the cause is removed.  A reason that names a command itself wins.  Dead
    letters, if the consumer has some, come before newer records.
    """
    text, source = reason or "", shard.channel.partition("@")[2]
    accept = f"penstock reset source {consumer} {source}"
    if f"--to '{shard} offset " in text:
        return "then type the command that penstock status shows"
    if source and accept in text:
        return f"then: {accept}"
    resume = f"penstock reset checkpoint {consumer} --resume --apply"
    if not has_letters:
        return f"then: {resume}"
    return f"then, in this order: penstock dead-letters retry {consumer} --all, and {resume}"


def skip_command(consumer: str, shard: ShardName, last: Offset, *, in_source: bool) -> str:
    """Returns the command that lets a halted shard go on behind offset ``last``.

    It goes on as if all up to it were applied.  ``in_source``: the shard is another source's, whose
    journal has the record.
    """
    place = f"'{Place(shard, last)}'"
    if in_source:
        source = shard.channel.partition("@")[2]
        return f"penstock reset source {consumer} {source} --to {place} --apply"
    return f"penstock reset checkpoint {consumer} --to {place} --resume --apply"
