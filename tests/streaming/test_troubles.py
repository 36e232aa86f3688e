"""What needs a person is reported to the application's functions: at least once, once if nothing fails, and again when it comes back."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.constants import SetConstants
from fixtures.documents import run_page
from fixtures.flow import running
from penstock import Log, Pipeline
from penstock.consuming import make_worker
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.observer import TroubleReport
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.streaming import Streamer
from penstock.streaming.troubles import TroubleWatch
from penstock.testing import eventually

STAGE = "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 0, %s, 'a', 'o', '1')"


@pytest.fixture
def reported() -> list[TroubleReport]:
    return []


@pytest.fixture
def troubled(flow: Pipeline, things: Log, reported: list[TroubleReport]) -> Pipeline:
    """One consumer dead-letters whatever it gets, one halts."""

    @flow.consumer(reads=things, name="refuses", attempts=1)
    def _(_session: Any, records: Sequence[Any]) -> None:
        raise ValueError(f"secret of {records[0].key}")

    @flow.consumer(reads=things, name="halts", attempts=1, on_poison="halt")
    def _(_session: Any, records: Sequence[Any]) -> None:
        raise LookupError(f"secret of {records[0].key}")

    flow.on_trouble(reported.append)
    return flow


@pytest.fixture
def quiet_streamer(things: Log, database_url: str, redis_url: str) -> Iterator[Streamer]:
    """A streamer that looks for no troubles, beside the test."""
    with Streamer(Pipeline([things]), database_url, redis_url) as made:
        yield made


@pytest.fixture
def fail(
    troubled: Pipeline, quiet_streamer: Streamer, connection: Connection, database_url: str, redis_url: str
) -> Callable[[str], None]:
    """Stages a record, and has both consumers fail with it."""

    def stage_and_fail(key: str) -> None:
        connection.execute(STAGE, (key,))
        quiet_streamer.drain()
        for name in troubled.consumers:
            worker = make_worker(troubled, troubled.get_consumer(name), database_url, redis_url)
            worker.drain()
            worker.close()

    return stage_and_fail


@pytest.fixture
def watch(troubled: Pipeline, database_url: str) -> TroubleWatch:
    return TroubleWatch(troubled.trouble_handlers, database_url, troubled.scope)


def kinds(reported: Sequence[TroubleReport]) -> list[tuple[str, str | None, int]]:
    return sorted((each.kind, each.consumer, each.count) for each in reported)


def test_each_trouble_is_told_once_and_dead_letters_together(
    fail: Callable[[str], None], watch: TroubleWatch, reported: list[TroubleReport]
) -> None:
    fail("one")
    fail("two")
    watch.look()
    watch.look()

    assert kinds(reported) == [("dead-lettered", "refuses", 2), ("halted", "halts", 1)]
    fail("three")
    watch.look()
    assert kinds(reported[2:]) == [("dead-lettered", "refuses", 1)]
    assert not any("secret" in repr(each) for each in reported)
    assert {each.fix for each in reported} == {"penstock status", "penstock dead-letters list refuses"}


def test_a_halt_that_comes_back_is_told_again(
    fail: Callable[[str], None], watch: TroubleWatch, reported: list[TroubleReport], connection: Connection
) -> None:
    fail("one")
    watch.look()
    reset_checkpoint(Store(connection), "halts", resume=True, apply=True)
    watch.look()
    reported.clear()

    fail("two")
    watch.look()

    assert ("halted", "halts", 1) in kinds(reported)


def test_a_report_is_forgotten_once_its_trouble_has_ended(connection: Connection) -> None:
    """Each is told from those of other kinds, consumers and shards."""
    held = {"a": ("why", None), "b": (None, "why"), "c": (None, None)}
    for consumer, why in held.items():
        connection.execute(
            'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted, waiting) '
            "VALUES (%s, 'things', 0, 0, 1, %s, %s)",
            [consumer, *why],
        )
    connection.execute("INSERT INTO penstock.stopped_shards VALUES ('things', 0, 'why')")
    remain = {
        "halted": {"a things 0"},
        "waiting": {"b things 0"},
        "stopped": {"things 0"},
        "dead-lettered": {"a things", "b things", "c things"},
    }
    subjects = ["things 0", "things 1", *(f"{each} things{shard}" for each in "abcd" for shard in ("", " 0", " 1"))]
    with connection.cursor() as cursor:
        rows = [(kind, subject, "why") for kind in remain for subject in subjects]
        cursor.executemany("INSERT INTO penstock.troubles (kind, subject, detail) VALUES (%s, %s, %s)", rows)

    connection.execute(statements("penstock")["forget_troubles"])

    left = connection.execute("SELECT kind, subject FROM penstock.troubles").fetchall()
    assert {*left} == {(kind, subject) for kind, some in remain.items() for subject in some}


def test_what_could_not_be_told_is_told_by_the_next_process(
    fail: Callable[[str], None], troubled: Pipeline, reported: list[TroubleReport], database_url: str
) -> None:
    fail("one")

    def refuse(_: TroubleReport) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        TroubleWatch([refuse], database_url, troubled.scope).look()
    TroubleWatch(troubled.trouble_handlers, database_url, troubled.scope).look()

    assert kinds(reported) == [("dead-lettered", "refuses", 1), ("halted", "halts", 1)]


def test_a_report_that_fails_keeps_no_other_back(
    fail: Callable[[str], None], troubled: Pipeline, reported: list[TroubleReport], database_url: str
) -> None:
    fail("one")

    def refuse_one(report: TroubleReport) -> None:
        if report.kind == "dead-lettered":
            raise ConnectionError

    watch = TroubleWatch([refuse_one, reported.append], database_url, troubled.scope)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            watch.look()

    assert kinds(reported) == [("halted", "halts", 1)]


def test_letters_that_are_retried_are_not_new_and_the_next_one_is(
    fail: Callable[[str], None], watch: TroubleWatch, reported: list[TroubleReport], connection: Connection
) -> None:
    fail("one")
    watch.look()
    # As a retry that succeeds writes it.
    connection.execute("UPDATE penstock.checkpoints SET dead = dead - 1, applied = applied + 1 WHERE dead > 0")
    watch.look()
    reported.clear()

    fail("two")
    watch.look()

    assert [each for each in kinds(reported) if each[0] == "dead-lettered"] == [("dead-lettered", "refuses", 1)]


def test_one_process_reports_at_a_time_and_one_without_functions_nothing(
    fail: Callable[[str], None], troubled: Pipeline, reported: list[TroubleReport], database_url: str
) -> None:
    fail("one")
    other = TroubleWatch(troubled.trouble_handlers, database_url, troubled.scope)

    def meanwhile(_: TroubleReport) -> None:
        assert other.look() == 0

    assert TroubleWatch([], database_url, troubled.scope).look() == 0
    assert TroubleWatch([meanwhile, reported.append], database_url, troubled.scope).look() > 0

    assert kinds(reported) == [("dead-lettered", "refuses", 1), ("halted", "halts", 1)]


def test_trouble_is_a_stopped_shard_and_every_epoch_but_the_first(
    watch: TroubleWatch, quiet_streamer: Streamer, reported: list[TroubleReport], connection: Connection
) -> None:
    quiet_streamer.drain()
    watch.look()
    assert reported == []

    connection.execute(
        "INSERT INTO penstock.epochs SELECT (jsonb_populate_record(e, '{\"epoch\": 2}')).* FROM penstock.epochs e"
    )
    connection.execute("INSERT INTO penstock.stopped_shards (channel, shard, reason) VALUES ('things', 1, 'foreign')")
    watch.look()

    assert kinds(reported) == [("epoch", None, 2), ("stopped", None, 1)]


def test_slack_pagerduty_and_sentry_are_told(
    fail: Callable[[str], None], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/how-to/hear-of-trouble.md shows it; the services are what is not here."""
    fail("one")
    sent: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda request, **_: sent.append(json.loads(request.data)))
    sentry = SimpleNamespace(capture_message=lambda text, **options: sent.append((text, options)))
    monkeypatch.setitem(sys.modules, "sentry_sdk", sentry)
    monkeypatch.setenv("SLACK_WEBHOOK", "https://hooks.example/x")
    monkeypatch.setenv("PAGERDUTY_KEY", "k")
    shown = Pipeline([])

    run_page("docs/how-to/hear-of-trouble.md", {"pipeline": shown})
    TroubleWatch(shown.trouble_handlers, database_url, shown.scope).look()

    text = "refuses has 1 new dead letters in things"
    fix = "penstock dead-letters list refuses"
    assert {"text": f"{text}: `{fix}`"} in sent
    assert (text, {"level": "warning", "fingerprint": ["dead-lettered", "refuses", "things"]}) in sent
    [incident] = [each for each in sent if isinstance(each, dict) and each.get("routing_key")]
    assert incident["payload"]["severity"] == "critical"
    assert incident["payload"]["summary"] == "halts is halted in things/0"
    assert incident["dedup_key"] == "halted halts things 0"


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock troubles"]


