"""Ends of the journal and of each shard's log, as last known; shards published or skipped."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic

import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import UnusableShards, ask_each
from penstock.channels.log.streams import extents
from penstock.database.driver_errors import describe
from penstock.database.registry import RegisteredChannel
from penstock.database.store import Store
from penstock.errors import PenstockError
from penstock.journal.journal_reader import registered_tails
from penstock.journal.lineage import check_tails
from penstock.observer import Observers, ShardStopped
from penstock.records import BEGINNING, Offset, ShardName
from penstock.streaming.share import ShardTakeover, Share
from penstock.streaming.unpublished import count_missing

log = structlog.get_logger("penstock.streamer")


def make_unusable(observers: Observers, clock: Callable[[], float] = monotonic) -> UnusableShards:
    """Returns the unusable shards of a streamer, reported to observers and the log."""

    def say(shard: ShardName, error: PenstockError | None, retry_s: float) -> None:
        if error is None:
            log.info("shard usable again", shard=str(shard))
        else:
            log.error("shard unusable", shard=str(shard), reason=describe(error), retry_s=retry_s)

    def note(shard: ShardName, error: PenstockError) -> None:
        observers(ShardStopped(shard.channel, shard.shard, type(error).__name__))

    return UnusableShards(say, note, clock)


class Tails:
    """Tails of all shards of registered channels, in the journal and in the log.

    A producer can write any name.  ``unusable`` shards are left out.
    """

    def __init__(
        self, store: Store, client: RedisClient, share: Share, unusable: UnusableShards
    ) -> None:
        self._store, self._client = store, client
        self._share, self._takeover = share, ShardTakeover(share)
        self._distances: dict[ShardName, int] = {}
        self._channels: Mapping[str, RegisteredChannel] = {}
        self._moved: set[ShardName] = set()
        self.journal: dict[ShardName, Offset] = {}
        self.log: dict[ShardName, Offset] = {}
        self.unusable = unusable

    def update(self, channels: Mapping[str, RegisteredChannel]) -> None:
        """Takes the registered channels."""
        shards = [shard for channel in channels.values() for shard in channel.shard_names]
        self._distances = self._share.distances(shards)
        self._channels = channels

    @property
    def kinds(self) -> Collection[str]:
        """Returns the kinds of all channels."""
        return {channel.kind for channel in self._channels.values()}

    def kind(self, shard: ShardName) -> str:
        """Returns the kind of the shard's channel."""
        return self._channels[shard.channel].kind if shard.channel in self._channels else "log"

    def entries(self, shard: ShardName) -> str:
        """Returns the form of a log's entries: see ``Batch.stored_as``."""
        return self._channels[shard.channel].entries if shard.channel in self._channels else "plain"

    @property
    def packed(self) -> Collection[str]:
        """Returns the channels whose entries hold whole batches."""
        return {name for name, channel in self._channels.items() if channel.entries != "plain"}

    @property
    def taken(self) -> Collection[ShardName]:
        """Returns the shards of other shares that this publisher has taken over."""
        return self._takeover.taken

    def is_own(self, shard: ShardName) -> bool:
        """Returns whether this publisher reads the shard from the journal."""
        return self._distances.get(shard) == 0 or shard in self.taken

    @property
    def known(self) -> list[ShardName]:
        """Returns all shards, of every share."""
        return list(self._distances)

    @property
    def others(self) -> list[ShardName]:
        """Returns the shards of other shares that this publisher has not taken over."""
        return [shard for shard in self._distances if not self.is_own(shard)]

    @property
    def own(self) -> list[ShardName]:
        """Returns the shards that this publisher reads from the journal."""
        return [shard for shard in self._distances if self.is_own(shard)]

    def targets(self, kind: str) -> dict[ShardName, Offset]:
        """Returns the targets of this publisher's own usable shards of a kind."""
        return {s: tail for s, tail in self._usable_targets().items() if self.kind(s) == kind}

    @property
    def backlog(self) -> int:
        """Returns the number of records that the journal has and those logs lack."""
        return count_missing(self._usable_targets(), self.log)

    @property
    def lacking(self) -> list[ShardName]:
        """Returns the shards with such a backlog."""
        return [shard for shard in self.journal if self.is_own(shard) and self._lacks(shard)]

    def _lacks(self, shard: ShardName) -> bool:
        """Returns whether the log can be used, and lacks records."""
        has_more = self.journal[shard] > self.log.get(shard, BEGINNING)
        return has_more and shard not in self.unusable

    def _usable_targets(self) -> dict[ShardName, Offset]:
        return {
            shard: tail
            for shard, tail in self.journal.items()
            if self.is_own(shard) and shard not in self.unusable
        }

    def advance_target(
        self, tails: Mapping[ShardName, Offset], firsts: Mapping[ShardName, Offset] | None = None
    ) -> None:
        """Publishes up to ``tails`` from now on, the new ends of the journal from a tick.

        ``firsts`` are the first new offsets: if the log has one of them already, rows of the
        journal were deleted.
        """
        for shard in tails.keys() & self._distances.keys():
            self.journal[shard] = max(tails[shard], self.journal.get(shard, BEGINNING))
        overwritten = [
            s for s, first in (firsts or {}).items() if first <= self.log.get(s, BEGINNING)
        ]
        self.check([shard for shard in overwritten if shard not in self.unusable])

    def read(self, shards: Iterable[ShardName]) -> None:
        """Reads the end of the journal, and the ends of the logs of some shards.

        The target becomes what the journal has, even if that is less than before: rows that were
        deleted by hand will never be published.
        """
        self.journal = registered_tails(self._store)
        tails = self.read_logs([shard for shard in shards if shard not in self.unusable])
        self._moved.update(
            shard
            for shard, tail in tails.items()
            if tail > self.log.get(shard, tail) or tail > self.journal.get(shard, BEGINNING)
        )
        self.log.update(tails)

    def read_logs(self, shards: Sequence[ShardName]) -> dict[ShardName, Offset]:
        """Returns the ends of the logs of usable shards."""
        read = partial(extents, self._client, self._store.scope.namespace)
        found_extents = ask_each(read, shards, self.unusable.add)
        return {shard: extent.tail for shard, extent in found_extents.items()}

    def check_moved(self) -> None:
        """Checks the logs that moved without this publisher, and takes over stalled shards.

        Another publisher has written, or something else: a log that is ahead would never get what
        the journal has.
        """
        moved_shards, self._moved = self._moved, set()
        self.check([shard for shard in moved_shards if shard not in self.unusable])
        lacking = {shard for shard in self.journal if self._lacks(shard)}
        self._takeover.update(self._distances, lacking, moved_shards)

    def take_over(self, distance: int) -> None:
        """Takes over the shards of the share at this distance, whose streamer is missing."""
        self._takeover.take(
            [s for s, shard_distance in self._distances.items() if shard_distance == distance]
        )

    def check(self, shards: Sequence[ShardName]) -> None:
        """Leaves out shards whose log does not end as their journal does, or before it.

        The last record has to be the same.
        """
        if shards:
            check_tails(self._store, self._client, shards, self.unusable.add)

    def move(self, shard: ShardName, tail: Offset, *, by_another: bool) -> None:
        """Takes the end of a log from a reply."""
        self.log[shard] = tail
        if by_another:
            self._takeover.give_back(shard)
