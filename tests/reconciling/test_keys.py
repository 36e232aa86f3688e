"""Reconciliation with keys of every kind, and when its snapshot is lost."""

from typing import Any

import pytest

from penstock import Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import ServerUnavailable, SnapshotLost
from penstock.reconciling.comparison import CanonicalTables, StateComparison
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Comparer, Intent, Reconciled, reconcile
from penstock.reconciling.state_repair import CanonicalRows
from penstock.records import DEFAULT_SCOPE

STATE = """
CREATE TABLE public.state (
    name text COLLATE {collation}, number int, day date, code uuid, cents numeric(12, 2), at timestamptz, doc jsonb, raw bytea,
    numbers int[], words text[],
    PRIMARY KEY (name, number, day, code)
)
"""

CANONICAL = """
CREATE TABLE public.canonical AS
SELECT n AS name, i AS number, date '2026-01-01' + i AS day, md5(n || i)::uuid AS code, i / 4.0 AS cents,
       timestamptz '2026-01-01 00:00+00' + i * interval '1.5 seconds' AS at, jsonb_build_object('b', i, 'a', n) AS doc, convert_to(n, 'UTF8') AS raw,
       ARRAY[i, NULL] AS numbers, ARRAY[n, 'x'] AS words
FROM unnest(%(names)s::text[]) n, generate_series(1, 5) i
"""


NAMES = ["", "a", "A", "\u00e4", "a'b", 'a"b', "a\\b", "a\nb", "{}", "\u00df", "ss", "\U0001f680", " a", "a ", "NULL"]


@pytest.fixture
def state(flow: Pipeline, keeper: str) -> ReconciliationSpec:
    """A consumer that has started, and the reconciliation of its state."""

    @flow.reconciliation(of=keeper, state="public.state", key=("name", "number", "day", "code"))
    def canonical(tables: CanonicalTables) -> Any:
        return tables("public.canonical")

    return flow.get_reconciliation(keeper)


@pytest.fixture
def comparer(database_url: str) -> InlineComparer:
    return InlineComparer(database_url)


@pytest.mark.parametrize("collation", ["C", "default"])
def test_composite_and_text_keys_of_any_collation(
    comparer: InlineComparer, state: ReconciliationSpec, connection: Connection, database_url: str, collation: str
) -> None:
    connection.execute(STATE.replace("{collation}", f'"{collation}"').encode())
    connection.execute(CANONICAL, {"names": NAMES})

    def run(intent: Intent = "compare") -> Reconciled:
        return reconcile(
            lambda: connect_postgres(database_url, application="test"), DEFAULT_SCOPE, state, comparer, intent=intent
        )

    filled = run("repair")
    connection.execute("UPDATE public.state SET cents = cents + 0.01 WHERE number = 2")
    connection.execute("UPDATE public.state SET name = name || 'x' WHERE number = 3")
    repaired = run("repair")
    [(apart,)] = connection.execute("SELECT count(*) FROM (TABLE public.state EXCEPT TABLE public.canonical) d")

    assert filled.repaired == 5 * len(NAMES)
    assert repaired.comparison is not None
    assert set(repaired.comparison.counts.values()) == {len(NAMES)}
    assert (repaired.repaired, run().clean, apart) == (3 * len(NAMES), True, 0)


class WithoutSnapshots:
    """Closes all other connections before it compares, as a restart of Postgres would."""

    def __init__(self, comparer: Comparer, connection: Connection) -> None:
        self._comparer, self._connection = comparer, connection
        self.engine = comparer.engine

    def compare(self, *arguments: Any, **options: Any) -> StateComparison:
        """Compares after the connections were closed."""
        self._cut()
        return self._comparer.compare(*arguments, **options)

    def rows(self, *arguments: Any, **options: Any) -> CanonicalRows:
        """Closes the connections before the rows are read, which happens on demand."""
        rows = self._comparer.rows(*arguments, **options)
        self._cut()
        return rows

    def _cut(self) -> None:
        self._connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock lost'"
        )


@pytest.mark.parametrize("intent", ["compare", "bootstrap"])
def test_a_lost_snapshot_is_reported(
    comparer: InlineComparer, state: ReconciliationSpec, connection: Connection, database_url: str, intent: Intent
) -> None:
    connection.execute(STATE.replace("{collation}", '"C"').encode())
    connection.execute(CANONICAL, {"names": NAMES})

    with pytest.raises((SnapshotLost, ServerUnavailable)):
        reconcile(
            lambda: connect_postgres(database_url, application="lost"),
            DEFAULT_SCOPE,
            state,
            WithoutSnapshots(comparer, connection),
            intent=intent,
        )
    outcome = connection.execute("SELECT outcome FROM penstock.reconciliations").fetchone()

    assert outcome in {("SnapshotLost",), ("ServerUnavailable",)}
