"""Postgres is restored, promoted, loaded or replicated elsewhere under load: everything stops before it does harm, or goes on exactly."""

import json
from typing import Any

import pytest

from fixtures.damage import copy_data, restore_data
from fixtures.histories import LOST_EFFECTS, History
from fixtures.running_pipeline import APPLICATION, READY_S
from fixtures.truth import Load
from penstock import Pipeline
from penstock.channels.log.stream_entries import parse_entries
from penstock.engines.stealing import Chore, Chores
from penstock.errors import HistoryDiverged
from penstock.records import Shard, ShardName

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def declared() -> Pipeline:
    """The pipeline of the processes."""
    names: dict[str, Any] = {}
    exec(APPLICATION, names)
    pipeline = names["pipeline"]
    assert isinstance(pipeline, Pipeline)
    return pipeline


def assert_stopped(history: History) -> None:
    """Every process has ended with exit code 5, and nothing that Postgres has lost has taken effect in it."""
    assert set(history.exit_codes()) == {5}
    assert history.count(LOST_EFFECTS) == 0


def go_on_with(chore: Chore, load: Load) -> None:
    """Does a chore again and again: the first time it finds the server gone, and leaves it alone for a moment."""
    for _ in range(50):
        chore()
        load.go_on(0.2)


def reset(history: History) -> Any:
    """Plans a new epoch and opens it; returns the plan."""
    plan = json.loads(history.run("reset", "epoch", "--json"))
    history.run("reset", "epoch", "--apply")
    return plan


def recover(history: History, *commands: tuple[str, ...]) -> Any:
    """Opens a new epoch once everything has stopped, and goes on in it; returns the plan."""
    assert_stopped(history)
    plan = reset(history)
    history.start(*commands)
    history.await_effects()
    return plan


def assert_exact(history: History) -> None:
    assert history.exact() > 20
    history.run("verify")


def test_postgres_restored_to_an_older_base_backup_under_load(history: History) -> None:
    """Guarantee 10: everything stops before the first lost record takes effect; the way out is exact and tells what was lost."""
    history.start()
    with Load(history.url) as load:
        history.await_effects()
        backup = history.back_up("backup")
        chores = Chores(declared(), history.url, history.redis.url)
        chores.stream()()
        history.await_effects()

        restore_data(history.postgres, backup)
        load.go_on(0.5)
        assert_stopped(history)
        for chore in (chores.stream(), chores.consume("one")):
            with pytest.raises(HistoryDiverged, match="penstock reset epoch"):
                go_on_with(chore, load)
        chores.close()
        plan = reset(history)
        history.start()
        history.await_effects()

    assert history.exact() > 20
    assert history.count(LOST_EFFECTS) == 0
    assert plan["in_doubt"]
    for doubt in plan["in_doubt"]:
        assert doubt["first"] == doubt["journal"] + 1
        assert [each["applied"] for each in doubt["consumers"]] == [0, 0]
    with history.client() as client:
        for doubt in plan["in_doubt"]:
            channel, _, number = doubt["shard"].partition("/")
            kept = parse_entries(ShardName(channel, Shard(int(number))), client.xrange(doubt["kept_as"]))
            assert kept[-1].offset == doubt["last"]
    history.run("verify")


@pytest.mark.storm
def test_postgres_restored_to_a_point_in_time(history: History) -> None:
    """Guarantee 10: the timeline is another one, and commits are lost all the same."""
    archive = history.archive()
    backup = history.back_up("backup")
    history.start(("run", "--engine", "inline"))
    with Load(history.url) as load:
        history.await_effects()
        history.execute("SELECT pg_create_restore_point('before')")
        history.await_effects()
        history.execute("SELECT pg_switch_wal()")
        load.go_on(0.5)

        restored = history.add_server("restored", backup, recover_to=("before", archive))
        history.turn_to(restored)
        plan = recover(history, ("run", "--engine", "inline"))

    assert plan["in_doubt"]
    assert_exact(history)


