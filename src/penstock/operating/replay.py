"""Replays a range of a log, or a key, into another channel: copies are staged there as new records.

They are staged in batches of a shard, each in one transaction with the progress, so that none is
doubled or left out.

A replay is a consumer of the log whose effect is staging: it has a checkpoint in each shard, named
``replay-3``, for which retention waits, which ``penstock status`` shows, and which is deleted at
its end.  The copies of a shard are committed in their order, so those of a key keep it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import structlog

from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.store import Store
from penstock.display import format_count
from penstock.errors import DamagedJournal, NotReplayable, Unknown
from penstock.journal.journal_reader import Since, journal_bounds, offsets_since
from penstock.operating.channels import unknown_channel
from penstock.records import Moment, Offset, Place, Shard, ShardName

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The request of an operator."""

    channel: str  # the log whose records are copied
    target: str  # the log, queue or Ick that the copies go to
    # The first offset, in each shard or in that of a place; or a time: only records staged then or
    # later. None begins with the oldest record that is kept.
    start: Offset | Place | Moment | None = None
    # The last offset; or a time: only records staged before it.  None ends with the newest record,
    # as of the begin.
    end: Offset | Place | Moment | None = None
    key: str | None = None
    shard: int | None = None

    @property
    def text(self) -> str:
        """Returns the choice of records; with the channels, it identifies an interrupted replay."""
        parts = {name: getattr(self, name) for name in ("start", "end", "key", "shard")}
        chosen = {
            name: part if isinstance(part, int | str) else str(part)
            for name, part in parts.items()
            if part is not None
        }
        return json.dumps(chosen, sort_keys=True)

    @property
    def only_shard(self) -> Shard | None:
        """Returns the shard that is named, by itself or in a place."""
        if self.shard is not None:
            return Shard(self.shard)
        for place in (self.start, self.end):
            if isinstance(place, Place):
                return place.shard.shard
        return None


