"""Reconcile at the size of a real table: a million keys, a thousand differences, thousands of records per second."""

import threading
from collections.abc import Callable, Sequence
from time import monotonic

import pytest
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import Site, at_work
from penstock import Log, Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.reconciling.comparison import DifferenceKind
from penstock.reconciling.reconciliation import Reconciled, reconcile
from penstock.records import DEFAULT_SCOPE, Record
from penstock.spark.reconcile.spark_comparer import SparkComparer, Tables

KEYS = 1_000_000
CHANGES = 50
"""Number of records in one producer's transaction."""

RATE = 5_000
"""Records per second that producers stage, if the machine is fast enough."""

# In ascending order, as in the consumer: transactions that change the same accounts must not deadlock.
CHANGE = """
WITH chosen AS (
    SELECT DISTINCT 1 + (random() * (%(keys)s - 1))::bigint AS id FROM generate_series(1, %(changes)s)
),
locked AS (
    SELECT id FROM public.accounts JOIN chosen USING (id) ORDER BY id FOR UPDATE
),
changed AS (
    UPDATE public.accounts SET cents = cents + 3 WHERE id IN (SELECT id FROM locked)
)
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', id %% 2, id::text, 'change', 'account', '{"cents": 3}' FROM locked
"""

DRIFT = (
    "DELETE FROM public.totals WHERE id %% 1000 = 1 AND id <= 300000",
    "UPDATE public.totals SET cents = cents + 1 WHERE id %% 1000 = 2 AND id <= 300000",
    "UPDATE public.totals SET cents = NULL WHERE id %% 1000 = 3 AND id <= 100000",
    "INSERT INTO public.totals SELECT i, 7 FROM generate_series(%(keys)s + 1, %(keys)s + 300) i",
)


@pytest.fixture
def bank(flow: Pipeline, things: Log, connection: Connection) -> Connection:
    """A million accounts, and a consumer's copy of their balances."""
    for name in ("accounts", "totals"):
        connection.execute(
            f"CREATE TABLE public.{name} AS SELECT i AS id, 100::bigint AS cents FROM generate_series(1, %s::bigint) i".encode(),
            (KEYS,),
        )
        connection.execute(f"ALTER TABLE public.{name} ADD PRIMARY KEY (id)".encode())
    connection.execute("VACUUM ANALYZE")

    @flow.consumer(reads=things)
    def totals(session: Session, records: Sequence[Record]) -> None:
        session.execute(
            text(
                "INSERT INTO public.totals "
                "SELECT id, 3 * count(*) FROM unnest(CAST(:ids AS bigint[])) id GROUP BY id ORDER BY id "
                "ON CONFLICT (id) DO UPDATE SET cents = totals.cents + excluded.cents"
            ),
            {"ids": [int(record.key) for record in records]},
        )

    @flow.reconciliation(of=totals, state="public.totals", key="id")
    def accounts(tables: Tables) -> DataFrame:
        return tables("public.accounts", columns="id,cents")

    return connection


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_a_thousand_differences_in_a_million_keys_under_load(
    site: Site, spark: SparkSession, bank: Connection, record_property: Callable[[str, object], None]
) -> None:
    """Guarantee 28: every difference is found and repaired, and nothing else, while records flow."""
    pause, staged = threading.Event(), 0

    def produce(stopped: Callable[[], bool]) -> None:
        nonlocal staged
        began = monotonic()
        with connect_postgres(site.database_url, application="producer") as producing:
            while not stopped():
                staged += producing.execute(CHANGE, {"keys": KEYS, "changes": CHANGES}).rowcount
                pause.wait(max(0.0, began + staged / RATE - monotonic()))

    def run(repair: bool = False) -> Reconciled:  # noqa: FBT001, FBT002  named at the call
        return reconcile(
            lambda: connect_postgres(site.database_url, application="reconcile"),
            DEFAULT_SCOPE,
            site.flow.get_reconciliation("totals"),
            SparkComparer(spark, site.database_url),
            intent="repair" if repair else "compare",
        )

    began = monotonic()
    with at_work(site.flow, site.database_url, site.redis_url, produce):
        clean = run()
        for statement in DRIFT:
            bank.execute(statement, {"keys": KEYS})
        found, repaired, again = run(), run(repair=True), run()
    seconds = monotonic() - began
    for each in (clean, found, repaired, again):
        record_property(
            f"run {each.run}", f"{each.seconds:.1f} s, paused {each.paused_s:.3f} s, held {each.held_s:.1f} s"
        )
    record_property("records a second", round(staged / seconds))

    assert clean.comparison is not None
    assert clean.comparison.counts == {}
    assert found.comparison is not None
    counts = found.comparison.counts
    # A deleted row returns with the next record of its key, and is wrong from then on.
    assert counts[DifferenceKind.MISSING] + counts[DifferenceKind.DIFFERENT] == 700
    assert counts[DifferenceKind.SURPLUS] == 300
    assert found.comparison.total == 1000
    assert repaired.repaired == 1000
    assert again.comparison is not None
    assert (again.comparison.counts, again.comparison.compared) == ({}, KEYS)
