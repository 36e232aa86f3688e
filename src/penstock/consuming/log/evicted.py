"""Reads what has left Redis from the journal, in bulk, until a shard is where its log begins.

A log that has used up its memory evicts its oldest entries, read or not.  A consumer that is behind them learns from one
read where the log begins now, and reads the journal up to there without asking Redis again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from penstock.consuming.delivery import Placed
from penstock.consuming.log.offset_source import Most
from penstock.errors import Gap
from penstock.records import Offset, ShardName

RECORDS_HELD = 20_000
"""Most records that are held of all shards together, unless a batch has more."""

BYTES_HELD = 32 * 1024 * 1024
"""About how many bytes their payloads may have, as Postgres stores them."""

Positions = Mapping[ShardName, Offset]

ReadJournal = Callable[[ShardName, Offset, Offset, Most], Sequence[Placed]]
"""Reads the first records between two offsets, both excluded.  Raises ``Gap`` if the journal lacks the first of them."""


class Evicted(Generic[Placed]):
    """The shards of a consumer that are behind the first entry of their log."""

    def __init__(self, read: ReadJournal[Placed], *, batch: int) -> None:
        """Sets up.

        Args:
            read: Reads the journal.
            batch: Most records of a shard that ``take`` returns.
        """
        self._read_journal, self._batch = read, batch
        self._begins: dict[ShardName, Offset] = {}
        self._held: dict[ShardName, Sequence[Placed]] = {}

    def note(self, shard: ShardName, after: Offset, begins: Offset) -> bool:
        """Notes where the log of a shard begins; whether the journal has what comes after a position.

        Raises:
            ServerUnavailable: Postgres does not answer.
        """
        self._begins[shard] = begins
        return bool(self._read(shard, after))

    def is_behind(self, shard: ShardName, after: Offset) -> bool:
        """Whether the record after a position is known not to be in the log."""
        return shard in self._begins and after + 1 < self._begins[shard]

    def take(self, positions: Positions) -> dict[ShardName, Sequence[Placed]]:
        """The next records of those shards that are behind, from the journal.

        A shard whose journal has them no more is left out, and forgotten.

        Raises:
            ServerUnavailable: Postgres does not answer.
        """
        for shard in [s for s, at in positions.items() if not self.is_behind(s, at)]:
            self.forget(shard)
        behind = {shard: at for shard, at in positions.items() if shard in self._begins}
        found = {shard: self._read(shard, after) for shard, after in behind.items()}
        return {shard: records for shard, records in found.items() if records}

    def join(self, records: Sequence[Placed], following: Sequence[Placed]) -> Sequence[Placed]:
        """Records of the journal, and those of the log if they come right after them: no more than are delivered at once."""
        if records[-1].offset + 1 != following[0].offset:
            return records
        return [*records, *following[: self._batch - len(records)]]

    def _read(self, shard: ShardName, after: Offset) -> Sequence[Placed]:
        held = self._held.get(shard, ())
        first = held[0].offset if held else after + 2
        if not first <= after + 1 < first + len(held):
            share = len(self._begins)
            most = Most(max(self._batch, RECORDS_HELD // share), BYTES_HELD // share)
            try:
                held, first = self._read_journal(shard, after, self._begins[shard], most), after + 1
            except Gap:
                self.forget(shard)
                return ()
            self._held[shard] = held
        begin = after + 1 - first
        return held[begin : begin + self._batch]

    def forget(self, shard: ShardName) -> None:
        """Drops what is held of a shard, and where its log begins."""
        self._begins.pop(shard, None)
        self._held.pop(shard, None)
