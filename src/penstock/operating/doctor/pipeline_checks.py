"""Checks Penstock's tables: that they are complete and consistent, and that records move."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from penstock.batches import compress
from penstock.consuming.dead_lettering import how_to_resume
from penstock.database.registration import Registration, find_objection
from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.statements import quote
from penstock.declaring.declarations import Channel
from penstock.errors import CodecMissing
from penstock.journal import missed_records
from penstock.operating.doctor.check import Check, CheckContext, CheckResult, format_age
from penstock.operating.status import ChannelStatus, ConsumerShard, Status
from penstock.pipeline import Pipeline
from penstock.schema.capture import inspect_triggers
from penstock.schema.revisions import find_revision, how_to_upgrade, is_newer, newest_shipped, why_unusable
from penstock.streaming.faults import UnknownShard
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


def schema(context: CheckContext) -> Iterator[CheckResult]:
    """This release works with the tables, and they are its own."""
    name, shipped = context.scope.schema, newest_shipped()
    found = find_revision(context.connection, name)
    if (unusable := why_unusable(found, name)) is not None:
        yield CheckResult.error("schema", unusable.reason, unusable.fix)
        return
    assert found is not None  # or it would be unusable
    kept = "" if found.is_own else f", kept in {found.table}"
    message = f"schema {name} is at revision {found.revision}{kept}"
    if found.revision == shipped:
        yield CheckResult.ok("schema", message)
    elif is_newer(found.revision):
        yield CheckResult.warning(
            "schema", f"{message}; this release ships {shipped} and works with it", "pip install --upgrade penstock"
        )
    else:
        yield CheckResult.warning(
            "schema", f"{message}; this release ships {shipped}, and works with both", how_to_upgrade(found, name)
        )


def identity(context: CheckContext) -> Iterator[CheckResult]:
    """Record ids are drawn one at a time, and ids and offsets are far from their limit."""
    check_identity_cache(context.connection, context.scope)
    [(highest, offset)] = context.rows("highest_id", table=quote(context.scope.schema, "staged_records"))
    if max(highest, offset) > MAX_OFFSET // 2:
        yield CheckResult.error(
            "identity",
            f"record {highest:,}, offset {offset:,}: numbers are exact up to {MAX_OFFSET:,}",
            "move to new channels before they reach it",
        )
    else:
        yield CheckResult.ok("identity", f"record ids are drawn one at a time; the last was {highest:,}")


def missed(context: CheckContext) -> Iterator[CheckResult]:
    """The sequencer has passed over no record."""
    found = [m for m in missed_records(context.connection, context.scope) if not m.is_isolated]
    if found:
        count, first = sum(each.count for each in found), min(each.first for each in found)
        yield CheckResult.error(
            "missed records",
            f"{count:,} committed records have no offset and will get none (the first is {first}): the database was partly "
            "restored, or changed by hand, or a producer wrote an old xid",
            "penstock reset epoch",
        )
    else:
        yield CheckResult.ok("missed records", "every record before the last tick has its offset")


def isolated(context: CheckContext) -> Iterator[CheckResult]:
    """No record is isolated, and no shard is stopped."""
    faults = context.status.faults
    for record in faults.isolated.first:
        yield CheckResult.error(
            "isolated records",
            f"record {record.id} of {str(record.shard)!r} gets no offset: {record.reason}; {faults.isolated.count:,} in all",
            f"correct it: UPDATE {context.scope.schema}.staged_records SET xid = pg_current_xact_id(), created_at = "
            f"clock_timestamp() WHERE id = {record.id}; or DELETE it; and let producers insert no xid, id or created_at",
        )
    for stopped in faults.stopped:
        yield CheckResult.error(
            "stopped shards",
            f"{stopped.shard} is not published: {stopped.reason}",
            "the other shards go on; the streamer checks this one again every few seconds",
        )
    if not faults.isolated.count and not faults.stopped:
        yield CheckResult.ok("shards", "no record is isolated, and no shard is stopped")


def journal(context: CheckContext) -> Iterator[CheckResult]:
    """The journal has no holes, and the records that it names exist."""
    holes = context.rows("holes")
    for channel, shard, count, first in holes:
        yield CheckResult.error(
            "journal",
            f"{channel}/{shard}: {count} holes, the first before offset {first}: rows were deleted by hand",
            "consumers before it halt with a Gap; see docs: errors#gap",
        )
    [(missing, first)] = context.rows("missing_records", entries=SAMPLE)
    if missing:
        yield CheckResult.error(
            "journal",
            f"it names {missing} records that are missing from staged_records (the first is {first}): not deleted by Penstock",
            "restore them; those already in Redis stay there until they are evicted",
        )
    if not holes and not missing:
        yield CheckResult.ok("journal", "no holes; its records exist")


def consumers(context: CheckContext) -> Iterator[CheckResult]:
    """Records are sequenced and applied, and every registered consumer is declared."""
    current = context.status
    findings = [
        *_check_sequencing(current),
        *_check_halted(current),
        *_check_unread(current),
        *_check_declared(current),
        *_check_dead_letters(current),
        *_check_lag(current),
        *_check_eviction(current),
        *_check_retention(current),
    ]
    yield from findings
    if not findings:
        yield CheckResult.ok("consumers", f"{len(current.consumers)} registered; none halted, none late")


def _check_sequencing(current: Status) -> Iterator[CheckResult]:
    for channel in current.channels:
        oldest = max((shard.staged_s for shard in channel.shards if shard.staged), default=0.0)
        if oldest > STALLED_S:
            staged = sum(shard.staged for shard in channel.shards)
            yield CheckResult.error(
                "streamer",
                f"{channel.channel}: {staged:,} committed records wait for the sequencer, the oldest for {format_age(oldest)}: no "
                "streamer and no recruit has ticked since they were committed; the last tick with records was "
                f"{format_age(current.tick_s)} ago",
                "penstock stream, or penstock run; if requests do the work, find out why none comes or why its chores give up",
            )


def _check_halted(current: Status) -> Iterator[CheckResult]:
    for consumer, shard, reason in current.halted:
        yield CheckResult.error(
            "consumers",
            f"{consumer} is halted in {shard}: {reason}",
            f"fix the cause, {how_to_resume(consumer, shard, reason, current.has_letters(consumer))}",
        )


def _check_unread(current: Status) -> Iterator[CheckResult]:
    for shard, count, reason in current.unread:
        yield CheckResult.error(
            "unread shards",
            f"{shard}: {count:,} records; {reason}",
            "start the consumer again, which adds the checkpoint, or declare the channel and run penstock stream; "
            "otherwise find out what staged them",
        )


def _check_declared(current: Status) -> Iterator[CheckResult]:
    for consumer in current.consumers:
        if consumer.declared is False:
            yield CheckResult.warning(
                "consumers",
                f"{consumer.consumer} is registered, but the pipeline does not declare it: everything after its checkpoints is kept",
                f"declare it, or run penstock doctor for the pipeline that does{consumer.how_to_end}",
            )


def _check_dead_letters(current: Status) -> Iterator[CheckResult]:
    for consumer in current.consumers:
        letters = sum(shard.dead_letters for shard in consumer.shards)
        if letters:
            yield CheckResult.warning(
                "dead letters",
                f"{consumer.consumer} has {letters:,} dead letters",
                f"penstock dead-letters list {consumer.consumer}",
            )


def _check_lag(current: Status) -> Iterator[CheckResult]:
    for consumer in current.consumers:
        lag = sum(shard.lag for shard in consumer.shards)
        seconds = max((shard.lag_s for shard in consumer.shards), default=0.0)
        if lag and seconds > SLOW_S:
            yield CheckResult.warning(
                "consumers",
                f"{consumer.consumer} is {lag:,} records and {format_age(seconds)} behind",
                consumer.how_to_go_on(
                    ", in more processes if one does not keep up; if requests do the work, at a higher rate"
                ),
            )


def _check_eviction(current: Status) -> Iterator[CheckResult]:
    """A consumer that reads from Postgres what has left Redis, or soon will."""
    channels = {channel.channel: channel for channel in current.channels}
    for consumer in current.consumers:
        channel = channels.get(consumer.channel)
        evicted = sum(shard.evicted for shard in consumer.shards)
        if evicted:
            message = (
                f"{consumer.consumer} is {evicted:,} records behind the first entry of {consumer.channel} in Redis: "
                "it reads them from Postgres until it has caught up"
            )
        elif channel is not None and any(_is_about_to_lose(channel, s) for s in consumer.shards):
            message = (
                f"{consumer.consumer} has not read most of what {consumer.channel} holds in Redis, and its memory is nearly "
                "used up: unread records are about to leave Redis, and are read from Postgres then"
            )
        else:
            continue
        yield CheckResult.warning(
            "consumers",
            message,
            consumer.how_to_go_on(", in more processes if one does not keep up, or a larger redis_memory")
            + consumer.how_to_end,
        )


def _is_about_to_lose(channel: ChannelStatus, read: ConsumerShard) -> bool:
    """True if a shard's part of the budget is nearly used up, mostly by records that a consumer has not read."""
    shard = next((each for each in channel.shards if each.shard == read.shard), None)
    if shard is None or shard.memory is None or not shard.records or shard.redis_memory is None:
        return False
    is_nearly_used = shard.memory > NEARLY_USED * shard.redis_memory
    return is_nearly_used and read.lag > shard.records / 2