@dataclass(frozen=True, slots=True)
class ReplayedShard:
    """The range of a shard that is replayed; ``done`` begins with the offset before the range."""

    shard: int
    first: int
    last: int
    done: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay, planned or carried out."""

    replay: int | None  # its number; None if it has not begun
    channel: str
    target: str
    shards: tuple[ReplayedShard, ...]  # the range of each shard
    records: int  # records that are still to be copied
    staged: int = 0
    # only records staged at this time or later are copied; None copies all
    since: datetime | None = None
    # only records staged before this time are copied; None copies all
    until: datetime | None = None
    ended_at: datetime | None = None  # time of its end; None if it goes on


BATCH = 5_000
"""Most records of a transaction."""


def replay(
    store: Store,
    request: ReplayRequest,
    *,
    apply: bool = False,
    again: bool = False,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Replay:
    """Plans a replay; with ``apply``, carries it out, or goes on with an interrupted one."""
    run = _ReplayRun(store, request)
    existing = run.find()
    if again and existing is not None and existing.ended_at is not None:
        existing = None
    if not apply:
        return run.count(existing or run.plan())
    if existing is not None and existing.ended_at is not None:
        raise NotReplayable(
            f"the same replay has already been carried out, as replay {existing.replay}, on "
            f"{existing.ended_at:%Y-%m-%d %H:%M:%S} (UTC): {existing.staged:,} copies. To copy all "
            "records again: --again"
        )
    return run.carry_out(run.count(existing or run.begin()), on_batch)


class _ReplayRun:
    def __init__(self, store: Store, request: ReplayRequest) -> None:
        self._store, self._request = store, request
        self._names = {
            "channel": request.channel,
            "target": request.target,
            "request": request.text,
        }
        channels = registered_channels(store)
        for name in (request.channel, request.target):
            if name not in channels:
                raise unknown_channel(store, name)
        self._source = channels[request.channel]
        _check_kinds(self._source, channels[request.target])

    def find(self) -> Replay | None:
        """Returns the newest replay of the same request, if there is one."""
        rows = self._rows("find_replay", self._names)
        for number, shards, firsts, lasts, staged, since, until, ended_at, offsets in rows:
            progress = offsets if len(offsets) == len(shards) else lasts
            if ended_at is None and progress is lasts:
                return None  # its checkpoints were retired: it is over
            ranges = tuple(map(ReplayedShard, shards, firsts, lasts, progress))
            return Replay(
                number,
                self._request.channel,
                self._request.target,
                ranges,
                0,
                staged,
                since,
                until,
                ended_at,
            )
        return None

    def plan(self) -> Replay:
        """Returns the plan of a new replay, without the number of records."""
        return self._plan_ranges(*self._find_times())

    def _find_times(self) -> list[Mapping[ShardName, Since]]:
        """Returns the offsets at which the records begin and end, if times were given."""
        return [
            offsets_since(self._store, self._source.shard_names, limit)
            if isinstance(limit, datetime | timedelta)
            else {}
            for limit in (self._request.start, self._request.end)
        ]

    def _plan_ranges(
        self, starts: Mapping[ShardName, Since], end_times: Mapping[ShardName, Since]
    ) -> Replay:
        shards = list(self._source.shard_names)
        only = self._request.only_shard
        if only is not None:
            shards = [shard for shard in shards if shard.shard == only]
        for place in (self._request.start, self._request.end):
            if isinstance(place, Place) and place.shard not in shards:
                raise Unknown(
                    f"{place} is not in {self._request.channel}, or not in the shard of --shard"
                )
        if not shards:
            raise Unknown(f"channel {self._request.channel} has no shard {only}")
        bounds = journal_bounds(self._store, shards)
        ranges = [self._plan_shard(starts, shard, *bounds[shard]) for shard in shards]
        return Replay(
            None,
            self._source.name,
            self._request.target,
            tuple(range_ for range_ in ranges if range_.first <= range_.last),
            0,
            since=next((range_.at for range_ in starts.values()), None),
            until=next((range_.at for range_ in end_times.values()), None),
        )

    def _plan_shard(
        self, starts: Mapping[ShardName, Since], name: ShardName, oldest: int, newest: int
    ) -> ReplayedShard:
        first, last = oldest, newest
        if name in starts:
            first = max(oldest, starts[name].before + 1)
        elif (offset := _get_offset(self._request.start)) is not None:
            if max(1, offset) < oldest:
                raise NotReplayable(
                    f"{name}: retention has removed the records before offset {oldest}; they "
                    f"cannot be replayed from {offset} on"
                )
            first = max(1, offset)
        if (offset := _get_offset(self._request.end)) is not None:
            last = min(newest, offset)
        return ReplayedShard(name.shard, first, last, first - 1)

    def count(self, planned: Replay) -> Replay:
        """Returns the replay with the number of records that are still to be copied.

        With a filter, it reads all of the range.
        """
        if planned.ended_at:
            return replace(planned, records=0)
        if not self._request.key and not planned.since and not planned.until:
            return replace(
                planned, records=sum(max(0, range_.last - range_.done) for range_ in planned.shards)
            )
        filter_, records = self._get_filter(planned), 0
        for range_ in planned.shards:
            values = {"shard": range_.shard, "first": range_.done + 1, "last": range_.last}
            [(count,)] = self._rows("count_to_replay", filter_ | values)
            records += count
        return replace(planned, records=records)

    def _get_filter(self, planned: Replay) -> dict[str, Any]:
        return {
            "channel": planned.channel,
            "key": self._request.key,
            "since": planned.since,
            "until": planned.until,
        }

    def begin(self) -> Replay:
        """Writes down what is replayed, and registers its checkpoints."""
        times = self._find_times()
        with self._store.transaction("beginning a replay"):
            # As the registration of a consumer: retention does not remove what is planned now.
            # Nothing that takes long is done while the row is held: streamers and applications need
            # it, too.
            if self._store.row("lock_channel", self._names) is None:
                raise unknown_channel(self._store, self._source.name)
            if (other := self.find()) is not None and other.ended_at is None:
                return other  # another process was faster
            planned = self._plan_ranges(*times)
            values = {
                **self._get_filter(planned),
                **self._names,
                "count": self._source.total_shards,
                "shards": [range_.shard for range_ in planned.shards],
                "firsts": [range_.first for range_ in planned.shards],
                "lasts": [range_.last for range_ in planned.shards],
            }
            [(number,)] = self._rows("begin_replay", values)
            self._store.execute("register_replay", {**values, "consumer": _name(number)})
        return replace(planned, replay=number)

    def carry_out(self, begun: Replay, on_batch: Callable[[int], None]) -> Replay:
        """Stages what is left, shard by shard, and ends the replay."""
        assert begun.replay is not None
        log.warning(
            "replay begun",
            replay=begun.replay,
            channel=begun.channel,
            target=begun.target,
            records=begun.records,
        )
        for shard in begun.shards:
            progress = shard.done
            while progress < shard.last:
                progress, copies = self._stage_batch(begun, shard)
                on_batch(copies)
        names = {"replay": begun.replay, "consumer": _name(begun.replay), "channel": begun.channel}
        self._store.execute("end_replay", names, doing="ending a replay")
        result = self.find()
        assert result is not None
        log.warning("replay ended", replay=begun.replay, target=begun.target, staged=result.staged)
        return result

    def _stage_batch(self, begun: Replay, shard: ReplayedShard) -> tuple[int, int]:
        """Stages the next batch of a shard; returns its progress, and the number of copies."""
        assert begun.replay is not None
        names = {
            **self._get_filter(begun),
            "consumer": _name(begun.replay),
            "shard": shard.shard,
            "replay": begun.replay,
        }
        with self._store.transaction("replaying"):
            row = self._store.row("lock_progress", names)
            if row is None:
                return self._check_ended(begun, shard)
            [progress] = row
            if progress >= shard.last:
                return progress, 0
            values = {
                **names,
                "target": begun.target,
                "after": progress,
                "last": shard.last,
                "records": BATCH,
            }
            [(last, records, existing, refused, copies, is_registered)] = self._rows(
                "stage_batch", values
            )
            if not is_registered:
                raise NotReplayable(
                    f"{begun.target} is not registered any more. Nothing of this batch was staged"
                )
            name = ShardName(begun.channel, Shard(shard.shard))
            if not records or last - progress != records or existing < records:
                raise DamagedJournal(
                    f"{Place(name, Offset(progress + 1))} and the records after it: rows of the "
                    "journal, or records that it names, were "
                    "deleted by something other than Penstock; the replay has stopped before them. "
                    "See penstock doctor"
                )
            if refused:
                raise NotReplayable(
                    f"{format_count(refused, 'record')} after {Place(name, Offset(progress))} with "
                    f"keys that the queue {begun.target} cannot take as tenants: "
                    "they are longer than 256 bytes, or have U+0001. Nothing of this batch was "
                    "staged"
                )
            self._store.execute("note_progress", {**names, "offset": last, "copies": copies})
        return last, copies

    def _check_ended(self, begun: Replay, shard: ReplayedShard) -> tuple[int, int]:
        """Checks that another process has ended the replay, not a retirement of its checkpoints."""
        existing = self.find()
        if (
            existing is not None
            and existing.replay == begun.replay
            and existing.ended_at is not None
        ):
            return shard.last, 0
        raise NotReplayable(
            f"the checkpoints of replay {begun.replay} were retired: it is cancelled, with a part "
            "of its copies staged"
        )

    def _rows(self, name: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return self._store.rows(name, values, binary=True, doing="replaying")


def _name(number: int) -> str:
    """Returns the consumer that a replay is, to retention and to ``penstock status``."""
    return f"replay-{number}"


def _get_offset(limit: object) -> int | None:
    if isinstance(limit, Place):
        return limit.offset
    return limit if isinstance(limit, int) else None


def _check_kinds(source: RegisteredChannel, target: RegisteredChannel) -> None:
    if not (traits := source.traits).keeps_records:
        raise NotReplayable(
            f"{source.name} is {traits.title}, which keeps {traits.keeps}, not records: only a log "
            "is replayed"
        )
    if source.name == target.name:
        raise NotReplayable(
            f"{source.name} cannot be replayed into itself: all its consumers would apply the "
            "records again. To have one of them do so: "
            "penstock reset checkpoint NAME --to …"
        )
