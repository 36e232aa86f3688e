"""Checks Penstock's tables: that they are complete and consistent, and that records move."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

from penstock.batches.columns import compress
from penstock.consuming.dead_lettering import how_to_resume
from penstock.consuming.failures import WAITING_FOR_SERVER
from penstock.database.registration import Registration, find_objection
from penstock.database.registry import registered_channels
from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.declaring.kinds import get_traits
from penstock.display import format_count, format_seconds
from penstock.errors import CodecMissing
from penstock.journal.journal_reader import missed_records as find_missed
from penstock.operating.doctor.check import (
    Check,
    CheckContext,
    CheckResult,
    Results,
    error,
    warning,
)
from penstock.operating.status.snapshot import ChannelStatus, ConsumerShard, ConsumerStatus, Status
from penstock.operating.worker_sessions import WorkerSession
from penstock.records import Scope
from penstock.schema.capture import find_unreadable, inspect_triggers
from penstock.schema.revisions import (
    find_revision,
    is_newer,
    newest_shipped,
    upgrade_command,
    why_unusable,
)
from penstock.streaming.faults import UnknownShard
from penstock.streaming.scheduler import make_declaration
from penstock.streaming.sequencer import check_identity_cache

SAMPLE = 1000
"""Number of journal rows at either end whose records are checked."""

MAX_OFFSET = 2**53
"""Lua's numbers are exact up to here."""

SLOW_S = 60.0
"""Lag of a consumer that is a warning, in seconds."""

NEARLY_USED = 0.75
"""Part of a memory budget from which on unread records are a warning."""

STALLED_S = 15.0
"""Age of the oldest unsequenced record that is an error, in seconds."""


def schema(context: CheckContext) -> Results:
    """Checks that this release works with the tables, and that they are Penstock's."""
    name, shipped = context.scope.schema, newest_shipped()
    revision = find_revision(Store(context.store.connection, Scope(name)))
    if (unusable := why_unusable(revision, name)) is not None:
        yield error(unusable.reason, unusable.fix)
        return None
    assert revision is not None  # or it would be unusable
    place = "" if revision.is_own else f", kept in {revision.table}"
    message = f"schema {name} is at revision {revision.revision}{place}"
    if is_newer(revision.revision):
        yield warning(
            f"{message}; this release ships {shipped} and works with it",
            "pip install --upgrade penstock-outbox",
        )
    elif revision.revision != shipped:
        yield warning(
            f"{message}; this release ships {shipped}, and works with both",
            upgrade_command(revision, name),
        )
    return message


def identity(context: CheckContext) -> Results:
    """Checks that record ids are drawn one by one; ids and offsets are far from their limit."""
    check_identity_cache(context.store)
    [(highest, offset)] = context.rows(
        "highest_id", table=quote(context.scope.schema, "staged_records")
    )
    if max(highest, offset) > MAX_OFFSET // 2:
        message = f"record {highest:,}, offset {offset:,}: numbers are exact up to {MAX_OFFSET:,}"
        yield error(message, "move to new channels before they reach it")
    return f"record ids are drawn one at a time; the last was {highest:,}"


def missed_records(context: CheckContext) -> Results:
    """Checks that the sequencer has passed over no record."""
    missed = [m for m in find_missed(context.store) if not m.is_isolated]
    if missed:
        count, first = sum(group.count for group in missed), min(group.first for group in missed)
        yield error(
            f"{format_count(count, 'committed record')} without an offset, which will get none "
            f"(the first is {first}): the database was partly "
            "restored, or changed by hand, or a producer wrote an old xid",
            "penstock reset epoch",
        )
    return "every record before the last tick has its offset"


def judge_status(current: Status) -> list[CheckResult]:
    """Returns what a status alone shows to be wrong; asks no server."""
    faults = (replace(result, check=result.check or "shards") for result in _judge_shards(current))
    progress = (
        replace(result, check=result.check or "consumers") for result in _judge_consumers(current)
    )
    return [*faults, *progress, *_judge_schedules(current)]


def shards(context: CheckContext) -> Results:
    """Checks that no record is isolated, and no shard is stopped."""
    yield from _judge_shards(context.status)
    return "no record is isolated, and no shard is stopped"


