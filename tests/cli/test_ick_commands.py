"""The commands' output for an Ick."""

import json

import pytest
import redis

from fixtures.command_line import CommandLine
from penstock.clients import DirtyList
from penstock.database.connections import Connection

APPLICATION = """
from penstock import Ick, Pipeline

pipeline = Pipeline([Ick("index", shards=2)])
"""


@pytest.fixture
def indexing(penstock: CommandLine, connection: Connection) -> CommandLine:
    """An application with an Ick of two shards, and 6 members marked twice."""
    (penstock.directory / "shop.py").write_text(APPLICATION)
    for _ in range(2):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'index', i % 2, 'k' || i, 'dirty', 'member', 'null' FROM generate_series(1, 6) AS i"
        )
    assert penstock("stream", "--drain").returncode == 0
    return penstock


def test_status_has_a_table_of_icks(indexing: CommandLine) -> None:
    table = indexing("status").stdout
    by_shard = indexing("status", "--by-shard").stdout
    [channel] = json.loads(indexing("status", "--json").stdout)["channels"]

    [row] = [line.split() for line in table.splitlines() if "2.0 : 1" in line]
    assert row[:4] == ["index", "6", "0", "0"]
    assert by_shard.count("2.0 : 1") == 2
    for shard in channel["shards"]:
        assert (shard["ick"]["dirty"], shard["ick"]["coalescing_ratio"]) == (3, 2.0)
        assert (shard["published"], shard["entries"]) == (6, None)


def test_tail_prints_the_members_that_have_waited_longest(indexing: CommandLine, redis_client: redis.Redis) -> None:
    ick = DirtyList(redis_client, "penstock:{index/1}:ick")
    ick.add([(b"\xff\x00", 5.0)])
    ick.reserve(1)
    DirtyList(redis_client, "penstock:{index/0}:ick").add({"long ago": -1e300})

    lines = indexing("tail", "index").stdout.splitlines()
    found = [json.loads(line) for line in indexing("tail", "index", "--json").stdout.splitlines()]
    first = indexing("tail", "index", "--shard", "1", "--count", "1").stdout

    assert [each["member"] for each in found] == ["long ago", "\\xff\x00"] + [f"k{n}" for n in range(1, 7)]
    assert (found[0]["since"], found[0]["state"]) == (None, "dirty")
    assert (found[1]["since"], found[1]["state"]) == ("1970-01-01T00:00:05+00:00", "reserved")
    assert lines[0] == "index/0  -1e+300  dirty long ago"
    assert first.startswith("index/1  1970-01-01 00:00:05  reserved")


@pytest.mark.parametrize("option", [("--follow",), ("--from", "1")])
def test_an_ick_has_no_records_to_follow(indexing: CommandLine, option: tuple[str, ...]) -> None:
    done = indexing("tail", "index", *option)

    assert done.returncode == 2
    assert "it keeps members, not records" in done.stderr


def test_a_damaged_ick_is_repaired_on_request(indexing: CommandLine, redis_client: redis.Redis) -> None:
    key = DirtyList(redis_client, "penstock:{index/1}:ick").keys.dirty
    redis_client.set(key, "somebody's")

    refused, damaged = indexing("stream", "--drain"), indexing("status")
    planned = indexing("reset", "ick", "index")
    still = redis_client.get(key)
    done = json.loads(indexing("reset", "ick", "index", "--apply", "--json").stdout)
    again = indexing("stream", "--drain")

    assert (refused.returncode, damaged.returncode, again.returncode) == (5, 1, 0)
    assert "damaged: index/1" in damaged.stdout
    assert "Nothing was changed" in planned.stderr
    assert still == b"somebody's"
    assert [each["key"] for each in done] == [key]
    assert redis_client.zcard(key) == 3
    assert "The Ick is not damaged" in indexing("reset", "ick", "index").stderr
