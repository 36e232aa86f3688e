"""The number of shards of a log changes while records are under way."""

import json
from datetime import timedelta
from itertools import count

import pytest
import redis

from fixtures.command_line import CommandLine
from fixtures.truth import TABLES, change, check_exact, declare_consumers
from penstock import Ick, Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.consuming import Consumed, WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.registry import registered_channels
from penstock.database.store import Store
from penstock.declaring.kinds import shard_for_key
from penstock.errors import DeclarationError, InvalidSetting, Refused, Unknown
from penstock.operating.channels import reshard
from penstock.operating.status.gathering import status
from penstock.operating.tracing.causes import explain
from penstock.records import Offset, Place, Shard, ShardName
from penstock.streaming import Streamer

KEYS = [f"k{number}" for number in range(24)]
ALL_SHARDS = Log("things", shards=4 + 6 + 3)


def declare(shards: int) -> Pipeline:
    """The application, as it declares the log at a time."""
    things = Log("things", shards=shards, keep=timedelta(hours=shards))
    pipeline = Pipeline([things])
    declare_consumers(pipeline, things, batch=5)
    return pipeline


def make_reader(pipeline: Pipeline, name: str, database_url: str, redis_url: str, *shards: int) -> LogWorker:
    chosen = list(shards) or None
    return LogWorker(
        WorkerSetup(pipeline, pipeline.get_consumer(name), database_url, redis_url, shards=chosen, block_ms=1)
    )


@pytest.fixture
def changed(connection: Connection) -> Connection:
    """A connection to a database with the tables of the truth."""
    connection.execute(TABLES)
    return connection


def shards_applied(connection: Connection, consumer: str = "one") -> set[int]:
    rows = connection.execute("SELECT DISTINCT shard FROM public.effects WHERE consumer = %s", [consumer])
    return {shard for (shard,) in rows}


