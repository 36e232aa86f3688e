"""A repair of a state with constraints and triggers: the least change that is right, or a refusal that names the constraint."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from penstock import Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import RepairRefused, ServerUnavailable
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import FailedRun, Intent, Reconciled, reconcile, reconcile_all
from penstock.records import DEFAULT_SCOPE

INTENTS: tuple[Intent, ...] = ("repair", "replace")
ACTIONS = ("NO ACTION", "RESTRICT", "CASCADE", "SET NULL", "SET DEFAULT")
DEFERRABLE = ("", " DEFERRABLE")
COMBINATIONS = [
    (intent, action, DEFERRABLE[(i + a) % 2]) for i, intent in enumerate(INTENTS) for a, action in enumerate(ACTIONS)
]
"""Each two of them meet."""

Run = Callable[..., Reconciled]


@pytest.fixture
def run(flow: Pipeline, keeper: str, database_url: str) -> Run:
    """Reconciles states of a consumer that has started: ``state`` by the canonical table ``canon``, others likewise."""

    def go(intent: Intent, state: str = "state", *others: str, **options: Any) -> Reconciled:
        for name in (state, *others):
            if name not in flow.reconciliations:
                query = f"SELECT * FROM public.{'canon' if name == 'state' else f'{name}_canon'}"
                flow.reconciliation(of=keeper, state=f"public.{name}", key="id", name=name)(
                    lambda _, query=query: query
                )
        first, *more = map(flow.get_reconciliation, (state, *others))
        return reconcile(
            lambda: connect_postgres(database_url, application="test"),
            DEFAULT_SCOPE,
            first,
            InlineComparer(database_url),
            intent=intent,
            others=more,
            **options,
        )

    return go


def execute(connection: Connection, statements: str) -> None:
    connection.execute(statements.encode())


def read(connection: Connection, table: str) -> list[tuple[Any, ...]]:
    return connection.execute(f"SELECT * FROM public.{table} ORDER BY 1".encode()).fetchall()


@pytest.mark.parametrize(("intent", "action", "deferrable"), COMBINATIONS)
def test_a_row_that_the_application_refers_to_is_not_deleted(
    run: Run, connection: Connection, intent: Intent, action: str, deferrable: str
) -> None:
    """Guarantee 43: whatever the foreign key would do with the application's rows."""
    execute(
        connection,
        f"""
        CREATE TABLE public.canon AS SELECT i AS id, i * 10 AS price FROM unnest(ARRAY[1, 2, 5]) i;
        CREATE TABLE public.state (id int PRIMARY KEY, price int);
        INSERT INTO public.state VALUES (1, 10), (2, 99), (3, 30), (4, 40);
        CREATE TABLE public.notes (id int, item int DEFAULT 1 REFERENCES public.state ON DELETE {action}{deferrable});
        INSERT INTO public.notes VALUES (1, 1), (2, 2), (3, 3);
        """,
    )
    before, application = read(connection, "state"), read(connection, "notes")

    with pytest.raises(RepairRefused, match=r"constraint notes_item_fkey of public\.notes"):
        run(intent)

    left = [(1, 10), (2, 20), (3, 30), (5, 50)] if intent == "repair" else before
    assert (read(connection, "state"), read(connection, "notes")) == (left, application)
    execute(connection, "DELETE FROM public.notes WHERE item = 3")
    listed = connection.execute("SELECT remaining FROM penstock.reconciliations ORDER BY id DESC").fetchone()
    assert listed == (['{"id":3}'] if intent == "repair" else None,)
    run(intent, resume=intent == "repair")
    assert (read(connection, "state"), run("compare").clean) == ([(1, 10), (2, 20), (5, 50)], True)
    assert read(connection, "notes") == application[:2]


