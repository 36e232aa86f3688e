"""A paused consumer, or channel, applies nothing in any process; it loses nothing, and goes on where it was."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.command_line import CommandLine, load_settings
from fixtures.flow import Site, retain_now, running
from fixtures.inspecting import Diagnose, ReadStatus
from penstock import Ick, Log, Pipeline, Queue
from penstock.cli.loops import raise_if_stopped
from penstock.consuming import make_worker
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.consuming.worker import Worker
from penstock.database.connections import Connection
from penstock.database.registry import PauseKind, register_consumer
from penstock.database.store import Store
from penstock.errors import Halted, Paused, Refused, Unknown
from penstock.operating.consumers import rename, retire
from penstock.operating.pausing import MAX_REASON, pause, resume
from penstock.operating.tracing.causes import explain
from penstock.reconciling.cut import Barrier, read_checkpoints
from penstock.records import RecordId
from penstock.streaming import Streamer
from penstock.testing import drained, eventually

THINGS = Log("things", shards=4, keep=timedelta(0))
INDEX = Ick("index", shards=2)
JOBS = Queue("jobs", keep=timedelta(0))

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT %(channel)s, i %% %(shards)s, 'k' || i, %(action)s, 'thing', to_jsonb(i), %(headers)s
FROM generate_series(1, %(count)s) AS i
RETURNING id
"""

Stage = Callable[[int], list[int]]
"""Stages so many records for each channel; returns the ids of those of the log."""


@pytest.fixture
def flow(connection: Connection) -> Pipeline:
    """A consumer of each kind of channel, and a second one of the log, each with a table of what it has applied."""
    connection.execute("CREATE TABLE public.effects (consumer text, item text)")
    made = Pipeline([THINGS, INDEX, JOBS])

    def note(session: Session, consumer: str, items: list[str]) -> None:
        values = [{"consumer": consumer, "item": item} for item in items]
        session.execute(text("INSERT INTO public.effects VALUES (:consumer, :item)"), values)

    @made.consumer(reads=THINGS, name="totals")
    def _(session: Session, records: Any) -> None:
        note(session, "totals", [record.key for record in records])

    @made.consumer(reads=THINGS, name="other")
    def _(session: Session, records: Any) -> None:
        note(session, "other", [record.key for record in records])

    @made.consumer(reads=INDEX, name="search")
    def _(session: Session, members: Sequence[str]) -> None:
        note(session, "search", [*members])

    @made.worker(reads=JOBS, name="jobs")
    def _(session: Session, job: Any) -> None:
        note(session, "jobs", [job.key])

    return made


@pytest.fixture
def stage(connection: Connection) -> Stage:
    def stage_each(count: int) -> list[int]:
        found: list[int] = []
        for channel, action, headers in (
            (INDEX, "dirty", None),
            (JOBS, "message", '{"tenant": "a"}'),
            (THINGS, "insert", None),
        ):
            values = {"channel": channel.name, "shards": channel.shards, "action": action, "headers": headers}
            found = [id_ for (id_,) in connection.execute(STAGE, {**values, "count": count})]
        return found

    return stage_each


@pytest.fixture
def applied(connection: Connection) -> Callable[[], dict[str, int]]:
    def count() -> dict[str, int]:
        rows = connection.execute("SELECT consumer, count(*) FROM public.effects GROUP BY consumer")
        return dict(rows.fetchall())

    return count


@pytest.fixture
def workers(flow: Pipeline, connection: Connection, database_url: str, redis_url: str) -> Iterator[dict[str, Worker]]:
    """A worker a consumer; all are registered."""
    with ExitStack() as stack:
        made: dict[str, Worker] = {}
        for name in flow.consumers:
            register_consumer(Store(connection, flow.scope), flow.get_consumer(name))
            worker = make_worker(flow, flow.get_consumer(name), database_url, redis_url)
            assert isinstance(worker, Worker)
            made[name] = stack.enter_context(closing(worker))
        yield made


def has_read(worker: Worker) -> bool:
    """True if the worker of a queue leaves all shards out."""
    assert isinstance(worker, QueueWorker)
    return bool(worker._states.halted)


