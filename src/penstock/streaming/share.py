"""The share of a streamer: shards that it publishes beside other streamers, and its takeovers.

A share divides work; it excludes nobody.  Compare and append makes any number of publishers of one
shard harmless.  No streamer asks whether another one is alive; it watches that one's work.  It
takes over a stalled shard, whose log lacks records and does not move, and ticks if records wait and
no tick comes, each after a few seconds.  It gives them back as soon as another process works on
them.  A wrong guess costs work that is done twice, and nothing else.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

import structlog

from penstock.errors import InvalidSetting
from penstock.records import ShardName

IDLE_S = 0.025
"""Longest pause between two rounds that found nothing, in seconds."""

BUSY_PAUSE_S = 0.0005
"""Shortest pause between two rounds without a backlog, in seconds.  Records committed meanwhile go
together: at a thousand records a second they arrive earlier than one by one, which would keep both
servers busy with the rounds themselves."""

PAUSE_FOR_EACH_S = 0.0001
"""Pause for each record of a round, in seconds: with many records, fewer and larger rounds leave
the processors to others."""

GATHERING_S = 0.005
"""Longest pause after a round that found something, in seconds: it adds to the latency of the next
records."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Result of one round of the streamer."""

    sequenced: int = 0  # records that got their offset
    added: int = 0  # records that were new to the log
    known: int = 0  # records sent that the log already had
    removed: int = 0  # staged records that retention removed
    # records that the journal has and the usable logs of the streamer's share lack
    backlog: int = 0

    @property
    def idle(self) -> bool:
        """Returns whether nothing was done and nothing waits."""
        return not (self.sequenced or self.added or self.known or self.backlog)


def pause_after(result: RoundResult, pause_s: float, idle_s: float) -> float:
    """Returns the pause after a round, in seconds, given the pause before it and the longest."""
    if result.backlog:
        return 0.0
    longer_s = pause_s * 1.5 if result.idle else min(GATHERING_S, result.added * PAUSE_FOR_EACH_S)
    return min(idle_s, max(BUSY_PAUSE_S, longer_s))


MAX_SHARES = 1000
_SHARE = re.compile(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class Share:
    """One of several equal shares; the first of them also sequences."""

    number: int = 1  # from 1 to ``of``
    of: int = 1  # number of shares

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def is_whole(self) -> bool:
        """Returns whether there are no other shares."""
        return self.of == 1

    @property
    def sequences(self) -> bool:
        """Returns whether its streamer gives new records their offsets."""
        return self.number == 1

    def distances(self, shards: Iterable[ShardName]) -> dict[ShardName, int]:
        """Returns the distance of each shard's share from this one.

        It is 0 for its own shards, 1 for those of the share before it, and so on.  Shards are dealt
        out in the order of their names, so all streamers compute the same.
        """
        return {
            shard: (self.number - 1 - position) % self.of
            for position, shard in enumerate(sorted(shards))
        }


WHOLE = Share()


def parse_share(text: str) -> Share:
    """Returns the share that a text such as ``1/2`` names."""
    match = _SHARE.fullmatch(text.strip())
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count <= MAX_SHARES:
        raise InvalidSetting(
            f"share {text!r}: give the number of the share and the number of all shares, such as "
            f"1/2 or 2/2; at most {MAX_SHARES} shares"
        )
    return Share(number, count)


log = structlog.get_logger("penstock.streamer")

TAKEOVER_S = 3.0
"""Seconds of stalled work of a share before the next share takes it over."""

STEP_S = 1.0
"""Additional seconds for each further share, so that they do not take over at once."""


class ShardTakeover:
    """Shards of other shares that this streamer has ``taken``, and publishes."""

    def __init__(self, share: Share, clock: Callable[[], float] = monotonic) -> None:
        self._share, self._clock = share, clock
        self._since: dict[ShardName, float] = {}
        self.taken: set[ShardName] = set()

    def update(
        self,
        distances: Mapping[ShardName, int],
        lacking: Collection[ShardName],
        moved_shards: Collection[ShardName],
    ) -> None:
        """Takes over the shards that have stalled."""
        now = self._clock()
        for shard in moved_shards:
            self.give_back(shard)
        stalled = {s for s in lacking if distances.get(s) and s not in moved_shards} - self.taken
        self._since = {shard: self._since.get(shard, now) for shard in stalled}
        self.take([s for s, since in self._since.items() if now - since >= _patience(distances[s])])

    def take(self, shards: Collection[ShardName]) -> None:
        """Takes shards over."""
        if shards:
            self.taken.update(shards)
            log.warning(
                "taking over shards",
                share=str(self._share),
                shards=[str(shard) for shard in sorted(shards)],
            )

    def give_back(self, shard: ShardName) -> None:
        """Returns a shard to its own share, because another process has published it."""
        if shard in self.taken:
            self.taken.remove(shard)
            log.info("giving back shard", share=str(self._share), shard=str(shard))


class TickTakeover:
    """Decides whether this streamer ticks in place of the one that sequences."""

    def __init__(self, share: Share, clock: Callable[[], float] = monotonic) -> None:
        self._share, self._clock = share, clock
        self._since = clock()
        self._tick = -1
        self.is_ticking = False

    def is_due(self, tick: int, *, has_new: bool) -> bool:
        """Returns whether a tick is due now."""
        if tick != self._tick:
            self._tick, self._since = tick, self._clock()
            if self.is_ticking:
                self.is_ticking = False
                log.info("giving back ticks", share=str(self._share))
        elif not has_new:
            self._since = self._clock()
        if not self.is_ticking and self._has_waited():
            self.is_ticking = True
            log.warning("taking over ticks", share=str(self._share))
        return self.is_ticking and has_new

    def ticked(self, tick: int) -> None:
        """Notes a tick of this streamer."""
        self._tick = tick

    def _has_waited(self) -> bool:
        return self._clock() - self._since >= _patience(self._share.number - 1)


def _patience(distance: int) -> float:
    return TAKEOVER_S + (distance - 1) * STEP_S
