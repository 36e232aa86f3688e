"""A tick that is too large for one statement is divided: nothing missed, nothing twice, each key in order."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.flow import running, stage_rows
from penstock import Log, Pipeline
from penstock.database import transactions
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import ServerUnavailable
from penstock.journal.journal_reader import missed_records
from penstock.reconciling.cut import cut
from penstock.records import DEFAULT_SCOPE
from penstock.streaming import Streamer
from penstock.streaming.sequencer import Sequencer, tick
from penstock.streaming.tick_slices import Slices
from penstock.testing import eventually

pytestmark = pytest.mark.things(shards=1)

KEYS = 4

PRODUCE = """
WITH changed AS (
    UPDATE public.counters SET n = n + 1 WHERE key = %(key)s RETURNING n
)
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', 0, %(key)s::text, 'change', 'counter', to_jsonb(n) FROM changed
"""

IN_ORDER = """
SELECT r.key, array_agg(r.data::int ORDER BY j.first_offset + n.position)
FROM penstock.journal j
CROSS JOIN LATERAL unnest(j.record_ids) WITH ORDINALITY AS n (id, position)
JOIN penstock.staged_records r ON r.id = n.id
GROUP BY r.key
"""


@pytest.fixture
def counters(connection: Connection) -> Connection:
    """Each record's payload is its place among the records of its key, in the order of the row's locks."""
    connection.execute(
        f"CREATE TABLE public.counters AS SELECT key, 0 AS n FROM generate_series(1, {KEYS}) AS key".encode()
    )
    return connection


class Producers:
    """Connections with transactions that overlap at random."""

    def __init__(self, connections: list[Connection], random: Random) -> None:
        self._connections, self._random = connections, random

    def step(self) -> None:
        """One of them changes a row and stages, begins, commits or rolls back."""
        producer = self._random.choice(self._connections)
        if producer.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            producer.execute("BEGIN")
            # As an application that writes to another table first: its transaction has an id long before it stages.
            if self._random.random() < 0.5:
                producer.execute("SELECT pg_current_xact_id()")
        elif self._random.random() < 0.7:
            self._change(producer)
        else:
            producer.execute("ROLLBACK" if self._random.random() < 0.2 else "COMMIT")

    def _change(self, producer: Connection) -> None:
        key = self._random.randint(1, KEYS)
        try:
            with producer.transaction():
                producer.execute("SELECT FROM public.counters WHERE key = %s FOR UPDATE NOWAIT", [key])
                producer.execute(PRODUCE, {"key": key})
        except psycopg.errors.LockNotAvailable:
            pass

    def finish(self) -> None:
        for producer in self._connections:
            producer.execute("COMMIT")


@pytest.fixture
def make_producers(database_url: str) -> Iterator[Callable[[Random], Producers]]:
    with ExitStack() as stack:
        yield lambda random: Producers(
            [stack.enter_context(psycopg.connect(database_url, autocommit=True)) for _ in range(6)], random
        )


def sliced(connection: Connection, most: int) -> Sequencer:
    """A sequencer whose ticks have failed before."""
    limited = Slices()
    limited.max_records = most
    return Sequencer(Store(connection), slices=limited)


def journaled_in_order(connection: Connection) -> None:
    """Checks that each key's records are in the journal, all of them, once, in order."""
    found: dict[str, list[int]] = dict(connection.execute(IN_ORDER).fetchall())
    expected = connection.execute("SELECT key::text, n FROM public.counters WHERE n > 0").fetchall()
    assert found == {key: list(range(1, n + 1)) for key, n in expected}
    bounds = connection.execute(
        "SELECT first_offset, last_offset FROM penstock.journal ORDER BY first_offset"
    ).fetchall()
    assert [first for first, _ in bounds] == [1, *(last + 1 for _, last in bounds[:-1])]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 15))])
def test_slices_sequence_what_one_tick_would_and_keep_the_order_of_each_key(
    counters: Connection, make_producers: Callable[[Random], Producers], database_url: str, seed: int
) -> None:
    """Guarantee 2: with transactions that overlap, others' ticks and cuts between the slices."""
    random = Random(seed)
    producers = make_producers(random)
    with connect_postgres(database_url, application="sliced") as connection:
        for _ in range(4):
            for _ in range(random.randint(20, 120)):
                producers.step()
            sequencer = sliced(connection, random.randint(1, 8))
            for _ in range(random.randint(0, 6)):
                sequencer.tick()
                producers.step()
                if random.random() < 0.1:
                    tick(Store(connection))
                if random.random() < 0.1:
                    check_cut(database_url)
                assert missed_records(Store(connection)) == []
        producers.finish()
        sequencer = sliced(connection, 3)
        while sequencer.tick().sequenced:
            pass

    journaled_in_order(counters)


def check_cut(database_url: str) -> None:
    """A cut's snapshot shows what is sequenced, no less and no more, whatever the last tick's snapshot was."""
    with (
        cut(lambda: connect_postgres(database_url, application="cut"), DEFAULT_SCOPE) as made,
        psycopg.connect(database_url) as reader,
    ):
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute(f"SET TRANSACTION SNAPSHOT '{made.snapshot}'".encode())
        shown = reader.execute("SELECT coalesce(sum(n), 0) FROM public.counters").fetchone()
    assert shown == (sum(made.offsets.values()),)


