"""``penstock run`` with set-based consumers: what their handlers raise is isolated and named, and never quoted."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it ships no types
import pytest

from fixtures.command_line import PENSTOCK, CommandLine
from penstock.database.connections import Connection
from penstock.testing import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

CANARY = "canary-in-the-mine"

APPLICATION = """
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType
from sqlalchemy import text
from penstock import Log, Pipeline

things = Log("things", shards=2)
pipeline = Pipeline([things])
NAME = "get_json_object(data, '$.name')"
options = {"reads": things, "dataframe": True, "attempts": 1}


def insert(session, who, frame):
    for key, value in frame.selectExpr("key", NAME).collect():
        session.execute(
            text("INSERT INTO public.effects VALUES (:who, :key, :value)"),
            {"who": who, "key": key, "value": value},
        )


@pipeline.consumer(**options)
def healthy(session, frame):
    insert(session, "healthy", frame)


@pipeline.consumer(**options)
def unique(session, frame):
    insert(session, "unique", frame)


@pipeline.consumer(**options)
def raising(session, frame):
    for (value,) in frame.selectExpr(NAME).collect():
        if not value.isdigit():
            raise ValueError(f"what is {value}?\\n{value}")
    insert(session, "raising", frame)


@pipeline.consumer(**options)
def casting(session, frame):
    frame.selectExpr(f"sum(CAST({NAME} AS int))").collect()
    insert(session, "casting", frame)


@F.udf(IntegerType(), useArrow=False)
def parse(value):
    return int(value)


@pipeline.consumer(**options)
def in_python(session, frame):
    frame.select(F.sum(parse(F.expr(NAME)))).collect()
    insert(session, "in_python", frame)
"""
FAILING = ("casting", "in_python", "raising", "unique")


@pytest.fixture
def staged(penstock: CommandLine, connection: Connection) -> None:
    (penstock.directory / "shop.py").write_text(APPLICATION)
    connection.execute("CREATE TABLE public.effects (who text, key text, value text)")
    connection.execute(
        f"CREATE UNIQUE INDEX names ON public.effects (value) WHERE value = '{CANARY}' AND who = 'unique'".encode()
    )
    connection.execute("INSERT INTO public.effects VALUES ('unique', 'first', %s)", [CANARY])
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i %% 2, 'k' || i, 'insert', 'thing', "
        "jsonb_build_object('name', CASE i WHEN 3 THEN %s ELSE i::text END) FROM generate_series(1, 6) AS i",
        [CANARY],
    )


def counts(connection: Connection) -> dict[str, int]:
    query = "SELECT who, count(DISTINCT key)::int FROM public.effects WHERE key <> 'first' GROUP BY 1"
    return dict(connection.execute(query).fetchall())


def lines(said: str, event: str) -> list[dict[str, Any]]:
    """The lines of the log with this event, also behind what Java has written without ending its line."""
    starts = [line[line.index('{"') :] for line in said.splitlines() if '{"' in line]
    parsed = [json.JSONDecoder().raw_decode(line)[0] for line in starts]
    return [line for line in parsed if line.get("event") == event]


@pytest.mark.usefixtures("staged")
def test_a_poison_record_is_isolated_and_named_and_its_payload_is_never_logged(
    penstock: CommandLine, connection: Connection, temporary: Path
) -> None:
    """Guarantees 21 and 33."""
    process = subprocess.Popen(
        [PENSTOCK, "run", "--engine", "spark"],
        cwd=penstock.directory,
        env=penstock.environment_within(temporary),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    expected = {"healthy": 6, "unique": 5, "raising": 5, "casting": 5, "in_python": 5}
    try:
        eventually(
            lambda: counts(connection) == expected or process.poll() is not None,
            "all others are applied",
            timeout_s=300,
        )
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
            process.kill()
            process.communicate()

    assert process.returncode == 0, said
    assert CANARY not in said
    failures = {each["consumer"]: each for each in lines(said, "handler failed")}
    assert {name: each["error"] for name, each in failures.items()} == {
        "unique": "UniqueViolation",
        "raising": "ValueError",
        "casting": "NumberFormatException",
        "in_python": "PythonException",
    }
    assert all(any("shop.py" in each for each in one["traceback"]) for one in failures.values())
    applied = [each for each in lines(said, "progress") if each["task"] == "raising"]
    assert sum(each.get("applied", 0) for each in applied) == 5
    assert sum(each.get("dead", 0) for each in applied) == 1
    assert len(lines(said, "stopped")) == 1, said
    [stopped] = lines(said, "stopped")
    assert (stopped["applied"], stopped["dead"]) == (26, 4)
    assert list(temporary.iterdir()) == []

    status = json.loads(penstock("status", "--json").stdout)
    lags = {c["consumer"]: sum(s["lag"] for s in c["shards"]) for c in status["consumers"]}
    assert lags == dict.fromkeys((*FAILING, "healthy"), 0)
    found = json.loads(penstock("dead-letters", "list", "--json").stdout)
    assert sorted((each["consumer"], each["key"]) for each in found) == [(name, "k3") for name in FAILING]
    [in_udf] = [each["reason"] for each in found if each["consumer"] == "in_python"]
    assert in_udf.startswith("PythonException: ValueError: invalid literal for int()")
    connection.execute("""UPDATE penstock.dead_letters SET data = '{"name": "3"}'""")
    again = penstock("dead-letters", "retry", "casting", "--all")
    assert again.returncode == 0, again.stderr
    assert counts(connection)["casting"] == 6