@pytest.mark.parametrize(
    ("name", "kind", "paused"),
    [
        ("totals", "consumer", "totals"),
        ("totals", "channel", "things"),
        ("search", "channel", "index"),
        ("jobs", "consumer", "jobs"),
    ],
)
def test_a_running_worker_begins_nothing_while_it_is_paused_and_all_of_it_afterwards(
    name: str,
    kind: PauseKind,
    paused: str,
    workers: dict[str, Worker],
    streamer: Streamer,
    connection: Connection,
    stage: Stage,
    applied: Callable[[], dict[str, int]],
) -> None:
    rounds = threading.Semaphore(0)
    with running(lambda stop: workers[name].run(stop, lambda _: rounds.release())):
        stage(3)
        streamer.drain()
        eventually(lambda: applied().get(name) == 3, "the worker runs")

        pause(Store(connection), kind, paused, reason="the mail server is being moved", by="ann")
        # The worker of a queue asks twice a second; the others with each transaction.
        eventually(lambda: name != "jobs" or has_read(workers[name]), "the worker has read it")
        stage(5)
        streamer.drain()
        while rounds.acquire(blocking=False):
            pass
        for _ in range(3):  # rounds in which the records were there
            assert rounds.acquire(timeout=60)

        assert applied()[name] == 3
        resume(Store(connection), kind, paused)
        eventually(lambda: applied()[name] == 8, "the worker goes on")


@pytest.mark.parametrize("kind", ["consumer", "channel"])
def test_a_drain_of_a_paused_consumer_ends_with_nothing_applied_and_another_one_goes_on(
    kind: Any,
    workers: dict[str, Worker],
    streamer: Streamer,
    connection: Connection,
    stage: Stage,
    applied: Callable[[], dict[str, int]],
) -> None:
    stage(5)
    streamer.drain()
    names = {"totals": "things", "search": "index", "jobs": "jobs"}
    for consumer, channel in names.items():
        pause(Store(connection), kind, consumer if kind == "consumer" else channel, reason="a deploy", by="ann")

    assert [workers[name].drain() for name in names] == [0, 0, 0]
    assert workers["other"].drain() == (5 if kind == "consumer" else 0)
    assert retain_now(streamer) == 0

    for consumer, channel in reversed(names.items()):
        resume(Store(connection), kind, consumer if kind == "consumer" else channel)
        assert workers[consumer].drain() == 5, "the others are still paused"
    workers["other"].drain()
    assert applied() == dict.fromkeys((*names, "other"), 5)


def test_a_worker_that_starts_while_it_is_paused_goes_on_where_it_was(
    workers: dict[str, Worker], streamer: Streamer, connection: Connection, stage: Stage
) -> None:
    stage(5)
    streamer.drain()
    worker = workers["totals"]
    worker.drain()
    pause(Store(connection), "consumer", "totals", reason="a deploy", by="ann")
    worker.close()
    worker.drain()
    resume(Store(connection), "consumer", "totals")
    stage(1)
    streamer.drain()

    seen = worker.round(block_ms=0)
    while not seen.done:
        seen = worker.round(block_ms=0)

    assert (seen.applied, seen.skipped) == (1, 0)