@pytest.mark.parametrize(("intent", "action", "deferrable"), COMBINATIONS)
def test_a_value_that_the_application_refers_to_is_not_changed(
    run: Run, connection: Connection, intent: Intent, action: str, deferrable: str
) -> None:
    """Guarantee 43: the foreign key refers to another column than the state's key."""
    execute(
        connection,
        f"""
        CREATE TABLE public.canon AS SELECT i AS id, i AS code, i * 10 AS price FROM generate_series(1, 4) i;
        CREATE TABLE public.state (id int PRIMARY KEY, code int UNIQUE, price int);
        INSERT INTO public.state VALUES (1, 1, 0), (2, 22, 20), (3, 33, 30);
        CREATE TABLE public.notes (id int, item int DEFAULT 1 REFERENCES public.state (code) ON UPDATE {action}{deferrable});
        INSERT INTO public.notes VALUES (1, 1), (2, 22);
        """,
    )
    before, application = read(connection, "state"), read(connection, "notes")

    with pytest.raises(RepairRefused, match=r"constraint notes_item_fkey of public\.notes"):
        run(intent)

    left = [(1, 1, 10), (2, 22, 20), (3, 3, 30), (4, 4, 40)] if intent == "repair" else before
    assert (read(connection, "state"), read(connection, "notes")) == (left, application)
    execute(connection, "DELETE FROM public.notes WHERE item = 22")
    assert (run(intent, resume=intent == "repair").resumed is not None) == (intent == "repair")
    assert (read(connection, "notes"), run("compare").clean) == ([(1, 1)], True)


@pytest.mark.parametrize(("intent", "action", "deferrable"), COMBINATIONS)
def test_states_that_refer_to_each_other_are_repaired_together(
    run: Run, flow: Pipeline, connection: Connection, database_url: str, intent: Intent, action: str, deferrable: str
) -> None:
    """Guarantee 43: parents and children are too many, missing and different; rows that are right stay as they are."""
    execute(
        connection,
        f"""
        CREATE TABLE public.canon AS SELECT i AS id, 'c' || i AS name FROM generate_series(1, 5) i;
        CREATE TABLE public.lines_canon AS SELECT i AS id, 1 + i % 5 AS item FROM generate_series(1, 9) i;
        CREATE TABLE public.state (id int PRIMARY KEY, name text UNIQUE);
        INSERT INTO public.state SELECT id, CASE id WHEN 2 THEN 'wrong' ELSE name END FROM public.canon WHERE id <> 3;
        INSERT INTO public.state VALUES (7, 'c3'), (8, 'eight');
        CREATE TABLE public.lines (id int PRIMARY KEY, item int DEFAULT 1 REFERENCES public.state ON DELETE {action} ON UPDATE {action}{deferrable});
        INSERT INTO public.lines SELECT id, CASE id WHEN 4 THEN 8 ELSE item END FROM public.lines_canon WHERE item <> 3 AND id > 1;
        INSERT INTO public.lines VALUES (21, 7);
        """,
    )
    unchanged = "SELECT id, xmin::text FROM public.lines WHERE id IN (3, 5, 8, 9) UNION ALL SELECT id, xmin::text FROM public.state WHERE id IN (1, 4, 5)"
    kept = connection.execute(unchanged).fetchall()

    if intent == "replace":
        run(intent, "lines", "state")
    else:
        run("compare", "lines")
        run("compare")
        specs = [[flow.get_reconciliation(name)] for name in ("lines", "state")]
        connect = partial(connect_postgres, database_url, application="test")
        done = list(reconcile_all(connect, DEFAULT_SCOPE, specs, InlineComparer(database_url), intent="repair"))
        assert [each for each in done if isinstance(each, FailedRun)] == []
        assert [isinstance(each, Reconciled) and each.resumed for each in done if each.name == "state"] != [None]
        assert len(done) == 2
        began = connection.execute("SELECT name FROM penstock.reconciliations WHERE intent = 'repair' ORDER BY id")
        assert began.fetchone() == ("state",), "to which the other one refers"

    assert read(connection, "state") == read(connection, "canon")
    assert read(connection, "lines") == read(connection, "lines_canon")
    assert connection.execute(unchanged).fetchall() == kept


@pytest.mark.parametrize(("deferrable", "top"), [("", "NULL"), (" DEFERRABLE", "id")])
def test_what_is_too_much_in_tables_that_refer_to_each_other_is_deleted(
    run: Run, connection: Connection, deferrable: str, top: str
) -> None:
    """Each foreign key is checked at the end of a statement, or later: children go first, whichever table that is."""
    execute(
        connection,
        f"""
        CREATE TABLE public.canon AS SELECT 1 AS id;
        CREATE TABLE public.lines_canon AS SELECT 1 AS id;
        CREATE TABLE public.state (id int PRIMARY KEY, top int);
        CREATE TABLE public.lines (id int PRIMARY KEY, item int DEFAULT 1 REFERENCES public.state{deferrable});
        ALTER TABLE public.state ADD FOREIGN KEY (top) REFERENCES public.lines{deferrable};
        INSERT INTO public.state VALUES (1), (2);
        INSERT INTO public.lines VALUES (2, 2);
        UPDATE public.state SET top = {top} WHERE id = 2;
        """,
    )
    run("replace", "lines", "state")

    assert (read(connection, "state"), read(connection, "lines")) == ([(1, None)], [(1, 1)])


