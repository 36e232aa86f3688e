"""``survives``: a handler that is right in quiet weather and wrong in a storm is found, and named."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psycopg
import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.crash_points import CRASH_POINTS
from fixtures.flow import stage_rows
from penstock import Ick, Job, Log, Pipeline, Queue, Record, mark_dirty
from penstock.consuming import Worker
from penstock.crash_points import crashpoint, install_crashpoint, install_repeats, is_repeated
from penstock.database.connections import Connection
from penstock.testing import make_job, survives, surviving
from penstock.testing.databases import delete_keys
from penstock.testing.surviving import HAZARDS, Hazard, Table, compare, copied, find_unstable, read_tables

THINGS, INDEX, JOBS = Log("things", shards=2), Ick("index", shards=1), Queue("jobs")
NOTHING, OTHER_JOBS = Log("nothing", shards=1), Queue("others")

TABLES = """
CREATE TABLE public.sums (id int PRIMARY KEY, n int NOT NULL, at timestamptz DEFAULT clock_timestamp());
INSERT INTO public.sums VALUES (1, 0);
CREATE TABLE public.seen (row int GENERATED ALWAYS AS IDENTITY, id bigint)
"""

JOB = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES (%s, 0, 'tenant', 'insert', 'job', '{"n": 1}')
"""

Survive = Callable[..., None]


@pytest.fixture
def survive(connection: Connection, engine: Engine, database_url: str, redis_url: str) -> Iterator[Survive]:
    """Some records for a pipeline, and tables; then no session but of what survives."""

    def run(pipeline: Pipeline, **options: Any) -> None:
        for statement in TABLES.split(";"):
            connection.execute(statement.encode())
        with Session(engine) as session, session.begin():
            pipeline.attach(session)
            if "things" in pipeline.channels:
                stage_rows(connection, THINGS, 8)
            if "index" in pipeline.channels:
                mark_dirty(session, [f"m{n}" for n in range(5)], to=INDEX)
        for queue in (JOBS, OTHER_JOBS):
            if queue.name in pipeline.channels:
                connection.execute(JOB, [queue.name])
        connection.close()
        engine.dispose()
        survives(pipeline, database_url, redis_url, **options)

    yield run
    delete_keys(redis_url, "penstock")


def add(session: Session, records: Sequence[Any]) -> None:
    session.execute(text("UPDATE public.sums SET n = n + :n, at = clock_timestamp()"), {"n": len(records)})


def see(session: Session, records: Sequence[Record]) -> None:
    if records:
        session.execute(text("INSERT INTO public.seen (id) VALUES (:id)"), [{"id": record.id} for record in records])


def own_url(session: Session) -> str:
    """That of the database of the run."""
    url = session.connection().engine.url.render_as_string(hide_password=False)
    return url.replace("+psycopg", "")


def by_memory(_: str) -> Callable[[Session, Sequence[Record]], None]:
    total: dict[str, int] = defaultdict(int)  # by database: a run is another process

    def handler(session: Session, records: Sequence[Record]) -> None:
        total[own_url(session)] += len(records)
        session.execute(text("UPDATE public.sums SET n = :n"), {"n": total[own_url(session)]})

    return handler


def by_batch(_: str) -> Callable[[Session, Sequence[Record]], None]:
    return lambda session, records: see(session, records[:1])


def by_connection(_: str) -> Callable[[Session, Sequence[Any]], None]:
    def handler(session: Session, records: Sequence[Any]) -> None:
        with psycopg.connect(own_url(session)) as other:
            other.execute("INSERT INTO public.seen (id) SELECT 1 FROM generate_series(1, %s)", [len(records)])

    return handler


def by_redis(url: str) -> Callable[[Session, Sequence[Record]], None]:
    """Which records are new is remembered in Redis."""

    def handler(session: Session, records: Sequence[Record]) -> None:
        with redis.Redis.from_url(url) as client:
            number = client.incrby("penstock:handler", len(records))
        session.execute(text("UPDATE public.sums SET n = :n"), {"n": number})

    return handler


