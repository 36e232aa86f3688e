"""The range to verify in each shard, and what the ends of log and journal show by themselves.

The reading order makes it exact: checkpoints, then the ends of the log, then the ends of the
journal.  When each was read it was behind the next one, and the next one has only grown since.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep

import psycopg

from penstock.channels.channel_kinds import get_kind
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import ShardError, ask_each
from penstock.channels.routing import log_keys
from penstock.channels.server import redis_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import name_shards
from penstock.database.store import Store
from penstock.declaring.kinds import get_traits
from penstock.errors import InvalidSetting, Unknown
from penstock.journal.journal_reader import journal_tails
from penstock.parsing import find_number
from penstock.records import BEGINNING, Offset, Place, Scope, Shard, ShardName
from penstock.verifying.comparing import (
    QUEUED,
    Finding,
    FindingKind,
    UnexpectedEntry,
    VerificationRange,
    make_finding,
)

Start = Offset | Place | str | None
"""The first record to verify: an offset in every shard, a place, or a time; None is the beginning.

With a place, only its shard is compared.
"""

CATCH_UP_TIMEOUT_S = 10.0
"""Seconds that a log may be behind a checkpoint before that is a finding.

A consumer that began with the tables is at the end of the journal.  The publisher may not have
reached that yet, or may be refilling a deleted Ick.
"""

BEYOND = 1000
"""Most entries beyond the end of the journal that are read."""

_POLL_S = 0.05


@dataclass(frozen=True)
class Bounds:
    """The range to verify in each shard, and what the ends show.

    Findings, and entries beyond the end of the journal.  ``unpublished`` is the number of records
    that the log does not have yet.
    """

    ranges: Sequence[VerificationRange]
    unpublished: int
    findings: list[Finding] = field(default_factory=list)
    unexpected: list[UnexpectedEntry] = field(default_factory=list)


@dataclass(frozen=True)
class _PostgresState:
    kinds: dict[ShardName, str]  # those of the registered
    journal_starts: dict[ShardName, int]
    checkpoints: dict[tuple[str, ShardName], int]
    registered: set[ShardName]
    evicting: set[ShardName]

    @property
    def consumers(self) -> set[tuple[str, str]]:
        """Registered consumers, each with its channel."""
        return {(consumer, shard.channel) for consumer, shard in self.checkpoints}


def read_bounds(
    store: Store,
    client: RedisClient,
    shards: Sequence[ShardName],
    start: Start,
    declared: Collection[ShardName] = (),
) -> Bounds:
    """Reads checkpoints, ends of the log and ends of the journal, in this order."""
    first = _read_starts(store, shards, start)
    state = _read_postgres(store, shards)
    log_ends, findings = _read_log_ends(client, store.scope, shards, state)
    journal = journal_tails(store)
    findings += _check_checkpoints(state, log_ends, journal)
    findings += _check_unread(state, journal, declared)
    for shard in shards:
        log_ends.setdefault(shard, BEGINNING)  # an unreadable one holds nothing of ours
    ranges, unexpected = [], []
    for shard in shards:
        end = journal.get(shard, BEGINNING)
        if log_ends[shard] > end:
            beyond = list(_read_beyond(client, store.scope, shard, end, log_ends[shard]))
            unexpected += beyond
            if not beyond:
                text = (
                    f"the log has given offsets up to {log_ends[shard]}, the journal ends at {end}"
                )
                findings.append(make_finding(shard, FindingKind.SURPLUS, "log", end + 1, text))
        previous = max(state.journal_starts[shard], first.get(shard, end + 1)) - 1
        if previous < end:
            traits = get_traits(state.kinds.get(shard))
            compared = (
                min(log_ends[shard], end)
                if traits.keeps_records
                else QUEUED
                if traits.has_jobs
                else BEGINNING
            )
            ranges.append(
                VerificationRange(shard, previous, end, compared, shard in state.evicting)
            )
    unpublished = sum(max(0, journal.get(shard, BEGINNING) - log_ends[shard]) for shard in shards)
    return Bounds(ranges, unpublished, findings, unexpected)


def _read_starts(store: Store, shards: Sequence[ShardName], start: Start) -> dict[ShardName, int]:
    """Returns the first offset to verify in each shard; leaves out shards without one."""
    if isinstance(start, Place):
        if start.shard not in shards:
            raise Unknown(f"--from {start}: there is no shard {start.shard}; see penstock status")
        return {start.shard: start.offset}
    if not isinstance(start, str):
        return dict.fromkeys(shards, start or 1)
    try:
        since = {**name_shards(shards), "since": start}
        rows = store.rows("first_since", since, doing="reading the journal")
    except psycopg.DataError as error:
        raise InvalidSetting(
            f"--from is {start!r}; it takes an offset, or a time that Postgres can parse, such as "
            "2026-03-01, '2026-03-01 02:00+00' or yesterday"
        ) from error
    return {ShardName(channel, Shard(shard)): first for channel, shard, first in rows}


def _read_postgres(store: Store, shards: Sequence[ShardName]) -> _PostgresState:
    channels = registered_channels(store)
    kinds = {shard: channels[shard.channel].kind for shard in shards if shard.channel in channels}
    registered = {shard for channel in channels.values() for shard in channel.shard_names}
    evicting = {s for s in kinds if channels[s.channel].redis_memory is not None}
    state = _PostgresState(kinds, {}, {}, registered, evicting)
    values = name_shards(shards)
    rows = store.rows("checkpoints_and_beginnings", values, doing="reading checkpoints")
    for channel, number, first_offset, consumer, offset in rows:
        shard = ShardName(channel, Shard(number))
        state.journal_starts[shard] = first_offset
        if consumer is not None:
            state.checkpoints[consumer, shard] = offset
    return state


def _read_log_ends(
    client: RedisClient, scope: Scope, shards: Sequence[ShardName], state: _PostgresState
) -> tuple[dict[ShardName, Offset], list[Finding]]:
    """Returns the ends of the log and the unreadable shards.

    Waits for the log to reach the checkpoints.
    """
    deadline = monotonic() + CATCH_UP_TIMEOUT_S
    of_kind: defaultdict[str | None, list[ShardName]] = defaultdict(list)
    for shard in shards:
        of_kind[state.kinds.get(shard)].append(shard)
    while True:
        unreadable: list[Finding] = []

        def note(shard: ShardName, error: ShardError, findings: list[Finding] = unreadable) -> None:
            findings.append(make_finding(shard, FindingKind.SURPLUS, "log", 0, str(error)))

        log_ends: dict[ShardName, Offset] = {}
        for kind, group in of_kind.items():
            log_ends |= ask_each(partial(get_kind(kind).ends, client, scope.namespace), group, note)
        behind = any(
            checkpoint > log_ends.get(shard, checkpoint)
            for (_, shard), checkpoint in state.checkpoints.items()
        )
        if not behind or monotonic() > deadline:
            return log_ends, unreadable
        sleep(_POLL_S)


def _check_checkpoints(
    state: _PostgresState, log_ends: dict[ShardName, Offset], journal: dict[ShardName, Offset]
) -> Iterator[Finding]:
    """Compares each checkpoint with the ends of journal and log and the journal's beginning."""
    for (consumer, shard), checkpoint in state.checkpoints.items():
        if shard not in log_ends:
            continue
        end, journal_start = journal.get(shard, BEGINNING), state.journal_starts[shard]
        if checkpoint > end:
            kind = FindingKind.AHEAD
            text = f"its checkpoint is {checkpoint}, the journal ends at {end}"
            first, count = end + 1, checkpoint - end
        elif checkpoint > log_ends[shard]:
            kind = FindingKind.AHEAD
            ending = "Ick was marked up to" if state.kinds.get(shard) == "ick" else "log ends at"
            text = (
                f"its checkpoint is {checkpoint}, the {ending} {log_ends[shard]}: Redis has "
                "lost records, or no streamer fills it"
            )
            first, count = log_ends[shard] + 1, checkpoint - log_ends[shard]
        elif checkpoint + 1 < journal_start:
            kind = FindingKind.MISSING
            text = (
                f"its checkpoint is {checkpoint}, the journal begins at {journal_start}: the "
                "records between were removed before it passed them"
            )
            first, count = checkpoint + 1, journal_start - checkpoint - 1
        else:
            continue
        yield make_finding(shard, kind, f"consumer {consumer}", first, text, count=count)


