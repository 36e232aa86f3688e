"""Capture by trigger, for writers that the session's hooks do not see: SQL, COPY, other languages, cascades.

A rule with ``capture="trigger"`` becomes a function and a trigger on the class's table, rendered as SQL for a migration.
The hooks and the guard ignore such a class.  The records have the same shape as those of the hooks: the attributes'
names, and the encoding of ``payload``.

The trigger is AFTER … FOR EACH ROW.  A statement trigger with transition tables is cheaper for bulk statements, but it
cannot pair an old row with its new one, loses the order between the inserts and updates of one statement, and misses
writes to a partition.  This one keeps the order per key, stages only rows that differ, and covers partitions.  The
row's lock is taken before the record's id is drawn.

The function is SECURITY DEFINER with a fixed ``search_path``: writers need no privilege on Penstock's schema.  Its
owner, the role that runs the migration, needs USAGE on it and INSERT on ``staged_records``.  TRUNCATE has no rows to
stage and is refused if the rule stages deletes.

Differences between triggers and hooks:

* A trigger sees the stored value, the hooks the object's: ``Decimal("5")`` in a ``numeric(9, 2)`` is ``"5.00"``.
* A trigger writes a float NaN or infinity as text; the hooks refuse it.  A trigger does not limit the payload's size.
* A trigger writes an infinite time as ``"infinity"``, and a year before 1 with ``BC`` behind it; Python has neither.
* A key that is NULL, empty or too long fails the writing statement with SQLSTATE 23514.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Column, Table, types
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Mapper, class_mapper

from penstock.declarations import Ick, StagingRule
from penstock.errors import DeclarationError
from penstock.staging.payload import MAX_KEY_CHARACTERS, json_text
from penstock.staging.rules import Declarations, column_names, object_name

_PAIRS_A_CALL = 50
"""A Postgres function takes at most 100 arguments, and so does ``jsonb_build_object``."""


def trigger_sql(rule: StagingRule, schema: str) -> list[str]:
    """Returns the statements that create a rule's function and triggers, or replace them if they exist.

    Args:
        rule: A rule with ``capture="trigger"``.
        schema: The Penstock schema.

    Raises:
        DeclarationError: The rule has another capture, or a trigger cannot capture its class or one of its columns.
    """
    mapper = _get_mapper(rule)
    table = _quote_table(mapper.local_table)
    function = f"{_quote(schema)}.{_quote(_make_name(rule))}"
    name = _quote(_make_name(rule))
    events = " OR ".join(
        change.upper() for change in ("insert", "update", "delete") if change in rule.on
    )
    statements = [
        _render_function(rule, mapper, schema, function),
        f"REVOKE ALL ON FUNCTION {function}() FROM PUBLIC",
        f"CREATE OR REPLACE TRIGGER {name}\nAFTER {events} ON {table}\nFOR EACH ROW EXECUTE FUNCTION {function}()",
    ]
    if "delete" in rule.on:
        statements.append(
            f"CREATE OR REPLACE TRIGGER {_quote(_make_name(rule, 'truncate'))}\nBEFORE TRUNCATE ON {table}\n"
            f"FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
        )
    return statements


def drop_trigger_sql(rule: StagingRule, schema: str) -> list[str]:
    """Returns the statements that drop a rule's triggers and function.

    Raises:
        DeclarationError: The rule has another capture, or a trigger cannot capture its class.
    """
    table = _quote_table(_get_mapper(rule).local_table)
    return [
        f"DROP TRIGGER IF EXISTS {_quote(_make_name(rule))} ON {table}",
        f"DROP TRIGGER IF EXISTS {_quote(_make_name(rule, 'truncate'))} ON {table}",
        f"DROP FUNCTION IF EXISTS {_quote(schema)}.{_quote(_make_name(rule))}()",
    ]


def trigger_migration(
    pipeline: Declarations, *, revision: str, down_revision: str | None = None
) -> str:
    """Returns the source of an Alembic migration that creates the triggers of all rules with ``capture="trigger"``.

    Args:
        pipeline: Declares the rules.
        revision: Id of the migration.
        down_revision: Id of the migration before it.  Penstock's own tables must exist by then.

    Raises:
        DeclarationError: No rule has ``capture="trigger"``, two of them stage the same changes, or one cannot be
            captured by a trigger.
    """
    rules = [rule for rule in pipeline.rules if rule.capture == "trigger"]
    if not rules:
        raise DeclarationError('no staging rule has capture="trigger": there is nothing to migrate')
    if len({_make_name(rule) for rule in rules}) < len(rules):
        raise DeclarationError(
            "two trigger rules stage the same table to the same channel under the same object name"
        )
    up = [sql for rule in rules for sql in trigger_sql(rule, pipeline.scope.schema)]
    down = [
        sql for rule in reversed(rules) for sql in drop_trigger_sql(rule, pipeline.scope.schema)
    ]
    return _MIGRATION.format(
        revision=revision,
        down=down_revision,
        up=_render_list(up),
        drop=_render_list(down),
    )


_MIGRATION = '''"""Penstock's triggers: stage changes to these tables, whichever client makes them.

