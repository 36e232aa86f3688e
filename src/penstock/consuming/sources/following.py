"""Follows the log of a source, and holds back what may be of another history than the consumer has applied."""

from collections.abc import Callable, Mapping, Sequence

from penstock.batches import Records
from penstock.channels.log import Follower
from penstock.records import Offset, Record, ShardName

Confirm = Callable[[Mapping[ShardName, Records]], dict[ShardName, Records]]
"""Gives what may be applied."""


class ConfirmedFollower:
    """A follower whose records are confirmed after they were read.

    What was read ahead is dropped when something is held back: it may be of a stream that is gone.
    """

    def __init__(self, make: Callable[[], Follower], confirm: Confirm) -> None:
        self._make, self._confirm = make, confirm
        self._follower = make()

    def wait(
        self, positions: Mapping[ShardName, Offset], block_ms: int | None
    ) -> Mapping[ShardName, Sequence[Record]]:
        """As ``Follower.wait``."""
        found = self._follower.wait(positions, block_ms)
        confirmed = self._confirm(found) if found else found
        if len(confirmed) < len(found):
            self._follower.close()
            self._follower = self._make()
        return confirmed

    def request_ahead(self, positions: Mapping[ShardName, Offset]) -> None:
        """As ``Follower.request_ahead``."""
        self._follower.request_ahead(positions)

    def close(self) -> None:
        """As ``Follower.close``."""
        self._follower.close()
