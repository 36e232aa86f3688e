"""``penstock reset epoch`` tells what is in doubt; the how-to's commands lead out."""

import json
import re
from pathlib import Path

import psycopg

from fixtures.command_line import CommandLine
from fixtures.restored import Restored, stage, stream
from penstock import Log, Pipeline


def test_the_command_tells_what_is_in_doubt_and_what_to_do(
    flow: Pipeline,
    things: Log,
    redis_url: str,
    database_url: str,
    copy_database: Restored,
    penstock: CommandLine,
) -> None:
    """Guarantee 10: loudly, with exit code 5; the way out is what the error names."""
    stage(database_url, things, 10, "kept")
    stream(flow, database_url, redis_url)
    restored = copy_database()
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
    assert "reader at 0: its effects in this Postgres were restored with it" in plan.stdout
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
    redis_url: str, database_url: str, copy_database: Restored, penstock: CommandLine
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
    restored = copy_database()
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