def test_troubles_are_looked_for_while_a_streamer_is_open_and_again_when_it_is_reopened(
    fail: Callable[[str], None], streamer: Streamer, reported: list[TroubleReport], set_constants: SetConstants
) -> None:
    set_constants("streaming.troubles", CLOSE_S=60.0)
    for key in ("one", "two"):
        fail(key)
        streamer.open()
        eventually(lambda: reported, "a trouble is reported")
        streamer.close()
        assert watching() == []
        reported.clear()


def test_a_streamer_of_slices_looks_for_troubles_once_when_it_sweeps(
    fail: Callable[[str], None], troubled: Pipeline, reported: list[TroubleReport], database_url: str, redis_url: str
) -> None:
    """It does not wait, and soon ends."""
    fail("one")
    with Streamer(troubled, database_url, redis_url, max_records=10) as streamer:
        assert watching() == []
        streamer.sweep()
        eventually(lambda: len(reported) == 2, "the troubles are reported")
        eventually(lambda: watching() == [], "the look ends")


def test_a_streamer_that_ends_waits_for_the_function_that_runs(
    fail: Callable[[str], None], troubled: Pipeline, database_url: str, set_constants: SetConstants
) -> None:
    set_constants("streaming.troubles", CLOSE_S=60.0)
    fail("one")
    began, returned = threading.Event(), threading.Event()

    def report(_: TroubleReport) -> None:
        began.set()
        assert made._stopping.wait(60)
        returned.wait(0.05)  # longer than it takes to close
        returned.set()

    made = TroubleWatch([report], database_url, troubled.scope)
    made.open()
    assert began.wait(60)
    made.close()
    assert returned.is_set()


def test_a_function_that_hangs_or_fails_stops_no_record(
    troubled: Pipeline,
    fail: Callable[[str], None],
    streamer: Streamer,
    connection: Connection,
    reported: list[TroubleReport],
) -> None:
    before = {*threading.enumerate()}
    fail("one")
    begun, release = threading.Event(), threading.Event()

    def hang(_: TroubleReport) -> None:
        begun.set()
        assert release.wait(60)

    troubled.trouble_handlers[:0] = [hang]
    for _ in range(3):  # a streamer that reconnects begins no second thread beside the one that hangs
        streamer.open()
    assert sum(each.name == "penstock troubles" for each in {*threading.enumerate()} - before) == 1
    with running(streamer.run):
        assert begun.wait(60)
        connection.execute(STAGE, ("two",))
        published = "SELECT last_offset FROM penstock.journal ORDER BY last_offset DESC LIMIT 1"
        eventually(lambda: connection.execute(published).fetchone() == (2,), "the streamer goes on")
        assert reported == []
        release.set()
        eventually(lambda: len(reported) == 2, "all is reported")
