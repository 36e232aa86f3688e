"""A repair writes what the second comparison found, while the consumer is paused; the first one may be out of date."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import pytest

from fixtures.constants import SetConstants
from penstock import Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import BarrierMissed, Gap, Refused
from penstock.reconciling.comparison import StateComparison
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Reconciled, reconcile
from penstock.reconciling.state_repair import CanonicalRows, choose_batch
from penstock.records import DEFAULT_SCOPE
from penstock.testing import eventually


class Comparer(InlineComparer):
    """Has something happen after one of the comparisons, or while the canonical rows are read."""

    def __init__(self, database_url: str, meanwhile: Callable[[], None], after: int) -> None:
        super().__init__(database_url)
        self._meanwhile, self._after = meanwhile, after
        self.comparisons = 0

    def compare(
        self, spec: ReconciliationSpec, canonical: str, state: str, among: Sequence[str] | None = None
    ) -> StateComparison:
        """Compares, in the snapshots that were taken before."""
        found = super().compare(spec, canonical, state, among)
        self.comparisons += 1
        if self.comparisons == self._after:
            self._meanwhile()
        return found

    def rows(self, spec: ReconciliationSpec, canonical: str) -> CanonicalRows:
        """The canonical rows, in the snapshot of the cut."""
        self._meanwhile()
        return super().rows(spec, canonical)


class Repair(Protocol):
    """Repairs the state; ``meanwhile`` is executed after that many comparisons."""

    def __call__(
        self, meanwhile: str | Callable[[], None] = "", *, after: int = 1, name: str = "state", **options: Any
    ) -> Reconciled: ...


@pytest.fixture
def repair(flow: Pipeline, keeper: str, connection: Connection, database_url: str) -> Repair:
    """Repairs ``public.state`` from ``public.canon``."""

    declared = (
        ("state", "public.state", "id, value"),
        ("keys", "public.state", "id"),
        ("unqualified", "state", "id, value"),
    )
    for name, state, columns in declared:
        query = f"SELECT {columns} FROM public.canon"
        flow.reconciliation(of=keeper, state=state, key="id", name=name)(lambda _, query=query: query)
    connection.execute("CREATE TABLE public.canon (id int PRIMARY KEY, value text)")
    connection.execute("CREATE TABLE public.state (id int PRIMARY KEY, value text)")
    connection.execute("INSERT INTO public.canon VALUES (1, 'one'), (2, 'two'), (3, 'three')")
    connection.execute("INSERT INTO public.state VALUES (1, 'wrong'), (2, 'wrong'), (4, 'four')")

    def run(
        meanwhile: str | Callable[[], None] = "", *, after: int = 1, name: str = "state", **options: Any
    ) -> Reconciled:
        def execute() -> None:
            for statement in filter(None, str(meanwhile).split(";")):
                connection.execute(statement.encode())

        return reconcile(
            lambda: connect_postgres(database_url, application="test"),
            DEFAULT_SCOPE,
            flow.get_reconciliation(name),
            Comparer(database_url, meanwhile if callable(meanwhile) else execute, after),
            **{"intent": "repair", **options},
        )

    return run


def rows(connection: Connection) -> list[tuple[int, str]]:
    return [(number, value) for number, value in connection.execute("SELECT id, value FROM public.state ORDER BY id")]


def test_every_kind_of_difference_is_told_and_repaired(
    repair: Repair, connection: Connection, set_constants: SetConstants
) -> None:
    """Missing, surplus, different and doubled rows, with all their values, however few of these a comparison shows."""
    set_constants("reconciling.comparison", SAMPLES=1)
    connection.execute("ALTER TABLE public.state DROP CONSTRAINT state_pkey")
    connection.execute("INSERT INTO public.canon VALUES (5, 'five'), (6, 'six')")
    connection.execute(
        "INSERT INTO public.state VALUES (5, 'five'), (5, 'five'), (6, 'five'), (6, 'six'), (7, ''), (8, '')"
    )
    repair(intent="compare")
    done = repair()
    assert (done.repaired, 0 < done.held_s < done.seconds < 3600) == (8, True)

    counted = "SELECT missing, surplus, different, repaired, tick > 0 FROM penstock.reconciliations ORDER BY id"
    assert connection.execute(counted).fetchall() == [(1, 3, 4, 0, True), (1, 3, 4, 8, True)]
    assert rows(connection) == [(1, "one"), (2, "two"), (3, "three"), (5, "five"), (6, "six")]


@pytest.mark.parametrize("intent", ["repair", "replace"])
def test_a_state_without_a_schema_is_found_by_the_roles_search_path(
    repair: Repair, connection: Connection, intent: str
) -> None:
    repair(name="unqualified", intent=intent)

    assert rows(connection) == REPAIRED


def test_a_table_of_which_nothing_but_the_key_is_compared_is_repaired(repair: Repair, connection: Connection) -> None:
    done = repair(name="keys")

    assert done.repaired == 2
    assert [number for number, _ in rows(connection)] == [1, 2, 3]


def test_rows_that_changed_after_the_first_comparison_are_repaired_to_what_they_are_now(
    repair: Repair, connection: Connection
) -> None:
    repair(
        "UPDATE public.canon SET value = 'newer' WHERE id = 1;"
        "DELETE FROM public.canon WHERE id = 3;"
        "INSERT INTO public.canon VALUES (4, 'new')"
    )

    assert rows(connection) == [(1, "newer"), (2, "two"), (4, "new")]


def test_rows_that_the_consumer_brought_up_to_date_meanwhile_are_left_alone(
    repair: Repair, connection: Connection
) -> None:
    done = repair(
        "UPDATE public.canon SET value = 'newer' WHERE id = 1;"
        "UPDATE public.state SET value = 'newer' WHERE id = 1;"
        "INSERT INTO public.state VALUES (3, 'three');"
        "DELETE FROM public.state WHERE id = 4"
    )

    assert done.repaired == 1
    assert rows(connection) == [(1, "newer"), (2, "two"), (3, "three")]


def test_fewer_of_large_rows_are_repaired_at_once(
    repair: Repair, connection: Connection, flow: Pipeline, set_constants: SetConstants
) -> None:
    """They pass through memory as JSON: five thousand of a megabyte would not fit."""
    connection.execute("ALTER TABLE public.state ALTER COLUMN value SET STORAGE EXTERNAL")
    connection.execute("INSERT INTO public.state SELECT i, repeat('x', 100000) FROM generate_series(5, 24) i")
    connection.execute("ANALYZE public.state")
    spec = flow.get_reconciliation("state")
    set_constants("reconciling.state_repair", BATCH_BYTES=500_000)

    assert 1 < choose_batch(Store(connection), spec, 5000) < 10
    assert choose_batch(Store(connection), spec, 3) == 3
    assert repair().repaired == 24
    assert rows(connection) == [(1, "one"), (2, "two"), (3, "three")]


UNREPAIRED = [(1, "wrong"), (2, "wrong"), (4, "four")]
REPAIRED = [(1, "one"), (2, "two"), (3, "three")]


@pytest.mark.parametrize("by", ["1", "-1"])
def test_a_consumer_that_left_the_cut_is_not_repaired(repair: Repair, connection: Connection, by: str) -> None:
    """Guarantee 28: its state is no longer the one that was compared.  The third comparison is that of the repair."""
    moved = f'UPDATE penstock.checkpoints SET "offset" = "offset" + {by} WHERE shard = 1'

    with pytest.raises(BarrierMissed, match="no longer at the cut"):
        repair(moved, after=3)

    assert rows(connection) == UNREPAIRED


def test_a_repair_postpones_the_end_of_its_barrier(
    repair: Repair, connection: Connection, set_constants: SetConstants
) -> None:
    """As long as it takes: the consumer would go on, and the repair would have to begin again."""
    set_constants("reconciling.cut", EXPIRES_S=0.06)

    def wait() -> None:
        ends = "SELECT max(expires_at) FROM penstock.barriers"

        def is_after(before: list[Any]) -> bool:
            return connection.execute(ends).fetchall() > before

        for _ in range(2):
            before = connection.execute(ends).fetchall()
            eventually(partial(is_after, before), "it ends later")

    assert repair(wait, after=3).repaired == 4


def test_a_journal_that_does_not_follow_the_cut_keeps_the_old_state(repair: Repair, connection: Connection) -> None:
    """Guarantee 28: the records between are neither in the canonical rows nor in the journal."""
    begins = (
        "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) "
        "VALUES ('things', 0, {0}, {0}, '{{1}}', 1)"
    )

    with pytest.raises(Gap, match="things/0: the cut is at offset 0, the journal now begins at 2"):
        repair(begins.format(2), intent="replace")
    assert rows(connection) == UNREPAIRED

    connection.execute("DELETE FROM penstock.journal")
    repair(begins.format(1), intent="replace")
    assert rows(connection) == REPAIRED


def test_a_whole_state_takes_the_place_of_what_its_cut_includes(repair: Repair, connection: Connection) -> None:
    """Guarantee 28: dead letters up to the cut go, and those behind it stay; a halted shard goes on.

    What the consumer has of another channel, which it read before, stays.
    """
    letter = (
        'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, '
        "reason, attempts) VALUES ('keeper', 'things', 0, {}, 1, 'k', 'a', 'o', '{{}}', now(), 'test', 1)"
    )
    connection.execute(
        "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) "
        "VALUES ('things', 0, 1, 3, '{1,2,3}', 1)"
    )
    connection.execute('UPDATE penstock.checkpoints SET "offset" = 3 WHERE shard = 0')
    for offset in (3, 4):
        connection.execute(letter.format(offset).encode())
    connection.execute(letter.format(2).replace("'things'", "'others'").encode())
    with pytest.raises(Refused, match="dead-lettered 1 record that"):
        repair()
    connection.execute("UPDATE penstock.checkpoints SET \"offset\" = 1, halted = 'for a test' WHERE shard = 0")
    before = "INSERT INTO penstock.checkpoints (consumer, channel, shard, \"offset\", epoch) VALUES ('keeper', 'others', 0, 9, 1)"
    connection.execute(before.encode())

    connection.execute('UPDATE penstock.checkpoints SET "offset" = 5 WHERE shard = 1')

    repair(intent="replace")

    left = connection.execute('SELECT "offset" FROM penstock.dead_letters ORDER BY 1').fetchall()
    moved = 'SELECT "offset", skipped, halted FROM penstock.checkpoints ORDER BY 1'
    assert (rows(connection), left) == (REPAIRED, [(2,), (4,)])
    assert connection.execute(moved).fetchall() == [(0, 0, None), (3, 2, None), (9, 0, None)]


def test_checkpoints_are_replaced_without_the_roles_search_path(repair: Repair, connection: Connection) -> None:
    """Guarantee 31: between the statements that find the state's table, its operators and its triggers by it."""
    connection.execute("CREATE TABLE public.paths (path text)")
    connection.execute(
        "CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO public.paths VALUES (current_setting('search_path')); RETURN NULL; END $$"
    )
    connection.execute("CREATE TRIGGER note AFTER UPDATE ON penstock.checkpoints EXECUTE FUNCTION public.note()")

    repair(intent="replace")

    assert connection.execute("SELECT path FROM public.paths").fetchall() == [("pg_catalog, pg_temp",)]