def _judge_shards(current: Status) -> Iterator[CheckResult]:
    faults = current.faults
    for record in faults.isolated.first:
        yield error(
            f"record {record.id} of {str(record.shard)!r} gets no offset: {record.reason}; "
            f"{faults.isolated.count:,} in all",
            f"correct it: UPDATE {current.schema}.staged_records SET xid = pg_current_xact_id(), "
            "created_at = "
            f"clock_timestamp() WHERE id = {record.id}; or DELETE it; and let producers insert no "
            "xid, id or created_at",
            "isolated records",
        )
    for stopped in faults.stopped:
        yield error(
            f"{stopped.shard} is not published: {stopped.reason}",
            "the other shards continue; the streamer checks this one again every few seconds",
            "stopped shards",
        )


def journal(context: CheckContext) -> Results:
    """Checks that the journal has no holes, and that the records that it names exist."""
    for channel, shard, count, first in context.rows("holes"):
        yield error(
            f"{channel}/{shard}: {format_count(count, 'hole')}, the first before offset {first}: "
            "rows were deleted by hand",
            "consumers before it halt with a Gap; see docs: errors#gap",
        )
    [(missing, first)] = context.rows("missing_records", entries=SAMPLE)
    if missing:
        yield error(
            f"it names {format_count(missing, 'record')} missing from staged_records (the first is "
            f"{first}): not deleted by Penstock",
            "restore them; those already in Redis stay there until they are evicted",
        )
    return "no holes; its records exist"


def consumers(context: CheckContext) -> Results:
    """Checks that records are sequenced and applied, and every registered consumer is declared."""
    yield from _judge_consumers(context.status)
    return f"{len(context.status.consumers)} registered; none halted, none late"


def _judge_consumers(current: Status) -> Iterator[CheckResult]:
    yield from _check_sequencing(current)
    # it looks at every shard, and each of them may be halted
    has_letters = cache(current.has_letters)
    for consumer, shard, reason in current.halted:
        yield error(
            f"{consumer} is halted in {shard}: {reason}",
            f"fix the cause, {how_to_resume(consumer, shard, reason, has_letters(consumer))}",
        )
    for pause in current.pauses:
        yield warning(f"{pause}", pause.how_to_resume, "paused")
    for shard, count, reason in current.unread:
        yield error(
            f"{shard}: {format_count(count, 'record')}; {reason}",
            "start the consumer again, which adds the checkpoint, or declare the channel and run "
            "penstock stream; "
            "otherwise find out what staged them",
            "unread shards",
        )
    channels = {channel.channel: channel for channel in current.channels}
    for reader in current.consumers:
        yield from _check_consumer(reader)
        if current.find_pause(reader) is None:
            channel, sessions = channels.get(reader.channel), current.find_sessions(reader)
            yield from _check_lag(reader, channel, sessions, current.redis)


def _check_sequencing(current: Status) -> Iterator[CheckResult]:
    for channel in current.channels:
        oldest = max((shard.staged_s for shard in channel.shards), default=0.0)
        if oldest > STALLED_S:
            staged = sum(shard.staged for shard in channel.shards)
            yield error(
                f"{channel.channel}: {format_count(staged, 'committed record')} waiting for the "
                f"sequencer, the oldest for {format_seconds(oldest)}: no "
                "streamer and no recruit has ticked since they were committed; the last tick with "
                "records was "
                f"{format_seconds(current.tick_s)} ago",
                "penstock stream, or penstock run; if requests do the work, find out why none "
                "comes or why its chores give up",
                "streamer",
            )


def _check_consumer(consumer: ConsumerStatus) -> Iterator[CheckResult]:
    """Checks that it is declared, and has no dead letters."""
    if consumer.declared is False:
        yield warning(
            f"{consumer.consumer} is registered, but the pipeline does not declare it: everything "
            "after its checkpoints is kept",
            f"declare it, or run penstock doctor for the pipeline that does{consumer.how_to_end}",
        )
    if letters := consumer.dead_letters:
        message = f"{consumer.consumer} has {format_count(letters, 'dead letter')}"
        yield warning(message, f"penstock dead-letters list {consumer.consumer}", "dead letters")


