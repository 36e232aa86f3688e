"""What each page shows.  A page reads its values once, and shows them as HTML, or as JSON with the names of the command's ``--json``.

What a visitor may not see is left out here, of both: keys, and reasons, which may quote what a handler has said of a record.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from penstock.channels.channel_kinds import get_kind
from penstock.channels.log.streams import MAX_READ
from penstock.channels.queue.inspection import MAX_TENANTS, busiest_tenants
from penstock.console import job_pages
from penstock.console.access import Visitor
from penstock.console.reading import HIDDEN, Page, Reading, Shown, find_named
from penstock.console.status_sampler import Sample
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.registry import RegisteredChannel
from penstock.errors import InvalidName, Unknown
from penstock.operating import letters
from penstock.operating.channels import find_channel
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.pipeline_checks import judge_status
from penstock.operating.jobs.queue_limits import KINDS, list_limits
from penstock.operating.pausing import list_actions
from penstock.operating.status.snapshot import ConsumerShard, ConsumerStatus, ShardStatus, Status
from penstock.operating.tracing.causes import MAX_OF_KEY, Wanted, explain, search_key, trace
from penstock.operating.worker_sessions import list_sessions
from penstock.parsing import find_number
from penstock.records import Offset, Place, RecordId, Shard, ShardName, is_place, parse_place

LETTERS = 100
"""Dead letters, or results of the doctor, on a page."""

MAX_GROUPS = 20
"""Groups of dead letters above them."""

MAX_SHARDS = 64
"""Shards of a channel or a consumer on its page, those with work first."""

CONTENTS = 50
"""Records, messages, members, tenants or limits on a page."""

SEARCH_S = 2.0
"""Seconds in which the records of a key are looked for, from the newest back: no index has keys."""

MAX_ROWS = 200
"""Channels, consumers, actions or reconciliations on a page."""


@dataclass(frozen=True, slots=True)
class Content:
    """A record of a log, a message of a queue or a member of an Ick."""

    place: str  # where it is
    key: str  # its key, or the member
    tenant: str | None  # of a message
    what: str  # what happened, or its state
    at: datetime | None  # when it was staged, or has begun to wait; None if that is not known
    job: str | None = None  # the id of a job


@dataclass(frozen=True, slots=True)
class Lane:
    """A consumer with what its lane shows."""

    consumer: ConsumerStatus
    state: str
    lag: int
    lag_s: float
    rate: float | None
    dead_letters: int
    history: list[int]


def _read_overview(reading: Reading, visitor: Visitor, _: Request) -> Shown:
    sample, found = reading.status(visitor)
    channels, consumers = found.channels[:MAX_ROWS], found.consumers[:MAX_ROWS]
    shards = [shard for channel in found.channels for shard in channel.shards]
    waits = sum(shard.staged for shard in shards)
    read = [(shard.sequenced, shard.published) for shard in shards if shard.published is not None]
    names = [channel.channel for channel in found.channels]
    lanes = [make_lane(sample, found, consumer) for consumer in consumers]
    values = {
        "found": found,
        "steps": {
            "staged": (waits, max((shard.staged_s for shard in shards), default=0.0)),
            "sequenced": (sum(shard.sequenced for shard in shards), sample.rate("sequenced", *names)),
            "unpublished": sum(max(0, sequenced - published) for sequenced, published in read),
            "published": (sum(published for _, published in read), sample.rate("published", *names)),
            "unread": len(shards) - len(read),
            "lag": sum(shard.lag for each in found.consumers for shard in each.shards),
            "passed": sum(shard.checkpoint for each in found.consumers for shard in each.shards),
            "rate": sample.rate("passed", *((each.consumer, each.channel) for each in found.consumers)),
        },
        "troubles": find_troubles(found),
        "channels": channels,
        "lanes": lanes,
        "more": len(found.channels) + len(found.consumers) - len(channels) - len(consumers),
    }
    return Shown(values, found, sample)


def find_troubles(found: Status) -> list[CheckResult]:
    """What is wrong, the worst first."""
    troubles = judge_status(found)
    if found.redis is not None:
        fix = "records wait in Postgres, and nothing is lost; penstock doctor"
        troubles.append(CheckResult("redis", "error", found.redis, fix, unreachable=True))
    for shard, reason in found.damaged:
        troubles.append(CheckResult("redis", "error", f"{shard}: {reason}", "penstock doctor says what to do"))
    return sorted(troubles, key=lambda each: each.grade != "error")


def make_lane(sample: Sample, found: Status, consumer: ConsumerStatus) -> Lane:
    """What the lane of a consumer shows."""
    lag = sum(shard.lag for shard in consumer.shards)
    return Lane(
        consumer,
        find_state(found, consumer, lag),
        lag,
        max((shard.lag_s for shard in consumer.shards), default=0.0),
        sample.rate("passed", (consumer.consumer, consumer.channel)),
        sum(shard.dead_letters for shard in consumer.shards),
        sample.lags(consumer),
    )


def find_state(found: Status, consumer: ConsumerStatus, lag: int) -> str:
    """The state of a consumer, in a word."""
    if found.find_pause(consumer) is not None:
        return "paused"
    if any(shard.halted is not None for shard in consumer.shards):
        return "halted"
    if any(shard.waiting is not None for shard in consumer.shards):
        return "waiting"
    return "behind" if lag else "up to date"


def _read_channels(reading: Reading, visitor: Visitor, _request: Request) -> Shown:
    sample, status = reading.status(visitor)
    unlisted = len(status.channels[MAX_ROWS:])
    return Shown({"channels": status.channels[:MAX_ROWS], "more": unlisted}, status.channels, sample)


def _read_channel(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    sample, status = reading.status(visitor)
    name = request.path_params["name"]
    channel = find_named(status.channels, "channel", name)
    readers = [make_lane(sample, status, each) for each in status.consumers if each.channel == name]
    # Those with work first, then those of the newest generation.
    shards = sorted(channel.shards, key=lambda shard: (_is_at_rest(shard), -shard.shard))[:MAX_SHARDS]
    checkpoints = {
        shard.shard: [
            (each.consumer.consumer, other.checkpoint)
            for each in readers
            for other in each.consumer.shards
            if other.shard == shard.shard
        ]
        for shard in shards
    }
    schedules = [each for each in status.schedules if each.channel == name]
    values = {
        "channel": channel,
        "shards": sorted(shards, key=lambda shard: shard.shard),
        "readers": readers[:MAX_ROWS],
        "more_readers": len(readers[MAX_ROWS:]),
        "checkpoints": checkpoints,
        "pause": next((each for each in status.pauses if (each.kind, each.name) == ("channel", name)), None),
        "schedules": schedules[:CONTENTS],
        "more_schedules": len(schedules[CONTENTS:]),
    }
    return Shown(values, channel, sample)


def _is_at_rest(shard: ShardStatus) -> bool:
    return not (shard.staged or shard.damage or shard.unknown or (shard.published or 0) < shard.sequenced)


def _read_contents(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    """The newest records of a log; the messages of a queue, or members of an Ick, that have waited longest."""
    name = request.path_params["name"]
    with reading.postgres() as store:
        channel = find_channel(store, name)
    # Those of the newest generation first: new records are there.
    shards = _choose_shards(channel, request.query_params.get("shard"))
    namespace = reading.scope.namespace
    with reading.redis() as client:
        held = get_kind(channel.kind).items(client, namespace, shards, CONTENTS)
    contents = [
        Content(each.place, each.key, each.facts.get("tenant"), each.state, each.at, each.facts.get("id"))
        for each in held
    ]
    if not visitor.may("keys"):
        contents = [replace(each, key=HIDDEN, tenant=each.tenant and HIDDEN) for each in contents]
    read = min(len(shards), MAX_READ) if channel.traits.keeps_records else len(shards)
    cut = {"read": read, "shard": request.query_params.get("shard") or "", "is_full": len(contents) == CONTENTS}
    return Shown({"channel": channel, "contents": contents, **cut}, contents)


def _choose_shards(channel: RegisteredChannel, text: str | None) -> tuple[ShardName, ...]:
    """The shard that is asked for; without one, those of the newest generation first."""
    if not text:
        return channel.shard_names[::-1][:MAX_SHARDS]
    chosen = tuple(name for name in channel.shard_names if str(name.shard) == text)
    if not chosen:
        raise Unknown(f"{channel.name} has no shard {text!r}; it has {channel.total_shards}, from 0 on")
    return chosen


def _read_tenants(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    with reading.postgres() as store:
        channel = find_channel(store, request.path_params["name"])
    if not channel.traits.has_jobs:
        raise Unknown(f"{channel.name} is no queue, and only queues have tenants")
    with reading.redis() as client:
        tenants, are_all = busiest_tenants(client, reading.scope.namespace, channel.shard_names, MAX_TENANTS)
    busiest = tenants[:CONTENTS]
    if not visitor.may("keys"):
        busiest = [replace(each, tenant=HIDDEN) for each in busiest]
    unlisted = len(tenants) - len(busiest)
    return Shown({"channel": channel, "tenants": busiest, "more": unlisted, "are_all": are_all}, busiest)


def _read_limits(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    name = request.path_params["name"]
    with reading.postgres() as store:
        found, count = list_limits(store, name, limit=CONTENTS)
    if not visitor.may("keys"):
        found = [replace(each, name=each.name and HIDDEN) for each in found]
    shown = {"limits": found, "more": count - len(found)}
    names = {kind: [each.name for each in fields(limits)] for kind, limits in KINDS.items()}
    return Shown({"name": name, "fields": names, **shown}, shown)


def _read_consumers(reading: Reading, visitor: Visitor, _: Request) -> Shown:
    sample, status = reading.status(visitor)
    lanes = [make_lane(sample, status, each) for each in status.consumers[:MAX_ROWS]]
    unlisted = len(status.consumers) - len(lanes)
    return Shown({"lanes": lanes, "more": unlisted}, status.consumers, sample)


def _read_consumer(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    sample, status = reading.status(visitor)
    name = request.path_params["name"]
    mine = [each for each in status.consumers if each.consumer == name]
    if not mine:
        find_named(status.consumers, "consumer", name)

    def is_at_rest(shard: ConsumerShard) -> bool:
        return not (shard.halted or shard.waiting or shard.lag or shard.dead_letters)

    values = {
        "name": name,
        "lanes": [make_lane(sample, status, each) for each in mine],
        "shards": [
            (each.channel, shard) for each in mine for shard in sorted(each.shards, key=is_at_rest)[:MAX_SHARDS]
        ],
        "more": sum(len(each.shards[MAX_SHARDS:]) for each in mine),
        "pauses": [each for each in status.pauses if any(each.holds(name, consumer.channel) for consumer in mine)],
        "troubles": [each for each in find_troubles(status) if is_about(name, each.message)],
    }
    return Shown(values, mine, sample)


def is_about(name: str, message: str) -> bool:
    """True if a message names a consumer, and not only one whose name begins likewise."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) is not None


