"""Guarantee 30: an entry that Penstock did not write, or that was damaged, is a ``ForeignLog`` of its shard, wherever it is read."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from fixtures.broken_entries import BROKEN, DAMAGED, FOREIGN, OURS
from fixtures.command_line import CommandLine
from fixtures.constants import SetConstants
from fixtures.damaged_entries import rewrite
from fixtures.flow import Publish, Site, running, stage_rows
from penstock import Ick, Log, Pipeline
from penstock.channels.ick.marking import update_progress
from penstock.channels.ick.shard_states import inspect_shards
from penstock.channels.log.follower import Follower
from penstock.channels.log.streams import read, read_newest
from penstock.channels.routing import ick_shard_keys
from penstock.clients import DirtyList
from penstock.consuming import WorkerSetup, make_worker
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.errors import DamagedIck, ForeignLog
from penstock.records import Offset, ShardName
from penstock.testing import eventually

pytestmark = pytest.mark.things(entries="plain")

ODD_IDS = ["1000-1", "18446744073709551615-0", "9223372036854775808-0"]

Forge = Callable[[redis.Redis, str], object]


def entry(fields: dict[Any, Any], at: str = "1000-0") -> Forge:
    return lambda client, stream: client.xadd(stream, fields, id=at)


def another_type(client: redis.Redis, stream: str) -> None:
    client.delete(stream)
    client.set(stream, "somebody's")


FORGED: dict[str, Forge] = {
    **{name: entry(fields) for name, fields in BROKEN.items()},
    **{f"the id {at}": entry(OURS, at) for at in ODD_IDS},
}


@pytest.fixture
def stream(things: Log) -> str:
    """The stream of the first shard."""
    return f"penstock:{{{things.shard_names[0]}}}:log"


@pytest.fixture
def published(publish: Publish, things: Log) -> Log:
    """The channel, with 60 records in two shards."""
    publish(60)
    return things


@pytest.mark.parametrize("forged", FORGED)
def test_readers_name_a_broken_entry_and_a_follower_reads_up_to_it(
    forged: str, published: Log, stream: str, redis_client: redis.Redis
) -> None:
    shards = published.shard_names
    before = {s: redis_client.xlen(f"penstock:{{{s}}}:log") for s in shards}
    FORGED[forged](redis_client, stream)
    unusable: dict[ShardName, Exception] = {}
    follower = Follower(redis_client, "penstock", count=1000, on_unusable=unusable.__setitem__)

    ends = dict.fromkeys(shards, Offset(0))
    for _ in range(2):  # a few entries, and the others
        ends |= {shard: records[-1].offset for shard, records in follower.wait(ends, None).items()}
    assert (ends, unusable) == (before, {})
    follower.request_ahead(ends)
    assert follower.wait(ends, None) == {}
    assert list(unusable) == [shards[0]]
    with pytest.raises(ForeignLog):
        Follower(redis_client, "penstock", count=1000).wait(ends, None)
    for call in (partial(read, offset=Offset(0), count=100_000), partial(read_newest, count=5)):
        with pytest.raises(ForeignLog, match=r"things/0: entry \d+-\d "):
            call(redis_client, "penstock", shards[0])


def test_a_follower_reads_the_other_shards_beside_a_key_of_another_type(
    published: Log, stream: str, redis_client: redis.Redis
) -> None:
    another_type(redis_client, stream)
    unusable: dict[ShardName, Exception] = {}
    follower = Follower(redis_client, "penstock", count=9, on_unusable=unusable.__setitem__)

    found = follower.wait(dict.fromkeys(published.shard_names, Offset(0)), 1000)

    assert (list(found), list(unusable)) == ([published.shard_names[1]], [published.shard_names[0]])


@pytest.fixture
def reader(flow: Pipeline, things: Log, set_constants: SetConstants, redis_url: str, database_url: str) -> Any:
    """A consumer's worker, and the keys that it has seen."""
    set_constants("channels.isolation", RETRY_EVERY_S=0.05)
    seen: list[str] = []

    @flow.consumer(reads=things, name="reader")
    def reader(_session: Any, records: Any) -> None:
        seen.extend(record.key for record in records)

    spec = flow.get_consumer("reader")
    with LogWorker(WorkerSetup(flow, spec, database_url, redis_url, block_ms=20)) as worker:
        yield worker, seen