def _check_lag(
    consumer: ConsumerStatus,
    channel: ChannelStatus | None,
    sessions: Sequence[WorkerSession],
    redis: str | None,
) -> Iterator[CheckResult]:
    """Checks that it keeps up, and holds back no retention.

    It must not read from Postgres because records have left Redis, or soon will.
    """
    verb = get_traits(None if channel is None else channel.kind).verb
    behind = [shard for shard in consumer.shards if shard.lag and shard.halted is None]
    yield from _check_speed(consumer, verb, behind, sessions, redis)

    def how_to_go_on(hint: str = "") -> str:
        is_halted = not behind and any(shard.halted is not None for shard in consumer.shards)
        return (
            "resume its halted shards" if is_halted else consumer.how_to_go_on(verb, hint)
        ) + consumer.how_to_end

    message = None
    if evicted := sum(shard.evicted for shard in consumer.shards):
        message = (
            f"{consumer.consumer} is {format_count(evicted, 'record')} behind the first entry of "
            f"{consumer.channel} in Redis: "
            "it reads them from Postgres until it has caught up"
        )
    elif channel is not None and any(
        _is_about_to_lose(channel, shard) for shard in consumer.shards
    ):
        message = (
            f"{consumer.consumer} has not read most of what {consumer.channel} holds in Redis, and "
            "its memory is nearly "
            "used up: unread records are about to leave Redis, and are read from Postgres then"
        )
    if message is not None:
        yield warning(
            message,
            how_to_go_on(", in more processes if one does not keep up, or a larger redis_memory"),
        )
    oldest = consumer.lag_s
    overdue_s = 0.0 if channel is None or channel.keep_s is None else oldest - channel.keep_s
    if overdue_s > SLOW_S:
        since = datetime.now(UTC) - timedelta(seconds=overdue_s)
        lag = consumer.lag
        yield warning(
            f"{consumer.consumer} holds back retention of {consumer.channel} since "
            f"{since:%Y-%m-%d %H:%M} UTC: up to "
            f"{format_count(lag, 'record')} kept for it alone, longer than keep",
            how_to_go_on(),
        )


def _check_speed(
    consumer: ConsumerStatus,
    verb: str,
    behind: Sequence[ConsumerShard],
    sessions: Sequence[WorkerSession],
    redis: str | None,
) -> Iterator[CheckResult]:
    """Checks that the shards that are not halted keep up; halted ones are reported elsewhere.

    More processes are advised if those would help.
    """
    reasons = [shard.waiting or "" for shard in behind]
    waits = {
        reason
        for shard in consumer.shards
        if (reason := shard.waiting or "").startswith(WAITING_FOR_SERVER)
    }
    for reason in sorted(waits):
        yield warning(
            f"{consumer.consumer} is {reason}",
            "remove that cause; then the consumer continues by itself",
        )
    lag = sum(shard.lag for shard in behind)
    oldest = max((shard.lag_s for shard in behind), default=0.0)
    is_slow = bool(lag) and oldest > SLOW_S
    message = (
        f"{consumer.consumer} is {format_count(lag, 'record')} and {format_seconds(oldest)} behind"
    )
    for session in sessions if lag else ():
        if is_slow or session.blockers:
            yield warning(f"{message}: it {session}", session.how_to_go_on)
    if not is_slow or sessions or waits:
        return
    if redis is not None:
        yield warning(f"{message}: {redis}", "repair Redis; then the consumer continues by itself")
    elif all(reasons):
        yield warning(
            f"{message}: it waits: {reasons[0]}",
            "fix what the consumer waits for; then it continues by itself",
        )
    else:
        hint = (
            ", in more processes if one does not keep up; if requests do the work, at a higher rate"
        )
        yield warning(message, consumer.how_to_go_on(verb, hint))


def _is_about_to_lose(channel: ChannelStatus, read: ConsumerShard) -> bool:
    """Returns whether a shard's part of the budget is nearly used up, mostly by unread records."""
    shard = next((candidate for candidate in channel.shards if candidate.shard == read.shard), None)
    if shard is None or shard.memory is None or not shard.records or shard.redis_memory is None:
        return False
    is_nearly_used = shard.memory > NEARLY_USED * shard.redis_memory
    return is_nearly_used and read.lag > shard.records / 2