Revision ID: {revision}
Revises: {down}
"""

from alembic import op

revision = {revision!r}
down_revision = {down!r}
branch_labels = None
depends_on = None

UP = [
{up}]

DOWN = [
{drop}]


def upgrade() -> None:
    for statement in UP:
        op.execute(statement.replace(":", r"\\:"))  # text() would take a colon for a parameter


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement.replace(":", r"\\:"))
'''


def _render_list(statements: Iterable[str]) -> str:
    """Renders the statements as the items of a Python list, one source line for each line of SQL."""
    lines: list[str] = []
    for statement in statements:
        parts = [repr(part) for part in statement.splitlines(keepends=True)]
        lines += ["    (", *(f"        {part}" for part in parts), "    ),"]
    return "\n".join(lines) + "\n"


def _get_mapper(rule: StagingRule) -> Mapper[Any]:
    """Returns the rule's mapper, if a trigger can capture it."""
    if rule.capture != "trigger":
        raise _make_error(rule, 'capture is not "trigger"')
    mapper: Mapper[Any] = class_mapper(rule.type)
    if not isinstance(mapper.local_table, Table):
        raise _make_error(rule, "the class is not mapped to a table")
    if mapper.inherits is not None or len(list(mapper.self_and_descendants)) > 1:
        raise _make_error(
            rule,
            "the class takes part in inheritance; a trigger sees one table, and cannot tell the classes apart",
        )
    return mapper


def _render_function(rule: StagingRule, mapper: Mapper[Any], schema: str, function: str) -> str:
    names = column_names(mapper) if rule.data is None else tuple(rule.data)  # type: ignore[arg-type]  # not callable
    columns = {name: _get_column(rule, mapper, name) for name in (*names, str(rule.key))}
    key = _render_key(rule, columns[str(rule.key)])
    pairs = [f"{_quote_literal(name)}, {_render_json(rule, columns[name], name)}" for name in names]
    objects = [
        f"jsonb_build_object({', '.join(pairs[start : start + _PAIRS_A_CALL])})"
        for start in range(0, len(pairs), _PAIRS_A_CALL)
    ]
    parts = {
        "staged": f"{_quote(schema)}.staged_records",
        "channel": _quote_literal(rule.channel.name),
        "shards": rule.channel.shards,
        "object": _quote_literal(object_name(rule)),
    }
    is_ick = isinstance(rule.channel, Ick)
    old_key = key.replace("penstock_row.", "OLD.", 1)
    return _FUNCTION.format(
        **parts,
        function=function,
        key=key,
        limit=MAX_KEY_CHARACTERS,
        when=_render_condition(rule),
        old_member=_OLD_MEMBER.format(**parts, old_key=old_key) if is_ick else "",
        payload=" || ".join(objects) or "'{}'::jsonb",
    )


