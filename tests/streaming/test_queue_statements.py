"""The statements about what waits in Postgres for its queue, and about unique names, beside the same in plain Python.

Each is executed with rows of every kind, those of other queues and shards among them; the clock is the test's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate, product
from typing import Any

import psycopg
import pytest

from fixtures.clocks import Execute, executing
from penstock.declaring.outcomes import RESERVED

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)
HERE = {"channel": "jobs", "shard": 0}


@pytest.fixture
def execute(connection: psycopg.Connection) -> Execute:
    """Executes a named statement of the streamer's for one shard."""
    return executing(connection, NOW, **HERE)


LIMITS = (1, 40, 41, 10_000)
"""Bytes of payloads, from which on no further one is read."""


@dataclass(frozen=True)
class Waiting:
    """A record that waits, and whether it is staged still."""

    id: int
    channel: str
    shard: int
    tenant: str | None
    due: datetime
    is_given: bool
    is_staged: bool

    @property
    def is_here(self) -> bool:
        return (self.channel, self.shard) == ("jobs", 0)

    @property
    def columns(self) -> tuple[Any, ...]:
        return self.id, self.channel, self.shard, self.tenant, self.due, self.is_given


DUE = (-3600_000_000, -1, 0, 1)
WAITING = [
    Waiting(1000 + (37 * number) % 192, channel, shard, tenant, NOW + (us - number % 5 * (us < -1)) * INSTANT, *states)
    for number, (channel, shard, tenant, us, *states) in enumerate(
        product(("jobs", "others"), (0, 1), (None, "a", "b"), DUE, (False, True), (False, True))
    )
]
ALL = "SELECT record_id, channel, shard, tenant, due, is_given FROM penstock.waiting_records"


@pytest.fixture
def rows(connection: psycopg.Connection, execute: Execute) -> list[Waiting]:
    """All of them, with payloads that have each another size."""
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO penstock.waiting_records (record_id, channel, shard, tenant, due, is_given) "
            "VALUES (%s, %s, %s, %s, %s, %s)",
            [row.columns for row in WAITING],
        )
        cursor.executemany(
            "INSERT INTO penstock.staged_records (id, channel, shard, key, action, object, data) OVERRIDING SYSTEM VALUE "
            "VALUES (%s, %s, %s, 't', 'a', 'o', to_jsonb(repeat('x', %s)))",
            [(row.id, row.channel, row.shard, row.id % 7 * 10 + 9) for row in WAITING if row.is_staged],
        )
    return sorted(WAITING, key=lambda row: row.id)


def sizes(connection: psycopg.Connection) -> dict[int, int]:
    """How many bytes Postgres has of each payload."""
    return dict(connection.execute("SELECT id, pg_column_size(data) FROM penstock.staged_records").fetchall())


def within(limit: int, rows: Sequence[Waiting], bytes_of: dict[int, int]) -> list[Waiting]:
    """The first of them, until their payloads have reached a number of bytes."""
    before = accumulate((bytes_of.get(row.id, 0) for row in rows), initial=0)
    return [row for row, size in zip(rows, before, strict=False) if size < limit]


def read(found: Iterable[Sequence[Any]]) -> list[tuple[int, int | None]]:
    return [(row[0], row[1]) for row in found]


def expect(rows: Iterable[Waiting]) -> list[tuple[int, int | None]]:
    """The ids of the waiting record and of the staged one; None once it is done."""
    return [(row.id, row.id if row.is_staged else None) for row in rows]


def test_what_is_due_is_read_in_its_order_and_no_further_than_its_limits(
    rows: list[Waiting], execute: Execute, connection: psycopg.Connection
) -> None:
    due = sorted(
        (row for row in rows if row.is_here and not row.is_given and row.tenant is None and row.due <= NOW),
        key=lambda row: (row.due, row.id),
    )
    assert len(due) == 6
    for records, limit in product((1, 5, 1000), LIMITS):
        found = execute("due_records", records=records, bytes=limit)
        assert read(found) == expect(within(limit, due[:records], sizes(connection))), (records, limit)


def test_tenants_without_room_come_in_their_order_after_the_last_one(rows: list[Waiting], execute: Execute) -> None:
    tenants = sorted({row.tenant for row in rows if row.is_here and not row.is_given and row.tenant})

    for after, most in (("", 9), ("", 1), ("a", 9), ("b", 9)):
        found = [tenant for (tenant,) in execute("refused_tenants", after=after, tenants=most)]
        assert found == [tenant for tenant in tenants if tenant > after][:most], (after, most)


