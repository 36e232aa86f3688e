"""A state of the server is no fault of the record: it is waited for and said, and no record is dead-lettered, passed or charged.

The faults are made on a real server, and end after more attempts than a record has.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from sqlalchemy import column, literal_column, select, table, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from structlog.testing import capture_logs

from fixtures.clients import RedisClient
from fixtures.constants import SetConstants
from fixtures.dirty import DOCUMENTS, check_copy, copy_documents, mark_changed
from fixtures.flow import running
from fixtures.jobs import ADD_EFFECT, JOBS, Bench
from fixtures.reader import ALL, Reader, apply, apply_all
from fixtures.roles import UrlFor
from penstock import Ick, Job, Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.ick_worker import IckWorker
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.database.connections import Connection
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.errors import PrivilegeMissing
from penstock.observer import TroubleReport
from penstock.operating.doctor.diagnosis import diagnose
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.streaming.troubles import TroubleWatch
from penstock.testing import eventually

EFFECTS = table("effects", column("key"), schema="public")
WAITS_ALONE = 5
ATTEMPTS = WAITS_ALONE + 20

FAULTS: dict[str, tuple[str, str, str]] = {
    # the fault; its end; what the handler does beside its effect
    "table right": (
        "REVOKE ALL ON public.other FROM PUBLIC",
        "GRANT ALL ON public.other TO PUBLIC",
        "TABLE public.other",
    ),
    "column right": (
        "REVOKE ALL ON public.other FROM PUBLIC; GRANT SELECT (number) ON public.other TO PUBLIC",
        "GRANT ALL ON public.other TO PUBLIC",
        "SELECT word FROM public.other",
    ),
    "schema right": ("REVOKE ALL ON SCHEMA app FROM PUBLIC", "GRANT ALL ON SCHEMA app TO PUBLIC", "TABLE app.things"),
    "function right": (
        "REVOKE ALL ON FUNCTION app.double FROM PUBLIC",
        "GRANT ALL ON FUNCTION app.double TO PUBLIC",
        "SELECT app.double(1)",
    ),
    "sequence right": (
        "REVOKE ALL ON SEQUENCE app.numbers FROM PUBLIC",
        "GRANT ALL ON SEQUENCE app.numbers TO PUBLIC",
        "SELECT nextval('app.numbers')",
    ),
    "role": (
        "DROP ROLE IF EXISTS app_reader",
        "CREATE ROLE app_reader",
        "SET LOCAL ROLE NONE; SELECT 'app_reader'::regrole",
    ),
    "table": ("ALTER TABLE app.things RENAME TO gone", "ALTER TABLE app.gone RENAME TO things", "TABLE app.things"),
    "column": (
        "ALTER TABLE public.other RENAME word TO gone",
        "ALTER TABLE public.other RENAME gone TO word",
        "SELECT word FROM public.other",
    ),
    "schema": ("ALTER SCHEMA app RENAME TO gone", "ALTER SCHEMA gone RENAME TO app", "TABLE app.things"),
    "function": (
        "ALTER FUNCTION app.double RENAME TO gone",
        "ALTER FUNCTION app.gone RENAME TO double",
        "SELECT app.double(1)",
    ),
    "type": ("ALTER TYPE app.mood RENAME TO gone", "ALTER TYPE app.gone RENAME TO mood", "SELECT 'ok'::app.mood"),
    "unique index": (
        "DROP INDEX app.once",
        "CREATE UNIQUE INDEX once ON app.things (number)",
        "INSERT INTO app.things VALUES (1) ON CONFLICT (number) DO NOTHING",
    ),
    "sequence": (
        "SELECT setval('app.numbers', 1000)",
        "SELECT setval('app.numbers', 1)",
        "SELECT nextval('app.numbers')",
    ),
    "view": ("REFRESH MATERIALIZED VIEW app.sums WITH NO DATA", "REFRESH MATERIALIZED VIEW app.sums", "TABLE app.sums"),
    "generated column": (
        "ALTER TABLE public.other DROP word, ADD word text GENERATED ALWAYS AS ('w') STORED",
        "ALTER TABLE public.other DROP word, ADD word text",
        "INSERT INTO public.other (number, word) VALUES (1, 'w')",
    ),
}

OBJECTS = """
    CREATE TABLE public.other (number int, word text);
    CREATE SCHEMA app;
    CREATE TABLE app.things (number int);
    CREATE UNIQUE INDEX once ON app.things (number);
    CREATE FUNCTION app.double(int) RETURNS int LANGUAGE sql RETURN $1 * 2;
    CREATE TYPE app.mood AS ENUM ('ok');
    CREATE SEQUENCE app.numbers MAXVALUE 1000;
    CREATE MATERIALIZED VIEW app.sums AS SELECT 1 AS one;
    GRANT ALL ON SCHEMA app TO PUBLIC;
    GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC;
    GRANT ALL ON ALL TABLES IN SCHEMA app TO PUBLIC;
    GRANT ALL ON ALL SEQUENCES IN SCHEMA app TO PUBLIC;
