"""Each range of what an application gives ends where it says: the first and the last are taken, and none before or beyond them."""

import ast
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from math import nan
from pathlib import Path
from typing import Any

import pytest

from penstock import Ick, Log, Queue, Snooze, TenantLimits, Unique
from penstock.channels.log.arguments import check_seconds
from penstock.channels.queue.leases import LeaseState
from penstock.channels.queue.queue_messages import Message, NewMessage, checked_count
from penstock.channels.queue.rounds import ReaderOptions
from penstock.channels.queue.shard import QueueShape
from penstock.clients import (
    DirtyList,
    GroupOptions,
    LogGroup,
    LogReader,
    LogWriter,
    NewRecord,
    PinnedKeys,
    QueuedIds,
    QueueTracker,
    Reservations,
    VolatileHash,
)
from penstock.declaring.declarations import ConsumerSpec, WorkerSpec
from penstock.declaring.kinds import checked_source
from penstock.declaring.schedules import ScheduleSpec
from penstock.declaring.unique import KeyLimits
from penstock.errors import PenstockError
from penstock.staging.payload import json_text
from penstock.staging.rows import make_row
from penstock.streaming.share import parse_share
from penstock.testing import make_job

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
LOG, QUEUE = Log("rides"), Queue("jobs")
NOBODY: Any = None
"""A client that is not asked: what is refused is refused before that."""

YEAR_S, KB, MB = 365 * 86_400.0, 1024, 1024 * 1024
EXACT = 2**53


def handle(_session: object, _item: object) -> None: ...


def consumer(**options: Any) -> ConsumerSpec:
    return ConsumerSpec("c", LOG, handle, **options)


def worker(**options: Any) -> WorkerSpec:
    return WorkerSpec("w", QUEUE, handle, **options)


def message(**fields: Any) -> NewMessage:
    return NewMessage(**{"tenant": "t", "payload": b"", **fields})


def group(**options: Any) -> GroupOptions:
    return GroupOptions("l", "g", **options)


def schedule(every: Any = "1h", **options: Any) -> ScheduleSpec:
    return ScheduleSpec("s", QUEUE, every, **options)


class Asked(BaseException):
    """The answer to whatever is asked."""


def begin(steps: Generator[Any, Any, Any]) -> None:
    """Runs an operation up to what it asks first, if it asks anything."""
    with suppress(Asked, StopIteration):
        next(steps)
        while True:
            steps.throw(Asked)


def row(key: str = "k", action: str = "a", object_: str = "o", **more: Any) -> str:
    return make_row(LOG, key, action, object_, 1, **more)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


EMPTY = sum(map(len, NewRecord("").texts()))


def entries(size: int) -> list[Any]:
    """Entries of this size together, and no smaller than those of no data."""
    more, rest = divmod(max(size, EMPTY) - EMPTY, MB)
    return ["x" * rest, *["x" * (MB - EMPTY)] * more]


HASH, PINS = VolatileHash(NOBODY, "h"), PinnedKeys(NOBODY, "p")
READER, WRITER = LogReader(NOBODY, "l"), LogWriter(NOBODY, "l")
LOCK = PINS.lock("l")
TRACKER = QueueTracker(NOBODY, "t", QueuedIds(lambda *_: [], lambda *_: []))

Range = tuple[Callable[[Any], object], Any, Any, Any]

