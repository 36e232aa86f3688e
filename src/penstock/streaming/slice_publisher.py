"""A publisher that sends only a few records a call: for processes that publish beside their own work."""

from collections.abc import Mapping, Sequence
from random import randrange
from typing import Any

from typing_extensions import override

from penstock.channels.log import Batch
from penstock.records import BEGINNING, Offset, ShardName
from penstock.streaming.published import Published
from penstock.streaming.publisher import Publisher


class SlicePublisher(Publisher):
    """Publishes at most ``most`` records a call; a record that has to be found among others may take a few more."""

    def __init__(self, *servers: Any, most: int, **options: Any) -> None:
        """See ``Publisher`` for the rest."""
        super().__init__(*servers, **options)
        self._most = most

    @override
    def publish(self, prefetched: Sequence[Batch] = ()) -> Published:
        whole = self.ends.journal
        usable = {shard: tail for shard, tail in whole.items() if shard not in self.unusable}
        self.ends.journal = nearest(usable, self.tails, self._most)
        try:
            return super().publish(prefetched)
        finally:
            self.ends.journal = whole


def nearest(
    target: Mapping[ShardName, Offset], tails: Mapping[ShardName, Offset], most: int
) -> dict[ShardName, Offset]:
    """A target of at most ``most`` records beyond ``tails``, beginning with any shard: none is always the last."""
    lacking = [shard for shard, tail in target.items() if tail > tails.get(shard, BEGINNING)]
    at = randrange(len(lacking)) if lacking else 0  # noqa: S311  not for secrets
    found, left = dict(target), most
    for shard in lacking[at:] + lacking[:at]:
        tail = tails.get(shard, BEGINNING)
        found[shard] = Offset(min(target[shard], tail + left))
        left -= found[shard] - tail
    return found