# It has no percent sign: Alembic doubles them when it prints SQL.
_FUNCTION = """CREATE OR REPLACE FUNCTION {function}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET intervalstyle = 'iso_8601'
SET extra_float_digits = 1
SET datestyle = 'ISO, YMD'
SET timezone = 'UTC'
SET standard_conforming_strings = on
AS $penstock$
DECLARE
    penstock_row record;
    penstock_key text;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'restrict_violation',
            MESSAGE = 'penstock: TRUNCATE of ' || TG_TABLE_NAME || ' would remove rows without staging them; use DELETE';
    ELSIF TG_OP = 'DELETE' THEN
        penstock_row := OLD;
    ELSIF TG_OP = 'UPDATE' AND OLD *= NEW THEN
        RETURN NULL;
    ELSE
        penstock_row := NEW;
    END IF;
{when}    penstock_key := {key};
{old_member}    IF penstock_key IS NULL OR length(penstock_key) NOT BETWEEN 1 AND {limit} THEN
        RAISE EXCEPTION USING
            ERRCODE = 'check_violation',
            MESSAGE = 'penstock: the key of a row of ' || TG_TABLE_NAME
                || ' is NULL, empty or longer than {limit} characters';
    END IF;
    INSERT INTO {staged} (channel, shard, key, action, object, data)
    VALUES (
        {channel},
        mod(('x' || encode(substr(sha256(convert_to(penstock_key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, {shards}),
        penstock_key,
        lower(TG_OP),
        {object},
        {payload}
    );
    RETURN NULL;
END
$penstock$"""


# An update that changes the member marks the old one too; NULL marks nothing.
_OLD_MEMBER = """    IF TG_OP = 'UPDATE' AND {old_key} IS DISTINCT FROM penstock_key AND {old_key} IS NOT NULL THEN
        INSERT INTO {staged} (channel, shard, key, action, object, data)
        VALUES (
            {channel},
            mod(('x' || encode(substr(sha256(convert_to({old_key}, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, {shards}),
            {old_key},
            lower(TG_OP),
            {object},
            '{{}}'
        );
    END IF;
    IF penstock_key IS NULL THEN
        RETURN NULL;
    END IF;
"""


def _render_condition(rule: StagingRule) -> str:
    if not isinstance(rule.when, str):
        return ""
    return (
        "    IF (\n"
        "        SELECT (\n"
        f"{rule.when}\n"
        "        ) FROM (SELECT penstock_row.*) AS changed\n"
        "    ) IS NOT TRUE THEN\n"
        "        RETURN NULL;\n"
        "    END IF;\n"
    )


def _get_column(rule: StagingRule, mapper: Mapper[Any], name: str) -> Column[Any]:
    if name not in mapper.column_attrs:
        raise _make_error(rule, f"{name} is not a column")
    column = mapper.column_attrs[name].columns[0]
    if not isinstance(column, Column):
        raise _make_error(rule, f"{name} is computed by the mapper, not stored")
    return column


def _render_key(rule: StagingRule, column: Column[Any]) -> str:
    kind = _unwrap_type(column.type)
    is_text = isinstance(kind, types.String) and not isinstance(kind, (types.Enum, types.CHAR))
    if not (is_text or isinstance(kind, (types.Integer, types.Uuid))):
        raise _make_error(
            rule, f"its key is of type {column.type!r}; it takes text, integer or uuid"
        )
    return f"penstock_row.{_quote(column.name)}::text"


def _render_json(rule: StagingRule, column: Column[Any], name: str) -> str:
    """Renders the expression that encodes a column as the hooks encode its value."""
    value = f"penstock_row.{_quote(column.name)}"
    kind = _unwrap_type(column.type)
    written = _render_expression(kind, value)
    if written is None:
        raise _make_error(
            rule,
            f"{name} is of type {column.type!r}, which a trigger cannot encode as the hooks do: "
            "leave it out by listing the other attributes in data",
        )
    return written


