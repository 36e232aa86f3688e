"""A canonical value is compared and written as the state's column holds it, whatever the two types are."""

import pytest

from fixtures.assignments import BETWEEN_FLOATS, create_assignments
from fixtures.reconciling import Run
from penstock.database.connections import Connection
from penstock.errors import Refused
from penstock.reconciling.reconciliation import Intent


@pytest.mark.slow
def test_what_a_column_holds_of_another_type_is_equal(run: Run, connection: Connection) -> None:
    """Guarantee 43: all pairs of types that Postgres casts on assignment."""
    pairs = create_assignments(connection)
    assert len(pairs) > 300, "with one value or more each"

    found = run("TABLE public.canon").comparison
    assert found is not None
    differing = [pairs[name] for name in found.by_column]
    assert [each for each in differing if each[0] not in BETWEEN_FLOATS] == []

    intents: tuple[Intent, ...] = ("repair", "replace")
    for intent in intents:
        connection.execute("DELETE FROM public.state")
        run("TABLE public.canon", intent)
        again = run("TABLE public.canon").comparison
        assert again is not None
        assert (intent, [pairs[name] for name in again.by_column], again.equal) == (intent, [], True)


NEVER_HELD = {
    "too long": ("varchar(3)", "text 'abcd'"),
    "too long, spaces": ("varchar(3)", "text 'abc   '"),
    "too long, in an array": ("varchar(3)[]", "ARRAY['abcd']"),
    "too long, char": ("char(3)", "text 'abcd'"),
    "too long, bits": ("bit(3)", "bit '1010'"),
    "overflow": ("int", "5000000000"),
    "overflow, numeric": ("numeric(4, 2)", "1234.5"),
    "no number": ("int", "text 'seven'"),
    "no label": ("public.mood", "text 'angry'"),
    "no document": ("jsonb", "text '{'"),
    "no date": ("date", "text 'tomorrow or so'"),
    "domain": ("public.positive", "-1"),
    "domain of text": ("public.short", "text 'abcd'"),
}


@pytest.mark.parametrize("intent", ["repair", "replace"])
@pytest.mark.parametrize("name", NEVER_HELD)
def test_a_value_that_no_column_can_hold_is_refused_by_name(
    run: Run, connection: Connection, intent: Intent, name: str
) -> None:
    """Guarantee 43: and without the value."""
    type_, value = NEVER_HELD[name]
    connection.execute("CREATE TYPE public.mood AS ENUM ('sad', 'glad')")
    connection.execute("CREATE DOMAIN public.positive AS int CHECK (VALUE > 0)")
    connection.execute("CREATE DOMAIN public.short AS varchar(3)")
    connection.execute(f"CREATE TABLE public.state (id int PRIMARY KEY, v {type_})".encode())
    connection.execute("INSERT INTO public.state VALUES (2)")

    with pytest.raises(Refused, match=r"'v' of public\.state|constraint positive_check") as refusal:
        run(f"SELECT 1 AS id, {value} AS v", intent)

    assert value.removeprefix("text ").strip("'") not in str(refusal.value)
    assert connection.execute("SELECT id FROM public.state").fetchall() == [(2,)]


CONVERGING = {
    "text of a number": ("text", "1.50::numeric", ["1.5", "one"]),
    "text of a time": ("text", "timestamptz '2026-01-01 00:00Z'", ["2026-01-01T00:00:00+00:00", "today"]),
    "a number that only its text is cast to": ("numeric", "oid '5'", ["5", "6"]),
    "a number that is rounded": ("int", "1.5::numeric", ["2", "1"]),
    "json": ("json", """'{"a": 1}'::jsonb""", ['{"a":1}', '{"a": 2}', '"a"']),
    "jsonb": ("jsonb", """'{"b":1,  "a":1}'::json""", ['{"a":1,"b":1}', "[]"]),
}


@pytest.mark.parametrize("name", CONVERGING)
def test_text_that_means_the_canonical_value_is_equal_and_any_other_is_repaired(
    run: Run, connection: Connection, name: str
) -> None:
    """Guarantee 43: a handler writes a value's text in the form in which the record has it."""
    type_, canonical, (equal, *others) = CONVERGING[name]
    query = f"SELECT 1 AS id, {canonical} AS v"
    connection.execute(f"CREATE TABLE public.state (id int PRIMARY KEY, v {type_})".encode())
    connection.execute(f"INSERT INTO public.state VALUES (1, %s::text::{type_})".encode(), (equal,))
    assert run(query).clean
    for other in others:
        connection.execute(f"UPDATE public.state SET v = %s::text::{type_}".encode(), (other,))
        assert not run(query).clean
        assert run(query, "repair").repaired == 1
        assert run(query).clean
