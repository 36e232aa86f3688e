"""Reads the values of each page once, and shows them as HTML, or as JSON.

JSON has the names of the commands' ``--json``.  Both leave out what a visitor may not see: keys,
and reasons, which may quote what a handler has said of a record.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from penstock.channels.channel_kinds import get_kind
from penstock.channels.log.streams import MAX_READ
from penstock.channels.queue.inspection import MAX_TENANTS, busiest_tenants
from penstock.console import job_pages, record_pages
from penstock.console.access import Visitor
from penstock.console.history import CHARTS, PERIODS, recall
from penstock.console.reading import HIDDEN, Page, PageContent, Reading
from penstock.console.status_sampler import Sample
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.declaring.kinds import get_traits
from penstock.errors import InvalidName, ServerUnavailable, Unknown
from penstock.operating import letters
from penstock.operating.channels import unknown_channel
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.pipeline_checks import judge_status
from penstock.operating.jobs.queue_limits import KINDS, list_limits
from penstock.operating.pausing import list_actions
from penstock.operating.status.snapshot import ConsumerShard, ConsumerStatus, ShardStatus, Status
from penstock.operating.tracing.causes import trace
from penstock.records import Offset, Place, RecordId, Shard, ShardName, parse_place

LETTERS = 100
"""Dead letters, results of the doctor, or connections on a page."""

MAX_GROUPS = 20
"""Groups of dead letters above them."""

MAX_SHARDS = 64
"""Shards of a channel or a consumer on its page, those with work first."""

CONTENTS = 50
"""Records, messages, members, tenants or limits on a page."""

MAX_ROWS = 200
"""Channels, consumers, actions or reconciliations on a page."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A consumer with the values of its lane."""

    consumer: ConsumerStatus
    state: str
    rate: float | None
    history: list[int]


def _read_overview(reading: Reading, visitor: Visitor, _: Request) -> PageContent:
    sample, status = reading.status(visitor)
    channels, consumers = status.channels[:MAX_ROWS], status.consumers[:MAX_ROWS]
    shards = [shard for channel in status.channels for shard in channel.shards]
    waits = sum(shard.staged for shard in shards)
    read = [(shard.sequenced, shard.published) for shard in shards if shard.published is not None]
    names = [channel.channel for channel in status.channels]
    checkpoints = [shard for consumer in status.consumers for shard in consumer.shards]
    passing = [(consumer.consumer, consumer.channel) for consumer in status.consumers]
    lanes = [make_lane(sample, status, consumer) for consumer in consumers]
    values = {
        "status": status,
        "steps": {
            "staged": (waits, max((shard.staged_s for shard in shards), default=0.0)),
            "sequenced": (
                sum(shard.sequenced for shard in shards),
                sample.rate("sequenced", *names),
            ),
            "unpublished": sum(max(0, sequenced - published) for sequenced, published in read),
            "published": (
                sum(published for _, published in read),
                sample.rate("published", *names),
            ),
            "unread": len(shards) - len(read),
            "lag": sum(consumer.lag for consumer in status.consumers),
            "passed": sum(shard.checkpoint for shard in checkpoints),
            "rate": sample.rate("passed", *passing),
        },
        "troubles": find_troubles(status),
        "channels": channels,
        "lanes": lanes,
        "more": len(status.channels) + len(status.consumers) - len(channels) - len(consumers),
    }
    return PageContent(values, status, sample)


def find_troubles(status: Status) -> list[CheckResult]:
    """Returns what is wrong, the worst first."""
    troubles = judge_status(status)
    if status.redis is not None:
        fix = "records wait in Postgres, and nothing is lost; penstock doctor"
        troubles.append(CheckResult("redis", "error", status.redis, fix, unreachable=True))
    for shard, reason in status.damaged:
        troubles.append(
            CheckResult("redis", "error", f"{shard}: {reason}", "penstock doctor says what to do")
        )
    return sorted(troubles, key=lambda trouble: trouble.grade != "error")