def test_a_transaction_that_waited_for_a_later_one_is_sequenced_after_it(
    counters: Connection, database_url: str
) -> None:
    """Guarantee 2: its id is smaller, its record comes second, and its slice would be the first."""
    with psycopg.connect(database_url) as early:
        early.execute("SELECT pg_current_xact_id()")
        for _ in range(10):
            counters.execute(PRODUCE, {"key": 1})
        early.execute(PRODUCE, {"key": 1})
    with connect_postgres(database_url, application="sliced") as connection:
        sequencer = sliced(connection, 2)
        sizes = []
        while (done := sequencer.tick()).sequenced:
            sizes.append(done.sequenced)

    journaled_in_order(counters)
    assert sum(sizes) == 11
    assert len(sizes) > 3


def test_transactions_that_were_open_at_the_last_tick_are_divided_like_others(
    connection: Connection, database_url: str, things: Log
) -> None:
    with ExitStack() as stack:
        for number in range(10):
            stage_rows(stack.enter_context(psycopg.connect(database_url)), things, 1, f"{number} ")
        stage_rows(connection, things, 1)
        assert tick(Store(connection)).sequenced == 1
    sequencer = sliced(connection, 2)
    sizes = [sequencer.tick().sequenced for _ in range(10)]

    assert (sum(sizes), max(sizes)) == (10, 2)
    stage_many(connection, 100, 1)
    assert sequencer.tick().sequenced == 100, "there is no limit once nothing is left"


def test_a_slice_after_another_sequencers_tick_does_nothing(
    connection: Connection, database_url: str, things: Log
) -> None:
    """Guarantee 3: its snapshot is older than the one of the last tick."""
    for number in range(20):
        stage_rows(connection, things, 1, str(number))
    with connect_postgres(database_url, application="sliced") as slow:
        sequencer = sliced(slow, 5)
        first = sequencer.tick()
        rest = tick(Store(connection))
        stage_rows(connection, things, 1, "new")
        last = sequencer.tick()

    assert (first.sequenced, rest.sequenced, last.sequenced) == (5, 15, 1)
    ids = connection.execute("SELECT count(*), count(DISTINCT id) FROM penstock.journal, unnest(record_ids) AS id")
    assert ids.fetchone() == (21, 21)


# --- limits ---


@pytest.fixture
def limit(set_constants: SetConstants) -> Iterator[Callable[[float], None]]:
    """Sets the longest duration of a worker's statement."""

    def set_limit(seconds: float) -> None:
        set_constants("database.transactions", REPLY_TIMEOUT_S=seconds)
        transactions.own_settings.cache_clear()

    yield set_limit
    transactions.own_settings.cache_clear()


STAGE_MANY = """
DO $$
BEGIN
    FOR n IN 1..%(transactions)s LOOP
        INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
        SELECT 'things', 0, i::text, 'insert', 'thing', '{}' FROM generate_series(1, %(records)s) AS i;
        COMMIT;
    END LOOP;
END
$$
"""


def stage_many(connection: Connection, transactions: int, records: int) -> None:
    values: dict[str, Any] = {"transactions": transactions, "records": records}
    connection.execute(psycopg.ClientCursor(connection).mogrify(STAGE_MANY, values).encode())


@pytest.mark.slow
def test_a_backlog_that_exceeds_the_statement_timeout_is_delayed_and_not_stuck(
    connection: Connection, database_url: str, limit: Callable[[float], None]
) -> None:
    """Guarantee 13."""
    stage_many(connection, 250, 1000)
    limit(0.05)
    with connect_postgres(database_url, application="limited") as limited, capture_logs() as logs:
        sequencer = Sequencer(Store(limited))
        eventually(lambda: went_on(sequencer) and tail(connection) == 250_000, "all is sequenced")

    failed = [each for each in logs if each["event"] == "tick failed"]
    assert "statement timeout" in failed[0]["reason"]


def went_on(sequencer: Sequencer) -> bool:
    """Ticks; on a busy machine the smallest slice may take too long as well."""
    try:
        sequencer.tick()
    except ServerUnavailable:
        return False
    return True


LIMIT = """
CREATE FUNCTION limit_ticks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT sum(cardinality(record_ids)) FROM written) > 30000 THEN
        PERFORM {act}(pg_backend_pid());
        PERFORM pg_sleep(10);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER limit_ticks AFTER INSERT ON penstock.journal
REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION limit_ticks()
"""


@pytest.mark.slow
@pytest.mark.parametrize("act", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_tick_that_an_administrator_ends_is_delayed_and_not_stuck(
    flow: Pipeline, connection: Connection, database_url: str, redis_url: str, set_constants: SetConstants, act: str
) -> None:
    """Guarantee 13: as by a proxy with a time limit, or a server that ran out of memory."""
    set_constants("streaming.tick_slices", MAX_RECORDS=50_000)
    stage_many(connection, 100, 1000)
    connection.execute(LIMIT.format(act=act).encode())
    with running(Streamer(flow, database_url, redis_url).run):
        eventually(lambda: tail(connection) == 100_000, "all is sequenced", timeout_s=120)


def tail(connection: Connection) -> int:
    row = connection.execute("SELECT coalesce(max(last_offset), 0) FROM penstock.journal").fetchone()
    assert row is not None
    return int(row[0])


def test_a_transaction_that_is_too_large_for_a_slice_is_named(connection: Connection, database_url: str) -> None:
    """It goes as a whole, or not at all: its records may depend on each other."""
    stage_many(connection, 1, 40_000)
    connection.execute(LIMIT.format(act="pg_cancel_backend").encode())
    with connect_postgres(database_url, application="limited") as limited:
        sequencer = Sequencer(Store(limited))
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match=r"sequencing 40,000 records.*QueryCanceled"):
                sequencer.tick()
        connection.execute("DROP TRIGGER limit_ticks ON penstock.journal")
        assert sequencer.tick().sequenced == 40_000
        assert sequencer._slices.max_records is None
