"""The statements that remove what is over, beside the same in plain Python.

Each is executed with rows of every kind, those of others among them, at moments around the end of their time; the clock is the test's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate, product
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.clocks import Execute, executing

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)
KEEP, LONG = timedelta(hours=1), timedelta(days=7)
AGES = (KEEP - INSTANT, KEEP, KEEP + INSTANT)
"""Ages of what is removed from ``KEEP`` on, of which the last alone is too old."""


@pytest.fixture
def execute(connection: psycopg.Connection) -> Execute:
    return executing(connection, NOW, channel="jobs", shard=0)


def add(connection: psycopg.Connection, table: str, rows: Sequence[Sequence[Any]]) -> None:
    """Inserts rows with values of their first columns, or of those that are named."""
    into, values = f"INSERT INTO penstock.{table}", ", ".join(["%s"] * len(rows[0])) if rows else ""
    with connection.cursor() as cursor:
        cursor.executemany(f"{into} OVERRIDING SYSTEM VALUE VALUES ({values})".encode(), rows)


def stage(connection: psycopg.Connection, ids: Sequence[int]) -> None:
    columns = "staged_records (id, channel, shard, key, action, object, data)"
    add(connection, columns, [(id_, "jobs", 0, "t", "a", "o", "1") for id_ in ids])


@dataclass(frozen=True)
class Entry:
    """A row of the journal."""

    first: int
    count: int
    age: timedelta

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def offsets(self) -> range:
        return range(self.first, self.first + self.count)


JOURNALS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([AGES[2], AGES[2], *AGES])), min_size=2, max_size=8)


def make_entries(journal: Sequence[tuple[int, timedelta]]) -> list[Entry]:
    firsts = accumulate((count for count, _ in journal), initial=1)
    return [Entry(first, *each) for first, each in zip(firsts, journal, strict=False)]


def removable(entries: Sequence[Entry], floor: int, most: int) -> list[Entry]:
    """The oldest ones below the floor until they have as many records as one transaction takes; never the newest, and none too young."""
    passed = [each for each in entries[:-1] if each.last <= floor and each.age > KEEP]
    before = accumulate((each.count for each in passed), initial=0)
    upto = max((each.first for each, count in zip(passed, before, strict=False) if count < most), default=0)
    return [each for each in entries if each.first <= upto and each.age > KEEP]


@pytest.mark.slow
@settings(derandomize=True, max_examples=60)
@given(
    JOURNALS,
    st.integers(0, 7),
    st.sampled_from([0, -1, 1]),
    st.integers(1, 12),
    st.sets(st.integers(1, 32)),
    st.sets(st.integers(1, 32)),
)
def test_of_a_shard_goes_what_all_have_passed_and_nobody_keeps(
    connection: psycopg.Connection,
    journal: list[tuple[int, timedelta]],
    passed_to: int,
    beyond: int,
    most: int,
    gone: set[int],
    waiting: set[int],
) -> None:
    """Records of a queue stay, and wait in Postgres from then on, unless they are done.  Times are in no order after a clock was set."""
    entries = make_entries(journal)
    floor = entries[passed_to % len(entries)].last + beyond
    removed = removable(entries, floor, most)
    staged = [offset for entry in entries for offset in entry.offsets if offset not in gone]
    rows = [
        (*where, each.first, each.last, [1000 * number + offset for offset in each.offsets], 1, NOW - each.age)
        for number, where in enumerate([("jobs", 0), ("jobs", 1), ("others", 0)], 1)
        for each in entries
    ]
    with connection.transaction(force_rollback=True):
        execute = executing(connection, NOW, channel="jobs", shard=0, floor=floor, keep=KEEP, records=most)
        add(connection, "journal", rows)
        stage(connection, [1000 * number + offset for number in (1, 2, 3) for offset in staged])
        add(connection, "waiting_records", [(1000 + each, "jobs", 0, None, NOW, False) for each in waiting])
        journaled, last = sum(each.count for each in removed), max((each.last for each in removed), default=None)
        passed = [1000 + offset for each in removed for offset in each.offsets if offset not in gone]

        assert execute("remove_passed") == [(journaled, len(passed), last)]
        assert execute("trim_queue") == [(journaled, 0, last)]
        columns = (
            "SELECT channel, shard, first_offset, last_offset, record_ids, epoch, created_at FROM penstock.journal"
        )
        left = [row for row in rows if row[:3] not in {("jobs", 0, each.first) for each in removed}]
        for statement in ("remove_passed", "trim_queue"):
            assert sorted(execute(statement, then=columns)) == left
        ids = [id_ for (id_,) in execute("remove_passed", then="SELECT id FROM penstock.staged_records ORDER BY id")]
        everything = [1000 * number + offset for number in (1, 2, 3) for offset in staged]
        assert ids == [id_ for id_ in everything if id_ not in passed]
        assert execute("trim_queue", then="SELECT count(*) FROM penstock.staged_records") == [(len(everything),)]
        given = "SELECT record_id, channel, shard, tenant, is_given FROM penstock.waiting_records ORDER BY record_id"
        waits = {1000 + each: (1000 + each, "jobs", 0, None, False) for each in waiting}
        moved = {id_: (id_, "jobs", 0, None, True) for id_ in passed}
        assert execute("trim_queue", then=given) == [row for _, row in sorted((moved | waits).items())]


def test_a_shard_is_passed_up_to_its_slowest_checkpoint(connection: psycopg.Connection, execute: Execute) -> None:
    """Also that of a consumer that is halted, or of a replay."""
    assert execute("slowest_checkpoint") == [(None,)]
    for number, (channel, shard) in enumerate(product(("jobs", "others"), (0, 1))):
        for consumer, offset in (("a", 7), ("b", 5), ("replay-1", 6)):
            connection.execute(
                'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted) VALUES (%s, %s, %s, %s, 1, %s)',
                [consumer, channel, shard, offset - 2 * number, "why" if offset == 5 else None],
            )
    assert execute("slowest_checkpoint") == [(5,)]


QUEUES = {"jobs": KEEP, "kept longer": LONG + KEEP, "retired": LONG, "of another service": None}
NOTES = [
    (number, queue, attempts, NOW - base - moment, is_left)
    for number, (queue, attempts, base, moment, is_left) in enumerate(
        product(QUEUES, ("[]", '[{"attempt": 1}]'), (KEEP, LONG, LONG + KEEP), (-INSTANT, 0 * INSTANT, INSTANT), (False, True))
    )
]  # fmt: skip


def over(queue: str, since: datetime | None, least: timedelta = timedelta(0)) -> bool:
    """Whether something of a queue is kept no longer."""
    keep = QUEUES[queue]
    return since is not None and keep is not None and NOW - since > max(keep, least)


@pytest.fixture
def noted(connection: psycopg.Connection) -> None:
    """Notes, results and groups of jobs; some of the jobs are left."""
    add(connection, "job_notes", [(id_, queue, attempts, None, None, at) for id_, queue, attempts, at, _ in NOTES])
    stage(connection, [id_ for id_, *_, is_left in NOTES if is_left])
    add(connection, "job_results", [(id_, queue, "1", at) for id_, queue, _, at, _ in NOTES])
    groups: list[tuple[Any, ...]] = [
        (f"{id_:03}", queue, [], 0, None, at, at if is_left else None) for id_, queue, _, at, is_left in NOTES
    ]
    add(connection, "job_groups", groups)
    connection.execute("INSERT INTO penstock.retired_channels (channel) VALUES ('retired')")


@pytest.mark.usefixtures("noted")
def test_notes_results_and_groups_are_kept_as_long_as_their_queue_says(execute: Execute) -> None:
    """Those of a failed attempt a week at the least, and all of a retired queue; none of a job or a group that is left is removed."""
    queues = {"channels": ["jobs", "kept longer"], "keep": [KEEP, LONG + KEEP], "attempts_kept": LONG}
    old = {
        "job_notes": {
            id_
            for id_, queue, attempts, at, is_left in NOTES
            if not is_left and over(queue, at, LONG if attempts != "[]" else timedelta(0))
        },
        "job_results": {id_ for id_, queue, _, at, _ in NOTES if over(queue, at)},
        "job_groups": {id_ for id_, queue, _, at, is_left in NOTES if over(queue, at if is_left else None)},
    }

    assert execute("remove_old_notes", **queues, limit=1000) == [tuple(map(len, old.values()))]
    for table, removed in old.items():
        column = "name::integer" if table == "job_groups" else "record_id"
        left = execute("remove_old_notes", **queues, limit=1000, then=f"SELECT {column} FROM penstock.{table}")
        assert {id_ for (id_,) in left} == {id_ for id_, *_ in NOTES} - removed, table
    for most in (1, 5):
        assert execute("remove_old_notes", **queues, limit=most) == [(most, most, most)]


CANCELLED = [
    (100 + number, channel, shard, has_no_effect, None if age is None else NOW - age, is_left)
    for number, (channel, shard, has_no_effect, age, is_left) in enumerate(
        product(("jobs", "others"), (0, 1), (False, True), (None, *AGES), (False, True))
    )
]


def test_cancelled_jobs_are_taken_in_pages_and_known_for_a_while(
    connection: psycopg.Connection, execute: Execute
) -> None:
    add(connection, "cancellations", [row[:5] for row in CANCELLED])
    stage(connection, [id_ for id_, *_, is_left in CANCELLED if is_left])
    add(
        connection,
        "waiting_records",
        [(id_, channel, shard, None, NOW, False) for id_, channel, shard, *_ in CANCELLED],
    )
    here = [(id_, at) for id_, channel, shard, _, at, _ in CANCELLED if (channel, shard) == ("jobs", 0)]
    new, old = [id_ for id_, at in here if at is None], {id_ for id_, at in here if at is not None and NOW - at > KEEP}

    def left(table: str, column: str, most: int) -> set[int]:
        then = f"SELECT {column} FROM penstock.{table}"
        return {id_ for (id_,) in execute("take_cancelled", keep=KEEP, records=most, then=then)}

    everything = {id_ for id_, *_ in CANCELLED}
    for most in (1, 3, 1000):
        page = {*new[:most]}
        assert {id_ for (id_,) in execute("take_cancelled", keep=KEEP, records=most)} == page
        assert left("waiting_records", "record_id", most) == everything - page
        assert len(left("cancellations", "record_id", most)) == len(CANCELLED) - min(most, len(old))
        staged = {id_ for id_, *_, is_left in CANCELLED if is_left}
        assert left("staged_records", "id", most) == staged - page
    assert left("cancellations", "record_id", 1000) == everything - old
    forgotten = execute(
        "forget_cancelled", ids=new[:2], then="SELECT record_id, forgotten_at FROM penstock.cancellations"
    )
    assert {id_ for id_, at in forgotten if at == NOW} == {*new[:2]}


MEMBERS = {"": (), "those that are gone": (-1, -2), "one that is left": (-1, 501), "two that are left": (502, -1, 501)}
GROUPS = {
    f"{members}, {waits_for}, {ended_at}, {following}": (MEMBERS[members], waits_for, ended_at, following)
    for members, waits_for, ended_at, following in product(
        MEMBERS, (0, -1, 501, 502), (None, NOW - KEEP), (None, '["reports", 3, "t", "a", "o", {"x": 1}, {"h": 2}]')
    )
}


def test_a_group_ends_once_when_none_of_its_members_is_left_and_is_followed_once(
    connection: psycopg.Connection, execute: Execute
) -> None:
    stage(connection, [501, 502, 503])
    add(
        connection,
        "job_groups",
        [(name, "jobs", [*members], *more[:1], more[2], NOW, more[1]) for name, (members, *more) in GROUPS.items()],
    )
    open_ = {name: each for name, each in GROUPS.items() if each[2] is None}
    ending = {name: each for name, each in open_.items() if not {501, 502} & {*each[0]}}

    found = {name for (name,) in execute("groups_to_end")}
    assert found == {name for name, each in open_.items() if each[1] not in {501, 502}}
    assert execute("end_groups", names=[*GROUPS]) == [(len(ending),)]
    assert execute("end_groups", names=[*ending][:3]) == [(3,)]
    after = execute("end_groups", names=[*GROUPS], then="SELECT name, waits_for, ended_at FROM penstock.job_groups")
    assert {name: more for name, *more in after} == {
        name: [max({501, 502} & {*members}, default=waits_for) if name in open_ else waits_for, NOW if name in ending else ended_at]
        for name, (members, waits_for, ended_at, _) in GROUPS.items()
    }  # fmt: skip
    staged = "SELECT channel, shard, key, action, object, data, headers FROM penstock.staged_records WHERE id NOT IN (501, 502, 503)"
    following = [each for each in ending.values() if each[3]]
    assert execute("end_groups", names=[*GROUPS], then=staged) == [
        ("reports", 3, "t", "a", "o", {"x": 1}, {"h": 2}) for _ in following
    ]


@settings(derandomize=True, max_examples=40)
@given(JOURNALS, st.integers(-1, 12), st.integers(0, 20), st.integers(1, 9), st.sets(st.integers(1, 32)))
def test_what_redis_should_have_is_read_in_pages_of_the_journal(
    connection: psycopg.Connection,
    journal: list[tuple[int, timedelta]],
    after: int,
    tail: int,
    most: int,
    waiting: set[int],
) -> None:
    """Whole rows, until they have so many records; without what is done or waits."""
    entries = make_entries(journal)
    read = [each for each in entries if each.first > after and each.last <= tail]
    before = accumulate((each.count for each in read), initial=0)
    page = [each for each, count in zip(read, before, strict=False) if count < most]
    done = {offset for each in entries for offset in each.offsets if offset % 3 == 0}
    with connection.transaction(force_rollback=True):
        execute = executing(connection, NOW, channel="jobs", shard=0)
        for number, where in enumerate([("jobs", 0), ("jobs", 1), ("others", 0)], 1):
            rows = [
                (*where, each.first, each.last, [1000 * number + n for n in each.offsets], 1, NOW) for each in entries
            ]
            add(connection, "journal", rows)
            stage(connection, [1000 * number + n for each in entries for n in each.offsets if n not in done])
        add(connection, "waiting_records", [(1000 + n, "jobs", 0, None, NOW, n % 2 == 0) for n in waiting])

        ids = [1000 + n for each in page for n in each.offsets if n not in done and n not in waiting]
        last = page[-1].first if page else None
        [(found_last, found)] = execute("outstanding_journaled", after=after, tail=tail, records=most)
        assert (found_last, sorted(found)) == (last, ids)