def _render_expression(kind: types.TypeEngine[Any], value: str) -> str | None:  # noqa: PLR0911  one case a type
    if isinstance(kind, types.Enum):
        return _render_enum(kind, value)
    if isinstance(kind, types.DateTime):
        zone, offset = (" AT TIME ZONE 'UTC'", '"+00:00"') if kind.timezone else ("", "")
        return _render_timestamp(f"{value}{zone}", f'YYYY-MM-DD"T"HH24:MI:SS.US{offset}')
    if isinstance(kind, types.Time):
        return None if kind.timezone else f"to_char({value}, 'HH24:MI:SS.US')"
    if isinstance(kind, (types.Numeric, types.Float)):
        return f"{value}::text" if kind.asdecimal else f"{value}::float8"
    if isinstance(kind, (types.Uuid, postgresql.INTERVAL)):
        return f"{value}::text"
    if isinstance(kind, types.JSON):
        return f"{value}::jsonb"
    if isinstance(kind, types.ARRAY):
        inner = _unwrap_type(kind.item_type)
        return (
            value
            if isinstance(inner, _SAME_IN_BOTH) and not isinstance(inner, types.Enum)
            else None
        )
    return value if isinstance(kind, _SAME_IN_BOTH) else None


def _render_timestamp(value: str, form: str) -> str:
    """Infinity, which has no digits, is a word; a year before 1 has ``BC`` behind it, as in Postgres' own JSON."""
    era = f"CASE WHEN {value} < timestamp '0001-01-01' THEN ' BC' ELSE '' END"
    return f"coalesce(to_char({value}, '{form}' || {era}), ({value})::text)"


_CONVERSIONS = ("process_bind_param", "process_result_value", "bind_processor", "result_processor")
"""Methods that a ``TypeDecorator`` overrides to convert values."""

_SAME_IN_BOTH = (types.String, types.Integer, types.Boolean, types.Date)
"""Types that ``to_jsonb`` encodes as ``json.dumps`` does."""


def _render_enum(kind: types.Enum, value: str) -> str:
    """Maps labels to values: Postgres stores the label, usually the member's name; the record holds the value."""
    if kind.enum_class is None:
        return value if kind.native_enum is False else f"{value}::text"
    members = list(kind.enum_class)
    cases = " ".join(
        f"WHEN {_quote_literal(label)} THEN {_quote_literal(json_text(member, 'data', 1024 * 1024))}::jsonb"
        for label, member in zip(kind.enums, members, strict=True)
    )
    return f"(CASE {value}::text {cases} END)"


def _unwrap_type(kind: types.TypeEngine[Any]) -> types.TypeEngine[Any]:
    """Returns the type inside a ``TypeDecorator`` that converts no values, and any other type unchanged."""
    if isinstance(kind, types.Interval):
        return postgresql.INTERVAL()
    if isinstance(kind, types.TypeDecorator):
        base: type[types.TypeDecorator[Any]] = types.TypeDecorator
        if all(getattr(type(kind), name) is getattr(base, name) for name in _CONVERSIONS):
            return kind.impl_instance
    return kind


def _make_name(rule: StagingRule, suffix: str = "") -> str:
    """Makes the name of the function and the trigger: the same for each version of the rule, at most 63 bytes."""
    table: Any = class_mapper(rule.type).local_table
    identity = "\n".join((table.schema or "", table.name, rule.channel.name, object_name(rule)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    readable = "".join(
        c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in table.name[:30]
    )
    return "_".join(part for part in ("stage", readable, digest, suffix) if part)


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quote_table(table: Any) -> str:
    return f"{_quote(table.schema)}.{_quote(table.name)}" if table.schema else _quote(table.name)


def _quote_literal(value: str) -> str:
    """Renders a string literal that also works with ``standard_conforming_strings`` off."""
    quoted = value.replace("'", "''")
    return f" E'{quoted.replace(chr(92), chr(92) * 2)}'" if "\\" in quoted else f"'{quoted}'"


def _make_error(rule: StagingRule, reason: str) -> DeclarationError:
    return DeclarationError(f"staging rule of {rule.type.__name__}, capture by trigger: {reason}")
