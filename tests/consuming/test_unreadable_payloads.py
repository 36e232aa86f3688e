"""A payload that Postgres holds and Python cannot read becomes a dead letter, wherever it is read; all else goes on.

Guarantee 21.  A producer needs no more than INSERT on a few columns to stage one, or a jsonb column that a trigger captures.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import psycopg
import pytest
import redis
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fixtures.command_line import CommandLine
from fixtures.damaged_entries import PLAIN, damage_entry
from fixtures.jobs import JOBS, Bench
from fixtures.sources import Regions
from penstock import Ick, Job, Log, Pipeline
from penstock.channels.routing import ick_shard_keys
from penstock.clients import DirtyList
from penstock.consuming import WorkerSetup, make_worker
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.operating.letters import LetterFilter, newest
from penstock.records import Record
from penstock.streaming import Streamer

DEEP = "[" * 985 + "]" * 985
"""Deeper than Python 3.11 parses with a stack of its default size that has some frames on it already."""

UNREADABLE = {"deep": DEEP, "deep inside": f'{{"a": [{DEEP}]}}', "digits": "9" * 5000}
"""JSON that Postgres takes, by key."""

GOOD = 12
APPLIED = {f"k{number}" for number in range(GOOD)}
DEAD = {*UNREADABLE, "headers"}
STAGE = (
    "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)"
    " VALUES (%s, %s, %s, 'insert', 'thing', %s::jsonb, %s::jsonb)"
)


def stage_unreadable(connection: Connection, channel: str, *, shards: int = 1) -> None:
    """Stages good records in all shards, and between them, in the first shard, those that cannot be read."""
    for number in range(GOOD):
        where = (channel, number % shards)
        connection.execute(STAGE, (*where, f"k{number}", '{"a": {}}', None))
        if number == GOOD // 2:
            for key, data in UNREADABLE.items():
                connection.execute(STAGE, (channel, 0, key, data, None))
            connection.execute(STAGE, (channel, 0, "headers", "{}", f'{{"h": {DEEP}}}'))


@dataclass
class Wanted:
    a: Any


class Struct(msgspec.Struct):
    a: Any


def read_one(record: Any) -> str:
    assert record.data is not None
    assert record.headers is not None
    return str(record.key)


def declare_consumers(pipeline: Pipeline, things: Log) -> dict[str, list[str]]:
    """A consumer for each way to read a payload; gives the keys that each of them has applied."""
    seen: dict[str, list[str]] = {}

    def declare(name: str, handler: Callable[..., Any], **options: Any) -> None:
        seen[name] = []
        pipeline.consumer(reads=things, name=name, attempts=1, **options)(handler)

    def several(_: Session, records: Sequence[Record]) -> None:
        seen["several"] += [read_one(record) for record in records]

    def columns(_: Session, records: Any) -> None:
        assert len(records.data) == len(records)
        seen["columns"] += [read_one(record) for record in records]

    def each(_: Session, record: Record) -> None:
        seen["each"].append(read_one(record))

    async def awaited(_: AsyncSession, records: Sequence[Record]) -> None:
        seen["awaited"] += [read_one(record) for record in records]

    async def awaited_each(_: AsyncSession, record: Record) -> None:
        seen["awaited_each"].append(read_one(record))

    def model(_: Session, records: Sequence[Record[Any]]) -> None:
        seen["model"] += [read_one(record) for record in records]

    def struct(_: Session, records: Sequence[Record[Any]]) -> None:
        seen["struct"] += [read_one(record) for record in records]

    declare("several", several)
    declare("columns", columns)
    declare("each", each, each=True)
    declare("awaited", awaited)
    declare("awaited_each", awaited_each, each=True)
    declare("model", model, payload=Wanted)
    declare("struct", struct, payload=Struct)
    return seen


def dead(connection: Connection, consumer: str) -> set[str]:
    """Keys of the dead letters; their payloads are whole, and their reasons show nothing of them."""
    letters = newest(Store(connection), LetterFilter(consumer))
    assert not any("[[[" in each.reason or "9999" in each.reason for each in letters)
    rows = connection.execute(
        "SELECT key, data::text FROM penstock.dead_letters WHERE consumer = %s", (consumer,)
    ).fetchall()
    assert all(data == UNREADABLE[key] for key, data in rows if key in UNREADABLE)
    return {each.key for each in letters}


@pytest.mark.slow
def test_a_consumer_of_a_log_dead_letters_them_however_it_reads_them(
    flow: Pipeline, things: Log, streamer: Streamer, connection: Connection, database_url: str, redis_url: str
) -> None:
    stage_unreadable(connection, "things", shards=2)
    streamer.drain()
    seen = declare_consumers(flow, things)

    for name, keys in seen.items():
        with make_worker(flow, flow.get_consumer(name), database_url, redis_url) as worker:
            worker.drain()
        assert {*keys} == APPLIED, name
        assert dead(connection, name) == DEAD, name


def test_the_deepest_payload_that_postgres_takes_is_kept_as_a_dead_letter(
    flow: Pipeline, things: Log, streamer: Streamer, connection: Connection, database_url: str, redis_url: str
) -> None:
    """It takes all of a backend's stack: a statement that does more than to store it cannot parse it."""

    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    def is_refused(depth: int) -> bool:
        try:
            connection.execute("SELECT %s::jsonb", [nested(depth)])
        except psycopg.errors.StatementTooComplex:
            return True
        return False

    deepest = bisect_left(range(1_000_000), True, key=is_refused) - 1
    connection.execute(STAGE, ("things", 0, "deepest", nested(deepest), None))
    connection.execute(STAGE, ("things", 0, "good", "{}", None))
    streamer.drain()
    seen = declare_consumers(flow, things)
    with make_worker(flow, flow.get_consumer("several"), database_url, redis_url) as worker:
        worker.drain()

    assert seen["several"] == ["good"]
    assert dead(connection, "several") == {"deepest"}