def _check_retention(current: Status) -> Iterator[CheckResult]:
    """A consumer for which records stay that `keep` no longer holds."""
    keeps = {c.channel: c.keep_s for c in current.channels if c.keep_s is not None}
    for consumer in current.consumers:
        lag = sum(shard.lag for shard in consumer.shards)
        oldest = max((shard.lag_s for shard in consumer.shards if shard.lag), default=0.0)
        held = oldest - keeps.get(consumer.channel, oldest)
        if held > SLOW_S:
            since = datetime.now(UTC) - timedelta(seconds=held)
            yield CheckResult.warning(
                "consumers",
                f"{consumer.consumer} holds back retention of {consumer.channel} since {since:%Y-%m-%d %H:%M} UTC: up to "
                f"{lag:,} records stay for it alone, longer than keep",
                consumer.how_to_go_on() + consumer.how_to_end,
            )


@dataclass(frozen=True, slots=True)
class _Registry:
    """Registered channels.

    Attributes:
        retired: Names of the channels that were retired.
    """

    channels: Mapping[str, RegisteredChannel]
    retired: Collection[str]

    def find(self, declared: Channel) -> Registration:
        """The registration under a declared name."""
        found = self.channels.get(declared.name)
        return Registration(
            kind=None if found is None else found.kind,
            shards=None if found is None else found.every_generation[-1].shards,
            fits=None if found is None else found.fits(declared),
            is_retired=declared.name in self.retired,
        )