def by_connection_of_a_job(url: str) -> Callable[[Session, Job], None]:
    handler = by_connection(url)
    return lambda session, job: handler(session, [job])


def by_calls(_: str) -> Callable[[Session, Sequence[Any]], None]:
    return add


BEFORE, BEHIND, AGAIN, SINGLY, EMPTIED, BESIDE = HAZARDS

WRONG: dict[str, tuple[Any, Any, set[Hazard]]] = {
    "what it keeps in a variable": (THINGS, by_memory, {BEFORE}),
    "the first record of those that come together": (THINGS, by_batch, {SINGLY, EMPTIED}),
    "a connection of its own": (THINGS, by_connection, {BEFORE}),
    "what it keeps in Redis": (THINGS, by_redis, {BEFORE, EMPTIED}),
    "the calls for members": (INDEX, by_calls, {BEHIND, AGAIN, EMPTIED}),
    "a connection of its own, of a job": (JOBS, by_connection_of_a_job, {BEFORE}),
}
"""What a wrong handler writes or depends on, and the faults that it does not survive: all others it does."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_handler_is_named_with_each_fault_that_it_does_not_survive(
    name: str, survive: Survive, redis_url: str, set_constants: SetConstants
) -> None:
    channel, make, faults = WRONG[name]
    # Of a second process most show it by chance; of jobs each takes half a second of a queue's worker.
    set_constants("testing.surviving", HAZARDS=(BEFORE, EMPTIED) if channel is JOBS else HAZARDS[:-1])
    pipeline = Pipeline([channel])
    declare = pipeline.worker if channel is JOBS else pipeline.consumer
    declare(reads=channel, name="reader")(make(redis_url))

    with pytest.raises(AssertionError) as raised:
        survive(pipeline)

    first, *rows, last = str(raised.value).splitlines()
    *advice, nor = (last, "") if len(faults) == 1 else (rows.pop(), last)
    [worst, *others] = [fault for fault in HAZARDS if fault in faults]
    assert first == f"reader does not survive {worst.text}:"
    assert [each.strip() for each in advice] == [worst.advice]
    assert nor.strip() == (f"Nor {', '.join(each.text for each in others)}" if others else "")
    assert [row.split()[0] for row in rows] == ["sums" if make in (by_memory, by_redis, by_calls) else "seen"]


@pytest.mark.slow
def test_handlers_that_write_by_the_session_alone_survive_all(survive: Survive, redis_client: redis.Redis) -> None:
    """Sums are exact; a time and a number that the database draws are not compared."""
    pipeline = Pipeline([THINGS])

    @pipeline.consumer(reads=THINGS)
    def right(session: Session, records: Sequence[Record]) -> None:
        add(session, records)
        see(session, records)

    survive(pipeline)

    assert redis_client.keys("penstock:*") == []


def test_nothing_of_a_fault_is_left_for_what_comes_after_it(survive: Survive, set_constants: SetConstants) -> None:
    def crash(_: str) -> None:
        raise AssertionError

    def hurt(*_: object) -> None:
        install_crashpoint(crash)
        install_repeats(lambda _: True)
        raise ZeroDivisionError

    set_constants("testing.surviving", HAZARDS=(Hazard("a fault", "advice", hurt),))
    pipeline = Pipeline([THINGS])
    pipeline.consumer(reads=THINGS, name="reader")(add)
    with pytest.raises(ZeroDivisionError):
        survive(pipeline)

    crashpoint("consumer.after_apply")
    assert not is_repeated("consumer.after_round")


def test_the_faults_that_a_consumer_does_not_survive_are_named_and_its_rows_under_the_first(
    survive: Survive, set_constants: SetConstants
) -> None:
    """What needs Spark is left out.  All is published before a fault, and applied under it."""
    before: list[Any] = []

    def hurt(trial: Any, consumer: Any, number: int) -> None:
        before.append(trial.publish())
        trial.work_off(consumer)
        with psycopg.connect(trial.url) as other:
            before.extend(other.execute("SELECT count(*) FROM public.seen"))
            other.execute("INSERT INTO public.seen (id) SELECT %s WHERE %s > 0", [number, number])

    faults = [Hazard(f"fault {n}", f"advice {n}", partial(hurt, number=n)) for n in range(3)]
    set_constants("testing.surviving", HAZARDS=faults)
    pipeline = Pipeline([THINGS])
    pipeline.consumer(reads=THINGS, name="on_spark", dataframe=True)(lambda _session, _frame: None)
    pipeline.consumer(reads=THINGS, name="reader")(see)
    with pytest.raises(AssertionError) as raised:
        survive(pipeline)

    said = [line.strip() for line in str(raised.value).splitlines()]
    assert said == ["reader does not survive fault 1:", "seen has {'id': '1'}", "advice 1", "Nor fault 2"]
    assert before == [0, (8,)] * 3


def see_job(session: Session, _: Job) -> None:
    session.execute(text("INSERT INTO public.seen (id) VALUES (1)"))


@pytest.mark.slow
def test_only_the_chosen_consumers_and_columns_are_compared(survive: Survive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job fails once, unless it has one attempt and would be a dead letter; what has no records disturbs nobody."""
    monkeypatch.setattr(surviving, "HAZARDS", (BEFORE,))
    pipeline = Pipeline([THINGS, NOTHING, JOBS, OTHER_JOBS])
    pipeline.consumer(reads=THINGS, name="wrong")(by_connection(""))
    pipeline.consumer(reads=THINGS, name="ignored")(by_memory(""))
    pipeline.consumer(reads=NOTHING, name="idle")(add)
    pipeline.worker(reads=JOBS, name="once", attempts=1)(see_job)
    pipeline.worker(reads=OTHER_JOBS, name="again")(see_job)

    survive(pipeline, consumers=["ignored", "idle", "once", "again"], ignore=["sums.n"])