@pytest.mark.parametrize("forged", [*FOREIGN, "another type"])
def test_a_consumer_leaves_the_shard_out_and_goes_on_when_its_keys_are_deleted(
    site: Site, forged: str, reader: tuple[LogWorker, list[str]], published: Log, stream: str
) -> None:
    worker, seen = reader
    site.client.delete(stream)
    forge = another_type if forged == "another type" else entry(FOREIGN[forged], "1-0")
    forge(site.client, stream)
    site.streamer.close()

    with capture_logs() as logs, running(worker.run):
        stage_rows(site.connection, published, 20, "more")
        with suppress(ForeignLog):
            site.streamer.drain()
        tail = site.client.xlen(f"penstock:{{{published.shard_names[1]}}}:log")
        eventually(lambda: len(seen) == tail, "the other shard goes on")
        eventually(lambda: ("things/0", "ForeignLog") in reported(logs), "the shard is reported", timeout_s=15)
        [(waiting,)] = site.connection.execute("SELECT max(waiting) FROM penstock.checkpoints")
        assert "ForeignLog" in waiting
        site.client.delete(stream)
        site.streamer.close()
        site.streamer.opened().publisher.unusable.check_now()
        site.streamer.drain()
        eventually(lambda: len(seen) == 80, "it goes on")
    assert len(set(seen)) == 80


def reported(logs: list[Any]) -> set[tuple[str, str]]:
    """The shards that a consumer has reported, with the kind of error."""
    return {
        (each["shard"], each["reason"].partition(":")[0])
        for each in logs
        if each["event"] == "shard unusable" and "consumer" in each
    }


@pytest.mark.parametrize(("log_every_s", "lines"), [(3600.0, 1), (0.0, 5)])
def test_a_shard_that_stays_unusable_is_logged_once_and_then_every_hour(
    reader: tuple[LogWorker, list[str]],
    published: Log,
    stream: str,
    redis_client: redis.Redis,
    set_constants: SetConstants,
    log_every_s: float,
    lines: int,
) -> None:
    set_constants("channels.isolation", RETRY_EVERY_S=0.0)
    set_constants("logs", LOG_EVERY_S=log_every_s)
    worker, _ = reader
    redis_client.delete(stream)
    redis_client.xadd(stream, {"who": "me"}, id="1-0")

    with capture_logs() as logs:
        for _ in range(5):
            worker.round(block_ms=1)

    assert len([each for each in logs if each["event"] == "shard unusable"]) == lines


def test_a_shard_that_was_left_out_is_not_read_again_at_once(
    reader: tuple[LogWorker, list[str]],
    published: Log,
    stream: str,
    redis_client: redis.Redis,
    set_constants: SetConstants,
) -> None:
    set_constants("channels.isolation", RETRY_EVERY_S=60.0)
    set_constants("logs", LOG_EVERY_S=0.0)
    worker, seen = reader
    redis_client.delete(stream)
    redis_client.xadd(stream, {"who": "me"}, id="1-0")

    with capture_logs() as logs:
        for _ in range(5):
            worker.round(block_ms=1)
    assert len([each for each in logs if each["event"] == "shard unusable"]) == 1
    assert len(seen) == redis_client.xlen(f"penstock:{{{published.shard_names[1]}}}:log")


def test_draining_ends_with_the_error_of_the_shard_that_was_left_out(
    reader: tuple[LogWorker, list[str]], published: Log, stream: str, redis_client: redis.Redis
) -> None:
    worker, seen = reader
    redis_client.xadd(stream, {"who": "me"}, id="1000-0")

    with pytest.raises(ForeignLog, match="entry 1000-0"):
        worker.drain()
    assert len(seen) == 60


def test_a_consumer_starts_beside_a_foreign_log(
    reader: tuple[LogWorker, list[str]], published: Log, stream: str, redis_client: redis.Redis
) -> None:
    worker, seen = reader
    worker.close()
    redis_client.delete(stream)
    redis_client.xadd(stream, {"who": "me"}, id="1-0")

    with pytest.raises(ForeignLog, match="entry 1-0"):
        worker.drain()
    assert len(seen) == redis_client.xlen(f"penstock:{{{published.shard_names[1]}}}:log")