"""


@pytest.fixture(autouse=True)
def _few_waits(set_constants: SetConstants) -> None:
    set_constants("consuming.delivery", MAX_WAITS_ALONE=WAITS_ALONE)


@pytest.fixture
def consumer_reader(reader: Reader, database_url_for: UrlFor) -> Reader:
    """A consumer that logs in with the rights of its role."""
    reader.connection.execute(OBJECTS.encode())
    reader.urls = database_url_for("a_consumer"), reader.urls[1]
    reader.stage(10, 10)
    return reader


class Disturbance:
    """A fault of the server that ends after so many calls of a handler."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._calls = connection, count(1)
        self.begin, self._end, self.statement = FAULTS[name]
        connection.execute(self.begin.encode())

    def meet(self, session: Session) -> None:
        if next(self._calls) == ATTEMPTS:
            self._connection.execute(self._end.encode())
        for statement in self.statement.split("; "):
            session.execute(text(statement))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("short_pauses")
def test_a_fault_of_the_server_dead_letters_nothing(consumer_reader: Reader, fault: str) -> None:
    """Guarantee 48: here with one attempt, while records of another shard pass."""
    met = Disturbance(consumer_reader.connection, fault)

    def handler(session: Session, record: Record) -> None:
        if record.shard == 0:
            met.meet(session)
        apply(session, [record])

    consumer_reader.declare(handler, each=True, attempts=1)
    consumer_reader.drain()

    assert (consumer_reader.effects(), consumer_reader.dead()) == (ALL, [])


@pytest.mark.usefixtures("short_pauses")
def test_an_async_handler_waits_for_a_right(consumer_reader: Reader) -> None:
    """Guarantee 48."""
    met = Disturbance(consumer_reader.connection, "table right")

    async def handler(session: AsyncSession, records: Sequence[Record]) -> None:
        await session.run_sync(met.meet)
        await apply_all(session, records)

    consumer_reader.declare(handler, attempts=1)
    consumer_reader.drain()

    assert (consumer_reader.effects(), consumer_reader.dead()) == (ALL, [])


def test_a_shard_that_waits_for_one_thing_after_another_has_waited_since_the_first(reader: Reader) -> None:
    reader.declare(apply)
    consumer = reader.flow.get_consumer("reader")
    register_consumer(Store(reader.connection, reader.flow.scope), consumer)
    checkpoints, times = Checkpoints(consumer), []
    for reason in ("a lock", "a table", None, "a lock"):
        checkpoints.note_waiting(Store(reader.connection), reader.channel.shard_names[0], reason)
        times.append(reader.checkpoints("updated_at")[0])

    assert times[0] == times[1] == times[2] < times[3]