def make_lane(sample: Sample, status: Status, consumer: ConsumerStatus) -> Lane:
    """Returns a consumer with the values of its lane."""
    rate = sample.rate("passed", (consumer.consumer, consumer.channel))
    return Lane(consumer, find_state(status, consumer), rate, sample.lags(consumer))


def find_state(status: Status, consumer: ConsumerStatus) -> str:
    """Returns a consumer's state in a word."""
    if status.find_pause(consumer) is not None:
        return "paused"
    if any(shard.halted is not None for shard in consumer.shards):
        return "halted"
    if any(shard.waiting is not None for shard in consumer.shards):
        return "waiting"
    return "behind" if consumer.lag else "up to date"


def _read_charts(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    period = request.query_params.get("period") or "hour"
    if period not in PERIODS:
        raise InvalidName(f"period={period!r}: give {' or '.join(PERIODS)}")
    sample, note = None, ""
    try:
        moments = reading.charts[period].get()
    except (KeyError, ServerUnavailable) as error:
        sample, _ = reading.status(visitor)
        moments, period = recall(sample), "hour"
        note = (
            "Latency: median and maximum of each shard's last record, within a minute. Every "
            "record's, a day, and history over restarts: --prometheus-url"
        )
        if isinstance(error, ServerUnavailable):
            note = str(error)
    columns = [(unit, name) for _, unit, names in CHARTS for name in names]
    values = {
        "period": period,
        "note": note,
        "charts": CHARTS,
        "lines": {name: [getattr(moment, name) for moment in moments] for _, name in columns},
        "columns": columns,
        "heads": [f">{name.replace('_', ' ').capitalize()}" for _, name in columns],
        "moments": moments,
    }
    return PageContent(values, moments, sample)


def _cut(name: str, rows: Sequence[Any], limit: int | None = None) -> dict[str, Any]:
    """Returns the rows that a page shows, by their name, and how many more there are."""
    listed = rows[: MAX_ROWS if limit is None else limit]
    return {name: listed, "more": len(rows) - len(listed)}


def _read_channel(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    sample, status = reading.status(visitor)
    name = request.path_params["name"]
    channel = next((channel for channel in status.channels if channel.channel == name), None)
    if channel is None:
        raise Unknown(f"no channel {name!r} is registered")
    readers = [
        make_lane(sample, status, consumer)
        for consumer in status.consumers
        if consumer.channel == name
    ]
    # Those with work first, then those of the newest generation.
    shards = sorted(channel.shards, key=lambda shard: (_is_at_rest(shard), -shard.shard))[
        :MAX_SHARDS
    ]
    checkpoints = {
        shard.shard: sorted(  # those that are furthest behind first
            (other.checkpoint, lane.consumer.consumer)
            for lane in readers
            for other in lane.consumer.shards
            if other.shard == shard.shard
        )
        for shard in shards
    }
    schedules = [schedule for schedule in status.schedules if schedule.channel == name]
    pauses = {(pause.kind, pause.name): pause for pause in status.pauses}
    values = {
        "channel": channel,
        "shards": sorted(shards, key=lambda shard: shard.shard),
        "readers": readers[:MAX_ROWS],
        "more_readers": len(readers[MAX_ROWS:]),
        "checkpoints": checkpoints,
        "pause": pauses.get(("channel", name)),
        "schedules": schedules[:CONTENTS],
        "more_schedules": len(schedules[CONTENTS:]),
    }
    return PageContent(values, channel, sample)


def _is_at_rest(shard: ShardStatus) -> bool:
    return not (
        shard.staged or shard.damage or shard.unknown or (shard.published or 0) < shard.sequenced
    )


def _find_shards(reading: Reading, visitor: Visitor, name: str) -> tuple[str, list[ShardName]]:
    """Returns the kind and the shards of a channel, by the last status, or by its declaration.

    Redis alone is asked then: viewers may follow it, and Postgres may be away.
    """
    try:
        _, status = reading.status(visitor)
    except ServerUnavailable:
        if reading.pipeline is None or name not in reading.pipeline.channels:
            raise
        declared = reading.pipeline.channels[name]
        return declared.kind, list(declared.shard_names)
    for channel in status.channels:
        if channel.channel == name and channel.keep_s is not None:
            shards = [Shard(shard.shard) for shard in channel.shards if not shard.unknown]
            return channel.kind, [ShardName(name, shard) for shard in shards]
    with reading.postgres() as store:
        raise unknown_channel(store, name)


def _read_contents(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    """Returns the newest records of a log, or what has waited longest.

    Messages of a queue and members of an Ick wait.
    """
    name = request.path_params["name"]
    kind, names = _find_shards(reading, visitor, name)
    # Those of the newest generation first: new records are there.
    shards = _choose_shards(names[::-1], request.query_params.get("shard"))
    namespace = reading.scope.namespace
    with reading.redis() as client:
        items = get_kind(kind).items(client, namespace, shards, CONTENTS)
    contents = [
        {
            "place": item.place,
            "key": item.key,  # or the member of an Ick
            "tenant": item.facts.get("tenant"),
            "what": item.state,  # what happened, or its state
            "at": item.at,  # when it was staged, or has begun to wait
            "job": item.facts.get("id"),
        }
        for item in items
    ]
    if not visitor.may("keys"):
        contents = [
            content | {"key": HIDDEN, "tenant": content["tenant"] and HIDDEN}
            for content in contents
        ]
    keeps_records = get_traits(kind).keeps_records
    cut = {
        "read": min(len(shards), MAX_READ) if keeps_records else len(shards),
        "total": len(names),
        "shard": request.query_params.get("shard") or "",
        "is_full": len(contents) == CONTENTS,
    }
    return PageContent({"name": name, "kind": kind, "contents": contents, **cut}, contents)


def _choose_shards(names: Sequence[ShardName], text: str | None) -> Sequence[ShardName]:
    """Returns the shard that is asked for, or the first of all."""
    chosen = [name for name in names if str(name.shard) == text] if text else names[:MAX_SHARDS]
    if not chosen:
        raise Unknown(f"{names[0].channel} has no shard {text!r}; it has {len(names)}, from 0 on")
    return chosen


def _read_tenants(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    name = request.path_params["name"]
    kind, shards = _find_shards(reading, visitor, name)
    if not get_traits(kind).has_jobs:
        raise Unknown(f"{name} is not a queue, and only queues have tenants")
    with reading.redis() as client:
        tenants, are_all = busiest_tenants(client, reading.scope.namespace, shards, MAX_TENANTS)
    if not visitor.may("keys"):
        tenants = [replace(tenant, tenant=HIDDEN) for tenant in tenants]
    values = _cut("tenants", tenants, CONTENTS)
    return PageContent({"name": name, "are_all": are_all, **values}, values["tenants"])


def _read_limits(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    name = request.path_params["name"]
    with reading.postgres() as store:
        limits, count = list_limits(store, name, limit=CONTENTS)
    if not visitor.may("keys"):
        limits = [replace(limit, name=limit.name and HIDDEN) for limit in limits]
    listed = {"limits": limits, "more": count - len(limits)}
    names = {
        kind: [field.name for field in fields(limits_class)] for kind, limits_class in KINDS.items()
    }
    return PageContent({"name": name, "fields": names, **listed}, listed)


def _read_consumers(reading: Reading, visitor: Visitor, _: Request) -> PageContent:
    sample, status = reading.status(visitor)
    values = _cut("lanes", status.consumers)
    values["lanes"] = [make_lane(sample, status, consumer) for consumer in values["lanes"]]
    return PageContent(values, status.consumers, sample)


def _read_consumer(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    sample, status = reading.status(visitor)
    name = request.path_params["name"]
    consumers = [consumer for consumer in status.consumers if consumer.consumer == name]
    if not consumers:
        raise Unknown(f"no consumer {name!r} is registered")

    def is_at_rest(shard: ConsumerShard) -> bool:
        return not (shard.halted or shard.waiting or shard.lag or shard.dead_letters)

    values = {
        "name": name,
        "lanes": [make_lane(sample, status, consumer) for consumer in consumers],
        "shards": [
            (consumer.channel, shard)
            for consumer in consumers
            for shard in sorted(consumer.shards, key=is_at_rest)[:MAX_SHARDS]
        ],
        "more": sum(len(consumer.shards[MAX_SHARDS:]) for consumer in consumers),
        "is_paused": any((pause.kind, pause.name) == ("consumer", name) for pause in status.pauses),
        "troubles": [
            trouble for trouble in find_troubles(status) if is_about(name, trouble.message)
        ],
    }
    return PageContent(values, consumers, sample)


def is_about(name: str, message: str) -> bool:
    """Returns whether a message names a consumer, and not only one whose name begins likewise."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) is not None


def _read_letters(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    filters = {
        name: request.query_params.get(name) or None
        for name in ("consumer", "channel", "key", "error", "after")
    }
    letter_filter = letters.LetterFilter(
        filters["consumer"],
        filters["channel"],
        filters["key"] if visitor.may("keys") else None,
        filters["error"],
    )
    with reading.postgres() as store:
        last = _parse_position(filters["after"])
        rows = letters.newest(store, letter_filter, after=last, limit=LETTERS + 1)
        groups = letters.group(store, letter_filter) if last is None else []
    if not visitor.may("keys"):
        groups = [replace(group, error=_find_class(group.error)) for group in groups]
    listed = [_conceal_letter(letter, visitor) for letter in rows[:LETTERS]]
    active = {name: text for name, text in filters.items() if text is not None and name != "after"}
    values = {
        "letters": listed,
        "groups": groups[:MAX_GROUPS],
        "more_groups": len(groups[MAX_GROUPS:]),
        "filters": filters,
        "active": active,
        "retried": urlencode(active),
        "next": urlencode({**active, "after": _name_position(rows[LETTERS - 1])})
        if len(rows) > LETTERS
        else None,
        "is_counted": sum(group.letters for group in groups) < letters.MAX_GROUPED,
    }
    return PageContent(values, {"letters": listed, "groups": groups})


def _name_position(letter: DeadLetterRow) -> str:
    return f"{letter.failed_at.isoformat()} {letter.consumer} {letter.place}"


def _parse_position(text: str | None) -> letters.LetterPosition | None:
    """Returns where the page before has ended, from its name in the address."""
    if text is None:
        return None
    failed_at, _, identity = text.partition(" ")
    consumer, _, name = identity.partition(" ")
    place = parse_place(name)
    try:
        moment = datetime.fromisoformat(failed_at)
    except ValueError:
        raise InvalidName(f"after={text!r} is not a position in the list") from None
    return letters.LetterPosition(
        moment, consumer, place.shard.channel, place.shard.shard, place.offset
    )


def _read_letter(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    params = request.path_params
    place = Place(ShardName(params["channel"], Shard(params["shard"])), Offset(params["offset"]))
    with reading.redis() as client, reading.postgres() as store:
        row = letters.find(store, params["consumer"], place)
        story = next(iter(trace(store, client, RecordId(row.record_id))), None)
        payload = None
        if visitor.may("payloads") and "payload" in request.query_params:
            record = letters.read_record(store, row)
            payload = None if record is None else record.data_json
    letter = _conceal_letter(row, visitor)
    values = {
        "letter": letter,
        "story": job_pages.conceal_story(story, visitor),
        "payload": payload,
    }
    return PageContent(values, letter, is_partial=bool(story and story.redis))


def _read_rows(name: str, reading: Reading, visitor: Visitor, _: Request) -> PageContent:
    """Returns rows of the status, by their name there; of schedules, those in trouble first."""
    sample, status = reading.status(visitor)
    rows = sorted(getattr(status, name), key=lambda row: getattr(row, "trouble", "") is None)
    return PageContent(_cut(name, rows), rows, sample)


def _read_icks(reading: Reading, visitor: Visitor, _: Request) -> PageContent:
    sample, status = reading.status(visitor)
    icks = [ick for ick in status.channels if ick.kind == "ick"]
    readers = {
        ick.channel: [consumer for consumer in status.consumers if consumer.channel == ick.channel]
        for ick in icks
    }
    return PageContent({"readers": readers, **_cut("icks", icks)}, icks, sample)


def _read_workers(reading: Reading, _visitor: Visitor, _request: Request) -> PageContent:
    read = reading.workers.get()
    releases = Counter(sorted(session.release or "unknown" for session in read.sessions))
    values = {"releases": releases, "note": read.note, **_cut("workers", read.processes, LETTERS)}
    return PageContent(values, {"processes": read.processes, "sessions": read.sessions})


def _read_doctor(reading: Reading, visitor: Visitor, _: Request) -> PageContent:
    results = list(reading.doctor.get())
    # What a check has found may quote a record; which check it was does not.
    if not visitor.may("keys"):
        results = [
            result
            if result.grade == "ok"
            else replace(result, message=HIDDEN, fix="penstock doctor")
            for result in results
        ]
    results.sort(key=lambda result: ("error", "warning", "ok").index(result.grade))
    is_partial = any(result.unreachable for result in results)
    return PageContent(_cut("results", results, LETTERS), results, is_partial=is_partial)


def _find_class(reason: str) -> str:
    """Returns the class of an error, without its message, which may quote a record."""
    name = reason.partition(":")[0]
    return name if name.isidentifier() else HIDDEN


def _conceal_letter(letter: DeadLetterRow, visitor: Visitor) -> DeadLetterRow:
    return (
        letter
        if visitor.may("keys")
        else replace(letter, key=HIDDEN, reason=_find_class(letter.reason))
    )


def _read_actions(reading: Reading, visitor: Visitor, _: Request) -> PageContent:
    with reading.postgres() as store:
        actions = list_actions(store, limit=MAX_ROWS + 1)
    if not visitor.may("keys"):  # a tenant, a key, a unique name, a reason
        hidden = re.compile("penstock ((jobs|queues) .*|.* --reason .*)", re.DOTALL)
        actions = [
            replace(action, command=HIDDEN) if hidden.fullmatch(action.command) else action
            for action in actions
        ]
    return PageContent({"actions": actions[:MAX_ROWS], "more": len(actions) > MAX_ROWS}, actions)


_READ_RUNS = partial(_read_rows, "reconciliations")
_LETTER = "/dead-letters/{consumer}/{channel}/{shard:int}/{offset:int}"

PAGES: Mapping[str, Page] = {
    page.path: page
    for page in (
        Page("overview.html", _read_overview, "/", "Overview"),
        Page("charts.html", _read_charts, "/charts"),
        Page("channels.html", partial(_read_rows, "channels"), "/channels", "Channels"),
        Page("channel.html", _read_channel, "/channels/{name}"),
        Page("contents.html", _read_contents, "/channels/{name}/contents"),
        Page("tenants.html", _read_tenants, "/channels/{name}/tenants", is_live=False),
        Page("limits.html", _read_limits, "/channels/{name}/limits", is_live=False),
        *job_pages.PAGES,
        Page("consumers.html", _read_consumers, "/consumers", "Consumers"),
        Page("consumer.html", _read_consumer, "/consumers/{name}"),
        Page("letters.html", _read_letters, "/dead-letters", "Dead letters"),
        Page("letter.html", _read_letter, _LETTER, is_live=False),
        Page("workers.html", _read_workers, "/workers", "Workers"),
        Page("schedules.html", partial(_read_rows, "schedules"), "/schedules", "Schedules"),
        Page("icks.html", _read_icks, "/icks", "Icks"),
        Page("reconciliations.html", _READ_RUNS, "/reconciliations", "Reconcile"),
        Page("doctor.html", _read_doctor, "/doctor", "Doctor", is_live=False),
        Page("actions.html", _read_actions, "/actions", "Log", is_live=False),
        *record_pages.PAGES,
    )
}
"""Pages, by the path below the console's own."""
