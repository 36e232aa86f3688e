"""The share of a streamer: which shards it publishes beside other streamers of the same pipeline.

A share divides work; it excludes nobody.  Compare and append makes any number of publishers of one shard harmless, and each
streamer watches the other shares and takes over what nobody does: see ``takeover``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import InvalidSetting
from penstock.records import ShardName

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