def test_status_doctor_log_and_trouble_say_what_is_waited_for(
    consumer_reader: Reader, set_constants: SetConstants, database_url: str, redis_client: RedisClient
) -> None:
    """Guarantee 48: nothing waits in silence."""
    set_constants("operating.doctor.pipeline_checks", SLOW_S=0.0)
    set_constants("streaming.troubles", WAITING_S=0)
    reported: list[TroubleReport] = []
    watch = TroubleWatch([reported.append], database_url, consumer_reader.flow.scope)
    connection = consumer_reader.connection
    connection.execute("REVOKE ALL ON public.effects FROM PUBLIC")
    consumer_reader.declare(apply)
    waiting = "waiting for the server: InsufficientPrivilege: permission denied for table effects"

    with capture_logs() as logs, running(consumer_reader.worker().run):
        eventually(lambda: consumer_reader.checkpoints("waiting") == [waiting, waiting], "both shards say it")
        watch.look()
        watch.look()
        checks = [
            each
            for each in diagnose(Store(connection), redis_client, consumer_reader.flow)
            if each.check == "consumers"
        ]
        connection.execute("GRANT ALL ON public.effects TO PUBLIC")
        eventually(lambda: consumer_reader.effects() == ALL, "all are applied")
    watch.look()

    assert [each.kind for each in reported if each.kind == "waiting"] == ["waiting", "waiting"]
    assert reported[-1].fix == "penstock status"
    assert [(each.grade, each.message) for each in checks] == [("warning", f"reader is {waiting}")]
    assert "more processes" not in checks[0].fix
    assert {each["reason"] for each in logs if each["event"] == "waiting"} == {"InsufficientPrivilege"}
    assert consumer_reader.checkpoints("waiting") == [None, None]
    assert connection.execute("SELECT FROM penstock.troubles WHERE kind = 'waiting'").rowcount == 0


@pytest.mark.parametrize("options", [{}, {"isolation": "READ COMMITTED"}], ids=["repeatable", "committed"])
def test_a_row_that_a_policy_refuses_is_the_records_fault(consumer_reader: Reader, options: dict[str, Any]) -> None:
    """Guarantee 21: Postgres has one code for it and for a right that is missing."""
    consumer_reader.connection.execute(
        "ALTER TABLE public.effects ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY most ON public.effects WITH CHECK (record_id <> 7) "
    )
    consumer_reader.declare(apply, attempts=1, **options)
    consumer_reader.drain()

    assert [number for number, _ in consumer_reader.dead()] == [7]
    assert consumer_reader.effects() == [each for each in ALL if each != 7]


@pytest.mark.usefixtures("short_pauses")
def test_a_text_for_a_number_is_the_records_fault_once_others_pass(consumer_reader: Reader) -> None:
    """Guarantee 21: an operator that is missing for a value's type has the code of a function that is missing."""

    def handler(session: Session, record: Record) -> None:
        number: Any = "seven" if record.id == 7 else record.id
        session.execute(select(EFFECTS).where(literal_column("record_id") == number))
        apply(session, [record])

    consumer_reader.declare(handler, each=True, attempts=1)
    consumer_reader.drain()

    assert [number for number, _ in consumer_reader.dead()] == [7]


# --- Penstock's own tables ---


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        (
            "REVOKE UPDATE ON penstock.checkpoints FROM penstock_consumer",
            "GRANT UPDATE ON penstock.checkpoints TO penstock_consumer",
        ),
        (
            "REVOKE USAGE ON SCHEMA penstock FROM penstock_consumer",
            "GRANT USAGE ON SCHEMA penstock TO penstock_consumer",
        ),
        ("ALTER TABLE penstock.pauses RENAME TO gone", "ALTER TABLE penstock.gone RENAME TO pauses"),
    ],
    ids=["right", "schema", "table"],
)
def test_a_consumer_that_has_worked_waits_for_penstocks_own_tables(
    consumer_reader: Reader, fault: str, end: str, set_constants: SetConstants
) -> None:
    """Guarantee 48."""
    set_constants("logs", LOG_EVERY_S=0.0)
    connection = consumer_reader.connection
    consumer_reader.declare(apply)
    with capture_logs() as logs, running(consumer_reader.worker().run):
        eventually(lambda: consumer_reader.effects() == ALL, "it has worked")
        connection.execute(fault.encode())
        consumer_reader.stage(1, 1)
        eventually(lambda: sum("Missing" in str(each.get("reason")) for each in logs) > 1, "it says so")
        connection.execute(end.encode())
        eventually(lambda: len(consumer_reader.effects()) == len(ALL) + 2, "it goes on")

    assert consumer_reader.dead() == []