def test_what_a_tenant_has_no_room_for_is_read_whenever_it_is_asked_for(
    rows: list[Waiting], execute: Execute, connection: psycopg.Connection
) -> None:
    of = {
        tenant: [row for row in rows if row.is_here and not row.is_given and row.tenant == tenant]
        for tenant in ("a", "b")
    }
    for records, limit in product((1, 3, 50), LIMITS):
        found = execute("refused_records", tenants=["b", "a", "nobody"], records=records, bytes=limit)
        first = [*of["a"][:records], *of["b"][:records]]
        assert read(found) == expect(within(limit, first, sizes(connection))), (records, limit)


def test_what_redis_was_given_is_read_in_pages(rows: list[Waiting], execute: Execute) -> None:
    for after, records in ((0, 1000), (0, 5), (1100, 1000)):
        given = [row for row in rows if row.is_here and row.is_given and row.id > after]
        found = execute("given_records", after=after, records=records)
        assert found == [(row.id, row.is_staged) for row in given[:records]], (after, records)


Change = Callable[[Waiting], Waiting | None]

CHANGES: list[tuple[str, dict[str, Any], Change, tuple[str | None, datetime] | None]] = [
    ("note_given", {}, lambda row: replace(row, is_given=True, tenant=None), None),
    ("forget_waiting", {}, lambda _: None, None),
    ("put_missing", {}, lambda row: replace(row, is_given=False), (None, NOW)),
    (
        "put_refused",
        {"tenants": ["a", None, "new", "new", "a"], "pause": timedelta(seconds=1)},
        lambda row: replace(row, is_given=False, due=NOW + timedelta(seconds=1)),
        ("a", NOW + timedelta(seconds=1)),
    ),
    (
        "put_in_waiting",
        {"dues": [int(NOW.timestamp() * 1000)] * 5, "near": timedelta(hours=1)},
        lambda row: row,
        (None, NOW - timedelta(hours=1)),
    ),
]


def test_a_change_is_of_the_records_that_it_names_and_of_no_others(rows: list[Waiting], execute: Execute) -> None:
    """What is new is added, of what was given or refused before."""
    chosen = {(row.tenant is None, row.is_given): row for row in rows if row.is_here and row.due < NOW - INSTANT}
    named = {row.id: row for row in chosen.values()}
    assert len(named) == 4
    for name, values, change, added in CHANGES:
        expected = {row.id: row.columns for row in rows}
        for number, id_ in enumerate(named):
            changed = change(named[id_])
            del expected[id_]
            if changed is not None:
                tenant = values["tenants"][number] if "tenants" in values else changed.tenant
                expected[id_] = replace(changed, tenant=tenant).columns
        if added is not None:
            tenant, due = added
            expected[77] = (77, "jobs", 0, tenant, due, False)
        found = {row[0]: row for row in execute(name, then=ALL, ids=[*named, 77], **values)}
        if name == "put_missing":  # its default is of Postgres' own clock
            found[77] = expected[77]
        assert found == expected, name


def test_after_a_loss_all_that_redis_was_given_in_this_shard_is_due(rows: list[Waiting], execute: Execute) -> None:
    expected = [
        (replace(row, is_given=False, due=min(row.due, NOW)) if row.is_here and row.is_given else row).columns
        for row in rows
    ]

    assert sorted(execute("note_lost", then=ALL)) == expected


ROWS = {  # whether the holder's staged row is there, and whether a cancellation says that it has no effect
    "outstanding": (True, None),
    "done": (False, None),
    "cancelled": (False, True),
    "cancelled at work": (True, False),
    "cancelled too late": (False, False),
}
KINDS = {  # whether the name is held until its hand-over, and when a time ends for which it is held
    "until it is done": (False, None),
    "until its hand-over": (True, None),
    "for a moment more": (False, NOW + INSTANT),
    "until now": (False, NOW),
    "until a moment ago": (False, NOW - INSTANT),
}
HOLDER, OTHER = 7, 8


@pytest.fixture
def hold(connection: psycopg.Connection) -> Callable[[str, str], None]:
    """Has a record hold a name, and another one that wants it staged; some that are like them are of another queue."""

    def make(state: str, kind: str) -> None:
        is_there, no_effect = ROWS[state]
        connection.execute("TRUNCATE penstock.staged_records, penstock.cancellations, penstock.unique_names")
        stage = (
            "INSERT INTO penstock.staged_records (id, channel, shard, key, action, object, data, headers, created_at) "
            "OVERRIDING SYSTEM VALUE VALUES (%s, %s, 0, 't', 'a', 'o', '1', %s, %s)"
        )
        named = '{"penstock": {"unique": {"name": "n"}}}'
        connection.execute(stage, [OTHER, "jobs", named, NOW])
        if is_there:
            connection.execute(stage, [HOLDER, "jobs", named, NOW])
        if no_effect is not None:
            connection.execute(
                "INSERT INTO penstock.cancellations VALUES (%s, 'jobs', 0, %s, NULL)", [HOLDER, no_effect]
            )
        for channel in ("jobs", "others"):
            connection.execute(
                "INSERT INTO penstock.unique_names VALUES (%s, 'n', %s, 3, %s, %s)", [channel, HOLDER, *KINDS[kind]]
            )

    return make