def test_status_doctor_and_explain_show_a_pause_and_how_to_resume(
    site: Site, diagnosed: Diagnose, workers: dict[str, Worker], read_status: ReadStatus, stage: Stage
) -> None:
    *_, record = stage(1)
    site.streamer.drain()
    workers["other"].drain()
    paused = pause(Store(site.connection), "consumer", "totals", reason="its table is being moved", by="ann@desk")

    found = read_status()
    diagnosis = explain(Store(site.connection), site.client, RecordId(record))
    checks = diagnosed("paused")

    assert found.pauses == (paused,)
    held = {each.consumer: found.find_pause(each) for each in found.consumers}
    assert held == {"totals": paused, "other": None, "search": None, "jobs": None}
    elsewhere = next(replace(each, kind="reported") for each in found.consumers if each.consumer == "totals")
    assert found.find_pause(elsewhere) is None  # it is paused in its own database
    assert found.sound
    assert diagnosis.cause == "paused"
    assert f"ann@desk: {paused.reason}" in diagnosis.text
    assert diagnosis.fix == "penstock consumers resume totals"
    assert [(each.grade, each.message, each.fix) for each in checks] == [("warning", str(paused), diagnosis.fix)]


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_what_would_wait_for_a_paused_or_halted_consumer_ends_with_the_reason(
    connection: Connection, flow: Pipeline, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Those that are drained, by a test or a command, and no others."""
    stops = {
        "search": "channel index is paused",
        "totals": "consumer totals is paused",
        "other": "consumer other is halted in things/2",
    }
    pause(Store(connection), "channel", "index", reason="a deploy", by="ann")
    pause(Store(connection), "consumer", "totals", reason="a deploy", by="ann")
    connection.execute("UPDATE penstock.checkpoints SET halted = 'a test' WHERE consumer = 'other' AND shard = 2")

    assert drained(flow, database_url, redis_url, consumers=["jobs"]) == {"jobs": 0}
    for names in (*([name] for name in stops), [*stops, "jobs"]):
        with pytest.raises(AssertionError) as raised:
            drained(flow, database_url, redis_url, consumers=names)
        said = [re.split(r" since|: ", line)[0] for line in str(raised.value).splitlines()]
        assert said == [stops[name] for name in names if name in stops]

    settings = load_settings("--database-url", database_url, "--redis-url", redis_url, directory=tmp_path)
    raise_if_stopped(settings, flow, "jobs")
    for name, reason in stops.items():
        with pytest.raises((Paused, Halted), match=reason.removeprefix("consumer ")):
            raise_if_stopped(settings, flow, name)

    barrier = Barrier(flow.get_consumer("totals"), flow.scope)
    with pytest.raises(Paused, match="penstock consumers resume totals"):
        read_checkpoints(Store(connection), barrier)
    resume(Store(connection), "consumer", "totals")
    pause(Store(connection), "channel", "things", reason="a deploy", by="ann")
    with pytest.raises(Paused, match="penstock channels resume things"):
        read_checkpoints(Store(connection), barrier)


@pytest.mark.usefixtures("workers")
def test_a_pause_goes_with_a_renamed_consumer_and_ends_with_a_retired_one(connection: Connection) -> None:
    pause(Store(connection), "consumer", "totals", reason="a deploy", by="ann")

    rename(Store(connection), "totals", "sums", apply=True)
    assert connection.execute("SELECT kind, name FROM penstock.pauses").fetchall() == [("consumer", "sums")]

    retire(Store(connection), "sums", apply=True)
    assert connection.execute("SELECT kind, name FROM penstock.pauses").fetchall() == []


@pytest.mark.usefixtures("workers")
def test_a_pause_that_would_stop_nothing_is_refused(connection: Connection) -> None:
    with pytest.raises(Unknown, match="there are: jobs, other, search, totals"):
        pause(Store(connection), "consumer", "total", reason="a deploy", by="ann")
    with pytest.raises(Unknown, match="there are: index, jobs, things"):
        pause(Store(connection), "channel", "thing", reason="a deploy", by="ann")
    for reason in ("", " ", "x" * (MAX_REASON + 1)):
        with pytest.raises(Refused, match="a reason of 1 to 500 characters"):
            pause(Store(connection), "consumer", "totals", reason=reason, by="ann")
    connection.execute("UPDATE penstock.checkpoints SET reported_by = 'elsewhere' WHERE consumer = 'totals'")
    with pytest.raises(Refused, match="Pause it there"):
        pause(Store(connection), "consumer", "totals", reason="a deploy", by="ann")


@pytest.mark.usefixtures("workers")
def test_the_commands_name_the_pause_that_still_holds(connection: Connection, penstock: CommandLine) -> None:
    first = penstock("consumers", "pause", "totals", "--reason", "a deploy", "--by", "ann")
    penstock("channels", "pause", "things", "--reason", "Redis is moved")
    shown = penstock("status")
    ended = penstock("consumers", "resume", "totals")
    again = penstock("consumers", "resume", "totals")

    assert "consumer totals is paused since" in first.stdout
    assert "paused: consumer totals is paused" in shown.stdout
    assert "by ann: a deploy; to resume: penstock consumers resume totals" in shown.stdout
    assert shown.returncode == 0
    assert "resumed consumer totals, paused by ann: a deploy" in ended.stdout
    assert "It still waits: channel things is paused" in ended.stderr
    assert "consumer totals was not paused" in again.stdout
    assert [name for (name,) in connection.execute("SELECT name FROM penstock.pauses")] == ["things"]
