"""Where a worker gets records from: its log, and the journal for what has left the log."""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from penstock.consuming.delivery import Placed, get_offsets
from penstock.consuming.log.evicted import Evicted
from penstock.records import Offset, ShardName

Placed_co = TypeVar("Placed_co", covariant=True)

Positions = Mapping[ShardName, Offset]


class Follows(Protocol[Placed_co]):
    """What a worker asks for records: see ``Follower``."""

    def wait(self, positions: Positions, block_ms: int | None, /) -> Mapping[ShardName, Sequence[Placed_co]]:
        """Records after each position; waits up to ``block_ms`` for the first one."""

    def request_ahead(self, positions: Positions, /) -> None:
        """Requests the records after the positions for the next ``wait``."""

    def close(self) -> None:
        """Releases what it holds."""


class JournalFollower(Generic[Placed]):
    """Follows the log, and reads from the journal what the log has evicted.

    A gap that the journal cannot fill either is returned as it is: the delivery compares it with the checkpoint.

    Attributes:
        journaled: How many records of a shard, its first, came from the journal last.
    """

    def __init__(self, log: Follows[Placed], evicted: Evicted[Placed]) -> None:
        self._log: Follows[Placed] = log
        self._evicted = evicted
        self.journaled: dict[ShardName, int] = {}

    def wait(self, positions: Positions, block_ms: int | None) -> Mapping[ShardName, Sequence[Placed]]:
        """Records after each of ``positions``; waits up to ``block_ms`` for the first one, or not at all if that is None.

        Raises:
            ServerUnavailable: Redis or Postgres does not answer.
            ForeignLog: As ``Follower.wait``.
        """
        journaled = self._evicted.take(positions)
        logged: dict[ShardName, Sequence[Placed]] = {}
        beyond: dict[ShardName, Sequence[Placed]] = {}
        if others := {shard: at for shard, at in positions.items() if shard not in journaled}:
            found = self._log.wait(others, None if journaled else block_ms)
            logged = {s: each for s, each in found.items() if self._follows(s, others[s], each)}
            beyond = {s: each for s, each in found.items() if s not in logged}
            journaled |= self._evicted.take({s: at for s, at in others.items() if s not in logged})
        self.journaled = {shard: len(each) for shard, each in journaled.items()}
        for shard, records in beyond.items():
            journaled[shard] = self._evicted.join(journaled[shard], records)
        return {**journaled, **logged}

    def request_ahead(self, positions: Positions) -> None:
        """As ``Follower.request_ahead``, for the shards that the log has."""
        behind = self._evicted.is_behind
        self._log.request_ahead({s: at for s, at in positions.items() if not behind(s, at)})

    def close(self) -> None:
        """Closes the log's follower."""
        self._log.close()

    def _follows(self, shard: ShardName, after: Offset, records: Sequence[Placed]) -> bool:
        """Whether records come right after a position, or the journal does not have what comes between."""
        first = get_offsets(records)[0]
        return first <= after + 1 or not self._evicted.note(shard, after, first)
