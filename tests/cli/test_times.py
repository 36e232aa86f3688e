"""Times on the command line: ``tail --since``, ``reset checkpoint --to``."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import redis

from fixtures.command_line import CommandLine
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.errors import InvalidSetting
from penstock.records import Shard, ShardName, parse_moment


@pytest.fixture
def streamed(penstock: CommandLine, connection: Connection) -> CommandLine:
    """Records of two keys, one for every ten minutes, in both shards."""
    connection.execute("CREATE TABLE public.effects (id bigint)")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at) "
        "SELECT 'things', i %% 2, 'k' || i / 2 %% 2, 'insert', 'thing', jsonb_build_object('number', i), "
        "now() - (41 - i) * interval '10 min' FROM generate_series(1, 40) AS i",
        [],
    )
    penstock("stream", "--drain")
    return penstock


def numbers(command: CommandLine, *arguments: str) -> list[int]:
    done = command("tail", "things", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(line)["data"]["number"] for line in done.stdout.splitlines())


def test_tail_shows_what_was_staged_since_a_time(streamed: CommandLine) -> None:
    at = (datetime.now(UTC) - timedelta(minutes=55)).replace(tzinfo=None).isoformat()

    assert numbers(streamed, "--since", at) == [36, 37, 38, 39, 40]
    assert numbers(streamed, "--since", "55min", "--key", "k0") == [36, 37, 40]
    assert len(numbers(streamed, "--since", "55min", "--count", "2")) == 2


def test_tail_shows_what_redis_has_evicted_and_the_journal_still_has(
    streamed: CommandLine, redis_client: redis.Redis
) -> None:
    for shard in (0, 1):
        keys = log_keys("penstock", ShardName("things", Shard(shard)))
        redis_client.xtrim(keys.stream, maxlen=0, approximate=False)

    assert numbers(streamed, "--since", "55min") == [36, 37, 38, 39, 40]
    assert numbers(streamed, "--from", "19") == [37, 38, 39, 40]


def test_tail_shows_the_newest_of_what_redis_has_evicted(
    streamed: CommandLine, redis_client: redis.Redis, connection: Connection
) -> None:
    """All that is left in Redis are the records that are streamed afterwards."""
    for shard in (0, 1):
        keys = log_keys("penstock", ShardName("things", Shard(shard)))
        redis_client.xtrim(keys.stream, maxlen=0, approximate=False)
    assert numbers(streamed, "--count", "5") == [36, 37, 38, 39, 40]
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 1, 'k0', 'insert', 'thing', '{\"number\": 41}')"
    )
    streamed("stream", "--drain")

    assert numbers(streamed) == list(range(32, 42))
    assert numbers(streamed, "--count", "100") == list(range(1, 42))
    assert numbers(streamed, "--key", "k1", "--count", "3") == [35, 38, 39]
    assert numbers(streamed, "--key", "k0", "--shard", "1", "--count", "3") == [33, 37, 41]


def test_tail_shows_the_log_of_a_source_whose_name_has_an_at_sign(
    penstock: CommandLine, redis_client: redis.Redis, connection: Connection
) -> None:
    connection.execute(
        "INSERT INTO penstock.channels (channel, kind, shards, keep) VALUES ('orders@eu', 'log', 1, '1 day');"
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('orders@eu', 0, 'k', 'insert', 'order', '{}'), ('orders@eu', 0, 'k', 'insert', 'order', '{}')"
    )
    penstock("stream", "--drain")
    keys = log_keys("penstock", ShardName("orders@eu", Shard(0)))
    redis_client.xtrim(keys.stream, maxlen=0, approximate=False)

    for arguments in ((), ("--from", "1"), ("--key", "k")):
        done = penstock("tail", "orders@eu", "--json", *arguments)
        offsets = [json.loads(line)["offset"] for line in done.stdout.splitlines()]
        assert (offsets, done.stderr) == ([1, 2], "")


def test_tail_goes_on_behind_records_that_postgres_no_longer_has(
    streamed: CommandLine, redis_client: redis.Redis, connection: Connection
) -> None:
    for shard in (0, 1):
        keys = log_keys("penstock", ShardName("things", Shard(shard)))
        redis_client.xtrim(keys.stream, maxlen=0, approximate=False)
    connection.execute("DELETE FROM penstock.staged_records WHERE (data->>'number')::int <= 30")

    assert numbers(streamed, "--from", "1") == list(range(31, 41))
    assert numbers(streamed, "--from", "1", "--count", "7") == [31, 32, 33, 34, 36, 38, 40]
    assert numbers(streamed, "--count", "100") == list(range(31, 41))


def test_tail_shows_the_newest_records_of_a_key(streamed: CommandLine) -> None:
    assert numbers(streamed, "--key", "k1", "--count", "3") == [35, 38, 39]
    assert numbers(streamed, "--key", "k1", "--shard", "0", "--count", "1000") == [
        2, 6, 10, 14, 18, 22, 26, 30, 34, 38,
    ]  # fmt: skip
    assert numbers(streamed, "--key", "unknown") == []


def test_a_checkpoint_goes_back_to_a_time(streamed: CommandLine) -> None:
    streamed("consume", "reader", "--drain")

    plan = streamed("reset", "checkpoint", "reader", "--to", "95min", "--json")
    shown = streamed("reset", "checkpoint", "reader", "--to", "95min", "--apply")
    again = streamed("reset", "checkpoint", "reader", "--to", "95min", "--json")

    assert sum(move["again"] for move in json.loads(plan.stdout)) == 9
    assert (shown.returncode, "applied again" in shown.stdout) == (0, True)
    assert sum(move["again"] for move in json.loads(again.stdout)) == 0


def test_a_time_that_is_none_is_refused(streamed: CommandLine) -> None:
    for words in (
        ("reset", "checkpoint", "reader", "--to", "soon"),
        ("tail", "things", "--since", "soon"),
        ("tail", "things", "--since", "2h", "--from", "3"),
        ("dead-letters", "list", "--since", "soon"),
        ("dead-letters", "drop", "reader", "--all", "--until", "999999d"),
    ):
        refused = streamed(*words)
        assert refused.returncode == 2
        assert "exclude" in refused.stderr or "2h" in refused.stderr


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2h", timedelta(hours=2)),
        ("90s", timedelta(seconds=90)),
        ("1.5d", timedelta(hours=36)),
        ("15min", timedelta(minutes=15)),
        ("2026-11-23T14:05", datetime(2026, 11, 23, 14, 5, tzinfo=UTC)),
        ("2026-11-23", datetime(2026, 11, 23, tzinfo=UTC)),
        ("2026-11-23T14:05:06+02:00", datetime(2026, 11, 23, 12, 5, 6, tzinfo=UTC)),
        ("2026-11-23T14:05Z", datetime(2026, 11, 23, 14, 5, tzinfo=UTC)),
    ],
)
def test_a_time_is_iso_8601_or_an_age(text: str, moment: datetime | timedelta) -> None:
    assert parse_moment(text) == moment


@pytest.mark.parametrize("text", ["2", "-2h", "2y", "yesterday", "9999999999999d", "2026-13-01"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="not a time"):
        parse_moment(text)