def test_a_streamer_that_has_worked_waits_for_a_right(
    flow: Pipeline, things: Log, connection: Connection, database_url_for: UrlFor, redis_url: str
) -> None:
    """Guarantee 48."""
    streamer = Streamer(flow, database_url_for("a_streamer"), redis_url)
    stage = "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 0, 'k', 'insert', 'thing', '{}')"

    def sequenced() -> int:
        return connection.execute("SELECT FROM penstock.journal").rowcount

    with capture_logs() as logs, running(streamer.run):
        connection.execute(stage)
        eventually(lambda: sequenced() == 1, "it has worked")
        connection.execute("REVOKE INSERT ON penstock.journal FROM penstock_streamer")
        connection.execute(stage)
        eventually(lambda: any("PrivilegeMissing" in str(each.get("reason")) for each in logs), "it says so")
        connection.execute("GRANT INSERT ON penstock.journal TO penstock_streamer")
        eventually(lambda: sequenced() == 2, "it goes on")


def test_a_worker_that_lacks_a_right_at_its_start_ends(consumer_reader: Reader) -> None:
    """Guarantee 32."""
    connection = consumer_reader.connection
    connection.execute("REVOKE UPDATE ON penstock.checkpoints FROM penstock_consumer")
    consumer_reader.declare(apply)

    with pytest.raises(PrivilegeMissing, match="UPDATE on checkpoints"):
        consumer_reader.worker().run(lambda: False)


# --- jobs, members ---


@pytest.mark.slow
@pytest.mark.usefixtures("short_intervals", "short_pauses")
def test_no_job_is_charged_an_attempt_for_a_right_that_is_missing(
    working: Pipeline, bench: Bench, database_url_for: UrlFor, redis_url: str
) -> None:
    """Guarantee 48."""
    tried: list[int] = []

    @working.worker(reads=JOBS, attempts=1)
    def receipts(session: Session, job: Job) -> None:
        tried.append(job.attempts)
        session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

    spec = working.get_consumer("receipts")
    ids: list[int] = []
    waiting = "SELECT FROM penstock.checkpoints WHERE waiting LIKE 'waiting for the server: InsufficientPrivilege%'"
    with (
        capture_logs() as logs,
        running(QueueWorker(WorkerSetup(working, spec, database_url_for("a_consumer"), redis_url)).run),
    ):
        for times in (1, 2):  # the second time is said like the first
            bench.connection.execute("REVOKE ALL ON public.effects FROM PUBLIC")
            ids += bench.stage(5)
            eventually(lambda: bench.connection.execute(waiting).rowcount > 0, "the status says it")
            eventually(lambda: len(tried) > times * ATTEMPTS, "they were tried again and again")  # noqa: B023
            bench.connection.execute("GRANT ALL ON public.effects TO PUBLIC")
            eventually(lambda: bench.effects == ids, "all are done")  # noqa: B023
            eventually(lambda: bench.connection.execute(waiting).rowcount == 0, "the status says nothing any more")

    assert (bench.unfinished, bench.letters) == ([], [])
    assert set(tried) == {1}
    assert any(each["event"] == "waiting" and each["reason"] == "InsufficientPrivilege" for each in logs)


@pytest.mark.usefixtures("short_pauses")
def test_members_of_an_ick_wait_for_a_right(
    connection: Connection, database_url_for: UrlFor, redis_url: str, redis_client: RedisClient
) -> None:
    """Guarantee 48."""
    index = Ick("index", shards=2)
    flow = Pipeline([index])
    calls = count(1)

    @flow.consumer(reads=index, name="indexer", attempts=1)
    def copy(session: Session, members: Sequence[str]) -> None:
        if next(calls) == ATTEMPTS:
            connection.execute("GRANT ALL ON public.copies TO PUBLIC")
        copy_documents(session, members)

    connection.execute(DOCUMENTS)
    connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC; REVOKE ALL ON public.copies FROM PUBLIC")
    with Streamer(flow, database_url_for("a_streamer"), redis_url) as streamer:
        mark_changed(connection, [f"d{number}" for number in range(10)])
        streamer.drain()
    with IckWorker(
        WorkerSetup(flow, flow.get_consumer("indexer"), database_url_for("a_consumer"), redis_url)
    ) as worker:
        worker.drain()

    check_copy(connection, redis_client, index)
    assert connection.execute("SELECT FROM penstock.dead_letters").rowcount == 0
