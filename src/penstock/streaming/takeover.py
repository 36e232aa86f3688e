"""Takes over the work of a missing streamer, and gives it back.

No streamer asks whether another one is alive; it watches that one's work.  It takes over a stalled shard, whose log lacks
records and does not move, and ticks if records wait and no tick comes, each after a few seconds.  It gives them back as
soon as another process works on them.  A wrong guess costs work that is done twice, and nothing else.
"""

from collections.abc import Collection, Mapping
from time import monotonic

import structlog

from penstock.records import ShardName
from penstock.streaming.share import Share

log = structlog.get_logger("penstock.streamer")

TAKEOVER_S = 3.0
"""How long the work of a share must have stalled, in seconds, before the next share takes it over."""

STEP_S = 1.0
"""How much longer each further share waits, in seconds.  Otherwise all of them would take over at once."""


class ShardTakeover:
    """Shards of other shares that this streamer publishes.

    Attributes:
        taken: These shards.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._since: dict[ShardName, float] = {}
        self.taken: set[ShardName] = set()

    def update(
        self, distances: Mapping[ShardName, int], lacking: Collection[ShardName], moved: Collection[ShardName]
    ) -> None:
        """Takes over the shards that have stalled.

        Args:
            distances: How far the share of each shard is from this one.
            lacking: Shards whose log lacks records.
            moved: Shards to whose log another process has appended since the last call.
        """
        now = monotonic()
        for shard in moved:
            self.give_back(shard)
        stalled = {s for s in lacking if distances.get(s) and s not in moved} - self.taken
        self._since = {shard: self._since.get(shard, now) for shard in stalled}
        self.take([s for s, since in self._since.items() if now - since >= _patience(distances[s])])

    def take(self, shards: Collection[ShardName]) -> None:
        """Takes shards over."""
        if shards:
            self.taken.update(shards)
            log.warning(
                "taking over shards that nobody publishes",
                share=str(self._share),
                shards=[str(shard) for shard in sorted(shards)],
            )

    def give_back(self, shard: ShardName) -> None:
        """Leaves a shard to its own share, because another process has published it."""
        if shard in self.taken:
            self.taken.remove(shard)
            log.info("leaving a shard to its share", share=str(self._share), shard=str(shard))


class TickTakeover:
    """Whether this streamer ticks in place of the one that sequences.

    Attributes:
        is_ticking: Whether it does.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._since = monotonic()
        self._tick = -1
        self.is_ticking = False

    def is_due(self, tick: int, *, has_new: bool) -> bool:
        """Whether to tick now.

        Args:
            tick: The newest one.
            has_new: Whether records were committed since.
        """
        if tick != self._tick:
            self._tick, self._since = tick, monotonic()
            if self.is_ticking:
                self.is_ticking = False
                log.info("leaving the ticks to their share", share=str(self._share))
        elif not has_new:
            self._since = monotonic()
        if has_new and not self.is_ticking and self._has_waited():
            self.is_ticking = True
            log.warning("taking over the ticks, which nobody makes", share=str(self._share))
        return self.is_ticking and has_new

    def ticked(self, tick: int) -> None:
        """Notes a tick of this streamer."""
        self._tick = tick

    def _has_waited(self) -> bool:
        return monotonic() - self._since >= _patience(self._share.number - 1)


def _patience(distance: int) -> float:
    return TAKEOVER_S + (distance - 1) * STEP_S
