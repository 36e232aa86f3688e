"""Capture by trigger: for writers that the session's hooks do not see, such as SQL, COPY, other languages, cascades.

A rule with ``capture="trigger"`` becomes a function and a trigger of the class's table, rendered as SQL for a migration.
The hooks and the guard leave such a class alone.  The records have the shape that the hooks would have given them:
names of attributes, and the encoding of ``payload``.

The trigger is AFTER … FOR EACH ROW.  A statement trigger with transition tables is cheaper for bulk statements, but it
cannot pair an old row with its new one, loses the order between the inserts and updates of one statement, and misses
writes to a partition; this one keeps the order per key, tells only of rows that differ, and follows partitions.  The
row's lock is taken before the record's id is drawn.

The function is SECURITY DEFINER with a fixed ``search_path``: writers need no right on Penstock's schema.  Its owner,
whoever runs the migration, does.  TRUNCATE has no rows to tell of and is refused when deletes are told.

Where the two ways differ:

* A trigger sees what is stored, the hooks what the object holds: ``Decimal("5")`` in a ``numeric(9, 2)`` is ``"5.00"``.
* A float NaN or infinity is the word in text; the hooks refuse it.  The payload's size is not limited.
* A key that is NULL, empty or too long fails the writing statement, by SQLSTATE 23514.
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
"""``jsonb_build_object`` is a function like any other: at most 100 arguments."""


def trigger_sql(rule: StagingRule, schema: str) -> list[str]:
    """The statements that create a rule's function and triggers; running them again replaces both.

    Args:
        rule: A rule with ``capture="trigger"``.
        schema: The Penstock schema.

    Raises:
        DeclarationError: The rule, its class or the type of a column is not something that a trigger can follow.
    """
    mapper = _mapper(rule)
    table = _quoted_table(mapper.local_table)
    function = f"{_quoted(schema)}.{_quoted(_name(rule))}"
    name = _quoted(_name(rule))
    events = " OR ".join(
        change.upper() for change in ("insert", "update", "delete") if change in rule.on
    )
    statements = [
        _function(rule, mapper, schema, function),
        f"REVOKE ALL ON FUNCTION {function}() FROM PUBLIC",
        f"CREATE OR REPLACE TRIGGER {name}\nAFTER {events} ON {table}\nFOR EACH ROW EXECUTE FUNCTION {function}()",
    ]
    if "delete" in rule.on:
        statements.append(
            f"CREATE OR REPLACE TRIGGER {_quoted(_name(rule, 'truncate'))}\nBEFORE TRUNCATE ON {table}\n"
            f"FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
        )
    return statements


def drop_trigger_sql(rule: StagingRule, schema: str) -> list[str]:
    """The statements that take a rule's triggers and function away.

    Raises:
        DeclarationError: The rule is not one that a trigger can follow.
    """
    table = _quoted_table(_mapper(rule).local_table)
    return [
        f"DROP TRIGGER IF EXISTS {_quoted(_name(rule))} ON {table}",
        f"DROP TRIGGER IF EXISTS {_quoted(_name(rule, 'truncate'))} ON {table}",
        f"DROP FUNCTION IF EXISTS {_quoted(schema)}.{_quoted(_name(rule))}()",
    ]


def trigger_migration(
    pipeline: Declarations, *, revision: str, down_revision: str | None = None
) -> str:
    """The text of an Alembic migration with the triggers of all rules with ``capture="trigger"``.

    Args:
        pipeline: Where the rules are declared.
        revision: Identity of the migration.
        down_revision: The migration before it; one that comes after Penstock's own tables.

    Raises:
        DeclarationError: No rule has ``capture="trigger"``, two of them tell the same, or one cannot be followed.
    """
    rules = [rule for rule in pipeline.rules if rule.capture == "trigger"]
    if not rules:
        raise DeclarationError('no staging rule has capture="trigger": there is nothing to migrate')
    if len({_name(rule) for rule in rules}) < len(rules):
        raise DeclarationError(
            "two trigger rules tell the same channel of the same table under the same object"
        )
    up = [sql for rule in rules for sql in trigger_sql(rule, pipeline.schema)]
    down = [sql for rule in reversed(rules) for sql in drop_trigger_sql(rule, pipeline.schema)]
    return _MIGRATION.format(
        revision=revision,
        down=down_revision,
        up=_python_list(up),
        drop=_python_list(down),
    )


_MIGRATION = '''"""Penstock's triggers: changes of these tables are staged, whoever makes them.

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
        op.execute(statement.replace(":", r"\\:"))  # a colon would begin the name of a parameter


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement.replace(":", r"\\:"))
'''


def _python_list(statements: Iterable[str]) -> str:
    """The statements as Python, a line of SQL a line."""
    lines: list[str] = []
    for statement in statements:
        parts = [repr(part) for part in statement.splitlines(keepends=True)]
        lines += ["    (", *(f"        {part}" for part in parts), "    ),"]
    return "\n".join(lines) + "\n"


def _mapper(rule: StagingRule) -> Mapper[Any]:
    """The rule's mapper, if a trigger can follow it."""
    if rule.capture != "trigger":
        raise _impossible(rule, 'capture is not "trigger"')
    mapper: Mapper[Any] = class_mapper(rule.type)
    if not isinstance(mapper.local_table, Table):
        raise _impossible(rule, "the class is not mapped to a table")
    if mapper.inherits is not None or len(list(mapper.self_and_descendants)) > 1:
        raise _impossible(
            rule, "a trigger sees one table, and not the classes that inherit from each other in it"
        )
    return mapper


def _function(rule: StagingRule, mapper: Mapper[Any], schema: str, function: str) -> str:
    names = column_names(mapper) if rule.data is None else tuple(rule.data)  # type: ignore[arg-type]  # not callable
    columns = {name: _column(rule, mapper, name) for name in (*names, str(rule.key))}
    key = _key(rule, columns[str(rule.key)])
    pairs = [f"{_literal(name)}, {_json(rule, columns[name], name)}" for name in names]
    objects = [
        f"jsonb_build_object({', '.join(pairs[start : start + _PAIRS_A_CALL])})"
        for start in range(0, len(pairs), _PAIRS_A_CALL)
    ]
    told = {
        "staged": f"{_quoted(schema)}.staged_records",
        "channel": _literal(rule.channel.name),
        "shards": rule.channel.shards,
        "object": _literal(object_name(rule)),
    }
    is_ick = isinstance(rule.channel, Ick)
    former = key.replace("penstock_row.", "OLD.", 1)
    return _FUNCTION.format(
        **told,
        function=function,
        key=key,
        limit=MAX_KEY_CHARACTERS,
        when=_condition(rule),
        members=_MEMBERS.format(**told, former=former) if is_ick else "",
        payload=" || ".join(objects) or "'{}'::jsonb",
    )


# No percent sign in it: Alembic doubles them when it prints SQL.
_FUNCTION = """CREATE OR REPLACE FUNCTION {function}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET intervalstyle = 'iso_8601'
AS $penstock$
DECLARE
    penstock_row record;
    penstock_key text;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'restrict_violation',
            MESSAGE = 'penstock: TRUNCATE of ' || TG_TABLE_NAME || ' would remove rows without telling; use DELETE';
    ELSIF TG_OP = 'DELETE' THEN
        penstock_row := OLD;
    ELSIF TG_OP = 'UPDATE' AND OLD *= NEW THEN
        RETURN NULL;
    ELSE
        penstock_row := NEW;
    END IF;
{when}    penstock_key := {key};
{members}    IF penstock_key IS NULL OR length(penstock_key) NOT BETWEEN 1 AND {limit} THEN
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


# Who was another member before is dirty as that one too; NULL is no member.
_MEMBERS = """    IF TG_OP = 'UPDATE' AND {former} IS DISTINCT FROM penstock_key AND {former} IS NOT NULL THEN
        INSERT INTO {staged} (channel, shard, key, action, object, data)
        VALUES (
            {channel},
            mod(('x' || encode(substr(sha256(convert_to({former}, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, {shards}),
            {former},
            lower(TG_OP),
            {object},
            '{{}}'
        );
    END IF;
    IF penstock_key IS NULL THEN
        RETURN NULL;
    END IF;
"""


def _condition(rule: StagingRule) -> str:
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


def _column(rule: StagingRule, mapper: Mapper[Any], name: str) -> Column[Any]:
    if name not in mapper.column_attrs:
        raise _impossible(rule, f"{name} is no column")
    column = mapper.column_attrs[name].columns[0]
    if not isinstance(column, Column):
        raise _impossible(rule, f"{name} is computed by the mapper, not stored")
    return column


def _key(rule: StagingRule, column: Column[Any]) -> str:
    kind = _plain_type(column.type)
    is_text = isinstance(kind, types.String) and not isinstance(kind, (types.Enum, types.CHAR))
    if not (is_text or isinstance(kind, (types.Integer, types.Uuid))):
        raise _impossible(
            rule, f"its key is of type {column.type!r}; it takes text, integer or uuid"
        )
    return f"penstock_row.{_quoted(column.name)}::text"


def _json(rule: StagingRule, column: Column[Any], name: str) -> str:
    """The column as the hooks would write its value."""
    value = f"penstock_row.{_quoted(column.name)}"
    kind = _plain_type(column.type)
    written = _expression(kind, value)
    if written is None:
        raise _impossible(
            rule,
            f"{name} is of type {column.type!r}, which a trigger cannot write as the hooks would: "
            "list the attributes without it in data",
        )
    return written


def _expression(kind: types.TypeEngine[Any], value: str) -> str | None:  # noqa: PLR0911  a table, in order
    if isinstance(kind, types.Enum):
        return _enum(kind, value)
    if isinstance(kind, types.DateTime):
        zone, offset = (" AT TIME ZONE 'UTC'", '"+00:00"') if kind.timezone else ("", "")
        return f"""to_char({value}{zone}, 'YYYY-MM-DD"T"HH24:MI:SS.US{offset}')"""
    if isinstance(kind, types.Time):
        return None if kind.timezone else f"to_char({value}, 'HH24:MI:SS.US')"
    if isinstance(kind, (types.Numeric, types.Float)):
        return f"{value}::text" if kind.asdecimal else f"{value}::float8"
    if isinstance(kind, (types.Uuid, postgresql.INTERVAL)):
        return f"{value}::text"
    if isinstance(kind, types.JSON):
        return f"{value}::jsonb"
    if isinstance(kind, types.ARRAY):
        inner = _plain_type(kind.item_type)
        return (
            value
            if isinstance(inner, _SAME_IN_BOTH) and not isinstance(inner, types.Enum)
            else None
        )
    return value if isinstance(kind, _SAME_IN_BOTH) else None


_CONVERSIONS = ("process_bind_param", "process_result_value", "bind_processor", "result_processor")
"""What a ``TypeDecorator`` overrides to change values."""

_SAME_IN_BOTH = (types.String, types.Integer, types.Boolean, types.Date)
"""What ``to_jsonb`` writes as ``json.dumps`` does."""


def _enum(kind: types.Enum, value: str) -> str:
    """Postgres stores the label, as a rule the member's name; the record has the member's value."""
    if kind.enum_class is None:
        return value if kind.native_enum is False else f"{value}::text"
    members = list(kind.enum_class)
    cases = " ".join(
        f"WHEN {_literal(label)} THEN {_literal(json_text(member, 'data', 1024 * 1024))}::jsonb"
        for label, member in zip(kind.enums, members, strict=True)
    )
    return f"(CASE {value}::text {cases} END)"


def _plain_type(kind: types.TypeEngine[Any]) -> types.TypeEngine[Any]:
    """The type behind a ``TypeDecorator`` that changes no value; any other decorator is returned as it is."""
    if isinstance(kind, types.Interval):
        return postgresql.INTERVAL()
    if isinstance(kind, types.TypeDecorator):
        base: type[types.TypeDecorator[Any]] = types.TypeDecorator
        if all(getattr(type(kind), name) is getattr(base, name) for name in _CONVERSIONS):
            return kind.impl_instance
    return kind


def _name(rule: StagingRule, suffix: str = "") -> str:
    """Name of the function and the trigger: the same for every version of the rule, within 63 bytes."""
    table: Any = class_mapper(rule.type).local_table
    identity = "\n".join((table.schema or "", table.name, rule.channel.name, object_name(rule)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    readable = "".join(
        c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in table.name[:30]
    )
    return "_".join(part for part in ("stage", readable, digest, suffix) if part)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quoted_table(table: Any) -> str:
    return f"{_quoted(table.schema)}.{_quoted(table.name)}" if table.schema else _quoted(table.name)


def _literal(value: str) -> str:
    """A string literal, also where ``standard_conforming_strings`` is off."""
    quoted = value.replace("'", "''")
    return f" E'{quoted.replace(chr(92), chr(92) * 2)}'" if "\\" in quoted else f"'{quoted}'"


def _impossible(rule: StagingRule, reason: str) -> DeclarationError:
    return DeclarationError(f"staging rule of {rule.type.__name__} as a trigger: {reason}")
