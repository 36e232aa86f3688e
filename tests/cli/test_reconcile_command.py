"""``penstock reconcile`` and ``consume --from tables`` as users run them."""

import json

import pytest

from fixtures.bank import open_bank
from fixtures.command_line import CommandLine
from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection


@pytest.fixture
def bank(penstock: CommandLine, connection: Connection, things: Log) -> CommandLine:
    """An application whose consumer holds the same rows as the canonical table."""
    open_bank(penstock, connection, things)
    return penstock


@pytest.mark.slow
def test_differences_are_shown_repaired_and_gone(bank: CommandLine, connection: Connection) -> None:
    """Guarantee 28."""
    assert bank("consume", "copies", "--drain").returncode == 0
    connection.execute("DELETE FROM public.copies WHERE number = 7")
    connection.execute("UPDATE public.copies SET number = -1 WHERE number = 8")

    found = bank("reconcile", "copies", "--report", "differences.csv")
    repaired = bank("reconcile", "--apply", "--json")

    assert found.returncode == 4, found.stderr
    assert "50 keys compared" in found.stdout
    assert "2 differ (1 missing, 1 different)" in found.stdout
    assert list((bank.directory / "differences.csv").glob("*.csv"))
    assert repaired.returncode == 0, repaired.stderr
    assert (json.loads(repaired.stdout)[0]["repaired"], json.loads(repaired.stdout)[0]["differences"]) == (
        2,
        {"missing": 1, "different": 1},
    )
    assert connection.execute("SELECT number FROM public.copies WHERE number IN (7, 8) ORDER BY 1").fetchall() == [
        (7,),
        (8,),
    ]


def test_a_new_consumer_begins_from_the_tables(bank: CommandLine, connection: Connection, things: Log) -> None:
    connection.execute(
        "UPDATE penstock.staged_records SET data = '{\"number\": 0}'"
    )  # nothing can be read from history any more

    first = bank("consume", "copies", "--from", "tables", "--drain")
    stage_rows(connection, things, 3, prefix="new")
    assert bank("stream", "--drain").returncode == 0
    second = bank("consume", "copies", "--from", "tables", "--drain")

    assert first.returncode == 0, first.stderr
    assert "begins with 51 rows from the tables" in first.stderr
    assert second.returncode == 0
    rows = connection.execute(
        "SELECT count(*), count(*) FILTER (WHERE key LIKE 'new%'), min(number) FROM public.copies"
    )
    assert rows.fetchone() == (53, 3, 1)
    assert connection.execute("SELECT n FROM public.counted").fetchall() == [(53,)]


def test_options_that_need_each_other_are_named(bank: CommandLine) -> None:
    assert "needs --apply" in bank("reconcile", "--whole").stderr
    assert "no reconciliation 'nothing'" in bank("reconcile", "nothing").stderr
    assert bank("consume", "copies", "--from", "history").returncode == 2


@pytest.mark.slow
def test_one_reconciliation_that_fails_does_not_stop_the_next(bank: CommandLine, connection: Connection) -> None:
    """Guarantee 43: the exit code is that of the first failure, and each is named."""
    assert bank("consume", "copies", "--drain").returncode == 0
    connection.execute("UPDATE public.counted SET n = 7")
    connection.execute("ALTER TABLE public.copies ADD CONSTRAINT positive CHECK (number <> 0)")
    connection.execute("UPDATE public.canonical SET number = 0 WHERE number = 8")

    repaired = bank("reconcile", "--apply", "--json")
    again = bank("reconcile", "--apply")
    connection.execute("DROP TABLE public.canonical")
    missing = bank("reconcile")

    done, failed = json.loads(repaired.stdout)
    assert repaired.returncode == again.returncode == 5
    assert "constraint positive of public.copies" in failed["error"]
    assert "constraint positive of public.copies" in again.stderr
    assert done["repaired"] == 1
    assert "counted: 1 key compared" in again.stdout
    assert (missing.returncode, missing.stderr.count("public.canonical")) == (2, 2)
    assert connection.execute("SELECT n FROM public.counted").fetchall() == [(50,)]
