"""``penstock work``, and what other commands say of workers."""

import json

import pytest

from fixtures.command_line import CommandLine
from fixtures.jobs import Bench

APPLICATION = """
from sqlalchemy import text
from fixtures.jobs import ADD_EFFECT, JOBS
from penstock import Log, Pipeline, Snooze

rides = Log("rides", shards=1)
pipeline = Pipeline([JOBS, rides])

@pipeline.worker(reads=JOBS, attempts=1, halt_after=2, concurrency=1)
def receipts(session, job):
    if job.data == "poison":
        raise ValueError("secret")
    if job.data == "later":
        return Snooze("1h")
    session.execute(text(ADD_EFFECT), {"job": job.id, "attempt": job.attempts})

@pipeline.consumer(reads=rides)
def totals(session, records):
    pass
"""


@pytest.fixture
def command(penstock: CommandLine) -> CommandLine:
    (penstock.directory / "shop.py").write_text(APPLICATION)
    return penstock


def test_work_drains_and_counts(command: CommandLine, bench: Bench) -> None:
    ids = bench.stage(3)
    bench.stage(data="later")
    done = command("work", "receipts", "--drain", "--json", PENSTOCK_CONCURRENCY="2")
    assert (done.returncode, bench.effects) == (0, ids), done.stderr
    assert json.loads(done.stdout) == {
        "applied": 3,
        "cancelled": 0,
        "repeated": 0,
        "dead": 0,
        "snoozed": 1,
        "retried": 0,
        "stale": 0,
    }
    assert "3 jobs done" in done.stderr


def test_dead_letters_of_a_worker_are_listed_shown_staged_again_and_dropped(command: CommandLine, bench: Bench) -> None:
    [bad] = bench.stage(data="poison", tenant="acme")
    assert command("work", "--drain").returncode == 0
    listed = command("dead-letters", "list", "receipts")
    assert f"jobs/0 offset {bad}" in listed.stdout
    place = f"jobs/0 offset {bad}"
    assert '"poison"' in command("dead-letters", "show", "receipts", place).stdout
    again = command("dead-letters", "retry", "receipts", place)
    assert (again.returncode, bench.letters) == (0, []), again.stderr
    assert "staged" in again.stdout
    assert len(bench.unfinished) == 1


def test_a_drain_that_leaves_a_halted_queue_fails(command: CommandLine, bench: Bench) -> None:
    bench.stage(4, data="poison")
    done = command("work", "--drain")
    assert done.returncode == 1
    assert "receipts is halted in jobs/0" in done.stderr
    assert "secret" not in done.stderr
    assert "halted: receipts jobs/0: 2 dead letters in a row" in command("status").stdout


@pytest.mark.parametrize(
    ("words", "code", "said"), [(["nobody"], 2, "no consumer 'nobody'"), (["totals"], 2, "penstock consume totals")]
)
def test_work_that_cannot_be_is_refused(command: CommandLine, words: list[str], code: int, said: str) -> None:
    done = command("work", *words)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 2  # the second one names the page


def test_a_worker_without_concurrency_is_an_error_of_usage(command: CommandLine) -> None:
    done = command("work", "--concurrency", "0")
    assert done.returncode == 2
    assert "Invalid value for '--concurrency': Input should be greater than or equal to" in done.stderr
