"""``penstock verify`` as users run it: its exit codes, its list, its JSON."""

import json
from typing import Any

import pytest
import redis

from fixtures.command_line import CommandLine
from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection

LOG = "penstock:{things/1}:log"


@pytest.fixture
def streamed(penstock: CommandLine, connection: Connection, things: Log) -> CommandLine:
    for count in (20, 30):
        stage_rows(connection, things, count)
        assert penstock("stream", "--drain").returncode == 0
    return penstock


def delete_newest_entry(client: Any) -> tuple[int, int]:
    """Deletes the newest entry of shard 1; gives the offset of its first record, and their number."""
    [(entry_id, fields)] = client.xrevrange(LOG, count=1)
    client.xdel(LOG, entry_id)
    first = int(fields[b"first"])
    return first, int(entry_id.split(b"-")[0]) + 1 - first


def test_without_findings_the_exit_code_is_0(streamed: CommandLine) -> None:
    done = streamed("verify")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("50 records of 2 shards verified in ")
    assert "nothing missing, doubled, changed or out of order" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_findings_are_listed_and_the_exit_code_is_4(streamed: CommandLine, redis_client: redis.Redis) -> None:
    first, count = delete_newest_entry(redis_client)
    listed = streamed("verify", "--from", "2")
    as_json = streamed("verify", "--json")

    assert (listed.returncode, as_json.returncode) == (4, 4), listed.stderr
    [head, row, verdict] = listed.stdout.splitlines()
    assert head.split() == ["kind", "where", "shard", "offset", "offsets", "what"]
    assert row.split()[:5] == ["missing", "log", "things/1", str(first), str(count)]
    assert verdict.endswith(f": {count} missing")
    found = json.loads(as_json.stdout)
    assert (found["clean"], found["counts"]) == (False, {"missing": count})
    assert (found["findings"][0]["shard"], found["findings"][0]["offset"]) == (1, first)


def test_records_that_nobody_reads_are_a_finding(streamed: CommandLine, connection: Connection) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 7, 'k', 'insert', 'thing', '{}')"
    )
    streamed("stream", "--drain")

    done = streamed("verify")

    assert done.returncode == 4, done.stderr
    assert "no channel is registered or declared with this shard" in done.stdout


@pytest.mark.parametrize("command", ["status", "verify"])
def test_an_application_with_more_shards_than_are_registered_does_not_hide_them(
    streamed: CommandLine, connection: Connection, command: str
) -> None:
    """Its own declaration has the shards that nobody reads."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 7, 'k', 'insert', 'thing', '{}')"
    )
    streamed("stream", "--drain")
    application = streamed.directory / "shop.py"
    application.write_text(application.read_text().replace("shards=2", "shards=8"))

    done = streamed(command)

    assert done.returncode == (4 if command == "verify" else 1), done.stderr
    assert "things/7" in done.stdout


def test_a_place_verifies_its_shard_alone(streamed: CommandLine) -> None:
    done = streamed("verify", "--from", "things/1 offset 3", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records"] < 48