@pytest.mark.slow
def test_four_shards_become_six_and_three_in_the_order_of_each_key(
    changed: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 6: the workers that run take the new shards over; what is declared stays as it was."""
    flow = declare(4)
    workers = [make_reader(flow, name, database_url, redis_url) for name in ("one", "two")]
    with Streamer(flow, database_url, redis_url) as streamer, workers[0], workers[1]:
        for shards in (None, 6, 3):
            if shards is not None:
                assert reshard(Store(changed), "things", shards, apply=True).applied
            for _ in range(2):
                change(changed, KEYS, 4)
            streamer.drain()
            change(changed, KEYS, 4)
            streamer.drain()
            for worker in workers:
                worker.drain()

    assert check_exact(changed, redis_client, ALL_SHARDS, at_home=False) == 9 * len(KEYS)
    placed = changed.execute("SELECT shard, key FROM public.effects WHERE consumer = 'one' AND version > 6").fetchall()
    assert all(shard == 10 + shard_for_key(key, 3) for shard, key in placed)
    assert shards_applied(changed) == set(range(13))


def test_a_consumer_applies_nothing_of_new_shards_before_it_has_passed_the_old_ones(
    changed: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Guarantee 6: also if processes share the shards, and one of them is far ahead."""
    flow = declare(4)
    with Streamer(flow, database_url, redis_url) as streamer:
        change(changed, KEYS, 4)
        streamer.drain()
        for shards in (6, 3):
            reshard(Store(changed), "things", shards, apply=True)
            change(changed, KEYS, 4)
            streamer.drain()
        with (
            make_reader(flow, "one", database_url, redis_url, 0, 1) as ahead,
            make_reader(flow, "one", database_url, redis_url, 2, 3) as behind,
        ):
            ahead.drain()
            assert shards_applied(changed) == {0, 1}
            behind.drain()
            assert shards_applied(changed) == {0, 1, 2, 3, 6, 7}
            ahead.drain()
            assert shards_applied(changed) == {*range(12)}
            behind.drain()
        with make_reader(flow, "two", database_url, redis_url) as other:
            other.drain()

    assert check_exact(changed, redis_client, ALL_SHARDS, at_home=False) == 3 * len(KEYS)


def test_a_halted_shard_keeps_the_new_shards_waiting(changed: Connection, database_url: str, redis_url: str) -> None:
    """Guarantee 6: what is halted comes first, and draining does not wait for it."""
    flow = declare(4)
    with (
        Streamer(flow, database_url, redis_url) as streamer,
        make_reader(flow, "one", database_url, redis_url) as worker,
    ):
        changed.execute("UPDATE penstock.checkpoints SET halted = 'for a test' WHERE shard = 2 OR consumer = 'two'")
        change(changed, KEYS, 4)
        streamer.drain()
        [one, two] = reshard(Store(changed), "things", 6, apply=True).behind
        assert (one.consumer, one.lag, one.halted) == ("one", len(KEYS), 1)
        assert (two.consumer, two.lag, two.halted) == ("two", len(KEYS), 4)
        # Retention waits for one that is halted everywhere, too.
        counts = "SELECT consumer, count(*) FROM penstock.checkpoints GROUP BY 1 ORDER BY 1"
        assert changed.execute(counts).fetchall() == [("one", 10), ("two", 10)]
        change(changed, KEYS, 4)
        streamer.drain()
        worker.drain()
        assert shards_applied(changed) == {0, 1, 3}

        changed.execute("UPDATE penstock.checkpoints SET halted = NULL")
        worker.close()
        worker.drain()
        assert shards_applied(changed) == set(range(10))


def test_a_shard_that_waits_is_left_alone_although_redis_has_lost_its_entries(
    changed: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    """Its records come from the journal, as soon as it waits no more: draining ends before."""
    flow = declare(4)
    with (
        Streamer(flow, database_url, redis_url) as streamer,
        make_reader(flow, "one", database_url, redis_url) as worker,
    ):
        changed.execute("UPDATE penstock.checkpoints SET halted = 'for a test' WHERE shard = 2")
        for shards in (6, 3):
            change(changed, KEYS, 4)
            streamer.drain()
            reshard(Store(changed), "things", shards, apply=True)
        for number in range(4, 10):
            redis_client.xtrim(log_keys("penstock", ShardName("things", Shard(number))).stream, maxlen=0)
        rounds = count()

        def check(_: Consumed) -> None:
            assert next(rounds) < 20, "it does not come to an end"

        worker.drain(check)
        assert shards_applied(changed) == {0, 1, 3}
        changed.execute("UPDATE penstock.checkpoints SET halted = NULL")
        worker.close()
        worker.drain()
        assert shards_applied(changed) == set(range(10))


def test_what_a_new_shard_waits_for_is_shown(
    changed: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, penstock: CommandLine
) -> None:
    flow = declare(4)
    with (
        Streamer(flow, database_url, redis_url) as streamer,
        make_reader(flow, "one", database_url, redis_url) as worker,
        make_reader(flow, "two", database_url, redis_url) as other,
    ):
        changed.execute("UPDATE penstock.checkpoints SET halted = 'for a test' WHERE shard = 2 AND consumer = 'one'")
        change(changed, KEYS, 4)
        streamer.drain()
        reshard(Store(changed), "things", 6, apply=True)
        change(changed, KEYS, 4)
        streamer.drain()
        worker.drain()
        other.drain()
        found, shown = status(Store(changed), redis_client, flow), penstock("status", "--json")
        why = explain(Store(changed), redis_client, Place(ShardName("things", Shard(7)), Offset(1)))
        first = explain(Store(changed), redis_client, Place(ShardName("things", Shard(2)), Offset(1)))
        changed.execute("UPDATE penstock.checkpoints SET halted = NULL")
        worker.close()
        worker.drain()

    reason = "waiting for things/2, of an earlier generation, not wholly applied yet"
    assert [(consumer, why) for consumer, _, why in found.waiting] == [("one", reason)] * 6
    assert {shard.shard for _, shard, _ in found.waiting} == set(range(4, 10))
    assert [shard for _, shard, _ in found.halted] == [ShardName("things", Shard(2))]
    [by_json] = [each for each in json.loads(shown.stdout)["consumers"] if each["consumer"] == "one"]
    assert [each["waiting"] for each in by_json["shards"]] == [None] * 4 + [reason] * 6
    assert (why.cause, first.cause) == ("waiting", "halted")
    assert f"one is {reason}" in why.text
    assert status(Store(changed), redis_client, flow).waiting == ()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["application", "workers"])
def test_applications_and_workers_are_deployed_in_any_order(
    changed: Connection, database_url: str, redis_url: str, redis_client: redis.Redis, first: str
) -> None:
    """Guarantee 6: between the command and the last process of the new release."""
    old, new = declare(4), declare(6)

    def work(pipeline: Pipeline) -> None:
        with Streamer(pipeline, database_url, redis_url) as streamer:
            streamer.drain()
        for name in ("one", "two"):
            with make_reader(pipeline, name, database_url, redis_url) as worker:
                worker.drain()

    change(changed, KEYS, 4)
    work(old)
    with pytest.raises(DeclarationError, match="penstock channels reshard things --shards 6"):
        work(new)
    reshard(Store(changed), "things", 6, apply=True)
    change(changed, KEYS, 6 if first == "application" else 4)
    work(old if first == "application" else new)
    change(changed, KEYS, 4)  # one of the old processes still runs
    change(changed, KEYS, 6)
    work(new)
    assert registered_channels(Store(changed))["things"].keep == timedelta(hours=6)
    work(old)
    with pytest.raises(DeclarationError, match="registered as a log of 6"):
        work(declare(5))

    assert check_exact(changed, redis_client, ALL_SHARDS, at_home=False) == 4 * len(KEYS)


def test_status_and_verify_know_the_new_shards(
    changed: Connection, database_url: str, redis_url: str, redis_client: redis.Redis
) -> None:
    flow = declare(4)
    with Streamer(flow, database_url, redis_url) as streamer:
        reshard(Store(changed), "things", 6, apply=True)
        change(changed, KEYS, 4)
        streamer.drain()
        streamer.sweep()  # finds each record's offset, in whichever shard

    found = status(Store(changed), redis_client, flow)
    assert [s.shard for s in found.channels[0].shards] == list(range(10))
    assert not any(shard.unknown for shard in found.channels[0].shards)
    assert sum(s.lag for s in found.consumers[0].shards) == len(KEYS)


def test_only_logs_are_resharded_and_only_to_numbers_that_a_channel_can_have(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    with Streamer(Pipeline([Log("things"), Ick("index")]), database_url, redis_url):
        pass
    with pytest.raises(Unknown, match="there are: index, things"):
        reshard(Store(connection), "other", 6)
    with pytest.raises(Refused, match="only the shards of logs"):
        reshard(Store(connection), "index", 6)
    with pytest.raises(InvalidSetting, match="1 to 1024"):
        reshard(Store(connection), "things", 0)
    assert not reshard(Store(connection), "things", 4, apply=True).applied
    assert not registered_channels(Store(connection))["things"].generations
    for shards in (6, 4, 1):  # that of the first generation, too
        assert reshard(Store(connection), "things", shards, apply=True).applied
    assert registered_channels(Store(connection))["things"].generations == [6, 4, 1]
    connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, reported_by) '
        "VALUES ('r', 'things', 0, 0, 1, 'db')"
    )
    with pytest.raises(Refused, match="read from another database by r"):
        reshard(Store(connection), "things", 6)


def test_the_command_shows_a_plan_and_carries_it_out(
    penstock: CommandLine, connection: Connection, database_url: str, redis_url: str
) -> None:
    with Streamer(Pipeline([Log("things")]), database_url, redis_url):
        pass
    plan = penstock("channels", "reshard", "things", "--shards", "6")
    assert "4 shards → 6, numbers 4 to 9" in plan.stdout
    assert "--apply" in plan.stderr
    assert not registered_channels(Store(connection))["things"].generations

    assert penstock("channels", "reshard", "things", "--shards", "6", "--apply").returncode == 0
    assert registered_channels(Store(connection))["things"].generations == [6]
    assert "nothing to do" in penstock("channels", "reshard", "things", "--shards", "6").stdout
