"""Registered consumers are listed, renamed and retired."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.command_line import CommandLine
from fixtures.flow import Site, running, stage_rows
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.errors import ChannelRetired, ConsumerRenamed, InvalidName, PenstockError, Refused, SchemaMissing, Unknown
from penstock.operating.channels import retire_channel
from penstock.operating.consumers import list_consumers, rename, retire
from penstock.records import Record
from penstock.streaming import Streamer
from penstock.testing import drained, eventually

EFFECT = text("INSERT INTO public.effects VALUES (:id)")


@pytest.fixture(autouse=True)
def _reader(connection: Connection, flow: Pipeline, things: Log) -> None:
    def reader(_session: Any, _records: Any) -> None:
        """Does nothing."""

    flow.consumer(reads=things)(reader)
    register_consumer(Store(connection, flow.scope), flow.get_consumer("reader"))


def test_a_registered_consumer_is_listed(connection: Connection) -> None:
    assert [(r.consumer, r.channel, r.shards, r.lag) for r in list_consumers(Store(connection))] == [
        ("reader", "things", 2, 0)
    ]


def test_a_plan_to_retire_changes_nothing(connection: Connection) -> None:
    plan = retire(Store(connection), "reader")

    assert plan == list_consumers(Store(connection), "reader")
    assert len(plan) == 1


def test_a_retired_consumer_holds_up_retention_no_longer(connection: Connection) -> None:
    retire(Store(connection), "reader", apply=True)

    assert list_consumers(Store(connection)) == []
    assert connection.execute("SELECT FROM penstock.checkpoints").fetchall() == []


def test_an_unknown_name_is_refused_with_the_list_of_consumers(connection: Connection) -> None:
    with pytest.raises(Unknown, match="there are: reader"):
        retire(Store(connection), "raeder", apply=True)


def declare(name: str, things: Log) -> Pipeline:
    """A pipeline whose consumer has this name, and writes each record's id into a table."""
    pipeline = Pipeline([things])

    @pipeline.consumer(reads=things, name=name, attempts=1)
    def handle(session: Session, records: Sequence[Record]) -> None:
        for record in records:
            if record.action == "bad":
                raise ValueError
        session.execute(EFFECT, [{"id": record.id} for record in records])

    return pipeline


@pytest.fixture
def effects(connection: Connection) -> None:
    """The table of the consumer, in which a record may be twice."""
    connection.execute("CREATE TABLE public.effects (id bigint)")


def test_a_plan_to_rename_changes_nothing(connection: Connection) -> None:
    before = list_consumers(Store(connection))

    assert rename(Store(connection), "reader", "totals") == before == list_consumers(Store(connection))


@pytest.mark.usefixtures("effects")
def test_dead_letters_and_reconciliations_go_with_a_renamed_consumer(
    connection: Connection, things: Log, database_url: str, redis_url: str
) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, 'k', 'bad', 'o', '{}')"
    )
    connection.execute(
        "INSERT INTO penstock.reconciliations (name, consumer, intent, engine) VALUES "
        "('reader', 'reader', 'compare', 'inline'), ('nightly', 'reader', 'compare', 'inline')"
    )
    drained(declare("reader", things), database_url, redis_url, allow_dead_letters=True)

    rename(Store(connection), "reader", "totals", apply=True)

    assert connection.execute("SELECT consumer FROM penstock.dead_letters").fetchall() == [("totals",)]
    runs = connection.execute("SELECT name, consumer FROM penstock.reconciliations ORDER BY id")
    assert runs.fetchall() == [("totals", "totals"), ("nightly", "totals")]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ("rename", ConsumerRenamed, "was renamed to totals: declare it by its new name"),
        ("retire channel", ChannelRetired, "consumer reader: channel things was retired"),
        ("retire", SchemaMissing, "consumer reader has no checkpoint"),
    ],
)
@pytest.mark.usefixtures("short_intervals")
def test_a_worker_that_runs_meanwhile_stops_and_says_why(
    site: Site, change: str, error: type[PenstockError], said: str
) -> None:
    pipeline = declare("reader", site.things)
    drained(pipeline, site.database_url, site.redis_url)
    worker = LogWorker(WorkerSetup(pipeline, pipeline.get_consumer("reader"), site.database_url, site.redis_url))
    with closing(worker):
        worker.drain()
        match change:
            case "rename":
                rename(Store(site.connection), "reader", "totals", apply=True)
            case "retire":
                retire(Store(site.connection), "reader", apply=True)
            case _:
                retire_channel(Store(site.connection), site.client, "things", apply=True, pause=lambda _: None)

        with pytest.raises(error, match=said):
            worker.run(lambda: False)