def _read_letters(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    given = {name: request.query_params.get(name) or None for name in ("consumer", "channel", "key", "error", "after")}
    chosen = letters.LetterFilter(
        given["consumer"], given["channel"], given["key"] if visitor.may("keys") else None, given["error"]
    )
    with reading.postgres() as store:
        last = _parse_position(given["after"])
        found = letters.newest(store, chosen, after=last, limit=LETTERS + 1)
        groups = letters.group(store, chosen) if last is None else []
    if not visitor.may("keys"):
        groups = [replace(each, error=_find_class(each.error)) for each in groups]
    shown = [_conceal_letter(each, visitor) for each in found[:LETTERS]]
    kept = {name: text for name, text in given.items() if text is not None and name != "after"}
    values = {
        "letters": shown,
        "groups": groups[:MAX_GROUPS],
        "more_groups": len(groups[MAX_GROUPS:]),
        "given": given,
        "kept": kept,
        "retried": urlencode(kept),
        "next": urlencode({**kept, "after": _name_position(found[LETTERS - 1])}) if len(found) > LETTERS else None,
        "is_counted": sum(each.letters for each in groups) < letters.MAX_GROUPED,
    }
    return Shown(values, {"letters": shown, "groups": groups})


def _name_position(letter: DeadLetterRow) -> str:
    return f"{letter.failed_at.isoformat()} {letter.consumer} {letter.place}"


def _parse_position(text: str | None) -> letters.LetterPosition | None:
    """Where the page before has ended, from its name in the address."""
    if text is None:
        return None
    failed_at, _, rest = text.partition(" ")
    consumer, _, name = rest.partition(" ")
    place = parse_place(name)
    try:
        at = datetime.fromisoformat(failed_at)
    except ValueError:
        raise InvalidName(f"after={text!r} is no position in the list") from None
    return letters.LetterPosition(at, consumer, place.shard.channel, place.shard.shard, place.offset)


def _read_letter(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    params = request.path_params
    place = Place(ShardName(params["channel"], Shard(params["shard"])), Offset(params["offset"]))
    with reading.postgres() as store, reading.redis() as client:
        found = letters.find(store, params["consumer"], place)
        story = next(iter(trace(store, client, RecordId(found.record_id))), None)
        payload = None
        if visitor.may("payloads") and "payload" in request.query_params:
            record = letters.read_record(store, found)
            payload = None if record is None else record.data_json
    letter = _conceal_letter(found, visitor)
    values = {"letter": letter, "story": job_pages.conceal_story(story, visitor), "payload": payload}
    return Shown(values, letter)


def _read_schedules(reading: Reading, visitor: Visitor, _: Request) -> Shown:
    sample, status = reading.status(visitor)
    schedules = sorted(status.schedules, key=lambda each: each.trouble is None)
    return Shown({"schedules": schedules[:MAX_ROWS], "more": len(schedules[MAX_ROWS:])}, status.schedules, sample)


def _read_icks(reading: Reading, visitor: Visitor, _: Request) -> Shown:
    sample, status = reading.status(visitor)
    icks = [each for each in status.channels if each.kind == "ick"]
    readers = {each.channel: [other for other in status.consumers if other.channel == each.channel] for each in icks}
    return Shown({"icks": icks[:MAX_ROWS], "more": len(icks[MAX_ROWS:]), "readers": readers}, icks, sample)


def _read_workers(reading: Reading, _visitor: Visitor, _request: Request) -> Shown:
    with reading.postgres() as store:
        sessions = list_sessions(store)
    return Shown({"sessions": sessions[:MAX_ROWS], "more": len(sessions[MAX_ROWS:])}, sessions)


def _read_reconciliations(reading: Reading, visitor: Visitor, _: Request) -> Shown:
    sample, status = reading.status(visitor)
    runs = status.reconciliations
    return Shown({"runs": runs[:MAX_ROWS], "more": len(runs[MAX_ROWS:])}, runs, sample)


def _read_doctor(reading: Reading, visitor: Visitor, _: Request) -> Shown:
    results = reading.diagnose()
    if not visitor.may("keys"):  # what a check has found may quote a record; which check it was does not
        hidden = [replace(each, message=HIDDEN, fix="penstock doctor") for each in results]
        results = [each if each.grade == "ok" else bare for each, bare in zip(results, hidden, strict=True)]
    results.sort(key=lambda each: ("error", "warning", "ok").index(each.grade))
    return Shown({"results": results[:LETTERS], "more": len(results[LETTERS:])}, results)


def _read_find(reading: Reading, visitor: Visitor, request: Request) -> Shown:
    text = request.query_params.get("q", "").strip()
    values: dict[str, Any] = {"text": text, "stories": (), "diagnosis": None, "since": None}
    if text:
        wanted: Wanted = _parse_wanted(text, is_key="key" in request.query_params)
        if isinstance(wanted, str) and not visitor.may("keys"):
            raise InvalidName(
                "a record's number, or its place such as 'rides/2 offset 4118', is wanted: keys are not for this visitor"
            )
        with reading.postgres() as store, reading.redis() as client:
            if isinstance(wanted, str):
                wanted = search_key(store, wanted, SEARCH_S)
                values["since"] = wanted.since if len(wanted.ids) < MAX_OF_KEY and wanted.since > 1 else None
            with suppress(Unknown):  # the diagnosis says why
                values["stories"] = trace(store, client, wanted)
            values["diagnosis"] = explain(store, client, wanted)
        values["stories"] = [job_pages.conceal_story(each, visitor) for each in values["stories"]]
        if not visitor.may("keys"):
            values["diagnosis"] = replace(values["diagnosis"], text=HIDDEN, story=None, writers=())
    return Shown(values, {name: values[name] for name in ("stories", "diagnosis", "since")})


def _parse_wanted(text: str, *, is_key: bool) -> RecordId | Place | str:
    if is_key:
        return text
    if text.isascii() and text.isdigit() and (number := find_number(text.encode())) is not None:
        return RecordId(number)
    return parse_place(text) if is_place(text) else text


def _find_class(reason: str) -> str:
    """The class of an error, without its message, which may quote a record."""
    name = reason.partition(":")[0]
    return name if name.isidentifier() else HIDDEN


def _conceal_letter(letter: DeadLetterRow, visitor: Visitor) -> DeadLetterRow:
    return letter if visitor.may("keys") else replace(letter, key=HIDDEN, reason=_find_class(letter.reason))


def _read_actions(reading: Reading, visitor: Visitor, _: Request) -> Shown:
    with reading.postgres() as store:
        actions = list_actions(store, limit=MAX_ROWS + 1)
    if not visitor.may("keys"):  # a tenant, a key, a unique name, a reason
        hidden = re.compile("penstock ((jobs|queues) .*|.* --reason .*)", re.DOTALL)
        actions = [replace(each, command=HIDDEN) if hidden.fullmatch(each.command) else each for each in actions]
    return Shown({"actions": actions[:MAX_ROWS], "more": len(actions) > MAX_ROWS}, actions)


_LETTER = "/dead-letters/{consumer}/{channel}/{shard:int}/{offset:int}"

PAGES: Mapping[str, Page] = {
    page.path: page
    for page in (
        Page("overview.html", _read_overview, "/", "Overview"),
        Page("channels.html", _read_channels, "/channels", "Channels"),
        Page("channel.html", _read_channel, "/channels/{name}"),
        Page("contents.html", _read_contents, "/channels/{name}/contents", is_live=False),
        Page("tenants.html", _read_tenants, "/channels/{name}/tenants", is_live=False),
        Page("limits.html", _read_limits, "/channels/{name}/limits", is_live=False),
        *job_pages.PAGES,
        Page("consumers.html", _read_consumers, "/consumers", "Consumers"),
        Page("consumer.html", _read_consumer, "/consumers/{name}"),
        Page("letters.html", _read_letters, "/dead-letters", "Dead letters"),
        Page("letter.html", _read_letter, _LETTER, is_live=False),
        Page("workers.html", _read_workers, "/workers", "Workers", is_live=False),
        Page("schedules.html", _read_schedules, "/schedules", "Schedules"),
        Page("icks.html", _read_icks, "/icks", "Icks"),
        Page("reconciliations.html", _read_reconciliations, "/reconciliations", "Reconciliations"),
        Page("doctor.html", _read_doctor, "/doctor", "Doctor", is_live=False),
        Page("actions.html", _read_actions, "/actions", "Log", is_live=False),
        Page("find.html", _read_find, "/find", "Find", is_live=False),
    )
}
"""The pages, by the path below the console's own."""