ENDS: dict[str, Range] = {
    "Log shards": (lambda n: Log("a", shards=n), 1, 1024, 1),
    "Ick shards": (lambda n: Ick("a", shards=n), 1, 1024, 1),
    "Queue shards": (lambda n: Queue("a", shards=n), 1, 1024, 1),
    "Queue streams": (lambda n: Queue("a", streams=n), 1, 256, 1),
    "Queue hand": (lambda n: Queue("a", streams=7, hand=n), 1, 7, 1),
    "Log max_bytes": (lambda n: Log("a", max_bytes=n), 1, 64 * MB, 1),
    "Queue max_bytes": (lambda n: Queue("a", max_bytes=n), 1, 64 * MB, 1),
    "Log redis_memory": (lambda n: Log("a", redis_memory=n), 1, 1 << 60, 1),
    "Log redis_memory, as text": (lambda n: Log("a", redis_memory=f"{n}TB"), 1, 1 << 20, 1),
    "Log keep": (lambda s: Log("a", keep=s), 0, 100 * YEAR_S, 0.001),
    "Log keep, as a timedelta": (lambda s: Log("a", keep=timedelta(seconds=s)), 0, 100 * YEAR_S, 0.001),
    "Log keep, as text": (lambda s: Log("a", keep=f"{s:.0f}s"), 0, 100 * YEAR_S, 1),
    "length of the name of a channel": (lambda n: Log("a" * n), 1, 63, 1),
    "length of the name of a consumer": (lambda n: ConsumerSpec("a" * n, LOG, handle), 1, 63, 1),
    "length of the name of a source": (lambda n: checked_source("a" * n), 1, 63, 1),
    "length of the name of a log with its source": (lambda n: Log("a" * n, source="eu"), 1, 60, 1),
    "length of the name of a schedule": (lambda n: ScheduleSpec("a" * n, QUEUE, "1h"), 1, 63, 1),
    "ConsumerSpec batch": (lambda n: consumer(batch=n), 1, None, 1),
    "ConsumerSpec attempts": (lambda n: consumer(attempts=n), 1, None, 1),
    "ConsumerSpec halt_after": (lambda n: consumer(halt_after=n), 1, None, 1),
    "ConsumerSpec idle_timeout": (lambda s: consumer(idle_timeout=s), 0.1, 86_400, 0.001),
    "WorkerSpec concurrency": (lambda n: worker(concurrency=n), 1, 1000, 1),
    "WorkerSpec together": (lambda n: worker(together=n), 1, 100, 1),
    "WorkerSpec lease": (lambda s: worker(lease=s), 0.05, 86_400, 0.001),
    "WorkerSpec limit": (lambda s: worker(limit=s), 0.05, 86_400, 0.001),
    "WorkerSpec backoff": (lambda s: worker(backoff=s), 0, 86_400, 0.001),
    "TenantLimits weight": (lambda x: TenantLimits(weight=x), 0.001, 999.999, 0.001),
    "TenantLimits elastic": (lambda n: TenantLimits(elastic=n), 1, EXACT - 1, 1),
    "TenantLimits in_flight": (lambda n: TenantLimits(in_flight=n), 1, EXACT - 1, 1),
    "TenantLimits rate": (lambda x: TenantLimits(rate=x), 1, EXACT - 1, 1),
    "TenantLimits rate, of less than one": (lambda x: TenantLimits(rate=x), 0.001, None, 0.001),
    "TenantLimits burst": (lambda n: TenantLimits(burst=n), 1, EXACT - 1, 1),
    "TenantLimits bytes": (lambda n: TenantLimits(bytes=n), 1, EXACT - 1, 1),
    "KeyLimits in_flight": (lambda n: KeyLimits(in_flight=n), 1, EXACT - 1, 1),
    "KeyLimits rate": (lambda x: KeyLimits(rate=x), 1, EXACT - 1, 1),
    "KeyLimits burst": (lambda n: KeyLimits(burst=n), 1, EXACT - 1, 1),
    "length of a tenant": (lambda n: message(tenant="t" * n), 1, 256, 1),
    "length of a tenant, in bytes": (lambda n: message(tenant="ü" * n), 1, 128, 1),
    "length of a tenant that has limits": (lambda n: Queue("a", limits={"t" * n: TenantLimits()}), None, 256, 1),
    "length of a key of a message": (lambda n: message(key="k" * n), None, 256, 1),
    "length of an id": (lambda n: message(id="i" * n), 1, 256, 1),
    "length of a unique name": (lambda n: message(unique=Unique("u" * n)), 1, 256, 1),
    "size of a payload of a message": (lambda n: message(payload=b"x" * n), None, MB, 1),
    "size of headers of a message": (lambda n: message(headers="x" * n), None, MB, 1),
    "NewMessage delay_s": (lambda s: message(delay_s=s), 0, 10 * YEAR_S, 0.001),
    "Unique window": (lambda s: message(unique=Unique("u", window=s)), 0, 10 * YEAR_S, 0.001),
    "messages that are asked for": (checked_count, 1, None, 1),
    "QueueShape streams": (lambda n: QueueShape("a", streams=n), 1, 256, 1),
    "QueueShape hand": (lambda n: QueueShape("a", streams=7, hand=n), 1, 7, 1),
    "QueueShape shards": (lambda n: QueueShape("a", shards=n), 1, 1024, 1),
    "ReaderOptions lease_s": (lambda s: ReaderOptions(lease_s=s), 0.05, 86_400, 0.001),
    "ReaderOptions limit_s": (lambda s: ReaderOptions(limit_s=s), 0.001, None, 0.001),
    "ReaderOptions attempts": (lambda n: ReaderOptions(attempts=n), 1, None, 1),
    "ReaderOptions preferred": (lambda n: ReaderOptions(preferred=n), 0, 255, 1),
    "Snooze after": (Snooze, 0, 10 * YEAR_S, 0.001),
    "Job.report_progress fraction": (lambda x: make_job().report_progress(x), 0, 1, 0.001),
    "interval of a schedule": (schedule, 1, 366 * 86_400, 0.001),
    "deadline of a schedule": (lambda s: schedule(deadline=s), 0.001, 10 * YEAR_S, 0.001),
    "number of a share": (lambda n: parse_share(f"{n}/7"), 1, 7, 1),
    "number of shares": (lambda n: parse_share(f"1/{n}"), 1, 1000, 1),
    "length of a key": (lambda n: row("k" * n), 1, 1024, 1),
    "length of a key of several parts": (lambda n: make_row(LOG, ("k" * n,), "a", "o", 1), None, 1020, 1),
    "length of an action": (lambda n: row(action="a" * n), 1, 255, 1),
    "length of an object": (lambda n: row(object_="a" * n), 1, 255, 1),
    "size of headers": (lambda n: row(headers={"a": "x" * n}), None, 64 * KB - len('{"a":""}'), 1),
    "size of a payload": (lambda n: make_row(Log("a", max_bytes=9), "k", "a", "o", "x" * n), None, 7, 1),
    "depth of a payload": (lambda n: json_text(nested(n), "data", MB), None, 100, 1),
    "digits of a number": (lambda n: json_text(10**n, "data", MB), None, 4299, 1),
    "GroupOptions shards": (lambda n: group(shards=n), 1, 1024, 1),
    "GroupOptions max_pending": (lambda n: group(max_pending=n), 1, 100_000, 1),
    "GroupOptions retry_s": (lambda s: group(retry_s=s), 0.01, 30 * 86_400, 0.001),
    "GroupOptions expire_s": (lambda s: group(retry_s=1, expire_s=s), 0.01, 30 * 86_400, 0.001),
    "LogGroup.read count": (lambda n: begin(LogGroup.read(LogGroup(NOBODY, "l", "g"), n)), 1, 1000, 1),
    "LogReader shards": (lambda n: LogReader(NOBODY, "l", shards=n), 1, 1024, 1),
    "LogReader.read count": (lambda n: begin(LogReader.read(READER, count=n)), 0, 10_000, 1),
    "LogReader.read_back count": (lambda n: begin(LogReader.read_back(READER, count=n)), 0, 10_000, 1),
    "LogReader.read_any count": (lambda n: begin(LogReader.read_any(READER, {0: 1}, n)), 0, 10_000, 1),
    "LogWriter shards": (lambda n: LogWriter(NOBODY, "l", shards=n), 1, 1024, 1),
    "LogWriter.append entries": (lambda n: begin(LogWriter.append(WRITER, ["x"] * n)), 1, 10_000, 1),
    "LogWriter.append, size of all entries": (lambda n: begin(LogWriter.append(WRITER, entries(n))), None, 32 * MB, 1),
    "LogWriter.append keep_at_least": (lambda n: begin(LogWriter.append(WRITER, ["x"], keep_at_least=n)), 0, EXACT - 1, 1),
    "LogWriter.append, length of the token": (lambda n: begin(LogWriter.append(WRITER, ["x"], token="t" * n)), 1, 256, 1),
    "LogWriter.evict upto": (lambda n: begin(LogWriter.evict(WRITER, upto=n)), 0, EXACT - 1, 1),
    "LogWriter.evict keep": (lambda n: begin(LogWriter.evict(WRITER, keep=n)), 0, EXACT - 1, 1),
    "LogWriter.evict older_than_s": (lambda s: begin(LogWriter.evict(WRITER, older_than_s=s)), 0, 1e9, 0.001),
    "seconds of a log": (lambda s: check_seconds("slack_s", s), 0, 1e9, 0.001),
    "length of the name of a structure": (lambda n: VolatileHash(NOBODY, "n" * n), 1, 256, 1),
    "length of a field": (lambda n: begin(VolatileHash.hget(HASH, "f" * n)), 1, 1024, 1),
    "size of a value": (lambda n: begin(PinnedKeys.put(PINS, "k", b"x" * n, 1)), None, 16 * MB, 1),
    "size of a field and its value": (lambda n: begin(VolatileHash.hset(HASH, "f", b"x" * n, 1)), None, 16 * MB - 1, 1),
    "fields that are read together": (lambda n: begin(VolatileHash.hmget(HASH, *map(str, range(n)))), None, 1000, 1),
    "fields that are set together": (
        lambda n: begin(VolatileHash.hset_many(HASH, dict.fromkeys(map(str, range(n)), "v"), 1)), None, 1000, 1,
    ),
    "VolatileHash.hset ttl_s": (lambda s: begin(VolatileHash.hset(HASH, "f", b"", s)), 0.001, 10 * YEAR_S, 0.001),
    "VolatileHash.gc": (lambda n: begin(VolatileHash.gc(HASH, n)), 1, 1000, 1),
    "PinnedKeys.put ttl_s": (lambda s: begin(PinnedKeys.put(PINS, "k", b"", s)), 0.001, 10 * YEAR_S, 0.001),
    "PinnedKeys.reap most": (lambda n: begin(PinnedKeys.reap(PINS, n)), 1, 1000, 1),
    "FencedLock lease_s": (lambda s: PINS.lock("l", lease_s=s), 0.001, 10 * YEAR_S, 0.001),
    "FencedLock.acquire above": (lambda n: begin(type(LOCK).acquire(LOCK, 0, above=n)), 0, 2**52, 1),
    "FencedLock.acquire wait_s": (lambda s: begin(type(LOCK).acquire(LOCK, s)), 0, 10 * YEAR_S, 0.001),
    "ids that are added together": (lambda n: begin(QueueTracker.add(TRACKER, [*map(str, range(n))])), None, 1000, 1),
    "QueueTracker.sample count": (lambda n: begin(QueueTracker.sample(TRACKER, n)), 1, 1000, 1),
    "Reservations size": (lambda n: Reservations(NOBODY, "i", holder="h", size=n), 1, None, 1),
    "DirtyList.exchange size": (lambda n: begin(DirtyList.exchange(DirtyList(NOBODY, "i"), n, [])), 0, None, 1),
}  # fmt: skip
"""What is called, the first and the last value that are taken (None: from nothing on, or without a last one), and their distance to others."""

