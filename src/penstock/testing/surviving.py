"""A pipeline's consumers under the faults that they will meet.

Their tables have to end as if nothing had happened.  Every run begins with a copy of the test's
database, so that whatever was staged and committed there is applied again and again: twice without
a fault, to see which columns differ by themselves, then once for each consumer and fault.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, sleep
from typing import Any

from psycopg import sql
from sqlalchemy import make_url

from penstock.consuming import SeveralRunners, Worker, make_worker
from penstock.crash_points import install_crashpoint, install_repeats
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec, WorkerSpec
from penstock.embedded.postgres import database_url as name_database
from penstock.pipeline import Pipeline
from penstock.streaming import Streamer
from penstock.testing.databases import delete_keys, temporary_database
from penstock.testing.draining import MAX_ROUNDS, RETRY_S, drained, within

BEFORE_COMMIT = ("consumer.after_apply", "together.after_apply", "members.after_apply")
AFTER_COMMIT = ("consumer.after_commit", "together.after_commit", "members.after_commit")

REPEATS = 10
"""Batches that are delivered twice."""

LEAVING_S = 1.0
"""Seconds that sessions which were just closed have to leave the database."""

MAX_SHOWN = 3
"""Rows of each kind that a failure shows of a table."""

Row = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a table, as text; without columns that the database numbers by itself."""

    columns: tuple[str, ...]
    rows: Counter[Row]

    def without(self, left_out: frozenset[str]) -> "Table":
        """Returns the table without some columns."""
        positions = [number for number, name in enumerate(self.columns) if name not in left_out]
        rows: Counter[Row] = Counter()
        for row, count in self.rows.items():
            rows[tuple(row[number] for number in positions)] += count
        return Table(tuple(self.columns[number] for number in positions), rows)

    def values(self, name: str) -> Counter[str | None]:
        """Counts the values of a column."""
        position = self.columns.index(name)
        counts: Counter[str | None] = Counter()
        for row, count in self.rows.items():
            counts[row[position]] += count
        return counts


Tables = Mapping[str, Table]


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something that happens to a consumer."""

    text: str  # what it is, as the rest of ``does not survive …``
    advice: str  # the usual mistake of a handler that does not survive it
    # applies all that is there, under the fault; takes a run and the consumer
    run: "Callable[[_Run, ConsumerSpec], None]"


class _Died(BaseException):
    """The end of a consumer's process: nothing catches it."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A pipeline on a database of its own."""

    pipeline: Pipeline
    url: str
    redis_url: str

    def publish(self) -> int:
        """Publishes what is staged."""
        with Streamer(self.pipeline, self.url, self.redis_url) as streamer:
            return streamer.drain()

    def worker(self, consumer: ConsumerSpec) -> Worker | SeveralRunners:
        """Makes a worker of the consumer, without connecting it."""
        if isinstance(consumer, WorkerSpec):
            consumer = replace(consumer, backoff=RETRY_S)
        return make_worker(self.pipeline, consumer, self.url, self.redis_url)

    def work_off(self, consumer: ConsumerSpec) -> None:
        """Applies what is in the log."""
        worker = self.worker(consumer)
        try:
            worker.drain()
        finally:
            worker.close()

    def finish(self, names: Iterable[str]) -> None:
        """Has all consumers apply what is left."""
        drained(self.pipeline, self.url, self.redis_url, consumers=names, allow_dead_letters=True)


