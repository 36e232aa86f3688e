"""Registered channels are listed, retired, and their names brought back."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import permutations
from typing import Any

import psycopg
import pytest
import redis
from psycopg.types.json import Json
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.crash_points import killed_at
from fixtures.flow import Site, running, stage_rows
from penstock import Ick, KeyLimits, Log, Pipeline, Queue, TenantLimits, mark_dirty, stage
from penstock.channels.log.streams import read
from penstock.channels.routing import log_keys
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.registry import RegisteredChannel, read_queue_limits, register_channel, registered_channels
from penstock.database.store import Store
from penstock.declaring.kinds import Channel
from penstock.errors import ChannelMismatch, ChannelRetired, NotReplayable, Refused, ServerUnavailable, Unknown
from penstock.operating.channels import adopt_channel, list_channels, retire_channel
from penstock.operating.replay import Replay, ReplayRequest, replay
from penstock.operating.status.gathering import status
from penstock.records import BEGINNING, Record, Shard, ShardName
from penstock.streaming import Streamer
from penstock.testing import drained, eventually

old = Log("old", shards=2, keep=timedelta(hours=1))
kept = Log("kept", shards=2, keep=timedelta(hours=1))
dirty = Ick("dirty", shards=2)
jobs = Queue("jobs", shards=2)


@pytest.fixture
def pipeline() -> Pipeline:
    """Two logs, an Ick and a queue, and a consumer of a log."""
    made = Pipeline([old, kept, dirty, jobs])

    @made.consumer(reads=old)
    def reader(_session: Session, _records: Sequence[Record]) -> None:
        """Does nothing."""

    return made


@pytest.fixture
def filled(pipeline: Pipeline, connection: Connection, database_url: str, redis_url: str) -> Iterator[Streamer]:
    """All of them have records, in Redis too."""
    for channel in (old, kept):
        stage_rows(connection, channel, 20)
    with psycopg.connect(database_url) as own:
        mark_dirty(own, to=dirty, members=range(20), pipeline=pipeline)
        for number in range(20):
            stage(own, to=jobs, tenant=f"t{number}", action="a", object="o", data=number, pipeline=pipeline)
    with Streamer(pipeline, database_url, redis_url) as streamer:
        streamer.drain()
        yield streamer


def find_keys(client: redis.Redis, channel: str) -> list[bytes]:
    return [*client.scan_iter(match=f"*{{{channel}/*", count=10_000)]


def count_rows(connection: Connection) -> Counter[tuple[str, str]]:
    """The rows of each channel in each table that names channels."""
    named = (
        "SELECT c.table_name FROM information_schema.columns c JOIN information_schema.tables USING (table_schema, table_name) "
        "WHERE table_schema = 'penstock' AND column_name = 'channel' AND table_type = 'BASE TABLE'"
    )
    return Counter(
        (table, channel)
        for (table,) in connection.execute(named).fetchall()
        for (channel,) in connection.execute(f"SELECT channel FROM penstock.{table}".encode())
    )


REQUIRED = """
SELECT c.table_name, array_agg(c.column_name::text), array_agg(c.data_type::text)
FROM information_schema.columns c
JOIN information_schema.tables t USING (table_schema, table_name)
WHERE table_schema = 'penstock' AND table_type = 'BASE TABLE' AND c.is_nullable = 'NO' AND c.column_default IS NULL AND c.is_identity = 'NO'
GROUP BY c.table_name
HAVING bool_or(c.column_name = 'channel') AND NOT c.table_name = ANY (%s)
"""

STAYING = ["channels", "retired_channels", "journal", "staged_records", "isolated_records", "schedules", "job_groups"]
"""Tables that have rows of each channel already, or keep those of a retired one."""

SAMPLES = {"text": "tenant", "timestamp with time zone": "now", "jsonb": "{}", "ARRAY": "{1}", "boolean": "f"}


def fill_tables(connection: Connection, *channels: str) -> None:
    """A row of each channel in every table that names channels."""
    for number, channel in enumerate(channels, 901):
        for table, columns, types in connection.execute(REQUIRED, [STAYING]).fetchall():
            row = {name: SAMPLES.get(type_, str(number)) for name, type_ in zip(columns, types, strict=True)}
            row["channel"] = channel
            names, values = ", ".join(f'"{name}"' for name in row), ", ".join(["%s"] * len(row))
            connection.execute(f"INSERT INTO penstock.{table} ({names}) VALUES ({values})".encode(), [*row.values()])
        connection.execute(
            "INSERT INTO penstock.pauses (kind, name, reason, paused_by) VALUES ('channel', %s, '', '')", [channel]
        )
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES (%s, 0, 'k', 'a', 'o', '1')",
            [channel],
        )


def retire(connection: Connection, client: redis.Redis, name: str, **options: Any) -> Any:
    return retire_channel(Store(connection), client, name, pause=lambda _: None, **options)


@pytest.mark.usefixtures("filled")
def test_the_registered_channels_are_listed(connection: Connection) -> None:
    found = {each.channel: each for each in list_channels(Store(connection), Pipeline([old]))}

    assert [*found] == ["dirty", "jobs", "kept", "old"]
    assert (found["old"].kind, found["old"].shards, found["old"].records) == ("log", 2, 20)
    assert (found["old"].consumers, found["old"].keep_s) == (("reader",), 3600.0)
    assert [name for name, each in found.items() if each.declared is False] == ["dirty", "jobs", "kept"]


PER_TENANT = Queue(
    "a",
    limits={"t": TenantLimits(weight=2), "u": TenantLimits(weight=3)},
    key_limits={"k": KeyLimits(in_flight=1)},
    keys_within="tenant",
)


@pytest.mark.parametrize(
    "declared",
    [
        [
            Log("a"),
            Log("a", keep="2h"),
            Log("a", entries="packed"),
            Log("a", redis_memory="1MB"),
            Log("a", redis_memory="2MB"),
        ],
        [Ick("a"), Ick("a", keep="2h")],
        [Queue("a"), Queue("a", streams=8), Queue("a", hand=2), PER_TENANT],
    ],
    ids=["log", "ick", "queue"],
)
def test_what_a_channel_is_declared_with_is_registered_whatever_it_was_before(
    declared: Sequence[Channel], connection: Connection
) -> None:
    """And written only if it is another."""

    def read() -> tuple[object, object]:
        version = connection.execute("SELECT xmin::text FROM penstock.channels").fetchone()
        return registered_channels(Store(connection))["a"], version

    for former, channel in permutations(declared, 2):
        values: dict[str, Any] = {}
        if isinstance(channel, Queue):
            values = {"streams": channel.streams, "hand": channel.hand, "limits": channel.limits_as_json}
        elif not isinstance(channel, Ick):
            values = {"entries": channel.stored_as, "redis_memory": channel.memory_bytes}
        register_channel(Store(connection), former)
        register_channel(Store(connection), channel)
        registered = read()
        keep = timedelta(seconds=channel.keep)
        assert registered[0] == RegisteredChannel("a", channel.kind, channel.shards, keep, generations=[], **values)
        register_channel(Store(connection), channel)
        assert read() == registered

        kind = {"log": Ick, "ick": Queue, "queue": Log}[channel.kind]
        for other in (kind("a", shards=channel.shards), replace(channel, shards=9)):
            with pytest.raises(ChannelMismatch):
                register_channel(Store(connection), other)
        assert read() == registered


def test_limits_that_were_set_come_one_by_one_before_declared_ones(connection: Connection) -> None:
    first, second = {"in_flight": 5}, {"weight": 6}

    def read(name: str) -> dict[str, Any]:
        return read_queue_limits(Store(connection), name)

    assert read("a") == {}
    for queue in (PER_TENANT, Queue("b")):
        register_channel(Store(connection), queue)
    assert [read("a"), read("b")] == [PER_TENANT.limits_as_json, {"within": "queue"}]
    with connection.cursor() as cursor:
        each = ("a", first), ("b", second)
        rows = [(name, *of, Json(own)) for name, own in each for of in (("tenant", "u"), ("key", "l"))]
        cursor.executemany("INSERT INTO penstock.queue_limits VALUES (%s, %s, %s, %s)", rows)
    assert [read("a"), read("b")] == [
        {"within": "tenant", "tenants": {"t": {"weight": 2}, "u": first}, "keys": {"k": {"in_flight": 1}, "l": first}},
        {"within": "queue", "tenants": {"u": second}, "keys": {"l": second}},
    ]


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", ["old", "kept", "dirty", "jobs"])
def test_a_channel_whose_records_are_unread_is_retired_only_if_they_may_be_lost(
    connection: Connection, redis_client: redis.Redis, name: str
) -> None:
    before = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchone()
    plan = retire(connection, redis_client, name)
    assert (plan.unread, plan.applied) == (20, False)

    with pytest.raises(Refused, match=rf"20 records.*penstock channels retire {name} --discard"):
        retire(connection, redis_client, name, apply=True)

    assert connection.execute("SELECT count(*) FROM penstock.staged_records").fetchone() == before
    assert len(list_channels(Store(connection))) == 4
    assert find_keys(redis_client, name)


def test_what_commits_after_the_last_tick_is_unread(
    filled: Streamer, connection: Connection, redis_client: redis.Redis, database_url: str
) -> None:
    """Also that of a transaction which was open at the tick."""
    with connect_postgres(database_url, application="test") as late, late.transaction():
        stage_rows(late, kept, 1)
        stage_rows(connection, kept, 2)
        filled.drain()
    stage_rows(connection, kept, 4)

    assert retire(connection, redis_client, "kept").unread == 20 + 1 + 2 + 4


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", ["old", "kept", "dirty", "jobs"])
def test_nothing_is_left_of_a_retired_channel_and_the_others_stay(
    connection: Connection, redis_client: redis.Redis, name: str
) -> None:
    others = {each: len(find_keys(redis_client, each)) for each in ("old", "kept", "dirty", "jobs")}
    del others[name]
    keys = log_keys("penstock", ShardName(name, Shard(1)))
    redis_client.mset({keys.ends: "of an epoch", keys.writes: "of a writer"})

    fill_tables(connection, name, "another")
    rows = count_rows(connection)

    assert retire(connection, redis_client, name, discard=True, apply=True).applied

    assert find_keys(redis_client, name) == []
    assert count_rows(connection) == {place: count for place, count in rows.items() if place[1] != name} | {
        ("retired_channels", name): 1
    }
    assert connection.execute("SELECT name FROM penstock.pauses").fetchall() == [("another",)]
    assert {each: len(find_keys(redis_client, each)) for each in others} == others
    assert [*others] == [each for each in ("old", "kept", "dirty", "jobs") if each != name]
    connection.execute("INSERT INTO penstock.retired_channels (channel) VALUES ('another')")
    redis_client.set(keys.writes, "of a writer that has not noticed")
    with pytest.raises(Refused, match="0 records and 1 key in Redis are left"):
        adopt_channel(Store(connection), redis_client, name, apply=True)
    retire(connection, redis_client, name, discard=True, apply=True)
    adopt_channel(Store(connection), redis_client, name, apply=True)
    assert connection.execute("SELECT channel FROM penstock.retired_channels").fetchall() == [("another",)]


@pytest.mark.slow
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("point", ["retire.after_registry", "retire.after_journal"])
def test_a_retirement_that_was_killed_is_completed_by_the_next(
    connection: Connection, redis_client: redis.Redis, point: str
) -> None:
    with killed_at(point):
        retire(connection, redis_client, "old", discard=True, apply=True)

    assert retire(connection, redis_client, "old", discard=True, apply=True).applied
    assert find_keys(redis_client, "old") == []
    assert [each.channel for each in list_channels(Store(connection))] == ["dirty", "jobs", "kept"]


def test_what_everybody_has_read_needs_no_permission_to_be_lost(
    site: Site, filled: Streamer, pipeline: Pipeline
) -> None:
    filled.close()
    assert drained(pipeline, site.database_url, site.redis_url)["reader"] == 20

    assert retire(site.connection, site.client, "old", apply=True).unread == 0


def test_users_of_a_retired_channel_are_refused_and_the_streamer_goes_on(
    site: Site, filled: Streamer, pipeline: Pipeline
) -> None:
    """Guarantee 22: the error names the command that brings the name back."""
    filled.close()
    retire(site.connection, site.client, "old", discard=True, apply=True)
    record: dict[str, Any] = {"key": "k", "action": "a", "object": "o", "data": {}}

    with (
        psycopg.connect(site.database_url) as own,
        pytest.raises(ChannelRetired, match="penstock channels adopt old --apply"),
    ):
        stage(own, to=old, **record, pipeline=Pipeline([old]))
    worker = LogWorker(WorkerSetup(pipeline, pipeline.get_consumer("reader"), site.database_url, site.redis_url))
    with pytest.raises(ChannelRetired):
        worker.open()
    worker.close()
    with pytest.raises(Unknown, match="'kept' was not retired"):
        adopt_channel(Store(site.connection), site.client, "kept")
    stage_rows(site.connection, kept, 5, "more")
    with Streamer(pipeline, site.database_url, site.redis_url) as streamer:
        streamer.drain()

    assert sum(map(len, site.logged(kept).values())) == 25
    assert "old" not in {each.channel for each in list_channels(Store(site.connection))}


@pytest.mark.slow
def test_a_name_is_adopted_once_nothing_is_left_of_the_retired_channel(
    site: Site, filled: Streamer, pipeline: Pipeline
) -> None:
    filled.close()
    with pytest.raises(Unknown):
        adopt_channel(Store(site.connection), site.client, "old", apply=True)
    retire(site.connection, site.client, "old", discard=True, apply=True)
    stage_rows(site.connection, old, 3)  # by an application that has not noticed
    with pytest.raises(Refused, match=r"3 records and 0 keys .* retire old --discard --apply"):
        adopt_channel(Store(site.connection), site.client, "old", apply=True)
    assert retire(site.connection, site.client, "old", discard=True, apply=True).staged == 3

    adopt_channel(Store(site.connection), site.client, "old", apply=True)
    stage_rows(site.connection, old, 5)
    with Streamer(pipeline, site.database_url, site.redis_url) as streamer:
        streamer.drain()

    assert sorted(r.offset for r in site.logged(old)[old.shard_names[0]])[:1] == [1]
    assert sum(map(len, site.logged(old).values())) == 5


@pytest.mark.slow
def test_replays_end_with_the_channel_and_do_not_come_back_with_its_name(
    site: Site, filled: Streamer, pipeline: Pipeline
) -> None:
    """Neither one that is under way, nor one that was carried out."""

    def replay_kept(**options: Any) -> Replay:
        with connect_postgres(site.database_url, application="test") as own:
            return replay(Store(own), ReplayRequest("kept", "old", **options), apply=True)

    def stop(_: int) -> None:
        raise InterruptedError

    replay_kept(key="k1")
    with pytest.raises(InterruptedError), connect_postgres(site.database_url, application="test") as own:
        replay(Store(own), ReplayRequest("kept", "old"), apply=True, on_batch=stop)
    filled.close()
    retire(site.connection, site.client, "old", discard=True, apply=True)

    for table in ("replays", "checkpoints"):
        left = site.connection.execute(f"SELECT * FROM penstock.{table}".encode()).fetchall()
        assert left == [], table
    with pytest.raises(Unknown, match="it was retired"):
        replay_kept(key="k1")
    adopt_channel(Store(site.connection), site.client, "old", apply=True)
    with Streamer(pipeline, site.database_url, site.redis_url):
        assert replay_kept(key="k1").staged == 1


def test_a_replay_into_a_channel_that_is_gone_stops(
    filled: Streamer, connection: Connection, database_url: str
) -> None:
    """Otherwise it would go on, and stage nothing."""
    filled.close()

    def lose(_: int) -> None:
        connection.execute("DELETE FROM penstock.channels WHERE channel = 'old'")

    with (
        connect_postgres(database_url, application="test") as own,
        pytest.raises(NotReplayable, match="old is not registered any more"),
    ):
        replay(Store(own), ReplayRequest("kept", "old"), apply=True, on_batch=lose)


def test_an_unknown_channel_is_refused_with_the_list_of_channels(
    filled: Streamer, connection: Connection, redis_client: redis.Redis
) -> None:
    filled.close()
    with pytest.raises(Unknown, match="there are: dirty, jobs, kept, old"):
        retire(connection, redis_client, "odl", apply=True)


HOLDS = {
    "a registration": "LOCK TABLE penstock.channels IN ROW EXCLUSIVE MODE",
    "a tick": "LOCK TABLE penstock.ticks IN ROW EXCLUSIVE MODE",
    "retention": "SELECT FROM penstock.channels WHERE channel = 'old' FOR UPDATE",
}


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_a_retirement_gives_up_what_somebody_holds_for_long(
    connection: Connection, redis_client: redis.Redis, database_url: str, set_constants: SetConstants, hold: str
) -> None:
    set_constants("operating.channels", LOCK_TIMEOUT_S=0.1)
    before = count_rows(connection)

    with psycopg.connect(database_url) as holder:
        holder.execute(hold.encode())
        with pytest.raises(Refused, match=r"for longer than 0\.1 s; nothing was changed"):
            retire(connection, redis_client, "old", discard=True, apply=True)

    assert count_rows(connection) == before
    assert retire(connection, redis_client, "old", discard=True, apply=True).applied


@pytest.mark.slow
@pytest.mark.parametrize("name", ["old", "jobs"])
def test_a_channel_is_retired_under_a_streamer_that_publishes_it(
    pipeline: Pipeline, connection: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, name: str
) -> None:
    """The streamer goes on with the other channels, and writes no key of the retired one again."""
    channel = pipeline.channels[name]

    def produce(stop: Callable[[], bool]) -> None:
        with psycopg.connect(database_url, autocommit=True) as own:
            while not stop():
                for each in (channel, kept):
                    stage_rows(own, each, 50)  # type: ignore[arg-type]  # of any kind

    streamer = Streamer(pipeline, database_url, redis_url)
    with running(produce, streamer.run):
        eventually(lambda: bool(find_keys(redis_client, name)), "it is published")
        retire_channel(Store(connection), redis_client, name, discard=True, apply=True)
        tail = published(redis_client)
        eventually(lambda: published(redis_client) > tail + 500, "the other one goes on")
        assert find_keys(redis_client, name) == []

    found = status(Store(connection), redis_client, pipeline)
    assert {each.channel: each.kind for each in found.channels}[kept.name] == "log"
    assert retire(connection, redis_client, name, discard=True, apply=True).applied
    assert find_keys(redis_client, name) == []


def published(client: redis.Redis) -> int:
    """Number of records in the log that stays."""
    return sum(
        len([*read(client, "penstock", ShardName("kept", shard.shard), BEGINNING, 1_000_000)])
        for shard in kept.shard_names
    )


@pytest.mark.slow
def test_without_redis_a_channel_is_said_to_be_retired_in_postgres(
    connection: Connection, redis_client: redis.Redis, filled: object
) -> None:
    away = redis.Redis.from_url("unix:///nowhere", retry=None)
    said = r"old is retired in Postgres, but not in Redis: .*repeat it: penstock channels retire old --apply"
    with pytest.raises(ServerUnavailable, match=said):
        retire(connection, away, "old", apply=True, discard=True)
    assert find_keys(redis_client, "old")
    assert retire(connection, redis_client, "old", apply=True, discard=True).applied
    assert find_keys(redis_client, "old") == []
