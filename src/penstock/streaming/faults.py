"""Faults of single records and shards, noted by the streamer in Postgres, for status and doctor.

isolated records  staged rows that can get no offset: an impossible time, id, name or transaction id
unknown shards    records that have offsets, and belong to no registered channel: not published
stopped shards    shards that the streamer leaves out, while all others go on
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import structlog

from penstock.database.driver_errors import postgres_errors
from penstock.database.store import Store
from penstock.display import format_count
from penstock.errors import DamagedJournal, PenstockError
from penstock.records import RecordId, Shard, ShardName

log = structlog.get_logger("penstock.streamer")

MAX_NAMED = 20
"""Limit of the records, and of the shards, that the log and reports name."""

MAX_EXAMINED = 5000
"""Limit of new rows per second whose transaction id is examined, which takes about a millisecond.
The others are examined later."""

MAX_UNREACHABLE = 1000
"""Limit of the rows with an impossible transaction id that are noted."""


@dataclass(frozen=True, slots=True)
class IsolatedRecord:
    """A staged row that gets no offset until it is corrected."""

    id: RecordId  # its number
    shard: ShardName  # the shard that it names; a long name is cut
    reason: str  # what is wrong with it


@dataclass(frozen=True, slots=True)
class IsolatedRecords:
    """Isolated records."""

    count: int = 0  # how many there are
    first: tuple[IsolatedRecord, ...] = ()  # the first of them
    last_number: int = 0  # in the order in which they were noted


@dataclass(frozen=True, slots=True)
class UnknownShard:
    """A shard with records that belongs to no registered channel."""

    shard: ShardName  # the shard that the records name
    records: int  # number of records
    first: RecordId | None  # the first of them; None if its journal row was just removed


@dataclass(frozen=True, slots=True)
class StoppedShard:
    """A shard that the streamer leaves out."""

    shard: ShardName
    reason: str  # why
    since_s: float  # how long it has been stopped, in seconds


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of all kinds."""

    isolated: IsolatedRecords  # records without an offset
    unknown: tuple[UnknownShard, ...]  # shards of no registered channel, at most ``MAX_NAMED``
    stopped: tuple[StoppedShard, ...]  # shards that are left out


def read_faults(store: Store) -> Faults:
    """Reads the faults that streamers have noted."""
    return Faults(_read_isolated(store, 0), _read_unknown(store), _read_stopped(store))


def _read_isolated(store: Store, number: int) -> IsolatedRecords:
    values = {"number": number, "limit": MAX_NAMED}
    rows = store.rows("isolated_records", values, doing="reading isolated records")
    if not rows:
        return IsolatedRecords(last_number=number)
    first = tuple(
        IsolatedRecord(record, ShardName(channel, Shard(shard)), reason)
        for record, channel, shard, reason, _, _ in rows
    )
    *_, last_number, count = rows[0]
    return IsolatedRecords(count, first, last_number)


def _read_unknown(store: Store) -> tuple[UnknownShard, ...]:
    limit = {"limit": MAX_NAMED}
    rows = store.rows("unknown_shards", limit, doing="looking for unknown shards")
    return tuple(
        UnknownShard(ShardName(channel, Shard(shard)), records, first)
        for channel, shard, records, first in rows
    )


def _read_stopped(store: Store) -> tuple[StoppedShard, ...]:
    rows = store.rows("stopped_shards", doing="reading stopped shards")
    return tuple(
        StoppedShard(ShardName(channel, Shard(shard)), reason, since_s)
        for channel, shard, reason, since_s in rows
    )


def check_missed(store: Store, shard: ShardName) -> None:
    """Checks that no record of a shard has lost its offset."""
    parameters = {"channel": shard.channel, "shard": shard.shard}
    [(count, first)] = store.rows("missed_in_shard", parameters, doing="looking for missed records")
    if count:
        raise DamagedJournal(
            f"{shard}: something other than Penstock has deleted rows of the journal, and with "
            f"them the offsets of {format_count(count, 'record')} (the first is record {first}). "
            "See docs: errors#damagedjournal; then: penstock reset epoch"
        )


class FaultLog:
    """Notes faults in Postgres and names each of them in the log once."""

    def __init__(self) -> None:
        self._last_number = 0
        self._examined: tuple[str, int] | None = None
        self._unknown: set[ShardName] = set()
        self._noted: tuple[dict[ShardName, str], list[str]] | None = None

    def reopen(self) -> None:
        """Begins anew on a new connection: others may have changed what is stopped."""
        self._noted = self._examined = None

    def update(self, store: Store) -> None:
        """Notes records that can get no offset, and shards that belong to no channel."""
        with postgres_errors("noting isolated records"):
            store.execute("isolate_unreachable", {"limit": MAX_UNREACHABLE})
            self._isolate_overtaken(store)
            self._log_isolated(_read_isolated(store, self._last_number))
            self._log_unknown(_read_unknown(store))

    def _isolate_overtaken(self, store: Store) -> None:
        """Notes rows with the id of a transaction that had ended before they were inserted.

        Rows committed more than a second after their insertion, or with the id of a transaction of
        the last second, are found only by ``penstock doctor`` and ``penstock verify``, which
        compare everything.
        """
        if self._examined is None:
            [self._examined] = store.rows("newest_record")
            return
        snapshot, last = self._examined
        [(now, last, rows)] = store.rows(
            "isolate_overtaken", {"shown": snapshot, "last": last, "limit": MAX_EXAMINED}
        )
        self._examined = (snapshot if rows == MAX_EXAMINED else now), last

    def forget(self, store: Store) -> None:
        """Removes the notes of records that are no longer isolated."""
        store.execute("forget_isolated", doing="removing old notes")

    def _log_isolated(self, isolated: IsolatedRecords) -> None:
        for record in isolated.first:
            log.error(
                "record isolated", record=record.id, shard=str(record.shard), reason=record.reason
            )
        if unnamed := isolated.count - len(isolated.first):
            log.error("more records isolated", records=unnamed, see="penstock doctor")
        self._last_number = isolated.last_number

    def _log_unknown(self, unknown: Collection[UnknownShard]) -> None:
        for row in unknown:
            if row.shard not in self._unknown:
                why = "no registered channel has it; its records are not published"
                log.error(
                    "shard unknown",
                    shard=str(row.shard),
                    records=row.records,
                    first_record=row.first,
                    reason=why,
                )
        self._unknown = {row.shard for row in unknown}

    def note_stopped(
        self,
        store: Store,
        stopped: Mapping[ShardName, PenstockError],
        others: Iterable[ShardName] = (),
    ) -> None:
        """Notes which shards are stopped, if that has changed."""
        reasons = {shard: str(error) for shard, error in stopped.items()}
        still_stopped = sorted(str(shard) for shard in {*stopped, *others})
        if (reasons, still_stopped) == self._noted:
            return
        with store.transaction("noting stopped shards"):
            store.execute("start_shards", {"kept": still_stopped})
            for shard, reason in reasons.items():
                store.execute(
                    "stop_shard", {"channel": shard.channel, "shard": shard.shard, "reason": reason}
                )
        self._noted = reasons, still_stopped
