"""Reconcile: a consumer's state is compared exactly with the canonical tables, and repaired."""

import csv
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from sqlalchemy import column, func, select, table, text
from sqlalchemy.orm import Session

from fixtures.crash_points import RECONCILING_CRASH_POINTS, killed_at
from fixtures.flow import at_work
from fixtures.spark import IN_SESSION
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import BarrierMissed, DeclarationError, PenstockError, Refused
from penstock.reconciling.comparison import DifferenceKind
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Comparer, Reconciled, reconcile
from penstock.records import DEFAULT_SCOPE, Record
from penstock.spark.reconcile.spark_comparer import SparkComparer, Tables
from penstock.streaming import Streamer

Run = Callable[..., Reconciled]

CHANGE = """
WITH changed AS (
    UPDATE public.accounts SET cents = cents + %(cents)s WHERE id = %(account)s
)
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES ('things', %(account)s %% 2, %(account)s::text, 'change', 'account', jsonb_build_object('cents', %(cents)s))
"""


@pytest.fixture
def bank(flow: Pipeline, things: Log, connection: Connection) -> Connection:
    """Accounts, and two consumers that total them: one per account, one as a single sum."""
    connection.execute(
        "CREATE TABLE public.accounts AS SELECT i AS id, 0::bigint AS cents, 'name ' || i AS name FROM generate_series(1, 200) i"
    )
    connection.execute("CREATE TABLE public.totals (id int PRIMARY KEY, cents bigint, note text DEFAULT 'new')")
    connection.execute("CREATE TABLE public.grand AS SELECT 0::bigint AS cents")

    @flow.consumer(reads=things)
    def totals(session: Session, records: Sequence[Record]) -> None:
        for record in sorted(records, key=lambda record: int(record.key)):
            if record.data.get("poison"):
                raise ValueError(record.key)
            session.execute(
                text(
                    "INSERT INTO public.totals VALUES (:id, :cents) "
                    "ON CONFLICT (id) DO UPDATE SET cents = totals.cents + excluded.cents"
                ),
                {"id": int(record.key), "cents": record.data["cents"]},
            )

    @flow.consumer(reads=things)
    def grand(session: Session, records: Sequence[Record]) -> None:
        session.execute(
            text("UPDATE public.grand SET cents = cents + :more"),
            {"more": sum(record.data["cents"] for record in records)},
        )

    @flow.reconciliation(of=totals, state="public.totals", key="id")
    def accounts(tables: Tables) -> DataFrame:
        return tables("public.accounts", columns="id,cents", where="cents <> 0")

    @flow.reconciliation(of=grand, state="public.grand")
    def sum_of_all(_tables: Tables) -> Any:
        return select(func.coalesce(func.sum(column("cents")), 0).label("cents")).select_from(
            table("accounts", schema="public")
        )

    return connection


