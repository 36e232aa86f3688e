"""The statements about runs, checkpoints, dead letters and barriers of a reconciliation, beside the same in plain Python.

Each is executed with rows of every kind, those of other consumers, channels, shards and names among them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from fixtures.reconciling import declare
from penstock import Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.errors import Refused
from penstock.reconciling.reconciliation import RemainingKeys, has_never_applied, last_runs
from penstock.records import DEFAULT_SCOPE

Execute = Callable[..., list[Any]]


@pytest.fixture
def execute(connection: Connection) -> Execute:
    """Executes a named statement; returns its rows, if it has any."""
    sql = statements("penstock")

    def run(name: str, **values: Any) -> list[Any]:
        cursor = connection.execute(sql[name], values or None)
        return cursor.fetchall() if cursor.description else []

    return run


NAMES = ("totals", "others")
Lists = dict[int, tuple[str, list[str] | None]]
"""Runs by number: their names, and the keys that they have left."""

LISTS: Sequence[list[str] | None] = (["a", "b", "c"], None, [], ["d"])
"""Keys that an earlier run of each name has left: it was none that repairs, has repaired everything, or was interrupted."""


@pytest.fixture
def runs(connection: Connection) -> Lists:
    """Runs by number: their names, and the keys that they have left."""
    rows = [(name, left) for left in LISTS for name in NAMES]
    for name, left in [*rows, *((name, None) for name in NAMES)]:
        connection.execute(
            "INSERT INTO penstock.reconciliations (name, consumer, intent, engine, remaining) VALUES (%s, 'reader', 'repair', 'inline', %s)",
            [name, left],
        )
    return read_lists(connection)


def write_lists(connection: Connection, runs: Lists) -> None:
    """Has the runs have left what they had."""
    for number, (_, left) in runs.items():
        connection.execute(
            "UPDATE penstock.reconciliations SET remaining = %s, repaired = 0 WHERE id = %s", [left, number]
        )


def read_lists(connection: Connection) -> Lists:
    found = connection.execute("SELECT id, name, remaining FROM penstock.reconciliations ORDER BY id")
    return {number: (name, left) for number, name, left in found}


def remaining(database_url: str, run: int) -> RemainingKeys:
    return RemainingKeys(lambda: connect_postgres(database_url, application="test"), DEFAULT_SCOPE, run)


def test_a_list_of_keys_is_of_one_run_alone(runs: Lists, connection: Connection, database_url: str) -> None:
    """It takes the place of those of earlier runs of its name, and of no others."""
    for run, (name, _) in runs.items():
        write_lists(connection, runs)
        remaining(database_url, run).keep(name, ["x", "y", "z", "y"])
        kept: Lists = {n: (of, None if of == name and n < run else left) for n, (of, left) in runs.items()}
        kept[run] = (name, ["x", "y", "z", "y"])
        assert read_lists(connection) == kept

        remaining(database_url, run).drop(["y", "a"], 7)
        kept[run] = (name, ["x", "z"])
        assert read_lists(connection) == kept
        repaired = connection.execute("SELECT id, repaired FROM penstock.reconciliations ORDER BY id").fetchall()
        assert repaired == [(number, 7 * (number == run)) for number in runs]


def test_the_last_list_that_is_left_is_taken_over_by_a_later_run_of_its_name(
    runs: Lists, connection: Connection, flow: Pipeline, keeper: str, database_url: str
) -> None:
    specs = {name: declare(flow, keeper, "TABLE public.canonical", name=name) for name in NAMES}
    lists: Lists = {n: (of, left and [f'{{"id": "{key}"}}' for key in left]) for n, (of, left) in runs.items()}
    for run, (name, _) in runs.items():
        write_lists(connection, lists)
        earlier = [number for number, (of, left) in lists.items() if of == name and left and number < run]
        list_ = remaining(database_url, run)
        if not earlier:
            assert list_.take_over(specs[name], "inline") is None
            assert read_lists(connection) == lists
            continue
        with pytest.raises(Refused, match="--engine inline"):
            list_.take_over(specs[name], "spark")
        assert read_lists(connection) == lists
        last, (_, keys) = earlier[-1], lists[earlier[-1]]
        assert list_.take_over(specs[name], "inline") == (last, keys)
        assert read_lists(connection) == lists | {last: (name, None), run: (name, keys)}


def test_the_last_run_of_each_reconciliation_is_told_with_all_that_it_found(
    runs: Lists, connection: Connection, execute: Execute
) -> None:
    last = max(runs)
    found: dict[str, Any] = {"tick": 5, "compared": 100, "missing": 1, "surplus": 20, "different": 300, "repaired": 7}
    execute("end_run", run=last, **found, paused_s=0.5, outcome="repaired")
    connection.execute("UPDATE penstock.reconciliations SET remaining = '{x,y}' WHERE id = %s", [last])
    others, totals = last_runs(Store(connection))

    assert runs[last][0] == "others"
    assert (others.name, others.compared, others.differences, others.repaired) == ("others", 100, 321, 7)
    assert (others.paused_s, others.outcome, others.remaining) == (0.5, "repaired", 2)
    assert others.seconds is not None
    assert (totals.name, totals.compared, totals.differences, totals.repaired) == ("totals", None, None, 0)
    assert (totals.paused_s, totals.outcome, totals.remaining, totals.seconds) == (None, "running", 0, None)
    ended = "SELECT id, ended_at IS NOT NULL FROM penstock.reconciliations ORDER BY id"
    assert connection.execute(ended).fetchall() == [(number, number == last) for number in runs]


HERE = {"consumer": "reader", "channel": "things"}
OWNERS = [("reader", "things"), ("reader", "others"), ("other", "things")]
POSITION = {"shards": [0, 1], "offsets": [5, 9]}
OFFSETS = (4, 5, 6, 9, 10)
PLACES = [(*owner, shard, offset) for owner, shard, offset in product(OWNERS, (0, 1, 2), OFFSETS)]


@pytest.fixture
def letters(connection: Connection) -> Callable[[], list[tuple[str, str, int, int]]]:
    """Dead letters at all places; its value reads which are left."""
    with connection.cursor() as cursor:
        cursor.executemany(
            'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, '
            "reason, attempts) VALUES (%s, %s, %s, %s, 1, 'k', 'a', 'o', '1', now(), 'test', 1)",
            PLACES,
        )
    places = 'SELECT consumer, channel, shard, "offset" FROM penstock.dead_letters'
    return lambda: sorted(connection.execute(places).fetchall())


def is_before(place: tuple[str, str, int, int]) -> bool:
    """Whether the cut includes a record."""
    *owner, shard, offset = place
    return tuple(owner) == ("reader", "things") and shard < 2 and offset <= POSITION["offsets"][shard]


def test_dead_letters_up_to_the_cut_are_counted_and_removed(execute: Execute, letters: Callable[[], list[Any]]) -> None:
    assert execute("dead_letters_before", **HERE, **POSITION) == [(sum(map(is_before, PLACES)),)]
    execute("drop_dead_letters", **HERE, **POSITION)
    assert letters() == sorted(place for place in PLACES if not is_before(place))


def test_checkpoints_are_locked_in_order_and_come_to_the_cut(connection: Connection, execute: Execute) -> None:
    """What they pass over counts as skipped; one that goes back has skipped nothing."""
    rows = [(*owner, shard, 7, 1, 20, "halted") for owner in OWNERS for shard in (2, 1, 0)]
    with connection.cursor() as cursor:
        cursor.executemany(
            'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, skipped, halted) VALUES (%s, %s, %s, %s, %s, %s, %s)',
            rows,
        )
    before = {row[:3]: row[3:] for row in rows}
    assert execute("lock_positions", **HERE) == [(0, 7), (1, 7), (2, 7)]
    assert [shard for shard, *_ in execute("checkpoints_with_halts", **HERE)] == [0, 1, 2]

    execute("put_checkpoints", **HERE, **POSITION, epoch=3)

    found = connection.execute(
        'SELECT consumer, channel, shard, "offset", epoch, skipped, halted FROM penstock.checkpoints'
    )
    moved = {(*OWNERS[0], 0): (5, 3, 20, None), (*OWNERS[0], 1): (9, 3, 22, None)}
    assert {row[:3]: row[3:] for row in found} == before | moved


@pytest.mark.parametrize("counted", ["applied", "skipped", "dead"])
def test_a_consumer_that_has_applied_skipped_or_dead_lettered_anything_is_not_new(
    connection: Connection, flow: Pipeline, keeper: str, database_url: str, counted: str
) -> None:
    spec = flow.get_consumer(keeper)
    connect = lambda: connect_postgres(database_url, application="test")  # noqa: E731  as it is passed
    connection.execute(
        "INSERT INTO penstock.checkpoints (consumer, channel, shard, \"offset\", epoch, applied) VALUES ('other', 'things', 0, 9, 1, 9)"
    )
    assert has_never_applied(connect, DEFAULT_SCOPE, spec)
    connection.execute(
        f"UPDATE penstock.checkpoints SET {counted} = 1 WHERE consumer = 'keeper' AND shard = 1".encode()
    )
    assert not has_never_applied(connect, DEFAULT_SCOPE, spec)


def test_barriers_are_of_a_run_and_of_an_hour(connection: Connection, execute: Execute) -> None:
    """A run postpones and lifts its own, and removes those of runs that died an hour ago."""
    for run, age in (("ours", "0"), ("theirs", "59 minutes"), ("dead", "61 minutes")):
        execute("place_barrier", **HERE, **POSITION, run=run, seconds=15.0)
        connection.execute("UPDATE penstock.barriers SET expires_at = now() - %s::interval WHERE run = %s", [age, run])
    assert read_barriers(connection) == {
        (run, shard, offset): False for run in ("ours", "theirs", "dead") for shard, offset in ((0, 5), (1, 9))
    }
    execute("extend_barrier", run="ours", seconds=15.0)
    assert {run for (run, *_), is_valid in read_barriers(connection).items() if is_valid} == {"ours"}
    execute("lift_barrier", run="ours")
    assert {run for run, *_ in read_barriers(connection)} == {"theirs"}


def read_barriers(connection: Connection) -> dict[tuple[str, int, int], bool]:
    rows: Iterator[Any] = iter(
        connection.execute(
            'SELECT run, shard, "offset", expires_at > clock_timestamp() AND expires_at <= clock_timestamp() + '
            "interval '15 seconds' FROM penstock.barriers"
        )
    )
    return {(run, shard, offset): is_valid for run, shard, offset, is_valid in rows}