def test_a_consumer_of_several_sources_does(regions: Regions) -> None:
    seen: list[str] = []
    pipeline = Pipeline([things := Log("things", sources=["eu", "us"])])

    @pipeline.consumer(reads=things, name="totals", attempts=1)
    def totals(_: Session, records: Sequence[Record]) -> None:
        seen.extend(read_one(record) for record in records)

    with psycopg.connect(regions.eu.url, autocommit=True) as connection:
        stage_unreadable(connection, regions.eu.channel.name, shards=2)
    regions.us.stage(3, "us ")
    for source in (regions.eu, regions.us):
        source.stream()
    replace(regions, pipeline=pipeline).drain()

    assert {*seen} == {*APPLIED, "us 1", "us 2", "us 3"}
    with psycopg.connect(regions.database_url, autocommit=True) as connection:
        assert dead(connection, "totals") == DEAD


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_worker_of_a_queue_does(
    working: Pipeline, bench: Bench, database_url: str, redis_url: str, *, is_async: bool
) -> None:
    seen: list[str] = []

    def plain(_: Session, job: Job) -> None:
        assert job.data is not None
        assert job.headers is not None
        seen.append(job.tenant)

    async def awaited(_: AsyncSession, job: Job) -> None:
        plain(Session(), job)

    working.worker(reads=JOBS, name="receipts", attempts=1)(awaited if is_async else plain)
    stage_unreadable(bench.connection, JOBS.name)
    with Streamer(working, database_url, redis_url) as streamer:
        streamer.drain()
    with QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url)) as worker:
        worker.drain()

    assert {*seen} == APPLIED
    assert dead(bench.connection, "receipts") == DEAD


def test_a_consumer_of_an_ick_does(
    connection: Connection, redis_client: redis.Redis, database_url: str, redis_url: str
) -> None:
    """A member is text: what a handler makes of it fails under the handler's name."""
    pipeline = Pipeline([index := Ick("index", shards=2)])
    seen: list[str] = []

    @pipeline.consumer(reads=index, name="indexer", attempts=1)
    def indexer(_: Session, members: Sequence[str]) -> None:
        seen.extend(str(json.loads(member)) for member in members)

    for number, shard in enumerate(index.shard_names):
        ick = DirtyList(redis_client, ick_shard_keys("penstock", shard).name)
        members: list[bytes | str] = [str(number), "[" * 2000, "9" * 5000, b"\xff", "\0"]
        ick.add((member, 1.0) for member in members)
    with make_worker(pipeline, pipeline.get_consumer("indexer"), database_url, redis_url) as worker:
        worker.drain()

    assert {*seen} == {"0", "1"}
    assert len(dead(connection, "indexer")) == 4


@pytest.mark.slow
def test_commands_show_what_cannot_be_read(
    penstock: CommandLine, connection: Connection, redis_client: redis.Redis
) -> None:
    """Guarantee 30: none of them ends in a way that Penstock did not expect.  Seconds: it is eight commands."""
    connection.execute("CREATE TABLE public.effects (record_id bigint)")
    stage_unreadable(connection, "things", shards=2)
    assert penstock("stream", "--drain").returncode == 0
    for shard, how in enumerate(("a key that is nested deep", "a key with half of a surrogate pair")):
        damage_entry(redis_client, f"penstock:{{things/{shard}}}:log", 0, PLAIN[how])
    said = "is damaged: its column keys cannot be read"

    for command, code, shown in (
        ("tail things --shard 0", 5, f"things/0: entry 10-0 (offsets 1-10) {said}"),
        ("verify", 4, f"things/0: entry 10-0 (offsets 1-10) {said}"),
        ("doctor", 1, f"things/1: entry 6-0 (offsets 1-6) {said}"),
        ("trace 1", 0, "things/0"),
        ("status", 0, ""),
        ("consume reader --drain", 0, said),
        ("dead-letters show reader things/0 offset 5", 0, UNREADABLE["deep"]),
        ("dead-letters show reader things/0 offset 6 --json", 0, UNREADABLE["deep inside"]),
    ):
        done = penstock(*command.split())
        found = shown in done.stdout + done.stderr
        assert (done.returncode, found) == (code, True), (command, done.stdout, done.stderr)
