"""The share of a streamer: which shards it publishes beside other streamers of the same pipeline.

A share divides work; it excludes nobody.  Compare and append makes any number of publishers of one shard harmless, and each
streamer watches the other shares and takes over what nobody does: see ``takeover``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import InvalidSetting
from penstock.records import ShardName

IDLE_S = 0.025
"""Longest pause between two rounds that found nothing, in seconds."""

BUSY_PAUSE_S = 0.0005
"""Shortest pause between two rounds without a backlog, in seconds.  Records committed meanwhile go together: at a thousand
records a second they arrive earlier than one by one, which would keep both servers busy with the rounds themselves."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Result of one round of the streamer.

    Attributes:
        sequenced: Records that got their offset.
        added: Records that were new to the log.
        known: Records sent that the log already had.
        removed: Staged records that retention removed.
        backlog: Records that the journal has and the usable logs of the streamer's share lack.
    """

    sequenced: int = 0
    added: int = 0
    known: int = 0
    removed: int = 0
    backlog: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing was done and nothing waits."""
        return not (self.sequenced or self.added or self.known or self.backlog)


def pause_after(done: RoundResult, pause_s: float, idle_s: float) -> float:
    """The pause after a round, in seconds, given the pause before it and the longest."""
    if done.backlog:
        return 0.0
    return min(idle_s, max(BUSY_PAUSE_S, pause_s * 1.5) if done.idle else BUSY_PAUSE_S)


MOST_SHARES = 1000
_SHARE = re.compile(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class Share:
    """One of several equal shares; the first of them also sequences.

    Attributes:
        number: From 1 to ``of``.
        of: Number of shares.
    """

    number: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def is_whole(self) -> bool:
        """Whether there are no other shares."""
        return self.of == 1

    @property
    def sequences(self) -> bool:
        """Whether its streamer gives new records their offsets."""
        return self.number == 1

    def distances(self, shards: Iterable[ShardName]) -> dict[ShardName, int]:
        """How far each shard's share is from this one: 0 for its own shards, 1 for those of the share before it, and so on.

        Shards are dealt out in the order of their names, so all streamers compute the same.
        """
        return {shard: (self.number - 1 - position) % self.of for position, shard in enumerate(sorted(shards))}


WHOLE = Share()


def parse_share(text: str) -> Share:
    """The share that a text such as ``1/2`` names.

    Raises:
        InvalidSetting: It names none.
    """
    found = _SHARE.fullmatch(text.strip())
    number, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= of <= MOST_SHARES:
        raise InvalidSetting(
            f"share {text!r}: give a number and how many shares there are, such as 1/2 and 2/2; at most {MOST_SHARES} shares"
        )
    return Share(number, of)