def test_a_new_consumer_begins_at_the_cut_of_its_state(repair: Repair, connection: Connection) -> None:
    connection.execute("DELETE FROM penstock.checkpoints")

    assert repair(intent="bootstrap").repaired == 3
    assert rows(connection) == REPAIRED
    assert connection.execute("SELECT shard FROM penstock.checkpoints ORDER BY 1").fetchall() == [(0,), (1,)]


def test_an_interrupted_repair_is_resumed_by_its_engine_and_with_its_key(
    repair: Repair, connection: Connection, set_constants: SetConstants
) -> None:
    """Guarantee 28: keys that another engine, or another declaration, has written would be found nowhere, and count as equal."""
    set_constants("reconciling.reconciliation", REPAIR_BATCH=1)
    with pytest.raises(BarrierMissed):  # in the second batch
        repair('UPDATE penstock.checkpoints SET "offset" = 1', after=4)
    connection.execute('UPDATE penstock.checkpoints SET "offset" = 0')
    left = "SELECT id, remaining FROM penstock.reconciliations WHERE cardinality(remaining) > 0"
    [(interrupted, keys)] = connection.execute(left).fetchall()
    assert len(keys) == 3, "the repaired one is off the list"

    for change, words in (
        ("engine = 'spark', remaining = %s", "--engine spark"),
        ("engine = 'inline', remaining = %s", "its key has changed"),
    ):
        written = keys if "spark" in change else [json.dumps({"other": 1})]
        connection.execute(f"UPDATE penstock.reconciliations SET {change}".encode(), [written])
        with pytest.raises(Refused, match=words):
            repair(resume=True)
    connection.execute("UPDATE penstock.reconciliations SET remaining = NULL")
    connection.execute("UPDATE penstock.reconciliations SET remaining = %s WHERE id = %s", [keys, interrupted])
    resumed = repair(resume=True)

    assert (resumed.resumed, resumed.repaired) == (interrupted, 3)
    assert (rows(connection), connection.execute(left).fetchall()) == (REPAIRED, [])