@pytest.mark.slow
def test_each_wrong_handler_is_named(survive: Survive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surviving, "HAZARDS", (BEFORE,))
    pipeline = Pipeline([THINGS])
    for name in ("one", "right", "two"):
        pipeline.consumer(reads=THINGS, name=name)(see if name == "right" else by_connection(""))

    with pytest.raises(AssertionError) as raised:
        survive(pipeline)

    named = [line.split()[0] for line in str(raised.value).splitlines() if "does not survive" in line]
    assert named == ["one", "two"]


def test_a_handler_that_writes_to_the_tests_own_database_is_named(survive: Survive, database_url: str) -> None:
    pipeline = Pipeline([THINGS])

    @pipeline.consumer(reads=THINGS)
    def outside(_session: Session, _records: Sequence[Record]) -> None:
        with psycopg.connect(database_url) as other:
            other.execute("INSERT INTO public.seen (id) VALUES (1)")

    with pytest.raises(AssertionError, match=r"a handler has written through a connection of its own, .*: seen has"):
        survive(pipeline)


def test_a_handler_that_keeps_something_between_runs_is_named(survive: Survive) -> None:
    pipeline, sent = Pipeline([JOBS]), set[str]()

    @pipeline.worker(reads=JOBS)
    def send(session: Session, job: Job) -> None:
        if job.data["n"] not in sent:  # the second run is in the same process
            session.execute(text("INSERT INTO public.seen (id) VALUES (1)"))
        sent.add(job.data["n"])

    with pytest.raises(AssertionError, match="without any fault, a second run ends with other rows: seen lacks"):
        survive(pipeline)