def channels(context: CheckContext) -> Results:
    """Checks that the pipeline declares the registered channels, and records have shards."""
    retired = {name for (name,) in context.rows("retired_channels")}
    registered = registered_channels(context.store)
    for unknown in context.status.faults.unknown:
        yield _report_unknown(unknown, retired)
    for name in sorted(c.name for c in registered.values() if c.entries == "zstd"):
        try:  # here, as a streamer or consumer on this machine would find it
            compress("zstd", b"")
        except CodecMissing as missing:
            yield error(f"{name}: {missing}", "pip install 'penstock-outbox[zstd]'")
    if context.pipeline is None:
        yield CheckResult("", "ok", "not compared with a pipeline: --app names one to compare with")
        return None
    for name, declared in context.pipeline.channels.items():
        channel = registered.get(name)
        is_known = Registration(
            kind=None if channel is None else channel.kind,
            shards=None if channel is None else channel.every_generation[-1].shards,
            fits=None if channel is None else channel.fits(declared),
            is_retired=name in retired,
        )
        if (objection := find_objection(declared, is_known)) is not None:
            yield error(objection.reason, objection.fix)
        elif channel is None:
            yield warning(f"{name} is declared and was never streamed", "penstock stream")
    for name in sorted(registered.keys() - context.pipeline.channels.keys()):
        yield warning(
            f"{name} is registered, but the pipeline does not declare it: its records are kept "
            "forever",
            "declare it, or run penstock stream for the pipeline that does; if it is gone for "
            "good: "
            f"penstock channels retire {name} --apply",
        )
    return f"{len(registered)} registered as declared"


def _report_unknown(unknown: UnknownShard, retired: Collection[str]) -> CheckResult:
    """Reports records of unknown channels; triggers still stage for a retired channel."""
    name = unknown.shard.channel
    records = (
        f"{format_count(unknown.records, 'record')} (the first is {unknown.first}) for "
        f"{str(unknown.shard)!r}"
    )
    if name in retired:
        return error(
            f"{records}, whose channel was retired: they are not published",
            f"find out what staged them; to remove them: penstock channels retire {name} --discard "
            "--apply",
        )
    return error(
        f"{records}, whose channel is not registered, or lacks the shard: they are not published",
        "declare the channel, with the shards that are registered, in the pipeline of the streamer "
        "and in that of the "
        "application; penstock channels list shows them",
    )


def _judge_schedules(current: Status) -> Iterator[CheckResult]:
    for schedule in current.schedules:
        if schedule.trouble is not None:
            yield warning(
                schedule.trouble,
                "penstock stream for the pipeline that declares it; if it is gone for good: DELETE "
                "FROM "
                f"{current.schema}.schedules WHERE name = '{schedule.name}'",
                "schedules",
            )


def schedules(context: CheckContext) -> Results:
    """Checks that schedules are registered as declared, and none is late or skips times."""
    registered = {schedule.name: schedule for schedule in context.status.schedules}
    yield from _judge_schedules(context.status)
    declared = {} if context.pipeline is None else context.pipeline.schedules
    for name, spec in declared.items():
        if (row := registered.get(name)) is None:
            yield warning(f"{name} is declared and was never registered", "penstock stream")
        elif make_declaration(spec) != (row.channel, row.every, row.timezone, row.digest):
            same = (spec.queue.name, spec.text) == (row.channel, row.every)
            registration = "other options" if same else f"{row.text!r} for queue {row.channel}"
            yield warning(
                f"{name} is registered with {registration}, by another release or another service: "
                "this pipeline's has no jobs",
                "if it is another service's, rename one of the two, because names are unique in a "
                "schema; otherwise restart "
                "the streamers of this release",
            )
    return f"{len(registered)} registered; none late" if registered else None


def triggers(context: CheckContext) -> Results:
    """Checks that each rule with capture by trigger has its trigger, as declared, and no other."""
    if context.pipeline is None:
        for fault in find_unreadable(context.store):
            yield error(fault.message, fault.fix)
        return None
    for fault in inspect_triggers(context.store.connection, context.pipeline):
        yield (error if fault.is_refused else warning)(fault.message, fault.fix)
    declared = sum(rule.capture == "trigger" for rule in context.pipeline.rules)
    return f"{declared} installed, as their rules declare" if declared else None


CHECKS: tuple[Check, ...] = (
    identity,
    missed_records,
    shards,
    journal,
    channels,
    consumers,
    schedules,
    triggers,
)
