"""Reads records for a worker: from its log, and from the journal those that have left the log.

A log that has used up its memory evicts its oldest entries, read or not.  A consumer that is behind
them learns from one read where the log begins now, and reads the journal up to there, in bulk,
without asking Redis again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from penstock.consuming.delivery import Placed, get_offsets
from penstock.consuming.journals import Limit
from penstock.errors import Gap
from penstock.records import Offset, ShardName

Placed_co = TypeVar("Placed_co", covariant=True)

Positions = Mapping[ShardName, Offset]

MAX_HELD_RECORDS = 20_000
"""Limit of the records held of all shards together, unless a batch has more."""

MAX_HELD_BYTES = 32 * 1024 * 1024
"""Approximate limit of their payloads, in bytes as Postgres stores them."""

ReadJournal = Callable[[ShardName, Offset, Offset, Limit], Sequence[Placed]]
"""Reads the first records between two offsets, both excluded; ``Gap`` if the journal lacks the
first of them."""

Confirm = Callable[[Mapping[ShardName, Sequence[Placed]]], Mapping[ShardName, Sequence[Placed]]]
"""Returns the records that may be applied."""


class EvictedRecords(Generic[Placed]):
    """The shards of a consumer that are behind the first entry of their log."""

    def __init__(self, read: ReadJournal[Placed], *, batch: int) -> None:
        """Sets up; ``batch`` limits the records of a shard that ``take`` returns."""
        self._read_journal, self._batch = read, batch
        self._begins: dict[ShardName, Offset] = {}
        self._held: dict[ShardName, Sequence[Placed]] = {}

    def note(self, shard: ShardName, position: Offset, first: Offset) -> bool:
        """Notes where the log of a shard begins.

        Returns whether the journal has the record after a position.
        """
        self._begins[shard] = first
        return bool(self._read(shard, position))

    def is_behind(self, shard: ShardName, position: Offset) -> bool:
        """Returns whether the record after a position is known not to be in the log."""
        return shard in self._begins and position + 1 < self._begins[shard]

    def take(self, positions: Positions) -> dict[ShardName, Sequence[Placed]]:
        """Returns the next records of shards that are behind, as far as the journal has them."""
        for shard in [s for s, position in positions.items() if not self.is_behind(s, position)]:
            self.forget(shard)
        behind = {shard: position for shard, position in positions.items() if shard in self._begins}
        batches = {shard: self._read(shard, position) for shard, position in behind.items()}
        return {shard: records for shard, records in batches.items() if records}

    def join(self, records: Sequence[Placed], following: Sequence[Placed]) -> Sequence[Placed]:
        """Joins records of the journal and those of the log that come right after them.

        Returns no more than are delivered at once.
        """
        if records[-1].offset + 1 != following[0].offset:
            return records
        return [*records, *following[: self._batch - len(records)]]

    def _read(self, shard: ShardName, position: Offset) -> Sequence[Placed]:
        records = self._held.get(shard, ())
        first = records[0].offset if records else position + 2
        if not first <= position + 1 < first + len(records):
            share = len(self._begins)
            limit = Limit(max(self._batch, MAX_HELD_RECORDS // share), MAX_HELD_BYTES // share)
            try:
                records = self._read_journal(shard, position, self._begins[shard], limit)
                first = position + 1
            except Gap:
                self.forget(shard)
                return ()
            self._held[shard] = records
        begin = position + 1 - first
        return records[begin : begin + self._batch]

    def forget(self, shard: ShardName) -> None:
        """Drops the records of a shard, and where its log begins."""
        self._begins.pop(shard, None)
        self._held.pop(shard, None)


class LogReaderProtocol(Protocol[Placed_co]):
    """Reads records of a log: see ``Follower``."""

    def wait(
        self, positions: Positions, block_ms: int | None, /
    ) -> Mapping[ShardName, Sequence[Placed_co]]:
        """Returns the records after each position; waits up to ``block_ms`` for the first one."""

    def request_ahead(self, positions: Positions, /) -> None:
        """Requests the records after the positions for the next ``wait``."""

    def close(self) -> None:
        """Releases its records."""


class JournalFollower(Generic[Placed]):
    """Follows the log, and reads from the journal the records that the log has evicted.

    A gap that the journal cannot fill either is returned as it is: the delivery compares it with
    the checkpoint.  ``journaled`` is the number of records of a shard, its first, that came from
    the journal last.
    """

    def __init__(
        self,
        follow: Callable[[], LogReaderProtocol[Placed]],
        evicted: EvictedRecords[Placed],
        confirm: Confirm[Placed],
    ) -> None:
        """Sets up; ``confirm`` gets the records of log and journal after they were read."""
        self._follow, self._evicted, self._confirm = follow, evicted, confirm
        self._log = follow()
        self.journaled: dict[ShardName, int] = {}

    def wait(
        self, positions: Positions, block_ms: int | None
    ) -> Mapping[ShardName, Sequence[Placed]]:
        """Returns the records after each of ``positions``.

        It waits up to ``block_ms`` for the first one, or not at all if that is None.  What was read
        ahead is dropped when some records are held back: it may be of a stream that is gone.
        """
        records = self._read(positions, block_ms)
        confirmed = self._confirm(records) if records else records
        if len(confirmed) < len(records):
            self._log.close()
            self._log = self._follow()
        return confirmed

    def _read(
        self, positions: Positions, block_ms: int | None
    ) -> Mapping[ShardName, Sequence[Placed]]:
        journaled = self._evicted.take(positions)
        logged: dict[ShardName, Sequence[Placed]] = {}
        beyond: dict[ShardName, Sequence[Placed]] = {}
        if others := {
            shard: position for shard, position in positions.items() if shard not in journaled
        }:
            answers = self._log.wait(others, None if journaled else block_ms)
            logged = {
                s: records for s, records in answers.items() if self._follows(s, others[s], records)
            }
            beyond = {s: records for s, records in answers.items() if s not in logged}
            journaled |= self._evicted.take(
                {s: position for s, position in others.items() if s not in logged}
            )
        self.journaled = {shard: len(records) for shard, records in journaled.items()}
        for shard, records in beyond.items():
            journaled[shard] = self._evicted.join(journaled[shard], records)
        return {**journaled, **logged}

    def request_ahead(self, positions: Positions) -> None:
        """Requests records of the shards that the log has: see ``Follower.request_ahead``."""
        behind = self._evicted.is_behind
        self._log.request_ahead(
            {s: position for s, position in positions.items() if not behind(s, position)}
        )

    def close(self) -> None:
        """Closes the log's follower."""
        self._log.close()

    def _follows(self, shard: ShardName, position: Offset, records: Sequence[Placed]) -> bool:
        """Returns whether records follow a position, or the journal lacks what comes between."""
        first = get_offsets(records)[0]
        return first <= position + 1 or not self._evicted.note(shard, position, first)
