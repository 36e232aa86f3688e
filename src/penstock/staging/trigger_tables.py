"""The triggers that call a rule's function, on the captured table and on those with its rows.

Postgres fires the triggers of a row in the order of their names, byte by byte.  Ours is first: an
application's that writes the row again would otherwise stage the later image before the earlier
one.

A partition gets a trigger on rows from its parent, but none on TRUNCATE.  A table that inherits
(``INHERITS``) gets neither.  Both are created for the tables that are there; the comment of the
trigger lists them, and the columns' types, so that ``penstock doctor`` sees what has changed since.

No statement has a percent sign: Alembic doubles them when it prints SQL.
"""

from collections.abc import Collection
from textwrap import indent

from penstock.database.statements import quote, quote_literal
from penstock.declaring.declarations import CHANGES, Change

FIRST = "!"
"""First character of a trigger on rows: it sorts before letters, digits and the underscore."""

ROW, BEFORE, TRUNCATE = 1, 2, 32
TYPE_BITS: dict[Change, int] = {"insert": 4, "delete": 8, "update": 16}
"""Bits of ``pg_trigger.tgtype``."""

_TREE = """\
WITH RECURSIVE tree AS (
    SELECT to_regclass({table})::oid AS oid
    UNION
    SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
)
SELECT c.oid, c.oid::regclass AS name, c.relispartition AS is_partition,
    quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS full_name
FROM tree
JOIN pg_class c ON c.oid = tree.oid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid <> to_regclass({table}) AND c.relpersistence <> 't'"""

_EXTEND = """DO $penstock$
DECLARE
    part record;
    captured_before jsonb;
BEGIN
    FOR part IN
{tree}
    LOOP
        IF NOT part.is_partition THEN
            EXECUTE {create_row} || part.name || {for_each_row};
        END IF;
        EXECUTE {on_truncate} || part.name || {for_truncate};
    END LOOP;
    SELECT obj_description(oid, 'pg_trigger') INTO captured_before
    FROM pg_trigger
    WHERE tgrelid = to_regclass({table}) AND tgname = {name};
    FOR part IN
        SELECT to_regclass(before.name) AS name
        FROM jsonb_array_elements_text(captured_before -> 'parts') AS before (name)
        WHERE to_regclass(before.name) NOT IN (SELECT oid FROM ({tree_again}) AS parts)
    LOOP
        EXECUTE {drop_row} || part.name;
        EXECUTE {drop_truncate} || part.name;
    END LOOP;
    EXECUTE {comment} || quote_literal(jsonb_build_object(
        'captures', jsonb_build_array({captures}),
        'columns', (
            SELECT jsonb_object_agg(a.attname, t.typname)
            FROM pg_attribute a
            JOIN pg_type t ON t.oid = a.atttypid
            WHERE a.attrelid = to_regclass({table}) AND a.attnum > 0
        ),
        'parts', (SELECT coalesce(jsonb_agg(full_name ORDER BY full_name), '[]') FROM ({tree_again}) AS parts)
    )::text);
END
$penstock$"""  # noqa: E501  SQL

_REMOVE = """DO $penstock$
DECLARE
    part record;
BEGIN
    FOR part IN
{tree}
    LOOP
        EXECUTE {drop_truncate} || part.name;
        IF NOT part.is_partition THEN
            EXECUTE {drop_row} || part.name;
        END IF;
    END LOOP;
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgfoid = to_regprocedure({function})) THEN
        DROP FUNCTION IF EXISTS {function_name}();
    END IF;
END
$penstock$"""


def trigger_types(name: str, on: Collection[Change]) -> dict[str, int]:
    """Returns ``pg_trigger.tgtype`` of each trigger of a rule, by its name.

    That on rows is the first.
    """
    on_rows = {FIRST + name: ROW + sum(TYPE_BITS[change] for change in on)}
    return {**on_rows, f"{name}_truncate": BEFORE + TRUNCATE} if "delete" in on else on_rows


def render_create(
    name: str, function: str, table: str, on: Collection[Change], captures: tuple[str, str]
) -> tuple[str, ...]:
    """Renders the statements that create the triggers, or replace them if they exist.

    The names of the table and of the channel, ``captures``, tell the trigger of a table that was
    renamed since.
    """
    row, truncate = quote(FIRST + name), quote(f"{name}_truncate")
    events = " OR ".join(change.upper() for change in CHANGES if change in on)
    create_row = f"CREATE OR REPLACE TRIGGER {row}\nAFTER {events} ON "
    for_each_row = f"\nFOR EACH ROW EXECUTE FUNCTION {function}()"
    on_truncate, for_truncate = f"DROP TRIGGER IF EXISTS {truncate} ON ", ""
    if "delete" in on:
        on_truncate = f"CREATE OR REPLACE TRIGGER {truncate}\nBEFORE TRUNCATE ON "
        for_truncate = f"\nFOR EACH STATEMENT EXECUTE FUNCTION {function}()"
    tree = _TREE.format(table=quote_literal(table))
    extend = _EXTEND.format(
        tree=indent(tree, " " * 8),
        tree_again=tree,
        table=quote_literal(table),
        name=quote_literal(FIRST + name),
        create_row=quote_literal(create_row),
        for_each_row=quote_literal(for_each_row),
        on_truncate=quote_literal(on_truncate),
        for_truncate=quote_literal(for_truncate),
        drop_row=quote_literal(f"DROP TRIGGER IF EXISTS {row} ON "),
        drop_truncate=quote_literal(f"DROP TRIGGER IF EXISTS {truncate} ON "),
        comment=quote_literal(f"COMMENT ON TRIGGER {row} ON {table} IS "),
        captures=", ".join(map(quote_literal, captures)),
    )
    return f"{create_row}{table}{for_each_row}", f"{on_truncate}{table}{for_truncate}", extend


def render_drop(name: str, function: str, table: str) -> tuple[str, ...]:
    """Renders the drops of the triggers, and of the function unless other triggers call it."""
    drop_row, drop_truncate = (
        f"DROP TRIGGER IF EXISTS {quote(trigger)} ON "
        for trigger in (FIRST + name, f"{name}_truncate")
    )
    remove = _REMOVE.format(
        tree=indent(_TREE.format(table=quote_literal(table)), " " * 8),
        drop_row=quote_literal(drop_row),
        drop_truncate=quote_literal(drop_truncate),
        function=quote_literal(f"{function}()"),
        function_name=function,
    )
    return f"{drop_row}{table}", f"{drop_truncate}{table}", remove