def _check_unread(
    state: _PostgresState, journal: dict[ShardName, Offset], declared: Collection[ShardName]
) -> Iterator[Finding]:
    """Finds shards of the journal without a channel, or without a checkpoint of a consumer.

    What is registered counts: an application that declares more shards stages into some that nobody
    reads.
    """
    channels = {shard.channel for shard in state.registered}
    for shard, end in journal.items():
        journal_start = state.journal_starts.get(shard, 1)
        if end < journal_start:
            continue
        is_declared = shard in declared and shard.channel not in channels
        if shard not in state.registered and not is_declared:
            text = (
                "no channel is registered or declared with this shard, so no consumer reads "
                "its records"
            )
            yield make_finding(
                shard,
                FindingKind.MISSING,
                "consumers",
                journal_start,
                text,
                count=end - journal_start + 1,
            )
        for consumer in sorted(
            name for name, channel in state.consumers if channel == shard.channel
        ):
            if (consumer, shard) not in state.checkpoints:
                text = "it has no checkpoint in this shard, so it reads none of its records"
                source = f"consumer {consumer}"
                yield make_finding(
                    shard,
                    FindingKind.MISSING,
                    source,
                    journal_start,
                    text,
                    count=end - journal_start + 1,
                )


def _read_beyond(
    client: RedisClient, scope: Scope, shard: ShardName, end: Offset, last: Offset
) -> Iterator[UnexpectedEntry]:
    """Yields the first ``BEYOND`` entries of the log beyond the end of the journal."""
    with redis_errors(f"reading {shard}"):
        entries = client.xrange(
            log_keys(scope.namespace, shard).stream, f"{end + 1}-0", f"{last}", BEYOND
        )
    for entry_id, fields in entries:
        offset, record = int(entry_id.partition(b"-")[0]), find_number(fields.get(b"id", b""))
        yield UnexpectedEntry(shard.channel, shard.shard, offset, entry_id.decode(), record, None)