def survives(
    pipeline: Pipeline,
    database_url: str,
    redis_url: str,
    *,
    consumers: Iterable[str] | None = None,
    ignore: Iterable[str] = (),
    also: Iterable[str] = (),
) -> None:
    """Checks that consumers end with the same rows after crashes, redelivery and other faults.

    Stage and commit first, as for ``drained``; the records must not be applied yet.  Each run has a
    copy of the database, and takes some tenths of a second; there are two, and six for each
    consumer.  The test's database must have no other sessions meanwhile: dispose of its engine.  It
    stays as it was, except for what a handler writes by a connection of its own, which is reported.

    Columns that the database numbers, and those that differ between two runs without a fault, such
    as times, are not compared.  Effects outside Postgres are not seen.

    Args:
        pipeline: The pipeline.
        database_url: Postgres; the role needs CREATEDB.
        redis_url: Redis or Valkey; the keys of the pipeline's namespace are deleted before each
            run.
        consumers: Names of the consumers to test; by default all but those that need Spark.
        ignore: Columns that are not compared, as ``table.column``.
        also: Schemas whose tables are compared, beside ``public``.

    Raises:
        AssertionError: A consumer does not survive: the text says which, under which fault, and
            which rows differ.  Or two runs without a fault differ, a handler writes by a connection
            of its own, or the database has other sessions.
    """
    names = (
        [n for n, spec in pipeline.consumers.items() if not spec.dataframe]
        if consumers is None
        else list(consumers)
    )
    left_out = frozenset(ignore)

    def run(work: Callable[[_Run], None]) -> Tables:
        with copied(database_url) as url:
            delete_keys(redis_url, pipeline.scope.namespace)
            work(_Run(pipeline, url, redis_url))
            return read_tables(url, also)

    original, failures = read_tables(database_url, also), list[str]()
    try:
        clean, again = (run(partial(_Run.finish, names=names)) for _ in range(2))
        if outside := list(compare(original, read_tables(database_url, also), {})):
            raise AssertionError(
                "a handler has written through a connection of its own, not through its session: "
                f"{', '.join(outside)}. Such an effect is outside the checkpoint's transaction: it "
                "may be lost, or happen twice"
            )
        unstable = {name: find_unstable(clean[name], again[name], name, left_out) for name in clean}
        if differences := list(compare(clean, again, unstable)):
            raise AssertionError(
                f"without any fault, a second run ends with other rows: {', '.join(differences)}. "
                "A handler keeps state between runs, or depends on chance"
            )
        for name in names:
            wrong: dict[Hazard, list[str]] = {}
            for hazard in HAZARDS:
                survivors = run(
                    partial(
                        _suffer, hazard=hazard, consumer=pipeline.get_consumer(name), names=names
                    )
                )
                if differences := list(compare(clean, survivors, unstable)):
                    wrong[hazard] = differences
            failures += _describe(name, wrong)
    finally:
        delete_keys(redis_url, pipeline.scope.namespace)
    if failures:
        raise AssertionError("\n".join(failures))


def _describe(name: str, wrong: Mapping[Hazard, Sequence[str]]) -> Iterator[str]:
    """Describes the faults that a consumer does not survive, with the rows of the first."""
    for hazard, differences in list(wrong.items())[:1]:
        yield f"{name} does not survive {hazard.text}:"
        yield from (f"    {line}" for line in differences)
        yield f"    {hazard.advice}"
    if others := [hazard.text for hazard in wrong][1:]:
        yield f"    Nor {', '.join(others)}"


def _suffer(trial: _Run, hazard: Hazard, consumer: ConsumerSpec, names: Iterable[str]) -> None:
    trial.publish()
    try:
        hazard.run(trial, consumer)
    finally:
        install_crashpoint(None)
        install_repeats(None)
    trial.finish(names)


def _die(trial: _Run, consumer: ConsumerSpec, points: Iterable[str]) -> None:
    """Ends the worker at the first of these crash points.

    A job fails instead, because it has threads of its own.
    """
    if isinstance(consumer, WorkerSpec):
        if points == BEFORE_COMMIT and consumer.attempts > 1:
            trial.work_off(_failing_once(consumer))
        return

    def crash(point: str) -> None:
        if point in points:
            install_crashpoint(None)
            raise _Died

    install_crashpoint(crash)
    try:
        trial.work_off(consumer)
    except _Died:
        return


def _failing_once(consumer: ConsumerSpec) -> ConsumerSpec:
    """Returns the worker with a handler that fails once for each job, after its effects."""
    failed_ids: set[str] = set()

    @contextmanager
    def failing(job: Any) -> Iterator[None]:
        yield
        if job.id not in failed_ids:
            failed_ids.add(job.id)
            raise RuntimeError("a fault of penstock.testing.survives")

    return within(consumer, failing)


def _repeat(trial: _Run, consumer: ConsumerSpec) -> None:
    """Delivers the first batches twice, as after a lost reply."""
    times = iter(range(REPEATS))
    install_repeats(lambda _: next(times, None) is not None)
    trial.work_off(consumer)


def _one_by_one(trial: _Run, consumer: ConsumerSpec) -> None:
    worker = trial.worker(consumer)
    if isinstance(worker, SeveralRunners):
        return
    with worker:
        for _ in range(MAX_ROUNDS * MAX_ROUNDS):
            if not worker.slice(1, lambda: False).done:
                return


