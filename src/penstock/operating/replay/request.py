"""What is to be replayed, as values."""

import json
from dataclasses import dataclass
from datetime import datetime

from penstock.records import Moment, Offset, Place, Shard


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What an operator asks for.

    Attributes:
        channel: The log whose records are copied.
        target: The log, queue or Ick that the copies go to.
        start: The first offset, in each shard or in that of a place; or a time: only records staged then or later.
            None begins with the oldest record that is kept.
        end: The last offset; or a time: only records staged before it.  None ends with the newest record, as of the begin.
        key: Only records of this key.
        shard: Only this shard.
    """

    channel: str
    target: str
    start: Offset | Place | Moment | None = None
    end: Offset | Place | Moment | None = None
    key: str | None = None
    shard: int | None = None

    @property
    def text(self) -> str:
        """What is chosen, by which an interrupted replay is found again, with the channels."""
        parts = {name: getattr(self, name) for name in ("start", "end", "key", "shard")}
        given = {
            name: part if isinstance(part, int | str) else str(part) for name, part in parts.items() if part is not None
        }
        return json.dumps(given, sort_keys=True)

    @property
    def only_shard(self) -> Shard | None:
        """The shard that is named, by itself or in a place."""
        for place in (self.start, self.end):
            if isinstance(place, Place):
                return place.shard.shard
        return None if self.shard is None else Shard(self.shard)


@dataclass(frozen=True, slots=True)
class ReplayedShard:
    """What is replayed of a shard.

    Attributes:
        shard: Its number.
        first: The first offset.
        last: The last offset.
        done: Up to which offset it is done; one less than ``first`` before the begin.
    """

    shard: int
    first: int
    last: int
    done: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay, planned or carried out.

    Attributes:
        replay: Its number; None if it has not begun.
        channel: The log.
        target: Where the copies go.
        shards: What is replayed of each shard.
        records: Records that are still to be copied.
        staged: Copies that are staged.
        since: Only records staged at this time or later are copied; None copies all.
        until: Only records staged before this time are copied; None copies all.
        ended_at: When it was done; None if it is not.
    """

    replay: int | None
    channel: str
    target: str
    shards: tuple[ReplayedShard, ...]
    records: int
    staged: int = 0
    since: datetime | None = None
    until: datetime | None = None
    ended_at: datetime | None = None