ERRORS = (PenstockError, ValueError)


@pytest.mark.parametrize("name", ENDS)
def test_a_value_is_accepted_up_to_both_limits_and_not_beyond(name: str) -> None:
    call, first, last, step = ENDS[name]
    call(first or 0)
    if first is not None:
        with pytest.raises(ERRORS):
            call(first - step)
    if isinstance(step, float):
        with pytest.raises(ERRORS):
            call(nan)
    if last is not None:
        call(last)
        with pytest.raises(ERRORS):
            call(last + step)


def noted(length: int) -> str:
    notes: list[str] = []
    job = replace(make_job(), _report=lambda _, note: notes.append(note))
    job.report_progress(1, "x" * length)
    return notes[0]


def settled(text: str) -> str:
    given = Message(0, "i", "t", "", 1, 0, 0, b"", "")
    return LeaseState(given, "token", 0.0).settlement("dead", reason=text).reason


CUT: dict[str, tuple[Callable[[int], str], int]] = {
    "note of progress": (noted, 500),
    "reason of a dead letter": (lambda n: settled("x" * n), 4000),
    "reason of a dead letter, in bytes": (lambda n: settled("ü" * n), 2000),
}


@pytest.mark.parametrize("name", CUT)
def test_a_longer_text_is_cut_and_the_longest_is_not(name: str) -> None:
    call, most = CUT[name]

    assert [len(call(length)) for length in (0, most, most + 1)] == [0, most, most]


