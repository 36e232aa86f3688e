"""``survives``: a handler that is right in quiet weather and wrong in a storm is found, and named."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from fixtures.flow import stage_rows
from penstock import Ick, Job, Log, Pipeline, Queue, Record, mark_dirty
from penstock.database.connections import Connection
from penstock.testing import survives, surviving
from penstock.testing.databases import delete_keys

THINGS, INDEX, JOBS = Log("things", shards=2), Ick("index", shards=1), Queue("jobs")


@pytest.fixture
def survive(
    connection: Connection, engine: Engine, database_url: str, redis_url: str
) -> Iterator[Callable[[Pipeline], None]]:
    """Some records for a pipeline, and a table; then no session but of what survives."""

    def run(pipeline: Pipeline) -> None:
        connection.execute(
            "CREATE TABLE public.sums (id int PRIMARY KEY, n int NOT NULL, at timestamptz DEFAULT clock_timestamp())"
        )
        connection.execute("INSERT INTO public.sums VALUES (1, 0)")
        connection.execute("CREATE TABLE public.seen (row int GENERATED ALWAYS AS IDENTITY, id bigint)")
        stage_rows(connection, THINGS, 8)
        connection.close()
        engine.dispose()
        survives(pipeline, database_url, redis_url)

    yield run
    delete_keys(redis_url, "penstock")


def add(session: Session, records: Sequence[Record]) -> None:
    session.execute(text("UPDATE public.sums SET n = n + :n, at = clock_timestamp()"), {"n": len(records)})
    session.execute(text("INSERT INTO public.seen (id) VALUES (:id)"), [{"id": record.id} for record in records])


def test_handlers_that_write_by_the_session_alone_survive_all(survive: Callable[[Pipeline], None]) -> None:
    """Sums are exact; a time and a number that the database draws are not compared."""
    pipeline = Pipeline([THINGS])
    pipeline.consumer(reads=THINGS, name="right")(add)

    survive(pipeline)


def wrong_by_memory(url: str) -> Callable[[Session, Sequence[Record]], None]:
    total = 0

    def handler(session: Session, records: Sequence[Record]) -> None:
        nonlocal total
        total += len(records)
        session.execute(text("UPDATE public.sums SET n = :n"), {"n": total % 8})

    return handler


def wrong_by_batch(_: str) -> Callable[[Session, Sequence[Record]], None]:
    def handler(session: Session, records: Sequence[Record]) -> None:
        add(session, records[:1])

    return handler


def wrong_by_connection(url: str) -> Callable[[Session, Sequence[Record]], None]:
    def handler(session: Session, records: Sequence[Record]) -> None:
        own = session.connection().engine.url.render_as_string(hide_password=False).replace("+psycopg", "")
        with psycopg.connect(own) as other:
            other.execute("INSERT INTO public.seen (id) SELECT generate_series(1, %s)", [len(records)])

    return handler


def wrong_by_database(url: str) -> Callable[[Session, Sequence[Record]], None]:
    def handler(session: Session, records: Sequence[Record]) -> None:
        with psycopg.connect(url) as other:
            other.execute("INSERT INTO public.seen (id) VALUES (1)")

    return handler


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (wrong_by_memory, "reader does not survive a crash between .*:\n    sums has .* lacks .*\n    .*variable"),
        (wrong_by_batch, "reader does not survive records one by one:\n    s"),
        (
            wrong_by_connection,
            "reader does not survive a crash between its effect and the commit:\n    seen has .*'id': ",
        ),
        (wrong_by_database, "a handler has written by a connection of its own, .*: seen has"),
    ],
)
def test_a_handler_that_does_not_survive_is_named_with_the_fault_and_the_rows(
    make: Any, says: str, survive: Callable[[Pipeline], None], database_url: str
) -> None:
    pipeline = Pipeline([THINGS])
    pipeline.consumer(reads=THINGS, name="reader")(make(database_url))

    with pytest.raises(AssertionError, match=says):
        survive(pipeline)


def test_members_and_jobs_are_tried_as_well(
    connection: Connection, engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.execute("CREATE TABLE public.members (id text PRIMARY KEY)")
    connection.execute("CREATE TABLE public.sent (id text)")
    pipeline, sent = Pipeline([INDEX, JOBS]), set[str]()

    @pipeline.consumer(reads=INDEX)
    def search(session: Session, members: Sequence[str]) -> None:
        for member in members:
            session.execute(text("INSERT INTO public.members VALUES (:id) ON CONFLICT DO NOTHING"), {"id": member})

    @pipeline.worker(reads=JOBS)
    def send(session: Session, job: Job) -> None:
        if job.data["n"] not in sent:  # the second run is in the same process
            session.execute(text("INSERT INTO public.sent VALUES (:id)"), {"id": job.data["n"]})
        sent.add(job.data["n"])

    with Session(engine) as session, session.begin():
        pipeline.attach(session)
        mark_dirty(session, [f"m{n}" for n in range(5)], to=INDEX)
        for n in range(3):
            send.stage(session, {"n": f"j{n}"}, tenant="t")
    connection.close()
    engine.dispose()

    monkeypatch.setattr(surviving, "HAZARDS", surviving.HAZARDS[::3])  # each takes half a second of a queue's worker
    with pytest.raises(AssertionError, match="without any fault, a second run ends with other rows: sent lacks"):
        survives(pipeline, database_url, redis_url)


def test_other_sessions_are_an_error_that_says_what_to_do(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    with pytest.raises(AssertionError, match=r"has other sessions.*engine\.dispose\(\)"):
        survives(Pipeline([THINGS]), database_url, redis_url)
    connection.execute("SELECT 1")