def is_held(state: str, kind: str) -> bool:
    """The rule: a name that is held for a time is held whatever becomes of its holder, unless that has no effect."""
    is_there, no_effect = ROWS[state]
    _, ends = KINDS[kind]
    return is_there if ends is None else ends > NOW and not no_effect


@pytest.mark.parametrize("state", ROWS)
def test_a_name_is_held_or_free_for_all_who_ask(state: str, hold: Callable[[str, str], None], execute: Execute) -> None:
    for kind in KINDS:
        hold(state, kind)
        ask_all(state, kind, execute)


def ask_all(state: str, kind: str, execute: Execute) -> None:
    is_queued, ends = KINDS[kind]
    names = "SELECT channel, record_id, shard, is_queued, ends FROM penstock.unique_names ORDER BY channel"
    others, before = ("others", HOLDER, 3, is_queued, ends), ("jobs", HOLDER, 3, is_queued, ends)
    of_another = ("jobs", OTHER, 0, True, NOW + timedelta(milliseconds=1500))
    claim = {"names": ["n", "n"], "ids": [OTHER, 99], "are_queued": [True, False], "windows": [1500, None]}

    claimed = execute("claim_names", then=names, **claim, released=[])
    assert claimed == ([before, others] if is_held(state, kind) else [of_another, others])
    released = execute("claim_names", then=names, **claim, released=[HOLDER])
    assert released == ([before, others] if ends is not None and is_held(state, kind) else [of_another, others])
    again = execute("claim_names", then=names, **{**claim, "ids": [HOLDER, 99]}, released=[])
    assert again == [before, others]
    held = execute("held_windows", names=["n", "m"])
    assert held == ([("n", HOLDER)] if ends is not None and is_held(state, kind) else [])
    forgotten = execute("forget_names", then=names, after="", records=9)
    assert forgotten == ([before, others] if is_held(state, kind) else [others])
    assert execute("name_holders", names=["n", "m"]) == [("n", HOLDER, 3, is_queued, ends is not None)]


def test_names_are_looked_through_in_pages(execute: Execute, connection: psycopg.Connection) -> None:
    for channel, name in product(("jobs", "others"), "abcde"):
        connection.execute("INSERT INTO penstock.unique_names VALUES (%s, %s, 1, 0, false, NULL)", [channel, name])
    names = "SELECT string_agg(name, '' ORDER BY name) FROM penstock.unique_names WHERE channel = 'jobs'"

    for after, records, last, left in (
        ("", 2, "b", "cde"),
        ("b", 2, "d", "abe"),
        ("d", 2, None, "abcd"),
        ("", 5, "e", None),
    ):
        assert execute("forget_names", after=after, records=records) == [(last,)]
        assert execute("forget_names", then=names, after=after, records=records) == [(left,)]


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("state", [*ROWS, "of no pipeline", "with another name", "of another queue"])
def test_a_duplicate_is_finished_if_a_job_with_an_effect_holds_its_name(
    state: str, hold: Callable[[str, str], None], execute: Execute, connection: psycopg.Connection, *, in_window: bool
) -> None:
    hold(state if state in ROWS else "outstanding", "until it is done")
    if state == "with another name":
        connection.execute(
            'UPDATE penstock.staged_records SET headers = \'{"penstock": {"unique": {"name": "m"}}}\' WHERE id = %s',
            [HOLDER],
        )
    if state == "of another queue":
        connection.execute("UPDATE penstock.staged_records SET channel = 'others' WHERE id = %s", [HOLDER])
    staged_us = int(NOW.timestamp() * 1_000_000)
    values = {
        "ids": [OTHER], "staged_us": [staged_us], "names": ["n"], "holders": [HOLDER], "in_window": [in_window],
        "reserved": RESERVED,
    }  # fmt: skip
    if state == "of no pipeline":
        values["holders"] = [None]
    held = {"outstanding", "of no pipeline"}
    if in_window:
        held |= {"done", "cancelled too late", "with another name", "of another queue"}

    assert execute("finish_duplicates", **values) == ([(OTHER,)] if state in held else [])
    for other in ({"staged_us": [staged_us + 1]}, {"channel": "others"}, {"ids": [OTHER + 1]}):
        assert execute("finish_duplicates", **{**values, **other}) == []
    connection.execute(
        "UPDATE penstock.staged_records SET headers = jsonb_set(headers, '{penstock,again}', '1') WHERE id = %s",
        [OTHER],
    )
    assert execute("finish_duplicates", **values) == []