def test_a_whole_repair_forgets_what_an_earlier_one_left(repair: Repair, connection: Connection) -> None:
    connection.execute(
        "INSERT INTO penstock.reconciliations (name, consumer, intent, engine, remaining) "
        "VALUES ('state', 'keeper', 'repair', 'inline', ARRAY['{\"id\": 1}'])"
    )
    repair()

    assert repair(resume=True).resumed is None


def test_more_differences_than_are_kept_are_not_repaired_in_part(
    repair: Repair, connection: Connection, set_constants: SetConstants
) -> None:
    set_constants("reconciling.comparison", DIFFERENCES_KEPT=3)
    with pytest.raises(Refused, match=r"4 keys of public\.state differ.*--whole"):
        repair()
    assert rows(connection) == UNREPAIRED

    set_constants("reconciling.comparison", DIFFERENCES_KEPT=4)
    assert repair().repaired == 4


def test_a_value_that_the_column_would_truncate_is_refused(repair: Repair, connection: Connection) -> None:
    """Every run would find it again."""
    connection.execute("ALTER TABLE public.state ALTER COLUMN value TYPE varchar(5)")
    connection.execute("UPDATE public.canon SET value = 'much too long' WHERE id = 1")

    for intent in ("repair", "replace"):
        with pytest.raises(Refused, match=r"'value' of public\.state, character varying\(5\)"):
            repair(intent=intent)
    assert rows(connection) == UNREPAIRED
