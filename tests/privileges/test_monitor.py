"""The role that reads everything but payloads: each command that shows none works, and no statement gets at one."""

import psycopg
import pytest

from fixtures.command_line import CommandLine
from fixtures.roles import UrlFor
from penstock.database.connections import Connection, connect_postgres

WITHHELD = {
    *(("staged_records", "data"), ("staged_records", "headers"), ("dead_letters", "data"), ("dead_letters", "headers")),
    *(
        ("repairs", "before"),
        ("repairs", "after"),
        ("job_notes", "note"),
        ("job_results", "result"),
        ("job_groups", "following"),
    ),
}

READABLE = """
SELECT c.relname, a.attname, has_column_privilege(c.oid, a.attnum, 'SELECT'),
       has_any_column_privilege(c.oid, 'INSERT, UPDATE') OR has_table_privilege(c.oid, 'DELETE, TRUNCATE')
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind IN ('r', 'v', 'm', 'p')
"""

WAYS_ROUND = [
    "SELECT * FROM penstock.{table}",
    "TABLE penstock.{table}",
    "SELECT t::text FROM penstock.{table} t",
    "SELECT to_jsonb(t) FROM penstock.{table} t",
    "COPY penstock.{table} TO STDOUT",
    "CREATE TEMPORARY TABLE mine AS SELECT {column} FROM penstock.{table}",
    "SELECT 1 FROM penstock.{table} WHERE {column}::text LIKE '%secret%'",
    "SELECT count({column}) FROM penstock.{table}",
]

BROKEN = """
@pipeline.consumer(reads=things, attempts=1)
def copies(session, records):
    raise ValueError("refused")
"""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
VALUES ('things', 0, 'k', 'insert', 'thing', '{"a": "secret"}', '{"b": "secret"}')
"""


def test_a_monitor_reads_every_column_but_those_with_payloads(database_url_for: UrlFor) -> None:
    """Guarantee 32: a new column is one of the role's, or is named here."""
    with connect_postgres(database_url_for("a_monitor"), application="test") as monitor:
        columns = monitor.execute(READABLE).fetchall()

    assert {(table, column) for table, column, readable, _ in columns if not readable} == WITHHELD
    assert not any(writable for *_, writable in columns)


def test_no_statement_of_a_monitor_gets_at_a_payload(database_url_for: UrlFor, connection: Connection) -> None:
    """Guarantee 32.  The most common values of a column are in Postgres' statistics."""
    connection.execute(STAGE + ", " + ", ".join(["('things', 0, 'k', 'insert', 'thing', '{}', '{}')"] * 9))
    connection.execute("ANALYZE penstock.staged_records")
    with connect_postgres(database_url_for("a_monitor"), application="test") as monitor:
        for table, column in WITHHELD:
            for way in WAYS_ROUND:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    monitor.execute(way.format(table=table, column=column).encode())
        known = monitor.execute("SELECT attname FROM pg_stats WHERE schemaname = 'penstock'").fetchall()
        connection.execute("SET ROLE penstock_owner; CREATE TABLE penstock.later (data jsonb); RESET ROLE")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            monitor.execute("SELECT data FROM penstock.later")

    assert ("key",) in known
    assert ("data",) not in known


COMMANDS = {
    ("status", "--json"): 0,
    ("trace", "k", "--key"): 0,
    ("explain", "k", "--key", "--query"): 1,  # not applied
    ("doctor",): 1,  # the tests' server is not durable
    ("dead-letters", "list"): 0,
    ("channels", "list"): 0,
    ("consumers", "list"): 0,
}


@pytest.mark.slow
def test_each_command_that_shows_no_payload_works_as_a_monitor(
    penstock: CommandLine, connection: Connection, database_url_for: UrlFor, redis_url_for: UrlFor
) -> None:
    application = penstock.directory / "shop.py"
    application.write_text(application.read_text() + BROKEN)
    connection.execute(STAGE)
    penstock("stream", "--drain")
    assert penstock("consume", "copies", "--drain").returncode == 0
    urls = {"PENSTOCK_DATABASE_URL": database_url_for("a_monitor"), "PENSTOCK_REDIS_URL": redis_url_for("viewer")}

    done = {arguments: penstock(*arguments, **urls) for arguments in COMMANDS}
    refused = penstock("dead-letters", "show", "copies", "things/0 offset 1", **urls)

    assert {arguments: each.returncode for arguments, each in done.items()} == COMMANDS, done
    assert not [each for each in done.values() if "secret" in each.stdout or "permission denied" in each.stdout]
    assert "permission denied for table dead_letters" in refused.stderr
