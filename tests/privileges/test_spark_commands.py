"""The commands that read everything, on Spark, as the logins that the documentation names for them."""

import json

import pytest
import redis

from fixtures.command_line import CommandLine
from fixtures.roles import UrlFor
from penstock.database.connections import Connection

APPLICATION = """
from sqlalchemy import text
from penstock import Log, Pipeline

things = Log("things", shards=2)
pipeline = Pipeline([things])

@pipeline.consumer(reads=things)
def copies(session, records):
    for record in records:
        session.execute(text("INSERT INTO public.copies VALUES (:key, 1)"), {"key": record.key})

@pipeline.reconciliation(of=copies, state="public.copies", key="key")
def canonical(tables):
    return "SELECT key, n FROM public.originals"
"""

TABLES = """
CREATE TABLE public.originals (key text PRIMARY KEY, n int);
CREATE TABLE public.copies (key text PRIMARY KEY, n int);
INSERT INTO public.originals SELECT 'k' || i, 1 FROM generate_series(1, 20) i;
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', i % 2, 'k' || i, 'insert', 'thing', '{}' FROM generate_series(1, 20) i;
GRANT SELECT ON public.originals TO a_reconciler;
GRANT SELECT, INSERT, UPDATE, DELETE ON public.copies TO a_reconciler, a_consumer;
"""


@pytest.mark.spark
@pytest.mark.storm
def test_verify_needs_a_viewer_and_reconcile_a_streamer_and_consumer(
    penstock: CommandLine,
    connection: Connection,
    database_url_for: UrlFor,
    redis_url_for: UrlFor,
    redis_client: redis.Redis,
) -> None:
    """Guarantee 32.  Each command starts a JVM; what it prints and returns is made of the engine's findings as it is inline."""
    (penstock.directory / "shop.py").write_text(APPLICATION)
    connection.execute(TABLES)

    def run_as(login: str, user: str, *arguments: str) -> tuple[int, str, str]:
        done = penstock(
            *arguments, PENSTOCK_DATABASE_URL=database_url_for(login), PENSTOCK_REDIS_URL=redis_url_for(user)
        )
        return done.returncode, done.stdout, done.stderr

    assert run_as("a_streamer", "streamer", "stream", "--drain")[0] == 0
    assert run_as("a_consumer", "consumer", "consume", "copies", "--drain")[0] == 0
    connection.execute("DELETE FROM public.copies WHERE key = 'k7'")
    connection.execute("UPDATE penstock.staged_records SET action = 'x' WHERE key = 'k8'")

    verify = ("verify", "--json", "--engine", "spark")
    code, found, said = run_as("a_viewer", "viewer", *verify)
    assert code == 4, said
    assert "log4j" not in said
    assert "log level" not in said
    assert json.loads(found)["counts"] == {"changed": 1}

    reconcile = ("reconcile", "copies", "--apply", "--json", "--report", "differences.parquet")
    code, found, said = run_as("a_reconciler", "consumer", *reconcile)
    assert code == 0, said
    assert json.loads(found)[0]["repaired"] == 1
    assert list((penstock.directory / "differences.parquet").rglob("*.parquet"))
    [(copies,)] = connection.execute("SELECT count(*) FROM public.copies").fetchall()
    assert copies == 20
