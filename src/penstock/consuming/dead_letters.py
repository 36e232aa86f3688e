"""Writes dead letters, in the transaction that moves the checkpoint past them."""

from collections.abc import Iterable, Sequence

from penstock.database.executor import Executor
from penstock.database.statements import statements
from penstock.declaring.declarations import ConsumerSpec
from penstock.journal.older import make_records
from penstock.records import Offset, Record, Scope, ShardName


class DeadLetters:
    """The dead letters of one consumer, as its own transactions write them."""

    def __init__(self, consumer: ConsumerSpec, scope: Scope) -> None:
        self._consumer = consumer
        self._sql = statements("penstock.consuming", scope.schema)

    def _where(self, shard: ShardName) -> dict[str, str | int]:
        return {"consumer": self._consumer.name, "channel": shard.channel, "shard": shard.shard}

    def write(
        self, executor: Executor, shard: ShardName, records: Sequence[Record], *, reason: str, attempts: int
    ) -> None:
        """Dead-letters records; without an attempt they are parked behind an earlier one of their key."""
        executor.execute(
            self._sql["dead_letter_records"],
            {
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
            },
        )

    def note_later(self, executor: Executor, shard: ShardName, keys: Sequence[str], offsets: Sequence[Offset]) -> None:
        """Notes at the dead letters of some keys that later records of theirs are applied; the places are in their order."""
        where = {**self._where(shard), "keys": [*keys], "offsets": [*offsets]}
        executor.execute(self._sql["note_later_records"], where)

    def note_later_range(self, executor: Executor, shard: ShardName, first: Offset, last: Offset) -> None:
        """Likewise, for the records from one offset to another."""
        where = {**self._where(shard), "first": first, "last": last}
        executor.execute(self._sql["note_later_range"], where)

    def parked_keys(self, executor: Executor, shard: ShardName, keys: Iterable[str]) -> set[str]:
        """Those of the keys that have a dead letter."""
        where = {**self._where(shard), "keys": [*keys]}
        rows = executor.execute(self._sql["parked_keys"], where)
        return {key for (key,) in rows.fetchall()}

    def parked_records(self, executor: Executor, shard: ShardName, first: Offset, last: Offset) -> list[Record]:
        """The records from one offset to another whose keys have a dead letter."""
        where = {**self._where(shard), "first": first, "last": last}
        return make_records(shard, executor.execute(self._sql["parked_records"], where).fetchall())

    def write_member(
        self, executor: Executor, shard: ShardName, member: str, *, since_us: int, reason: str, attempts: int
    ) -> None:
        """Dead-letters a member of an Ick; one that has a dead letter keeps it."""
        executor.execute(
            self._sql["dead_letter_member"],
            {**self._where(shard), "key": member, "since": since_us, "reason": reason, "attempts": attempts},
        )

    def forget_members(self, executor: Executor, shard: ShardName, members: Sequence[str]) -> None:
        """Removes the dead letters of members that are done now."""
        executor.execute(self._sql["forget_members"], {**self._where(shard), "keys": list(members)})

    def write_job(
        self, executor: Executor, shard: ShardName, record_id: int, staged_us: int, *, reason: str, attempts: int
    ) -> bool:
        """Dead-letters a job, which is then finished; false if it was finished before."""
        values = {"id": record_id, "staged_us": staged_us, "reason": reason, "attempts": attempts}
        statement = self._sql["dead_letter_job"]
        return executor.execute(statement, {**self._where(shard), **values}).rowcount == 1
