"""Follows the log of a source, and holds back what may be of another history than the consumer has applied."""

from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from penstock.channels.log import Follower
from penstock.consuming.evicted import Evicted
from penstock.consuming.following import JournalFollower
from penstock.records import Offset, Record, ShardName

Confirm = Callable[[Mapping[ShardName, Sequence[Record]]], Mapping[ShardName, Sequence[Record]]]
"""Gives what may be applied."""


class ConfirmedFollower(JournalFollower[Record]):
    """A follower whose records, of the log or of the source's journal, are confirmed after they were read.

    What was read ahead is dropped when something is held back: it may be of a stream that is gone.
    """

    def __init__(self, make: Callable[[], Follower], evicted: Evicted[Record], confirm: Confirm) -> None:
        super().__init__(make(), evicted)
        self._make, self._confirm = make, confirm

    @override
    def wait(self, positions: Mapping[ShardName, Offset], block_ms: int | None) -> Mapping[ShardName, Sequence[Record]]:
        found = super().wait(positions, block_ms)
        confirmed = self._confirm(found) if found else found
        if len(confirmed) < len(found):
            self._log.close()
            self._log = self._make()
        return confirmed
