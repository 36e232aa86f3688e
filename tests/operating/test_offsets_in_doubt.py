"""``penstock reset epoch`` names the offsets in doubt, who has applied them, and keeps what only the log has of them."""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from psycopg.conninfo import conninfo_to_dict

from fixtures.command_line import CommandLine
from fixtures.flow import stage_rows
from penstock import Log, Pipeline
from penstock.channels.log import evict, extents, read
from penstock.channels.log.entries import parse_entries
from penstock.channels.routing import log_keys
from penstock.database.connections import connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.errors import HistoryDiverged
from penstock.operating.reset import ConsumerInDoubt, EpochPlan, reset_epoch
from penstock.records import BEGINNING, DEFAULT_SCOPE, Offset, ShardName
from penstock.streaming import Streamer, tick

CHECKPOINTS = """
INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch)
VALUES ('reader', 'things', 0, %s, 1), ('reader', 'things', 1, 0, 1)
ON CONFLICT (consumer, channel, shard) DO UPDATE SET "offset" = excluded."offset"
"""
Restored = Callable[[], str]


@pytest.fixture
def copy(postgres: EmbeddedPostgres, database_url: str) -> Iterator[Restored]:
    """Copies the test's database as it is now: what a restore brings back later."""
    name = f"older_{secrets.token_hex(4)}"
    template = str(conninfo_to_dict(database_url)["dbname"])
    yield lambda: postgres.create_database(name, template)
    postgres.drop_database(name)


def stage(url: str, things: Log, count: int, prefix: str) -> None:
    with connect_postgres(url, application="test") as connection:
        stage_rows(connection, things, count, prefix)


def stream(flow: Pipeline, url: str, redis_url: str) -> None:
    with Streamer(flow, url, redis_url) as streamer:
        streamer.drain()


def reset(url: str, client: redis.Redis, flow: Pipeline, *, apply: bool = False) -> EpochPlan:
    with connect_postgres(url, application="test") as connection:
        return reset_epoch(connection, client, flow, apply=apply)


def tails(client: redis.Redis, things: Log) -> dict[ShardName, int]:
    found = extents(client, "penstock", list(things.shard_names))
    return {shard: extent.tail for shard, extent in found.items()}


def test_the_plan_names_the_offsets_that_postgres_has_lost_and_their_entries_are_kept(
    flow: Pipeline,
    things: Log,
    redis_client: redis.Redis,
    redis_url: str,
    database_url: str,
    copy: Restored,
) -> None:
    """Guarantee 10."""
    stage(database_url, things, 50, "kept")
    stream(flow, database_url, redis_url)
    with connect_postgres(database_url, application="test") as connection:
        connection.execute(CHECKPOINTS, [3])
    kept = tails(redis_client, things)
    restored = copy()
    stage(database_url, things, 30, "lost")
    stream(flow, database_url, redis_url)
    lost = tails(redis_client, things)

    plan = reset(restored, redis_client, flow)
    reset(restored, redis_client, flow, apply=True)

    assert {each.shard: (each.first, each.last, each.journal) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard], kept[shard]) for shard in things.shard_names
    }
    assert sum(each.count for each in plan.in_doubt) == 30
    assert plan.in_doubt[0].consumers == (ConsumerInDoubt("reader", 3, 0),)
    keys = []
    for each, shard in zip(plan.in_doubt, things.shard_names, strict=True):
        assert each.kept_as is not None
        entries: Any = redis_client.xrange(each.kept_as)
        keys += [record.key for record in parse_entries(shard, entries)]
    assert sorted(keys) == sorted(f"lost{number}" for number in range(1, 31))
    stage(restored, things, 5, "new")
    stream(flow, restored, redis_url)
    log = [
        record.key
        for shard in things.shard_names
        for record in read(redis_client, "penstock", shard, BEGINNING, 1000)
    ]
    assert len(log) == 55
    assert not [key for key in log if key.startswith("lost")]