def declared(context: CheckContext) -> Iterator[CheckResult]:
    """The pipeline declares the channels that are registered, and records belong to registered shards."""
    retired = {name for (name,) in context.rows("retired_channels")}
    registry = _Registry(registered_channels(context.connection, context.scope), retired)
    for each in context.status.faults.unknown:
        yield _report_unknown(each, registry)
    yield from _check_compression(registry)
    if context.pipeline is None:
        yield CheckResult.ok("channels", "not compared with a pipeline: --app names one to compare with")
        return
    found = [*_check_channels(context.pipeline, registry), *_check_undeclared(context.pipeline, registry)]
    yield from found
    if not found:
        yield CheckResult.ok("channels", f"{len(registry.channels)} registered as declared")


def _report_unknown(unknown: UnknownShard, registry: _Registry) -> CheckResult:
    """Records that no channel has; a trigger goes on to stage for a channel that was retired."""
    name = unknown.shard.channel
    what = f"{unknown.records:,} records (the first is {unknown.first}) are for {str(unknown.shard)!r}"
    if name in registry.retired:
        return CheckResult.error(
            "channels",
            f"{what}, whose channel was retired: they are not published",
            f"find out what staged them; to remove them: penstock channels retire {name} --discard --apply",
        )
    return CheckResult.error(
        "channels",
        f"{what}, whose channel is not registered, or lacks the shard: they are not published",
        "declare the channel, with the shards that are registered, in the pipeline of the streamer and in that of the "
        "application; penstock channels list shows them",
    )


def _check_compression(registry: _Registry) -> Iterator[CheckResult]:
    """Here, as a streamer or consumer on this machine would find it."""
    for name in sorted(c.name for c in registry.channels.values() if c.entries == "zstd"):
        try:
            compress("zstd", b"")
        except CodecMissing as error:
            yield CheckResult.error("channels", f"{name}: {error}", "pip install 'penstock[zstd]'")


def _check_channels(pipeline: Pipeline, registry: _Registry) -> Iterator[CheckResult]:
    for name, channel in pipeline.channels.items():
        found = registry.find(channel)
        objection = find_objection(channel, found)
        if objection is not None:
            yield CheckResult.error("channels", objection.reason, objection.fix)
        elif found.kind is None:
            message = f"{name} is declared and was never streamed"
            yield CheckResult.warning("channels", message, "penstock stream")


def _check_undeclared(pipeline: Pipeline, registry: _Registry) -> Iterator[CheckResult]:
    for name in sorted(registry.channels.keys() - pipeline.channels.keys()):
        yield CheckResult.warning(
            "channels",
            f"{name} is registered, but the pipeline does not declare it: its records are kept forever",
            "declare it, or run penstock stream for the pipeline that does; if it is gone for good: "
            f"penstock channels retire {name} --apply",
        )


def triggers(context: CheckContext) -> Iterator[CheckResult]:
    """Each rule with capture by trigger has its trigger, as declared, and there is no other."""
    if context.pipeline is None:
        return
    faults = inspect_triggers(context.connection, context.pipeline)
    for fault in faults:
        report = CheckResult.error if fault.is_refused else CheckResult.warning
        yield report("triggers", fault.message, fault.fix)
    declared = sum(rule.capture == "trigger" for rule in context.pipeline.rules)
    if declared and not faults:
        yield CheckResult.ok("triggers", f"{declared} installed, as their rules declare")


SCHEMA: tuple[Check, ...] = (schema,)
CHECKS: tuple[Check, ...] = (identity, missed, isolated, journal, declared, consumers, triggers)