@pytest.mark.parametrize(("intent", "action", "deferrable"), COMBINATIONS)
def test_rows_that_refer_to_rows_of_their_own_table_are_repaired(
    run: Run, connection: Connection, intent: Intent, action: str, deferrable: str
) -> None:
    execute(
        connection,
        f"""
        CREATE TABLE public.canon (id int, boss int);
        INSERT INTO public.canon VALUES (1, NULL), (2, 1), (3, 4), (4, 1), (5, 5);
        CREATE TABLE public.state (id int PRIMARY KEY, boss int DEFAULT 1 REFERENCES public.state ON DELETE {action}{deferrable});
        INSERT INTO public.state VALUES (1, NULL), (2, 2), (3, 1), (7, 1), (8, 7), (9, 9);
        UPDATE public.state SET boss = 8 WHERE id = 3;
        """,
    )

    run(intent)

    assert (read(connection, "state"), run("compare").clean) == (read(connection, "canon"), True)


@pytest.mark.parametrize("intent", INTENTS)
def test_a_row_without_its_parent_in_the_application_is_refused(
    run: Run, connection: Connection, intent: Intent
) -> None:
    execute(
        connection,
        """
        CREATE TABLE public.parents (id int PRIMARY KEY);
        INSERT INTO public.parents VALUES (1);
        CREATE TABLE public.canon AS SELECT 1 AS id, 2 AS parent;
        CREATE TABLE public.state (id int PRIMARY KEY, parent int REFERENCES public.parents);
        INSERT INTO public.state VALUES (1, 1);
        """,
    )

    with pytest.raises(RepairRefused, match=r"constraint state_parent_fkey of public\.state"):
        run(intent)

    assert (read(connection, "state"), read(connection, "parents")) == ([(1, 1)], [(1,)])


@dataclass(frozen=True)
class Case:
    """A state with a constraint or trigger, its canonical rows as a query, and what its repair is refused for."""

    create: str
    canonical: str
    refused: str = ""
    since: int = 0  # version of Postgres


SWAPPED = "SELECT * FROM (VALUES (1, 1), (2, 2), (3, 3)) v (id, place)"
STATE = "CREATE TABLE public.state (id int PRIMARY KEY, place int{}, note text DEFAULT 'new')"
FILL = "INSERT INTO public.state VALUES (1, 2, 'a'), (2, 1, 'b'), (3, 3, 'c')"
FUNCTION = "CREATE FUNCTION public.intervene() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {} END $$"
TRIGGER = "CREATE TRIGGER watch {} ON public.state FOR EACH ROW EXECUTE FUNCTION public.intervene()"