def test_other_sessions_are_an_error_that_says_what_to_do(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    with pytest.raises(AssertionError, match=r"has other sessions.*engine\.dispose\(\)"):
        survives(Pipeline([THINGS]), database_url, redis_url)
    connection.execute("SELECT 1")


@pytest.mark.parametrize("in_time", [True, False])
def test_a_session_that_leaves_in_time_is_waited_for(
    connection: Connection,
    database_url: str,
    set_constants: SetConstants,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_time: bool,
) -> None:
    """As one does that was just closed."""
    set_constants("testing.surviving", LEAVING_S=60.0 if in_time else 0.0)
    monkeypatch.setattr(surviving, "sleep", lambda _: connection.close())
    with (
        nullcontext() if in_time else pytest.raises(AssertionError, match="other sessions"),
        copied(database_url) as url,
    ):
        assert url != database_url


class Run:
    """Stands for a run under a fault: what the worker does is the test's."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def work_off(self, _: object) -> None:
        self._work()


def suffer(fault: Hazard, work: Callable[[], object]) -> None:
    pipeline = Pipeline([THINGS])
    pipeline.consumer(reads=THINGS, name="reader")(add)
    try:
        fault.run(Run(work), pipeline.get_consumer("reader"))  # type: ignore[arg-type]
    finally:
        install_crashpoint(None)
        install_repeats(None)


def test_two_processes_are_at_work_at_the_same_time_and_the_error_of_one_is_raised() -> None:
    """A wrong handler would show it by chance only."""
    both = threading.Barrier(2, timeout=30)
    suffer(BESIDE, both.wait)

    number = iter(range(2))

    def fails() -> None:
        both.wait()
        if next(number):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        suffer(BESIDE, fails)


@pytest.mark.parametrize(("fault", "ends"), [(BEFORE, "after_apply"), (BEHIND, "after_commit")])
def test_a_worker_dies_once_at_each_place_of_its_kind(fault: Hazard, ends: str) -> None:
    """Of all crash points of consumers, whatever they read."""
    places = [
        point
        for point in CRASH_POINTS
        if point.endswith(ends) and point.startswith(("consumer.", "together.", "members."))
    ]
    assert len(places) == 3
    passed: list[str] = []

    def work() -> None:
        for point in CRASH_POINTS:
            if point not in passed:
                passed.append(point)
                crashpoint(point)

    for place in places:
        suffer(fault, work)
        assert passed[-1] == place
        crashpoint(place)
    suffer(fault, work)
    assert sorted(passed) == sorted(CRASH_POINTS)


def test_each_job_fails_once_unless_it_has_one_attempt() -> None:
    """After its effects; it would be a dead letter."""
    effects, failed = list[int](), list[int]()

    def work(consumer: Any) -> None:
        for number in (1, 2, 1, 2):
            try:
                consumer.handler(None, make_job(id=number))
            except RuntimeError:
                failed.append(number)

    for attempts in (1, 2):
        pipeline = Pipeline([JOBS])
        pipeline.worker(reads=JOBS, name="worker", attempts=attempts)(lambda _, job: effects.append(job.id))
        for fault in (BEFORE, BEHIND):
            fault.run(SimpleNamespace(work_off=work), pipeline.get_consumer("worker"))  # type: ignore[arg-type]

    assert (effects, failed) == ([1, 2, 1, 2], [1, 2])


def test_records_come_one_by_one_until_none_is_left_or_before_redis_is_emptied(
    redis_client: redis.Redis, redis_url: str
) -> None:
    worker = MagicMock(spec=Worker)
    trial: Any = SimpleNamespace(worker=lambda _: worker, pipeline=Pipeline([THINGS]), redis_url=redis_url)
    worker.slice.side_effect = [SimpleNamespace(done=number) for number in (2, 1, 0)]
    SINGLY.run(trial, MagicMock())
    assert [call.args[0] for call in worker.slice.call_args_list] == [1, 1, 1]

    worker.slice.side_effect = lambda count, _: redis_client.set("penstock:key", count)
    EMPTIED.run(trial, MagicMock())
    assert (worker.slice.call_args.args[0], redis_client.keys("penstock:*")) == (1, [])


def test_the_first_batches_are_delivered_twice() -> None:
    times: list[bool] = []
    suffer(AGAIN, lambda: times.extend(is_repeated("members.after_delivery") for _ in range(surviving.REPEATS + 1)))

    assert times == [True] * surviving.REPEATS + [False]


ONE = Table(("id", "n"), Counter({("1", "a"): 1, ("2", "b"): 2}))
TWO = Table(("id",), Counter({("x",): 1}))
DIFFERING: dict[str, tuple[Counter[Any], str]] = {
    "nothing": (ONE.rows, ""),
    "a row more": (ONE.rows + Counter({("3", None): 1}), "one has {'id': '3', 'n': None}"),
    "a row less": (ONE.rows - Counter({("1", "a"): 1}), "one lacks {'id': '1', 'n': 'a'}"),
    "one of two that are alike": (ONE.rows - Counter({("2", "b"): 1}), "one lacks {'id': '2', 'n': 'b'}"),
    "a row twice": (ONE.rows + Counter({("1", "a"): 1}), "one has {'id': '1', 'n': 'a'}"),
    "a row twice, with another value": (ONE.rows + Counter({("1", "c"): 1}), "one has {'id': '1', 'n': 'c'}"),
    "a value": (
        ONE.rows - Counter({("1", "a"): 1}) + Counter({("1", "c"): 1}),
        "one has {'id': '1', 'n': 'c'}, and lacks {'id': '1', 'n': 'a'}",
    ),
    "many rows": (
        ONE.rows + Counter({("3", "c"): 5}),
        f"one has {', '.join(3 * [str({'id': '3', 'n': 'c'})])} and 2 rows more",
    ),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_rows_that_differ_are_told_of_each_table(name: str) -> None:
    rows, says = DIFFERING[name]
    found = {"one": replace(ONE, rows=rows), "two": TWO}

    assert list(compare({"two": TWO, "one": ONE}, found, {})) == ([says] if says else [])
    differs = [*compare({"one": ONE}, found, {"one": frozenset({"n"}), "two": frozenset({"id"})})]
    assert bool(differs) is (name not in {"nothing", "a value"}), "n is left out"


def test_a_column_whose_values_differ_between_two_runs_or_is_ignored_is_not_compared() -> None:
    def unstable(rows: dict[Any, int], *ignored: str) -> set[str]:
        return {*find_unstable(ONE, replace(ONE, rows=Counter(rows)), "one", frozenset(ignored))}

    assert unstable({("1", "b"): 1, ("2", "a"): 1, ("2", "b"): 1}) == set(), "other rows of the same values are no time"
    assert unstable({("1", "a"): 1, ("2", "c"): 2}) == {"n"}
    assert unstable({("1", "a"): 1, ("2", "b"): 1}) == {"id", "n"}
    assert unstable(ONE.rows, "one.n", "two.id", "id") == {"n"}


def test_all_tables_of_the_application_are_read_without_what_the_database_numbers(
    connection: Connection, database_url: str
) -> None:
    for statement in (
        "CREATE TABLE public.plain (row serial, always int GENERATED ALWAYS AS IDENTITY, a int, gone int, b int DEFAULT 7)",
        "ALTER TABLE public.plain DROP COLUMN gone",
        "INSERT INTO public.plain (a) VALUES (1), (1), (NULL)",
        "CREATE TABLE public.parts (a int) PARTITION BY LIST (a)",
        "CREATE TABLE public.part PARTITION OF public.parts FOR VALUES IN (1)",
        "INSERT INTO public.parts VALUES (1)",
        "CREATE VIEW public.shown AS TABLE public.plain",
        "CREATE SCHEMA more CREATE TABLE plain (a int)",
    ):
        connection.execute(statement.encode())
    ours = {
        "plain": Table(("a", "b"), Counter({("1", "7"): 2, (None, "7"): 1})),
        "parts": Table(("a",), Counter({("1",): 1})),
    }

    assert read_tables(database_url) == ours
    assert read_tables(database_url, ["more"]) == ours | {"more.plain": Table(("a",), Counter())}