def _empty_redis(trial: _Run, consumer: ConsumerSpec) -> None:
    worker = trial.worker(consumer)
    if isinstance(worker, Worker):
        with worker:
            worker.slice(1, lambda: False)
    delete_keys(trial.redis_url, trial.pipeline.scope.namespace)


def _work_beside(trial: _Run, consumer: ConsumerSpec) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            trial.work_off(consumer)
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


HAZARDS = (
    Hazard(
        "a crash between its effect and the commit",
        "Its effect is in a variable, or in the database despite the rollback: write only through "
        "the session",
        partial(_die, points=BEFORE_COMMIT),
    ),
    Hazard(
        "a crash after the commit",
        "The handler does something after the commit that nothing repeats: stage a record instead",
        partial(_die, points=AFTER_COMMIT),
    ),
    Hazard(
        "a second delivery",
        "The handler counts calls, or keeps state between them: keep that state in a table",
        _repeat,
    ),
    Hazard(
        "records one by one",
        "The handler depends on which records come together: it must take any number, in the order "
        "of each key",
        _one_by_one,
    ),
    Hazard(
        "an emptied Redis", "The handler reads from Redis what only Postgres keeps", _empty_redis
    ),
    Hazard(
        "a second process beside it",
        "Two of its shards change one row: see docs/how-to/write-a-handler.md, or the handler "
        "keeps state in the process",
        _work_beside,
    ),
)
"""The faults, in the order in which they are tried."""


@contextmanager
def copied(url: str) -> Iterator[str]:
    """Copies a database while the block runs; yields the URL of the copy."""
    database, server = make_url(url).database, name_database(url, "postgres")
    with connect_postgres(server, application="test") as connection:
        query = "SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE datname = %s"
        deadline = monotonic() + LEAVING_S
        while connection.execute(query, [database]).fetchall() != [(0,)]:
            if monotonic() > deadline:
                raise AssertionError(
                    f"{database} has other sessions, and cannot be copied: end those of the test, "
                    "and dispose of its engine: engine.dispose()"
                )
            sleep(0.01)
    with temporary_database(server, database) as copy:
        yield copy


def read_tables(url: str, also: Iterable[str] = ()) -> Tables:
    """Reads the application's tables: those of the schema ``public`` and of ``also``."""
    by_title: dict[str, Table] = {}
    with connect_postgres(url, application="test") as connection:
        for space, name, columns in Store(connection).rows(
            "application_tables", {"also": list(also)}
        ):
            listed = sql.SQL(", ").join(
                sql.SQL("{}::text").format(sql.Identifier(column)) for column in columns
            )
            query = sql.SQL("SELECT {} FROM {}").format(listed, sql.Identifier(space, name))
            title = name if space == "public" else f"{space}.{name}"
            by_title[title] = Table(tuple(columns), Counter(connection.execute(query).fetchall()))
    return by_title


def find_unstable(one: Table, other: Table, name: str, ignored: frozenset[str]) -> frozenset[str]:
    """Finds the columns that differ between two runs; adds the ignored ones."""
    return frozenset(
        column
        for column in one.columns
        if f"{name}.{column}" in ignored or one.values(column) != other.values(column)
    )


def compare(
    expected: Tables, actual: Tables, left_out: Mapping[str, frozenset[str]]
) -> Iterator[str]:
    """Yields a line for each table whose rows differ."""
    for name, table in expected.items():
        nothing: frozenset[str] = frozenset()
        right, wrong = (side.without(left_out.get(name, nothing)) for side in (table, actual[name]))
        surplus, fewer = wrong.rows - right.rows, right.rows - wrong.rows
        if surplus or fewer:
            lines = [
                f"{verb} {_show(right.columns, rows)}"
                for verb, rows in (("has", surplus), ("lacks", fewer))
                if rows
            ]
            yield f"{name} {', and '.join(lines)}"


def _show(columns: tuple[str, ...], rows: Counter[Row]) -> str:
    listed = list(rows.elements())
    texts = [str(dict(zip(columns, row, strict=True))) for row in listed[:MAX_SHOWN]]
    return ", ".join(texts) + (
        f" and {len(listed) - MAX_SHOWN} rows more" if len(listed) > MAX_SHOWN else ""
    )