@pytest.mark.usefixtures("effects")
def test_a_worker_with_the_old_name_is_refused_and_the_streamer_goes_on(
    connection: Connection, things: Log, database_url: str, redis_url: str
) -> None:
    """As a new consumer, it would apply everything again."""
    stage_rows(connection, things, 10)
    pipeline = declare("reader", things)
    assert drained(pipeline, database_url, redis_url) == {"reader": 10}
    rename(Store(connection), "reader", "totals", apply=True)
    stage_rows(connection, things, 5, "more")

    worker = LogWorker(WorkerSetup(pipeline, pipeline.get_consumer("reader"), database_url, redis_url))
    with closing(worker), pytest.raises(ConsumerRenamed, match="was renamed to totals"):
        worker.open()
    with Streamer(pipeline, database_url, redis_url) as streamer:
        assert streamer.drain() == 5
    assert drained(declare("totals", things), database_url, redis_url) == {"totals": 5}
    assert [each.consumer for each in list_consumers(Store(connection))] == ["totals"]


def test_a_name_that_was_left_may_be_used_again(connection: Connection, flow: Pipeline) -> None:
    rename(Store(connection), "reader", "totals", apply=True)
    assert retire(Store(connection), "reader", apply=True) == []

    register_consumer(Store(connection, flow.scope), flow.get_consumer("reader"))
    assert [each.consumer for each in list_consumers(Store(connection))] == ["reader", "totals"]


def test_a_consumer_gets_its_old_name_back(connection: Connection, flow: Pipeline) -> None:
    rename(Store(connection), "reader", "totals", apply=True)
    rename(Store(connection), "totals", "reader", apply=True)

    register_consumer(Store(connection, flow.scope), flow.get_consumer("reader"))
    assert [each.consumer for each in list_consumers(Store(connection))] == ["reader"]


def test_a_consumer_gets_back_the_first_of_several_names(connection: Connection, flow: Pipeline) -> None:
    for old, new in (("reader", "totals"), ("totals", "sums"), ("sums", "reader")):
        rename(Store(connection), old, new, apply=True)

    former = connection.execute("SELECT consumer, successor FROM penstock.former_consumers")
    assert sorted(former.fetchall()) == [("sums", "reader"), ("totals", "reader")]
    register_consumer(Store(connection, flow.scope), flow.get_consumer("reader"))
    with pytest.raises(Unknown, match="it is reader now"):
        rename(Store(connection), "totals", "more")


def test_the_name_of_a_consumer_of_another_channel_is_refused(
    connection: Connection, things: Log, penstock: CommandLine
) -> None:
    for log in (Log("others"), things):
        pipeline = declare("totals", log)
        register_consumer(Store(connection, pipeline.scope), pipeline.get_consumer("totals"))
        if log.name == "others":
            with pytest.raises(Refused, match="totals is registered for others, which reader does not read"):
                rename(Store(connection), "reader", "totals", apply=True)
            retire(Store(connection), "totals", apply=True)

    said = penstock("consumers", "rename", "reader", "totals", "--apply").stdout
    assert "the registration of totals, which has applied nothing, is replaced" in said
    assert [each.consumer for each in list_consumers(Store(connection))] == ["totals"]


@pytest.mark.parametrize("names", [("reader", "replay-3"), ("replay-3", "reader")])
def test_neither_name_is_that_of_a_replay(connection: Connection, names: tuple[str, str]) -> None:
    with pytest.raises(InvalidName):
        rename(Store(connection), *names)