def test_a_consumer_of_an_ick_leaves_a_damaged_shard_out(
    connection: Connection, redis_client: redis.Redis, redis_url: str, database_url: str, set_constants: SetConstants
) -> None:
    set_constants("channels.isolation", RETRY_EVERY_S=0.05)
    index = Ick("index", shards=2)
    pipeline = Pipeline([index])
    seen: list[str] = []

    @pipeline.consumer(reads=index, name="indexer")
    def indexer(_session: Any, members: Any) -> None:
        seen.extend(members)

    icks = [DirtyList(redis_client, ick_shard_keys("penstock", shard).name) for shard in index.shard_names]
    for number, ick in enumerate(icks):
        ick.add({f"m{number}": 1.0})
    held: Any = redis_client.dump(icks[0].keys.dirty)
    redis_client.set(icks[0].keys.dirty, "somebody's")
    worker = make_worker(pipeline, pipeline.get_consumer("indexer"), database_url, redis_url)

    with worker, pytest.raises(DamagedIck, match=r"index/0.*expected zset, found string"):
        worker.drain()
    assert seen == ["m1"]
    with running(worker.run):
        icks[1].add({"m2": 2.0})
        eventually(lambda: seen == ["m1", "m2"], "the other shard goes on")
        redis_client.restore(icks[0].keys.dirty, 0, held, replace=True)
        eventually(lambda: seen == ["m1", "m2", "m0"], "the repaired shard goes on")


def test_foreign_values_beside_an_ick_crash_no_reader(redis_client: redis.Redis) -> None:
    shard = Ick("index").shard_names[0]
    keys = ick_shard_keys("penstock", shard)
    ick = DirtyList(redis_client, keys.name)
    ick.add({"m": 1.0})
    redis_client.hset(keys.ick.fence, mapping={"number": "many", "holder": b"\xff"})
    values: dict[Any, Any] = {"passed": "far", "offset": "x", "score": "y", "records": "many", "dirtied": b"\xff"}
    redis_client.hset(keys.progress, mapping=values)

    stats = ick.stats()
    assert stats is not None
    assert (stats.number, stats.holder) == (0, "\\xff")
    assert update_progress(redis_client, "penstock", [shard])[shard].done_up_to == 0
    found = inspect_shards(redis_client, "penstock", [shard], 0.0)[shard]
    assert found.damage == "index/0: the counts of its records are not numbers"
    redis_client.set(keys.progress, "a text")
    assert "index/0: the key holds another type" in str(
        inspect_shards(redis_client, "penstock", [shard], 0.0)[shard].damage
    )


@pytest.mark.parametrize("forged", ["a key that is no UTF-8", "an id that is no number"])
def test_commands_name_the_entry_and_end_with_5(forged: str, penstock: CommandLine, redis_client: redis.Redis) -> None:
    FORGED[forged](redis_client, "penstock:{things/0}:log")

    for arguments in (("tail", "things"), ("tail", "things", "--from", "1")):
        done = penstock(*arguments)
        assert (done.returncode, done.stderr[:52]) == (5, "error: things/0: entry 1000-0 (offset 1000) is damag")


def test_a_time_that_no_calendar_has_is_printed_as_a_number(penstock: CommandLine, redis_client: redis.Redis) -> None:
    redis_client.xadd("penstock:{things/0}:log", OURS | {"ts": "9" * 18}, id="1-0")

    for format_ in ((), ("--json",)):
        done = penstock("tail", "things", *format_)
        assert (done.returncode, "9" * 18 in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_consumer_reads_a_damaged_record_from_the_journal(
    damaged: str, reader: tuple[LogWorker, list[str]], published: Log, stream: str, redis_client: redis.Redis
) -> None:
    worker, seen = reader
    rewrite(redis_client, stream, lambda entries: entries[3].__setitem__(1, DAMAGED[damaged]))

    worker.drain()

    assert len(seen) == len(set(seen)) == 60