IN_RANGES = {
    "declaring/declarations": {"MIN_IDLE_TIMEOUT_S", "MAX_IDLE_TIMEOUT_S", "MAX_CONCURRENCY", "MAX_TOGETHER", "MIN_LEASE_S", "MAX_LEASE_S"},
    "declaring/kinds": {"_LONGEST_NAME", "MAX_SHARDS", "MAX_STREAMS", "LARGEST_MAX_BYTES", "LARGEST_MEMORY"},
    "declaring/outcomes": {"MAX_SNOOZE_S", "MAX_NOTE_CHARACTERS"},
    "declaring/schedules": {"MIN_INTERVAL_S", "MAX_INTERVAL_S"},
    "declaring/unique": {"MAX_NAME_BYTES", "MAX_DELAY_S", "WEIGHTS"},
    "structures/calls": {"MIN_TTL_S", "MAX_TTL_S", "MAX_NAME_BYTES", "MAX_FIELD_BYTES", "MAX_VALUE_BYTES", "MAX_FIELDS"},
    "structures/group_options": {"MAX_PENDING", "MIN_RETRY_S", "MAX_RETRY_S"},
    "channels/log/arguments": {"NEWEST", "MAX_S", "MAX_COUNT"},
    "channels/log/log_reader": {"MAX_COUNT"},
    "structures/log_writer": {"MAX_APPEND_BYTES"},
    "structures/pins": {"MAX_NUMBER"},
    "channels/queue/leases": {"MAX_REASON_BYTES"},
    "channels/queue/rounds": {"MIN_LEASE_S", "MAX_LEASE_S"},
    "channels/queue/queue_messages": {"MAX_PAYLOAD_BYTES"},
    "staging/payload": {"MAX_DEPTH", "MAX_HEADERS_BYTES", "MAX_INT_DIGITS"},
    "streaming/share": {"MAX_SHARES"},
    "records": {"MAX_KEY_CHARACTERS", "MAX_LABEL_CHARACTERS"},
}  # fmt: skip
"""The limits whose ends are above."""