@pytest.mark.storm
def test_a_synchronous_standby_promoted_under_load_needs_no_operator(history: History) -> None:
    """Guarantee 10: every commit that was published is on the standby, which the comparison proves."""
    standby = history.add_standby("standby")
    history.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
    history.start()
    with Load(history.url):
        history.await_effects()
        history.postgres.kill()
        history.promote(standby)
        history.turn_to(standby)
        history.await_effects()

    assert history.exact() > 20
    assert [process.poll() for process in history.processes] == [None] * 4
    assert history.count("SELECT count(*) FROM penstock.epochs") == 2
    assert history.count("SELECT count(*) FROM penstock.epochs WHERE reason LIKE 'timeline 1 to 2%'") == 1
    history.run("verify")


@pytest.mark.storm
def test_a_standby_that_lacks_the_last_commits_promoted_under_load(history: History) -> None:
    """Guarantee 10: the new primary never had what was published."""
    standby = history.add_standby("standby")
    history.start()
    with Load(history.url):
        history.await_effects()
        history.execute("ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()", server=standby)
        history.await_effects()
        history.postgres.kill()
        history.promote(standby)
        history.turn_to(standby)
        plan = recover(history)

    assert plan["in_doubt"]
    assert_exact(history)


@pytest.mark.storm
def test_a_database_dumped_under_load_and_loaded_into_another_cluster(history: History) -> None:
    """Guarantee 10: transaction ids mean nothing there, and what was committed after the dump is missing."""
    history.start()
    other = history.add_server("other")
    with Load(history.url):
        history.await_effects()
        dump = history.program("pg_dump")
        history.await_effects()
        history.program("psql", "--quiet", "--set=ON_ERROR_STOP=1", database=other.url, text=dump)
        history.turn_to(other)
        plan = recover(history)

    assert plan["in_doubt"]
    assert_exact(history)


@pytest.mark.storm
def test_a_database_replicated_into_a_new_cluster(history: History) -> None:
    """A major upgrade by logical replication: nothing is lost, and ids are behind, which the way out repairs.

    Consumers go on: the log ends with the record with which the journal ends.
    """
    history.start()
    other = history.add_server("other")
    schema = history.program("pg_dump", "--schema-only")
    history.program("psql", "--quiet", "--set=ON_ERROR_STOP=1", database=other.url, text=schema)
    with Load(history.url):
        history.await_effects()
        history.replicate(other)
        history.await_effects()
    history.exact()
    history.await_replicated(other)

    # The application's own sequence is its own to set.
    history.execute(
        "SELECT setval(pg_get_serial_sequence('public.effects', 'effect'), max(effect)) FROM public.effects",
        server=other,
    )
    history.turn_to(other)
    streams, one, two, runs = history.processes
    assert [process.wait(READY_S) for process in (streams, runs)] == [5, 5]
    plan = reset(history)
    history.start(("stream",))
    with Load(history.url):  # not before: it would be given ids that records have
        history.await_effects()

    assert plan["in_doubt"] == []
    assert [process.poll() for process in (one, two)] == [None, None]
    assert_exact(history)


@pytest.mark.storm
def test_a_redis_from_before_a_new_epoch_does_not_bring_lost_records_back(history: History) -> None:
    """The same lost records come back with it: again everything stops, and the same way leads out."""
    history.start(("run", "--engine", "inline"))
    with Load(history.url):
        history.await_effects()
        backup = history.back_up("backup")
        history.await_effects()
        copy_data(history.redis, history.directory / "older")
        restore_data(history.postgres, backup)
        recover(history, ("run", "--engine", "inline"))

        restore_data(history.redis, history.directory / "older")
        recover(history, ("run", "--engine", "inline"))

    assert_exact(history)
    assert history.count(LOST_EFFECTS) == 0


@pytest.mark.storm
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_run_on_spark_stops_when_postgres_is_restored(history: History) -> None:
    """Guarantee 10: Spark starts failed tasks again; none of them applies what was lost."""
    history.start(("run", "--engine", "spark"))
    with Load(history.url):
        history.await_effects(timeout_s=2 * READY_S)
        backup = history.back_up("backup")
        history.await_effects()
        restore_data(history.postgres, backup)
        plan = recover(history, ("run", "--engine", "inline"))

    assert plan["in_doubt"]
    assert history.exact() > 20