CASES = {
    "unique": Case(f"{STATE.format(' UNIQUE')}; {FILL}", SWAPPED),
    "unique, deferrable": Case(f"{STATE.format(' UNIQUE DEFERRABLE')}; {FILL}", SWAPPED),
    "unique index": Case(f"{STATE.format('')}; CREATE UNIQUE INDEX ON public.state (place); {FILL}", SWAPPED),
    "unique expression": Case(f"{STATE.format('')}; CREATE UNIQUE INDEX ON public.state ((place * 2)); {FILL}", SWAPPED),
    "partial unique index": Case(
        f"{STATE.format('')}; CREATE UNIQUE INDEX ON public.state (place) WHERE place < 3; {FILL}", SWAPPED
    ),
    "unique nulls not distinct": Case(
        f"{STATE.format(' UNIQUE NULLS NOT DISTINCT')}; INSERT INTO public.state VALUES (1, NULL), (2, 1)",
        "SELECT * FROM (VALUES (1, 1), (2, NULL)) v (id, place)",
        since=15,
    ),
    "unique of several columns": Case(
        f"{STATE.format('')}; ALTER TABLE public.state ADD COLUMN area int DEFAULT 7, ADD UNIQUE (area, place); {FILL}",
        SWAPPED,
    ),
    "two unique constraints": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, a int UNIQUE, b int UNIQUE, note text); INSERT INTO public.state VALUES (1, 2, 3, 'a'), (2, 1, 1, 'b'), (3, 3, 2, 'c')",
        "SELECT i AS id, i AS a, i AS b FROM generate_series(1, 3) i",
    ),
    "unique, round": Case(
        f"{STATE.format(' UNIQUE')}; INSERT INTO public.state VALUES (1, 2), (2, 3), (3, 1)", SWAPPED
    ),
    "unique, moved on": Case(
        f"{STATE.format(' UNIQUE')}; INSERT INTO public.state VALUES (4, 1), (1, 2), (2, 3)", SWAPPED
    ),
    "exclude": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, span int4range, note text, EXCLUDE USING gist (span WITH &&)); "
        "INSERT INTO public.state VALUES (1, '[5,9)', 'a'), (2, '[1,5)', 'b')",
        "SELECT * FROM (VALUES (1, int4range(1, 5)), (2, int4range(5, 9))) v (id, span)",
    ),
    "exclude, deferrable": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, span int4range, EXCLUDE USING gist (span WITH &&) DEFERRABLE); "
        "INSERT INTO public.state VALUES (1, '[5,9)'), (2, '[1,5)')",
        "SELECT * FROM (VALUES (1, int4range(1, 5)), (2, int4range(5, 9))) v (id, span)",
    ),
    "unique that a row keeps": Case(
        f"{STATE.format(' UNIQUE')}; INSERT INTO public.state VALUES (1, 1)",
        "SELECT i AS id, 1 AS place FROM generate_series(1, 2) i",
        r"constraint state_place_key of public\.state",
    ),
    "unique that is referred to": Case(
        f"{STATE.format(' UNIQUE')}; {FILL}; CREATE TABLE public.notes (item int REFERENCES public.state (id) ON DELETE CASCADE); INSERT INTO public.notes VALUES (1)",
        SWAPPED,
        r"because of place, and constraint notes_item_fkey of public\.notes ON DELETE CASCADE",
    ),
    "referred to by two columns": Case(
        f"{STATE.format(', UNIQUE (place, id)')}; INSERT INTO public.state VALUES (1, 1), (2, 2), (3, 3), (9, 4); CREATE TABLE public.notes (item int, place int, "
        "FOREIGN KEY (place, item) REFERENCES public.state (place, id) ON DELETE CASCADE); INSERT INTO public.notes VALUES (9, 4)",
        SWAPPED,
        r"constraint notes_place_item_fkey of public\.notes",
    ),
    "check": Case(
        STATE.format(" CHECK (place < 3)"), SWAPPED, r"constraint state_place_check of public\.state"
    ),
    "not null": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, place int, more int NOT NULL)", SWAPPED, r"column more of public\.state"
    ),
    "domain": Case(
        "CREATE DOMAIN public.small AS int CHECK (VALUE < 3); CREATE TABLE public.state (id int PRIMARY KEY, place public.small)",
        SWAPPED,
        "constraint small_check",
    ),
    "identity always, key": Case(
        "CREATE TABLE public.state (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, place int); INSERT INTO public.state (place) VALUES (1), (9)",
        SWAPPED,
    ),
    "identity always, column": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, place int GENERATED ALWAYS AS IDENTITY, note text); "
        "INSERT INTO public.state (id, place, note) OVERRIDING SYSTEM VALUE VALUES (1, 1, 'a'), (2, 9, 'b')",
        SWAPPED,
    ),
    "identity by default": Case(
        "CREATE TABLE public.state (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, place int)", SWAPPED
    ),
    "generated": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, place int, twice int GENERATED ALWAYS AS (place * 2) STORED); INSERT INTO public.state VALUES (1, 5)",
        "SELECT i AS id, i AS place, i * 2 AS twice FROM generate_series(1, 3) i",
    ),
    "generated, virtual": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, place int, twice int GENERATED ALWAYS AS (place * 2) VIRTUAL); INSERT INTO public.state VALUES (1, 5)",
        "SELECT i AS id, i AS place, i * 2 AS twice FROM generate_series(1, 3) i",
        since=18,
    ),
    "generated, key": Case(
        "CREATE TABLE public.state (base int, place int, id int GENERATED ALWAYS AS (base + 1) STORED UNIQUE)",
        "SELECT i AS id, i - 1 AS base, i AS place FROM generate_series(1, 3) i",
    ),
    "generated, otherwise": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, place int, twice int GENERATED ALWAYS AS (place * 2) STORED)",
        "SELECT 1 AS id, 1 AS place, 3 AS twice",
        r"public\.state .*generated column twice",
    ),
    "partition key": Case(
        "CREATE TABLE public.state (id int, place int, note text) PARTITION BY LIST (place); "
        "CREATE TABLE public.low PARTITION OF public.state FOR VALUES IN (1, 2); CREATE TABLE public.high PARTITION OF public.state DEFAULT; "
        "INSERT INTO public.state VALUES (1, 3, 'a'), (3, 1, 'c'), (4, 1, 'd')",
        SWAPPED,
    ),
    "no partition": Case(
        "CREATE TABLE public.state (id int, place int) PARTITION BY LIST (place); CREATE TABLE public.low PARTITION OF public.state FOR VALUES IN (1, 2)",
        SWAPPED,
        r"CheckViolation in public\.state",
    ),
    "heir": Case(
        f"{STATE.format('')}; CREATE TABLE public.heir () INHERITS (public.state); INSERT INTO public.heir VALUES (2, 9), (7, 7)", SWAPPED
    ),
    "rule instead": Case(
        f"{STATE.format('')}; CREATE RULE ignored AS ON INSERT TO public.state DO INSTEAD NOTHING", SWAPPED, "rule ignored"
    ),
    "rule also": Case(
        f"{STATE.format('')}; CREATE TABLE public.audit (id int); CREATE RULE noted AS ON DELETE TO public.state DO ALSO INSERT INTO public.audit VALUES (old.id); "
        "INSERT INTO public.state VALUES (9, 9)",
        SWAPPED,
    ),
    "rule also, of inserts": Case(
        f"{STATE.format('')}; CREATE TABLE public.audit (id int); CREATE RULE noted AS ON INSERT TO public.state DO ALSO INSERT INTO public.audit VALUES (new.id)",
        SWAPPED,
    ),
    "trigger before, another value": Case(
        f"{STATE.format('')}; {FUNCTION.format('new.place := 7; RETURN new;')}; {TRIGGER.format('BEFORE INSERT OR UPDATE')}",
        SWAPPED,
        "trigger watch",
    ),
    "trigger before, suppresses": Case(
        f"{STATE.format('')}; INSERT INTO public.state VALUES (9); {FUNCTION.format('RETURN NULL;')}; {TRIGGER.format('BEFORE DELETE')}",
        SWAPPED,
        "trigger watch",
    ),
    "trigger before, another column": Case(
        f"{STATE.format('')}; {FILL}; {FUNCTION.format('new.note := now()::text; RETURN new;')}; {TRIGGER.format('BEFORE INSERT OR UPDATE')}",
        SWAPPED,
    ),
    "trigger before, finds a table by the role's search_path": Case(
        f"{STATE.format('')}; {FILL}; {FUNCTION.format('PERFORM FROM canon; RETURN new;')}; {TRIGGER.format('BEFORE INSERT OR UPDATE')}",
        SWAPPED,
    ),
    "trigger raises": Case(
        f"""{STATE.format('')}; {FUNCTION.format("RAISE 'secret %', new.place;")}; {TRIGGER.format('AFTER INSERT')}""",
        SWAPPED,
        r"RaiseException in public\.state, trigger watch",
    ),
    "constraint trigger, deferred": Case(
        f"""{STATE.format('')}; {FUNCTION.format("RAISE 'secret %', new.place;")};
        CREATE CONSTRAINT TRIGGER watch AFTER INSERT ON public.state INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.intervene()""",
        SWAPPED,
        r"RaiseException in public\.state, trigger watch",
    ),
    "trigger after, writes a row that is right": Case(
        f"{STATE.format('')}; INSERT INTO public.state VALUES (1, 1), (2, 9); "
        f"{FUNCTION.format('UPDATE public.state SET place = 7 WHERE id = 1; RETURN NULL;')}; {TRIGGER.format('AFTER INSERT')}",
        SWAPPED,
        "trigger watch",
    ),
    "trigger after, inserts another row": Case(
        f"{STATE.format('')}; {FUNCTION.format('INSERT INTO public.state SELECT new.id + 90, 1 WHERE new.id < 90; RETURN NULL;')}; {TRIGGER.format('AFTER INSERT')}",
        SWAPPED,
        "trigger watch",
    ),
    "trigger after, inserts what was too much": Case(
        f"{STATE.format('')}; INSERT INTO public.state VALUES (9); {FUNCTION.format('INSERT INTO public.state VALUES (old.id); RETURN NULL;')}; {TRIGGER.format('AFTER DELETE')}",
        SWAPPED,
        "trigger watch",
    ),
    "unique that is referred to, taken over": Case(
        f"{STATE.format(' UNIQUE')}; {FILL}; CREATE TABLE public.notes (place int REFERENCES public.state (place) DEFERRABLE); INSERT INTO public.notes VALUES (2)",
        SWAPPED,
    ),
    "view": Case("CREATE TABLE public.base (id int PRIMARY KEY, place int); CREATE VIEW public.state AS TABLE public.base", SWAPPED, r"public\.state is a view"),
    "materialized view": Case(
        "CREATE TABLE public.base (id int PRIMARY KEY, place int); CREATE MATERIALIZED VIEW public.state AS TABLE public.base", SWAPPED, r"public\.state is a view"
    ),
    "columns named like a row": Case(
        "CREATE TABLE public.state (id int PRIMARY KEY, r int UNIQUE, s text); INSERT INTO public.state VALUES (1, 2, 'p'), (2, 1, 'q')",
        "SELECT i AS id, i AS r, 'x' AS s FROM generate_series(1, 3) i",
    ),
    "key whose equality is coarse": Case(
        "CREATE TABLE public.state (id interval PRIMARY KEY, place int); INSERT INTO public.state VALUES ('1 day', 1), ('48:00', 9)",
        "SELECT id::interval, place FROM (VALUES ('24:00', 1), ('48:00', 2)) v (id, place)",
    ),
    "doubled": Case(
        "CREATE TABLE public.state (id int, place int); INSERT INTO public.state VALUES (1, 1), (1, 1), (2, 5), (2, 6), (9, 9), (9, 9)",
        SWAPPED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("intent", INTENTS)
@pytest.mark.parametrize("name", CASES)
def test_what_constrains_a_state_is_respected_or_named(
    run: Run, connection: Connection, intent: Intent, name: str
) -> None:
    """Guarantee 43: the second comparison finds nothing, or the repair was refused and has changed nothing."""
    case = CASES[name]
    if connection.info.server_version < case.since * 10_000:
        pytest.skip(f"Postgres {case.since} has it")
    execute(connection, f"CREATE TABLE public.canon AS {case.canonical}")
    for statement in [case.create] if "$$" in case.create else case.create.split("; "):
        execute(connection, statement)
    before = read(connection, "state")

    if case.refused:
        with pytest.raises(RepairRefused, match=case.refused) as refusal:
            run(intent)
        assert "secret" not in str(refusal.value)
        assert read(connection, "state") == before
    else:
        run(intent)
        assert run("compare").clean
        notes = {row[0]: row[2] for row in before if len(row) > 2 and row[2] in {"a", "b", "c"}}
        if "another column" not in name:
            assert notes.items() <= {row[0]: row[2] for row in read(connection, "state") if notes}.items()


@pytest.mark.parametrize("intent", INTENTS)
def test_an_error_that_passes_is_no_refusal(run: Run, connection: Connection, intent: Intent) -> None:
    execute(connection, f"CREATE TABLE public.canon AS {SWAPPED}; {STATE.format('')}")
    execute(connection, FUNCTION.format("RAISE disk_full;"))
    execute(connection, TRIGGER.format("BEFORE INSERT"))

    with pytest.raises(ServerUnavailable):
        run(intent)


def test_a_whole_repair_leaves_rows_that_are_right_alone(run: Run, connection: Connection) -> None:
    """Guarantee 43: neither written again, nor deleted with what refers to them."""
    execute(
        connection,
        """
        CREATE TABLE public.canon AS SELECT i AS id, 'c' || i AS name FROM generate_series(1, 100) i;
        CREATE TABLE public.state AS TABLE public.canon;
        ALTER TABLE public.state ADD PRIMARY KEY (id), ADD COLUMN note text DEFAULT 'kept';
        CREATE TABLE public.notes AS SELECT i AS id, i AS item FROM generate_series(1, 50) i;
        ALTER TABLE public.notes ADD FOREIGN KEY (item) REFERENCES public.state ON DELETE CASCADE;
        UPDATE public.state SET name = 'wrong', note = 'seen' WHERE id = 50;
        DELETE FROM public.state WHERE id = 99;
        INSERT INTO public.state VALUES (101, 'too many')
        """,
    )
    versions = "SELECT id, xmin::text FROM public.state WHERE id < 99 AND id <> 50 ORDER BY id"
    before = connection.execute(versions).fetchall()

    assert run("replace").repaired == 100

    assert connection.execute(versions).fetchall() == before
    assert run("compare").clean
    assert len(read(connection, "notes")) == 50
    assert connection.execute("SELECT note FROM public.state WHERE id = 50").fetchone() == ("seen",)