ELSEWHERE = {
    "declaring/kinds": {"MAX_PAYLOAD_BYTES": "a default"},
    "declaring/schedules": dict.fromkeys(("MAX_CATCH_UP", "MAX_AT_ONCE"), "tests/streaming/test_schedules.py"),
    "structures/log_group": {"MAX_RANGES": "tests/channels/groups/test_group_clients.py"},
    "channels/log/log_reader": {
        "MAX_BYTES": "tests/channels/test_entries_within_memory.py",
        "MIN_BYTES": "tests/channels/test_entries_within_memory.py",
        "MAX_WAIT_S": "a wait that is repeated",
    },
    "structures/pins": {"MAX_PAUSE_S": "a pause"},
    "channels/queue/adoption": {"MAX_ADOPTED": "tests/channels/queue/test_adopting.py"},
    "channels/queue/leases": {"MAX_PAUSE_S": "tests/unit/test_reader_rounds.py"},
    "channels/queue/rounds": {"MAX_WAIT_S": "a wait that is repeated"},
    "structures/queue_tracker": dict.fromkeys(("MAX_WALK", "MAX_SAMPLE"), "tests/structures/test_queue_tracker.py"),
    "staging/explicit": {"MAX_MEMBERS": "tests/jobs/test_groups.py"},
    "staging/guard": dict.fromkeys(("MAX_CACHED_CHARACTERS", "MAX_PASSED_STATEMENTS"), "tests/staging/test_guard.py"),
    "staging/rows": {"MAX_STATEMENT_CHARACTERS": "tests/staging/test_explicit.py", "_MAX_CACHED_LABELS": "a cache"},
    "staging/trace_headers": {"MAX_TRACE_BYTES": "tests/observing/test_traces.py"},
    "records": {"MAX_PARSED": "a batch of its own"},
}
"""Limits of what is done together, and those whose ends are in other tests."""

PLACES = (
    "declaring",
    "structures",
    "staging",
    *(f"channels/log/{name}.py" for name in ("arguments", "log_reader", "log_slices")),
    *(f"channels/ick/{name}.py" for name in ("dirty_list", "ick_repair", "reservations")),
    *(f"channels/queue/{name}.py" for name in ("adoption", "leases", "queue_messages", "queue_reader", "rounds")),
    "streaming/share.py",
    "records.py",
)


def test_every_limit_is_listed() -> None:
    found: dict[str, set[str]] = {}
    for place in PLACES:
        for path in [SOURCE / place] if place.endswith(".py") else (SOURCE / place).rglob("*.py"):
            if names := {name for name in _constants(path) if {*name.split("_")} & WORDS}:
                found[str(path.relative_to(SOURCE).with_suffix(""))] = names

    listed = {place: {*IN_RANGES.get(place, ()), *ELSEWHERE.get(place, ())} for place in {*IN_RANGES, *ELSEWHERE}}
    assert found == listed
    assert all(
        (SOURCE.parents[1] / where).exists()
        for of in ELSEWHERE.values()
        for where in of.values()
        if where.endswith(".py")
    )


WORDS = {"MAX", "MIN", "LARGEST", "LONGEST", "NEWEST", "WEIGHTS"}


def _constants(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (each.id for each in parts if isinstance(each, ast.Name))