def test_the_former_name_of_another_consumer_is_refused_until_it_is_freed(connection: Connection, things: Log) -> None:
    """A forgotten worker of that name would continue at the wrong checkpoints."""
    rename(Store(connection), "reader", "totals", apply=True)
    other = declare("other", things)
    register_consumer(Store(connection, other.scope), other.get_consumer("other"))
    with pytest.raises(Refused, match=r"former name of totals.*penstock consumers retire reader --apply frees"):
        rename(Store(connection), "other", "reader", apply=True)
    retire(Store(connection), "reader", apply=True)
    rename(Store(connection), "other", "reader", apply=True)
    assert [each.consumer for each in list_consumers(Store(connection))] == ["reader", "totals"]


@pytest.mark.usefixtures("effects")
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_consumer_takes_the_name_of_one_that_has_applied_nothing(
    connection: Connection, things: Log, database_url: str, redis_url: str, *, has_begun: bool
) -> None:
    """A streamer with the new name may be deployed first: it registers it."""
    stage_rows(connection, things, 10)
    drained(declare("reader", things), database_url, redis_url)
    following = declare("totals", things)
    register_consumer(Store(connection, following.scope), following.get_consumer("totals"))
    if has_begun:
        drained(following, database_url, redis_url)
        with pytest.raises(Refused, match="totals has applied records already"):
            rename(Store(connection), "reader", "totals", apply=True)
        return

    rename(Store(connection), "reader", "totals", apply=True)

    assert [(each.consumer, each.passed) for each in list_consumers(Store(connection))] == [("totals", 10)]


def test_a_consumer_is_not_renamed_during_a_reconciliation(connection: Connection) -> None:
    connection.execute(
        "INSERT INTO penstock.barriers VALUES ('reader', 'things', 0, 0, 'run', now() + interval '1 minute')"
    )
    with pytest.raises(Refused, match="a reconciliation of reader is running"):
        rename(Store(connection), "reader", "totals", apply=True)


def test_a_name_that_no_consumer_may_have_is_refused(connection: Connection) -> None:
    with pytest.raises(InvalidName):
        rename(Store(connection), "reader", "To Tals", apply=True)
    with pytest.raises(Unknown, match="there are: reader"):
        rename(Store(connection), "raeder", "totals", apply=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("effects")
def test_a_consumer_is_renamed_under_load_and_nothing_is_lost_or_doubled(
    connection: Connection, things: Log, database_url: str, redis_url: str
) -> None:
    """Guarantee 9: the worker of the old name stops, that of the new one goes on behind its last batch."""
    staged = 0

    def produce(stop: Callable[[], bool]) -> None:
        nonlocal staged
        with psycopg.connect(database_url, autocommit=True) as own:
            while not stop() and staged < 20_000:  # what remains is to be drained on a slow machine, too
                stage_rows(own, things, 20, f"{staged}-")
                staged += 20

    def stopping(stop: Callable[[], bool]) -> None:
        pipeline = declare("reader", things)
        worker = LogWorker(WorkerSetup(pipeline, pipeline.get_consumer("reader"), database_url, redis_url))
        with closing(worker), pytest.raises(ConsumerRenamed):
            worker.run(stop)

    following = declare("totals", things)
    streamer = Streamer(declare("reader", things), database_url, redis_url)
    successor = LogWorker(WorkerSetup(following, following.get_consumer("totals"), database_url, redis_url))
    with running(produce, streamer.run, stopping):
        eventually(lambda: count_effects(connection) > 200, "the old name works")
        rename(Store(connection), "reader", "totals", apply=True)
        before = count_effects(connection)
        with running(successor.run):
            eventually(lambda: count_effects(connection) > before + 200, "the new name does")
            eventually(lambda: not has_worker(connection), "the old worker has stopped")
    drained(following, database_url, redis_url, timeout_s=200)

    found = connection.execute("SELECT count(*), count(DISTINCT id) FROM public.effects").fetchone()
    assert found == (staged, staged)


def count_effects(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM public.effects").fetchall()
    return int(count)


def has_worker(connection: Connection) -> bool:
    """Whether a worker of the old name is connected."""
    [(count,)] = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '%consumer reader%'"
    ).fetchall()
    return bool(count)