def test_doubt_begins_where_two_histories_part_and_not_where_the_journal_ends(
    flow: Pipeline,
    things: Log,
    redis_client: redis.Redis,
    redis_url: str,
    database_url: str,
    copy: Restored,
) -> None:
    """Something has sequenced in the restored database: both have records at these offsets, and not the same."""
    first, _ = things.shard_names
    stage(database_url, things, 50, "kept")
    stream(flow, database_url, redis_url)
    kept = tails(redis_client, things)
    restored = copy()
    stage(database_url, things, 30, "lost")
    stream(flow, database_url, redis_url)
    stage(restored, things, 40, "other")
    with connect_postgres(restored, application="test") as connection:
        tick(connection, DEFAULT_SCOPE)
        connection.execute(CHECKPOINTS, [kept[first] + 4])

    plan = reset(restored, redis_client, flow)

    lost = tails(redis_client, things)
    assert {each.shard: (each.first, each.last) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard]) for shard in things.shard_names
    }
    assert all(each.journal > kept[shard] for each, shard in zip(plan.in_doubt, kept, strict=True))
    assert plan.in_doubt[0].consumers == (ConsumerInDoubt("reader", kept[first] + 4, 4),)


@pytest.mark.parametrize("left", [True, False])
def test_doubt_is_told_of_a_log_whose_older_records_were_evicted(
    flow: Pipeline,
    things: Log,
    redis_client: redis.Redis,
    redis_url: str,
    database_url: str,
    copy: Restored,
    left: bool,  # noqa: FBT001
) -> None:
    """No offset is in both the log and the journal; an empty log has nothing to keep."""
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    kept = tails(redis_client, things)
    restored = copy()
    for part in range(2):
        stage(database_url, things, 20, f"lost{part}")
        stream(flow, database_url, redis_url)
    lost = tails(redis_client, things)
    for shard in things.shard_names:
        evict(redis_client, "penstock", shard, Offset(lost[shard] + (not left)))

    plan = reset(restored, redis_client, flow, apply=True)

    assert {each.shard: (each.first, each.last, each.compared) for each in plan.in_doubt} == {
        str(shard): (kept[shard] + 1, lost[shard], 0) for shard in things.shard_names
    }
    assert [each.kept_as is not None for each in plan.in_doubt] == [left, left]


def test_nothing_is_in_doubt_of_a_log_that_agrees(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str
) -> None:
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    redis_client.set(log_keys("penstock", things.shard_names[0]).epoch, 7)

    plan = reset(database_url, redis_client, flow, apply=True)

    assert plan.applied
    assert plan.in_doubt == ()
    assert not redis_client.keys("*before*")


def test_ids_that_postgres_has_are_not_given_out_again(
    flow: Pipeline, things: Log, redis_client: redis.Redis, redis_url: str, database_url: str
) -> None:
    """A copy by logical replication brings rows, and leaves the sequences where they were."""
    stage(database_url, things, 20, "kept")
    stream(flow, database_url, redis_url)
    redis_client.flushall()
    redis_client.set(log_keys("penstock", things.shard_names[0]).epoch, 7)
    with connect_postgres(database_url, application="test") as connection:
        connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN id RESTART WITH 1")

    reset(database_url, redis_client, flow, apply=True)

    stage(database_url, things, 5, "new")


