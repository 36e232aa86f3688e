"""A repair writes what the second comparison found, while the consumer is paused; the first one may be out of date."""

from collections.abc import Callable, Sequence

import pytest
from sqlalchemy.orm import Session

from penstock import Log, Pipeline
from penstock.consuming import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.declarations import ReconciliationSpec
from penstock.inline import InlineComparer
from penstock.reconciling import Reconciled, StateComparison, reconcile
from penstock.reconciling import repair as repairing
from penstock.reconciling.repair import choose_batch
from penstock.records import DEFAULT_SCOPE, Record


class Comparer(InlineComparer):
    """Has something happen between the first comparison and the second one."""

    def __init__(self, database_url: str, meanwhile: Callable[[], None]) -> None:
        super().__init__(database_url)
        self._meanwhile = meanwhile
        self.comparisons = 0

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[str] | None = None,
    ) -> StateComparison:
        """Compares, in the snapshots that were taken before."""
        found = super().compare(spec, canonical, state, among)
        if self.comparisons == 0:
            self._meanwhile()
        self.comparisons += 1
        return found


Repair = Callable[[str], Reconciled]


@pytest.fixture
def repair(
    flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str
) -> Repair:
    """Repairs ``public.state`` from ``public.canon``; the given SQL is executed after the first comparison."""

    @flow.consumer(reads=things)
    def keeper(_session: Session, _records: Sequence[Record]) -> None: ...

    flow.reconciliation(of=keeper, state="public.state", key="id", name="state")(
        lambda _: "SELECT id, value FROM public.canon"
    )
    connection.execute("CREATE TABLE public.canon (id int PRIMARY KEY, value text)")
    connection.execute("CREATE TABLE public.state (id int PRIMARY KEY, value text)")
    connection.execute("INSERT INTO public.canon VALUES (1, 'one'), (2, 'two'), (3, 'three')")
    connection.execute("INSERT INTO public.state VALUES (1, 'wrong'), (2, 'wrong'), (4, 'four')")
    with LogWorker(flow, flow.get_consumer("keeper"), database_url, redis_url) as worker:
        worker.drain()

    def run(meanwhile: str) -> Reconciled:
        def execute() -> None:
            for statement in filter(None, meanwhile.split(";")):
                connection.execute(statement.encode())

        return reconcile(
            lambda: connect_postgres(database_url, application="test"),
            DEFAULT_SCOPE,
            flow.get_reconciliation("state"),
            Comparer(database_url, execute),
            intent="repair",
        )

    return run


def rows(connection: Connection) -> list[tuple[int, str]]:
    return [
        (number, value)
        for number, value in connection.execute("SELECT id, value FROM public.state ORDER BY id")
    ]


def test_every_kind_of_difference_is_repaired(repair: Repair, connection: Connection) -> None:
    """Different, missing and surplus rows."""
    done = repair("")

    assert done.repaired == 4
    assert rows(connection) == [(1, "one"), (2, "two"), (3, "three")]


def test_rows_that_changed_after_the_first_comparison_are_repaired_to_what_they_are_now(
    repair: Repair, connection: Connection
) -> None:
    repair(
        "UPDATE public.canon SET value = 'newer' WHERE id = 1;"
        "DELETE FROM public.canon WHERE id = 3;"
        "INSERT INTO public.canon VALUES (4, 'new')"
    )

    assert rows(connection) == [(1, "newer"), (2, "two"), (4, "new")]


def test_rows_that_the_consumer_brought_up_to_date_meanwhile_are_left_alone(
    repair: Repair, connection: Connection
) -> None:
    done = repair(
        "UPDATE public.canon SET value = 'newer' WHERE id = 1;"
        "UPDATE public.state SET value = 'newer' WHERE id = 1;"
        "INSERT INTO public.state VALUES (3, 'three');"
        "DELETE FROM public.state WHERE id = 4"
    )

    assert done.repaired == 1
    assert rows(connection) == [(1, "newer"), (2, "two"), (3, "three")]


def test_fewer_of_large_rows_are_repaired_at_once(
    repair: Repair, connection: Connection, flow: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass through memory as JSON: five thousand of a megabyte would not fit."""
    connection.execute("ALTER TABLE public.state ALTER COLUMN value SET STORAGE EXTERNAL")
    connection.execute(
        "INSERT INTO public.state SELECT i, repeat('x', 100000) FROM generate_series(5, 24) i"
    )
    connection.execute("ANALYZE public.state")
    spec = flow.get_reconciliation("state")
    monkeypatch.setattr(repairing, "BATCH_BYTES", 500_000)

    assert 1 < choose_batch(connection, DEFAULT_SCOPE, spec, 5000) < 10
    assert choose_batch(connection, DEFAULT_SCOPE, spec, 3) == 3
    assert repair("").repaired == 24
    assert rows(connection) == [(1, "one"), (2, "two"), (3, "three")]
