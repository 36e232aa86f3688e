"""``penstock reconcile --apply --resume``: an interrupted repair goes on where it was."""

import json
import signal
from typing import Any

import pytest

from fixtures.bank import open_bank
from fixtures.command_line import CommandLine, Started
from penstock import Log
from penstock.database.connections import Connection
from penstock.testing.assertions import eventually

SECOND_BATCH_WAITS = (
    """
CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT count(*) FROM public.copies) > 5000 THEN
        PERFORM pg_sleep(600);
    END IF;
    RETURN NULL;
END
$$
""",
    "CREATE TRIGGER wait BEFORE INSERT ON public.copies EXECUTE FUNCTION public.wait()",
)

ENDED = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"

LAST_RUN = """
SELECT repaired, cardinality(remaining), outcome
FROM penstock.reconciliations
ORDER BY id DESC
LIMIT 1
"""


@pytest.fixture
def bank(request: pytest.FixtureRequest, penstock: CommandLine, connection: Connection, things: Log) -> CommandLine:
    """A consumer that lacks 12,000 rows: three batches of a repair, the second of which waits."""
    penstock.environment["PENSTOCK_ENGINE"] = request.param
    open_bank(penstock, connection, things)
    assert penstock("consume", "copies", "--drain").returncode == 0
    connection.execute("INSERT INTO public.canonical SELECT 'm' || i, i FROM generate_series(1, 12000) i")
    for statement in SECOND_BATCH_WAITS:
        connection.execute(statement.encode())
    return penstock


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("bank", "how"),
    [
        ("inline", signal.SIGKILL),
        ("inline", signal.SIGINT),
        pytest.param("spark", signal.SIGKILL, marks=[pytest.mark.spark, pytest.mark.storm]),
    ],
    indirect=["bank"],
)
def test_a_repair_that_is_killed_goes_on_where_it_was(
    bank: CommandLine, started: Started, connection: Connection, how: signal.Signals
) -> None:
    """Guarantee 28: what was repaired stays, is not done again, and is not even compared again."""
    run = started("reconcile", "copies", "--apply")
    eventually(
        lambda: bool(
            connection.execute(
                "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
            ).fetchall()
        ),
        "the second batch is being repaired",
        timeout_s=120,
    )
    run.send_signal(how)
    connection.execute(ENDED)
    _, said = run.communicate(timeout=60)
    killed = connection.execute(LAST_RUN).fetchone()
    connection.execute("DROP TRIGGER wait ON public.copies")
    status = bank("status").stdout

    resumed = _reconcile(bank, "--resume")
    again = _reconcile(bank, "--resume")

    assert killed is not None
    assert killed[:2] == (5000, 7000)
    assert f"{killed[2]}, 7,000 left" in status
    assert (killed[2] == "running") == (how is signal.SIGKILL)
    assert ("penstock reconcile copies --apply --resume" in said) == (how is signal.SIGINT)
    assert (resumed["resumed"], resumed["compared"], resumed["repaired"]) == (1, 7000, 7000)
    assert (again["resumed"], again["compared"], again["equal"]) == (None, 12050, True)
    repairs = "SELECT count(*), count(DISTINCT key) FROM penstock.repairs"
    assert connection.execute(repairs).fetchone() == (12000, 12000)


def _reconcile(bank: CommandLine, *options: str) -> dict[str, Any]:
    done = bank("reconcile", "copies", "--apply", "--json", *options)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    return dict(found)
