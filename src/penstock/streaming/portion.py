"""Records of a shard on their way from the journal to Redis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.records import Offset, ShardName

PORTION_RECORDS = 500
"""Most records a portion: a script that appends so many keeps Redis busy for about 2 ms."""

PORTION_BYTES = 512 * 1024
"""Weight of payloads, as Postgres stores them, after which a portion ends early."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Records of a shard that follow each other.

    Attributes:
        shard: Where they belong.
        first: Offset of the first.
        begins: Nothing before ``first`` exists any more.
        records: Of each what ``append.lua`` takes: id, key, action, object, data, headers, time in microseconds.
    """

    shard: ShardName
    first: Offset
    begins: bool
    records: Sequence[tuple[Any, ...]]

    @property
    def last(self) -> Offset:
        """Offset of the last."""
        return Offset(self.first + len(self.records) - 1)

    @property
    def length(self) -> int:
        """Characters of its payloads."""
        return sum(len(data) for _, _, _, _, data, *_ in self.records)