def test_the_command_tells_what_is_in_doubt_and_what_to_do(
    flow: Pipeline,
    things: Log,
    redis_url: str,
    database_url: str,
    copy: Restored,
    penstock: CommandLine,
) -> None:
    """Guarantee 10: loudly, with exit code 5; the way out is what the error names."""
    stage(database_url, things, 10, "kept")
    stream(flow, database_url, redis_url)
    restored = copy()
    stage(database_url, things, 10, "lost")
    stream(flow, database_url, redis_url)
    here = {"PENSTOCK_DATABASE_URL": restored}
    with psycopg.connect(restored, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.effects (id bigint)")

    for words in (
        ["stream", "--drain"],
        ["consume", "reader", "--drain"],
        ["run", "--engine", "inline"],
    ):
        stopped = penstock(*words, **here)
        assert stopped.returncode == 5
        assert "Postgres has lost commits" in stopped.stderr
        assert "penstock reset epoch" in stopped.stderr
    plan = penstock("reset", "epoch", **here)
    data = json.loads(penstock("reset", "epoch", "--json", **here).stdout)
    done = penstock("reset", "epoch", "--apply", **here)

    assert "offsets in doubt, at which the log has what Postgres has not: 10" in plan.stdout
    first = data["in_doubt"][0]
    assert (
        f"things/0: {first['first']} to {first['last']}; the journal ends at {first['journal']}"
        in plan.stdout
    )
    assert f"penstock tail things --shard 0 --from {first['first']} --json" in plan.stdout
    assert "reader at 0: its effects were restored with it" in plan.stdout
    assert "reads again from there" in plan.stdout
    assert f"their entries are kept in {first['kept_as']}" in done.stdout
    assert penstock("stream", "--drain", **here).returncode == 0
    assert penstock("consume", "reader", "--drain", **here).returncode == 0
    assert penstock("verify", **here).returncode == 0


RESTORE = Path(__file__).parents[2] / "docs" / "how-to" / "restore-postgres.md"
SHOP = """
from sqlalchemy import text
from penstock import Log, Pipeline

rides = Log("rides", shards=2)
pipeline = Pipeline([rides])

@pipeline.consumer(reads=rides, name="ride-totals")
def ride_totals(session, records):
    rows = [{"key": record.key} for record in records]
    session.execute(text("INSERT INTO public.totals VALUES (:key)"), rows)
"""


def test_the_commands_of_the_how_to_lead_out(
    redis_url: str, database_url: str, copy: Restored, penstock: CommandLine
) -> None:
    """Word for word; only the offset is that of this test."""
    rides = Log("rides", shards=2)
    flow = Pipeline([rides])
    (penstock.directory / "shop.py").write_text(SHOP)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.totals (key text)")
    stage(database_url, rides, 20, "kept")
    stream(flow, database_url, redis_url)
    penstock("consume", "ride-totals", "--drain")
    restored = copy()
    stage(database_url, rides, 20, "lost")
    stream(flow, database_url, redis_url)
    stage(restored, rides, 5, "after")
    penstock.environment["PENSTOCK_DATABASE_URL"] = restored
    first = json.loads(penstock("reset", "epoch", "--json").stdout)["in_doubt"][0]["first"]

    commands = re.findall(r"^\$ penstock (.*)$", RESTORE.read_text(), re.MULTILINE)
    printed = {}
    for command in commands:
        words = command.partition(" > ")[0].replace("577", str(first)).split()
        done = penstock(*words)
        assert done.returncode == 0, (words, done.stderr)
        printed[words[0]] = done.stdout

    assert [command.split()[0] for command in commands] == [
        *("reset", "tail", "reset", "stream", "consume", "verify")
    ]
    lost = [json.loads(line)["key"] for line in printed["tail"].splitlines()]
    assert lost
    assert all(key.startswith("lost") for key in lost)
    with psycopg.connect(restored) as connection:
        totals = connection.execute("SELECT key FROM public.totals ORDER BY 1").fetchall()
        staged = connection.execute("SELECT key FROM penstock.staged_records ORDER BY 1").fetchall()
    assert len(totals) == 25
    assert totals == staged


def test_a_copy_in_the_same_cluster_goes_on_and_the_other_one_stops_once_it_publishes(
    flow: Pipeline,
    things: Log,
    redis_client: redis.Redis,
    redis_url: str,
    database_url: str,
    copy: Restored,
) -> None:
    """Transaction ids mean the same there, so what was not sequenced yet is found by the next tick."""
    stage(database_url, things, 20, "streamed ")
    stream(flow, database_url, redis_url)
    stage(database_url, things, 10, "waiting ")
    copied = copy()
    stage(copied, things, 5, "new ")
    stream(flow, copied, redis_url)

    keys = [
        record.key
        for shard in things.shard_names
        for record in read(redis_client, "penstock", shard, BEGINNING, 1000)
    ]
    assert (
        sorted(key.split()[0] for key in keys) == ["new"] * 5 + ["streamed"] * 20 + ["waiting"] * 10
    )
    stage(database_url, things, 40, "other ")
    with pytest.raises(HistoryDiverged):
        stream(flow, database_url, redis_url)
