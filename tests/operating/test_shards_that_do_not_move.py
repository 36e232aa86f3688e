"""A shard that is halted, damaged or unread is an error in ``status``, ``doctor`` and ``verify``, never a lag of 0."""

import json
from collections.abc import Sequence

import pytest
import redis

from fixtures.command_line import CommandLine
from fixtures.flow import Publish
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.errors import Unknown
from penstock.journal.journal_reader import known_shards
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.gathering import status
from penstock.operating.status.snapshot import Status
from penstock.records import DEFAULT_SCOPE, Shard, ShardName, parse_place
from penstock.streaming import Streamer
from penstock.verifying.bounds import read_bounds
from penstock.verifying.comparing import Finding, FindingKind


@pytest.fixture
def reading(flow: Pipeline, things: Log, connection: Connection) -> Pipeline:
    """A pipeline with a registered consumer, which has applied nothing."""

    @flow.consumer(reads=things, name="reader")
    def reader(_session: object, records: Sequence[object]) -> None:
        del records

    register_consumer(Store(connection, flow.scope), flow.get_consumer("reader"))
    return flow


def stage_in(connection: Connection, channel: str, shard: int, count: int = 3) -> None:
    """What a producer may do by hand: any channel, any shard."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT %s, %s, 'k', 'insert', 'thing', '{}' FROM generate_series(1, %s)",
        [channel, shard, count],
    )


def lags(found: Status) -> dict[int, int]:
    [reader] = found.consumers
    return {shard.shard: shard.lag for shard in reader.shards}


def errors(connection: Connection, client: redis.Redis, pipeline: Pipeline) -> list[str]:
    return [r.message for r in diagnose(Store(connection), client, pipeline) if r.grade == "error"]


def findings(connection: Connection, client: redis.Redis, pipeline: Pipeline) -> list[Finding]:
    """What ``verify`` finds before it compares a record."""
    shards = known_shards(Store(connection), pipeline.shard_names)
    declared = set(pipeline.shard_names)
    return read_bounds(Store(connection), client, shards, None, declared).findings


def test_records_in_a_shard_that_no_channel_has_are_lag_and_an_error(
    connection: Connection, redis_client: redis.Redis, reading: Pipeline, streamer: Streamer
) -> None:
    streamer.drain()
    stage_in(connection, "things", 7)
    before = status(Store(connection), redis_client, reading)
    streamer.drain()

    found = status(Store(connection), redis_client, reading)

    assert not before.sound
    assert not found.sound
    assert lags(found)[7] == 3
    assert [(str(shard), count) for shard, count, _ in found.unread] == [("things/7", 3)] * 2
    assert any("things/7: 3 records" in each for each in errors(connection, redis_client, reading))
    assert {(f.where, f.kind, f.shard, f.count) for f in findings(connection, redis_client, reading)} == {
        ("consumers", FindingKind.MISSING, 7, 3),
        ("consumer reader", FindingKind.MISSING, 7, 3),
    }


def test_records_of_a_channel_that_is_neither_registered_nor_declared_are_an_error(
    connection: Connection, redis_client: redis.Redis, reading: Pipeline, streamer: Streamer
) -> None:
    stage_in(connection, "typo", 0)
    streamer.drain()

    found = status(Store(connection), redis_client, reading)

    assert [(str(shard), count) for shard, count, _ in found.unread] == [("typo/0", 3)]
    assert any("typo/0: 3 records" in each for each in errors(connection, redis_client, reading))
    assert [f.channel for f in findings(connection, redis_client, reading)] == ["typo"]


def test_a_missing_checkpoint_is_lag_and_an_error(
    connection: Connection, redis_client: redis.Redis, reading: Pipeline, publish: Publish
) -> None:
    publish(20)
    before = status(Store(connection), redis_client, reading)
    connection.execute("DELETE FROM penstock.checkpoints WHERE shard = 1")

    found = status(Store(connection), redis_client, reading)

    assert before.sound
    assert lags(found) == lags(before)
    assert lags(found)[1] > 0
    assert [str(shard) for shard, _, _ in found.unread] == ["things/1"]
    assert any("has no checkpoint" in each for each in errors(connection, redis_client, reading))
    [finding] = findings(connection, redis_client, reading)
    assert (finding.where, finding.shard, finding.count) == ("consumer reader", 1, lags(found)[1])


@pytest.mark.parametrize("damage", ["another type", "a foreign entry"])
def test_a_damaged_shard_is_an_error_and_the_others_are_shown(
    connection: Connection, redis_client: redis.Redis, reading: Pipeline, publish: Publish, damage: str
) -> None:
    publish(20)
    stream = log_keys(DEFAULT_SCOPE.namespace, ShardName("things", Shard(0))).stream
    if damage == "another type":
        redis_client.delete(stream)
        redis_client.set(stream, "x")
    else:
        redis_client.xadd(stream, {"x": "y"})

    found = status(Store(connection), redis_client, reading)

    shards = found.channels[0].shards
    assert found.redis is None
    assert not found.sound
    assert shards[1].published == shards[1].sequenced
    assert [str(shard) for shard, _ in found.damaged] == ["things/0"]
    assert any("things/0" in each for each in errors(connection, redis_client, reading))
    if damage == "another type":
        [finding] = findings(connection, redis_client, reading)
        assert (finding.where, finding.shard) == ("log", 0)


def test_a_verification_from_a_place_compares_its_shard_alone(
    connection: Connection, redis_client: redis.Redis, reading: Pipeline, publish: Publish
) -> None:
    publish(20)
    shards = list(reading.shard_names)

    def ranges(place: str) -> list[tuple[str, int]]:
        found = read_bounds(Store(connection), redis_client, shards, parse_place(place))
        return [(str(each.shard), each.after) for each in found.ranges]

    assert ranges("things/1 offset 3") == [("things/1", 2)]
    with pytest.raises(Unknown, match="no shard things/9"):
        ranges("things/9 offset 3")


def test_status_exits_with_1_if_a_shard_does_not_move(penstock: CommandLine, connection: Connection) -> None:
    penstock("stream", "--drain")
    penstock("consume", "reader", "--drain")
    sound = penstock("status")
    connection.execute("UPDATE penstock.checkpoints SET halted = 'because' WHERE shard = 1")

    halted, as_json = penstock("status"), penstock("status", "--json")

    assert (sound.returncode, halted.returncode, as_json.returncode) == (0, 1, 1)
    assert "halted: reader things/1: because" in halted.stdout
    assert json.loads(as_json.stdout)["consumers"][0]["shards"][1]["halted"] == "because"
