"""``penstock verify`` as users run it: its exit codes, its list, its JSON."""

import json

import pytest
import redis

from fixtures.command_line import CommandLine
from fixtures.engines import ENGINES
from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=ENGINES)
def streamed(
    request: pytest.FixtureRequest, penstock: CommandLine, connection: Connection, things: Log
) -> CommandLine:
    penstock.environment["PENSTOCK_ENGINE"] = request.param
    stage_rows(connection, things, 50)
    assert penstock("stream", "--drain").returncode == 0
    return penstock


def test_without_findings_the_exit_code_is_0(streamed: CommandLine) -> None:
    done = streamed("verify")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("50 records of 2 shards verified in ")
    assert "nothing missing, doubled, changed or out of order" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert "log4j" not in done.stderr
    assert "log level" not in done.stderr


def test_findings_are_listed_and_the_exit_code_is_4(
    streamed: CommandLine, redis_client: redis.Redis
) -> None:
    redis_client.xdel("penstock:{things/1}:log", "3-0")
    listed = streamed("verify", "--from", "2")
    as_json = streamed("verify", "--json")

    assert (listed.returncode, as_json.returncode) == (4, 4), listed.stderr
    [head, row, verdict] = listed.stdout.splitlines()
    assert head.split() == ["kind", "where", "shard", "offset", "offsets", "what"]
    assert row.split()[:5] == ["missing", "log", "things/1", "3", "1"]
    assert verdict.endswith(": 1 missing")
    found = json.loads(as_json.stdout)
    assert (found["clean"], found["counts"]) == (False, {"missing": 1})
    assert (found["findings"][0]["shard"], found["findings"][0]["offset"]) == (1, 3)


def test_an_invalid_time_is_refused(streamed: CommandLine) -> None:
    refused = streamed("verify", "--from", "soon")

    assert refused.returncode == 2
    assert "it takes an offset, or a time" in refused.stderr