def on_spark(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Runs a test on Spark as well, where it has these marks; the others show what is the same on both engines."""
    engines = ["inline", pytest.param("spark", marks=[*IN_SESSION, *marks])]
    return pytest.mark.parametrize("run", engines, indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest, flow: Pipeline, bank: Connection, database_url: str) -> Run:
    """Reconciles inline, or on the engine that is the test's parameter."""
    is_on_spark = getattr(request, "param", "inline") == "spark"
    # here, not in the threads that some tests run it in
    spark = request.getfixturevalue("spark") if is_on_spark else None

    def make_comparer(report: str | None) -> Comparer:
        if spark is None:
            return InlineComparer(database_url, report)
        return SparkComparer(spark, database_url, report)

    def go(name: str = "totals", report: Path | None = None, application: str = "test", **options: Any) -> Reconciled:
        comparer = make_comparer(None if report is None else str(report))
        return reconcile(
            lambda: connect_postgres(database_url, application=application),
            DEFAULT_SCOPE,
            flow.get_reconciliation(name),
            comparer,
            **options,
        )

    return go


Working = Callable[[], Any]


@pytest.fixture
def working(flow: Pipeline, bank: Connection, database_url: str, redis_url: str) -> Working:
    """Runs the streamer and both consumers until the block ends."""

    return partial(at_work, flow, database_url, redis_url)


def change(connection: Connection, times: int, cents: int = 5, first: int = 1) -> None:
    for number in range(times):
        connection.execute(CHANGE, {"account": number % 200 + first, "cents": cents})


def settle(flow: Pipeline, database_url: str, redis_url: str) -> None:
    streamer = Streamer(flow, database_url, redis_url)
    streamer.drain()
    streamer.close()
    for spec in flow.consumers.values():
        worker = LogWorker(WorkerSetup(flow, spec, database_url, redis_url))
        worker.drain()
        worker.close()


def seed_drift(connection: Connection) -> None:
    """Thirty differences of all kinds except repeated rows."""
    connection.execute("DELETE FROM public.totals WHERE id <= 10")
    connection.execute("UPDATE public.totals SET cents = cents + 1, note = 'kept' WHERE id BETWEEN 11 AND 15")
    connection.execute("UPDATE public.totals SET cents = NULL WHERE id BETWEEN 16 AND 20")
    connection.execute("INSERT INTO public.totals SELECT i, 7 FROM generate_series(1001, 1010) i")


@on_spark()
@pytest.mark.chaos
@pytest.mark.storm_on_spark
def test_seeded_drift_is_found_and_repaired_under_load_without_false_alarms(
    run: Run, working: Any, bank: Connection, database_url: str
) -> None:
    """Guarantee 28: every difference, no false alarm, while records flow."""

    def produce(stopped: Callable[[], bool]) -> None:
        with connect_postgres(database_url, application="producer") as producing:
            while not stopped():
                change(producing, 20, cents=3, first=101)

    change(bank, 400)
    with working(produce):
        clean = run()
        seed_drift(bank)
        found = run()
        repaired = run(intent="repair")
        again = run()
        total = run("grand")

    assert (clean.comparison.equal, total.comparison.equal) == (True, True)  # type: ignore[union-attr]
    assert found.comparison is not None
    assert found.comparison.counts == {
        DifferenceKind.MISSING: 10,
        DifferenceKind.DIFFERENT: 10,
        DifferenceKind.SURPLUS: 10,
    }
    assert repaired.repaired == 30
    assert again.comparison is not None
    assert again.comparison.counts == {}
    assert again.comparison.compared == 200
    kept = bank.execute("SELECT count(*) FROM public.totals WHERE note = 'kept'").fetchone()
    assert kept == (5,)
    audit = bank.execute(
        "SELECT kind, count(*), count(before), count(after) FROM penstock.repairs GROUP BY kind ORDER BY kind"
    ).fetchall()
    assert audit == [("different", 10, 10, 10), ("missing", 10, 0, 10), ("surplus", 10, 10, 0)]
    outcomes = bank.execute("SELECT outcome FROM penstock.reconciliations ORDER BY id").fetchall()
    assert [o for (o,) in outcomes] == ["equal", "differs", "repaired", "equal", "equal"]


@pytest.mark.slow
def test_a_repeated_row_is_repaired(
    run: Run, working: Any, flow: Pipeline, bank: Connection, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    change(bank, 200)
    settle(flow, database_url, redis_url)
    bank.execute("ALTER TABLE public.totals DROP CONSTRAINT totals_pkey")
    bank.execute("INSERT INTO public.totals SELECT * FROM public.totals WHERE id < 4")
    bank.execute("UPDATE public.grand SET cents = 1")

    with working():
        found = run(report=tmp_path / "report.csv")
        run(intent="repair")
        assert run().clean
        assert run("grand", intent="repair").repaired == 1
        assert run("grand").clean

    assert found.comparison is not None
    assert found.comparison.counts == {DifferenceKind.DOUBLED: 3}
    [report] = (p for p in (tmp_path / "report.csv").rglob("*.csv") if p.is_file())
    with report.open(newline="") as lines:
        assert sorted(row["key"] for row in csv.DictReader(lines)) == ['{"id":1}', '{"id":2}', '{"id":3}']
    assert bank.execute("SELECT count(*) FROM public.totals").fetchone() == (200,)


@on_spark(pytest.mark.storm)
@pytest.mark.chaos
@pytest.mark.parametrize("intent", ["replace", "bootstrap"])
def test_state_and_position_are_replaced_together_under_load(
    run: Run, working: Any, bank: Connection, database_url: str, intent: str
) -> None:
    """Guarantee 28: records after the cut are applied once, those before it never again."""

    def produce(stopped: Callable[[], bool]) -> None:
        with connect_postgres(database_url, application="producer") as producing:
            while not stopped():
                change(producing, 20, cents=3, first=101)

    change(bank, 100)
    with working(produce):
        if intent == "replace":
            run()
            seed_drift(bank)
        for _ in range(3):
            run(intent=intent)
            assert run().clean


@on_spark()
@pytest.mark.storm
@pytest.mark.timeout(600)
def test_fifty_bootstraps_under_load_with_kills(run: Run, working: Any, bank: Connection, database_url: str) -> None:
    """Guarantee 28: whenever a run is killed, the next one brings state and position into agreement."""
    dice, killed = random.Random(28), 0

    def produce(stopped: Callable[[], bool]) -> None:
        with connect_postgres(database_url, application="producer") as producing:
            while not stopped():
                change(producing, 20, cents=3, first=101)

    def kill() -> None:
        """Closes the connections, as Postgres sees a SIGKILL."""
        bank.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE split_part(application_name, '/', 1) = 'penstock bootstrap'"
        )

    change(bank, 100)
    with working(produce):
        for number in range(50):
            killer = threading.Timer(dice.uniform(0.01, 0.6), kill)
            if number % 2:
                killer.start()
            try:
                run(intent="bootstrap", application="bootstrap")
            except PenstockError:
                killed += 1
            killer.cancel()
            if number % 5 == 0:
                seed_drift(bank)
                run(intent="bootstrap")
            assert run().clean
    assert killed > 5


@pytest.mark.chaos
@pytest.mark.parametrize("point", RECONCILING_CRASH_POINTS)
def test_a_run_that_dies_at_any_point_is_harmless(
    run: Run, working: Any, flow: Pipeline, bank: Connection, database_url: str, redis_url: str, point: str
) -> None:
    change(bank, 200)
    settle(flow, database_url, redis_url)
    seed_drift(bank)
    intent = "repair" if point.startswith("repair") else "replace"
    with working():
        with killed_at(point):
            run(intent=intent)
        run(intent=intent)
        assert run().clean


@pytest.mark.chaos
def test_two_operators_at_once_are_harmless(
    run: Run, working: Any, flow: Pipeline, bank: Connection, database_url: str, redis_url: str
) -> None:
    change(bank, 200)
    settle(flow, database_url, redis_url)
    seed_drift(bank)

    with working():
        threads = [threading.Thread(target=run, kwargs={"intent": "repair"}) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert run().clean
    assert bank.execute("SELECT count(*) FROM public.totals").fetchone() == (200,)


@pytest.mark.chaos
def test_records_that_were_dead_lettered_are_not_repaired_twice(
    run: Run, working: Any, flow: Pipeline, bank: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 28: otherwise a dead letter that is retried later would count twice."""
    change(bank, 200)
    bank.execute(
        CHANGE.replace("jsonb_build_object(", "jsonb_build_object('poison', true, "), {"account": 1, "cents": 9}
    )
    settle(flow, database_url, redis_url)

    with working():
        assert not run().clean
        with pytest.raises(Refused, match="dead-lettered 1 record that"):
            run(intent="repair")
        run(intent="replace")
        assert run().clean
    assert bank.execute("SELECT count(*) FROM penstock.dead_letters").fetchone() == (0,)


def test_a_reconciliation_that_cannot_be_compared_is_refused_with_the_reason(
    run: Run, flow: Pipeline, bank: Connection, database_url: str, redis_url: str
) -> None:
    settle(flow, database_url, redis_url)

    def declare(name: str, query: str, **options: Any) -> None:
        flow.reconciliation(of="totals", state="public.totals", name=name, **options)(lambda _: query)

    declare("no-key", "SELECT cents FROM public.accounts", key="id")
    declare("null-key", "SELECT NULL::int AS id, 1::bigint AS cents", key="id")
    declare("twice", "SELECT 1 AS id, cents FROM public.accounts", key="id")
    declare("words", "SELECT id, name AS note FROM public.accounts", key="id", tolerance={"note": 1})

    for name, words in (
        ("no-key", "no column 'id'"),
        ("null-key", "has a NULL; a key must"),
        ("twice", "more than once in the canonical rows"),
        ("words", "tolerance is for numbers"),
    ):
        with pytest.raises(DeclarationError, match=words):
            run(name)
    change(bank, 3)
    with pytest.raises(BarrierMissed, match="Is it running"):
        run(wait_s=0.2)
