"""Makes the roles: what is missing in a database, as statements.

Or all of it, as a script for an administrator.
"""

from dataclasses import dataclass
from typing import Any

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.database.tables import DOMAINS, FUNCTIONS, TABLE_NAMES
from penstock.errors import InvalidName, PrivilegeMissing, SchemaMissing
from penstock.records import Scope, checked_schema
from penstock.schema.roles import (
    ROLE_NAMES,
    Right,
    RoleName,
    describe,
    grant_sql,
    object_sql,
    revoke_sql,
    rights,
)

_WORKING: tuple[RoleName, ...] = ROLE_NAMES[1:]
"""The roles that live by their privileges; the owner owns."""

_MAX_PREFIX = 63 - len("_producer")

_WRITES = {"INSERT", "UPDATE", "DELETE", "TRUNCATE"}


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The statements that make the roles in a database, none if all is as it should be.

    ``notes`` are the steps that this connection cannot take, and who can.
    """

    statements: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Present:
    """The roles as they are."""

    roles: set[str]  # those that exist, by their names in Postgres
    foreign: list[tuple[Any, ...]]  # kind and name of what another role owns in the schema
    granted: dict[str, set[Right]]  # the rights of each role, of ours and of others
    acts_as_owner: bool  # true if this connection's role inherits the owner's
    reads_new_tables: bool  # true if the viewer may read tables that the owner creates
    sees_activity: bool  # true if the viewer sees what others do in ``pg_stat_activity``
    may_show_activity: bool  # true if this connection's role can let it


def plan_roles(connection: Connection, schema: str, prefix: str) -> RolePlan:
    """Plans the statements for the roles of a schema.

    Missing roles, foreign owners, missing and surplus privileges.  The connection's role must be a
    superuser, or own schema and tables and have CREATEROLE.
    """
    names = _full_names(prefix)
    with postgres_errors("reading roles and privileges"):
        present = _read_present(Store(connection, Scope(schema)), names)
    shows = present.sees_activity or present.may_show_activity
    planned = [
        *(
            f"CREATE ROLE {quote(name)} NOLOGIN"
            for name in names.values()
            if name not in present.roles
        ),
        *_own(present, schema, names["owner"]),
        *(sql for role in _WORKING for sql in _grant(present, schema, role, names[role])),
        *([] if present.reads_new_tables else [_let_read_new_tables(schema, names)]),
        *([_show_activity(names)] if shows and not present.sees_activity else []),
    ]
    note = (
        f"Not part of it, because only a superuser may: {_show_activity(names)}; without it, "
        "penstock doctor run as a viewer does not see the long transactions of others"
    )
    notes = [*_note_others(present, schema, names), *([] if shows else [note])]
    return RolePlan(tuple(planned), tuple(notes))


def make_roles(connection: Connection, schema: str, prefix: str) -> RolePlan:
    """Carries out the plan in one transaction; returns the plan."""
    with postgres_errors("making the roles"), connection.transaction():
        Store(connection, Scope(schema)).execute("lock_migrations")
        plan = plan_roles(connection, schema, prefix)
        for statement in plan.statements:
            connection.execute(statement.encode())
        # Postgres only warns of a GRANT by a role that has a privilege and may not pass it on.
        if remaining := plan_roles(connection, schema, prefix).statements:
            raise PrivilegeMissing(
                f"making the roles: this role may not {remaining[0]}. Nothing was changed. Run it "
                "as a superuser, or give an administrator the script: penstock init --roles --sql"
            )
    return plan


def roles_sql(schema: str, prefix: str) -> str:
    """Returns the script that makes the roles in any database, for an administrator and psql."""
    names = _full_names(prefix)
    checked_schema(schema)
    workers = ", ".join(quote(names[role]) for role in _WORKING)
    granted = [("TABLE", name) for name in TABLE_NAMES] + [("FUNCTION", name) for name in FUNCTIONS]
    owned = [*granted, *(("DOMAIN", name) for name in DOMAINS)]
    create = (
        "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{}') THEN CREATE "
        "ROLE {} NOLOGIN; END IF; END $$"
    )
    join = (
        "DO $$ BEGIN IF NOT pg_has_role('{}', 'USAGE') THEN GRANT {} TO CURRENT_USER; END IF; "
        "END $$"
    )
    parts = [
        "BEGIN",
        *(create.format(name, quote(name)) for name in names.values()),
        join.format(names["owner"], quote(names["owner"])),
        *grant_sql(rights("owner"), schema, names["owner"]),
        *(_hand_over(kind, name, schema, names["owner"]) for kind, name in owned),
        *(
            f"REVOKE ALL ON {object_sql(kind, name, schema)} FROM {workers}"
            for kind, name in [("SCHEMA", ""), *granted, ("SEQUENCE", "staged_records_id_seq")]
        ),
        *(sql for role in _WORKING for sql in grant_sql(rights(role), schema, names[role])),
        _let_read_new_tables(schema, names),
        "COMMIT",
    ]
    remark = "\n-- As a superuser, for the viewer to see the long transactions of others:\n"
    return "".join(f"{part};\n" for part in parts) + remark + f"-- {_show_activity(names)};\n"


def _full_names(prefix: str) -> dict[RoleName, str]:
    """Returns the names of the roles in Postgres: ``penstock_streamer``."""
    checked_schema(prefix, "role prefix")
    if len(prefix) > _MAX_PREFIX:
        raise InvalidName(
            f"role prefix {prefix!r}: it has {len(prefix)} characters; Postgres' names of roles "
            f"leave {_MAX_PREFIX}"
        )
    return {role: f"{prefix}_{role}" for role in ROLE_NAMES}


def _read_present(store: Store, names: dict[RoleName, str]) -> _Present:
    values = {
        "schema": store.scope.schema,
        "roles": list(names.values()),
        "tables": list(TABLE_NAMES),
        "functions": [*FUNCTIONS],
        "domains": [*DOMAINS],
        "owner": names["owner"],
        "viewer": names["viewer"],
    }
    if not store.value("has_tables", values):
        raise SchemaMissing(
            f"schema {store.scope.schema} has no Penstock tables. Create them first: penstock init"
        )
    granted: dict[str, set[Right]] = {name: set() for name in names.values()}
    for role, *right in store.rows("granted", values):
        granted.setdefault(role, set()).add(Right(*right))
    [details] = store.rows("role_details", values)
    return _Present(
        {name for (name,) in store.rows("known_roles", values)},
        store.rows("owned_by_others", values),
        granted,
        *details,
    )


def _own(present: _Present, schema: str, owner: str) -> list[str]:
    """Transfers the tables to the owner, after making this connection's role a member of it."""
    return [
        *([] if present.acts_as_owner else [f"GRANT {quote(owner)} TO CURRENT_USER"]),
        *grant_sql(rights("owner") - present.granted[owner], schema, owner),
        *(_hand_over(kind, name, schema, owner) for kind, name in present.foreign),
    ]


def _grant(present: _Present, schema: str, role: RoleName, name: str) -> list[str]:
    """Revokes what the role should not have, then grants what it lacks."""
    needed, granted = rights(role), present.granted[name]
    surplus = granted - needed
    # A REVOKE on a table takes the same privilege from its columns.
    gone = {(right.name, right.privilege) for right in surplus if not right.column}
    remaining = {right for right in granted - surplus if (right.name, right.privilege) not in gone}
    return [*revoke_sql(surplus, schema, name), *grant_sql(needed - remaining, schema, name)]


def _note_others(present: _Present, schema: str, names: dict[RoleName, str]) -> list[str]:
    """Notes other roles with write privileges.

    INSERT on a whole table is not limited to a producer's columns.
    """
    notes = []
    for role in sorted(set(present.granted) - set(names.values())):
        writes = [right for right in present.granted[role] if right.privilege in _WRITES]
        if writes:
            revokes = "; ".join(revoke_sql(writes, schema, role))
            notes.append(
                f"{role} has privileges of its own: {describe(writes)}. Once it is a member of "
                f"the roles that it needs: {revokes}"
            )
    return notes


def _hand_over(kind: str, name: str, schema: str, owner: str) -> str:
    return f"ALTER {object_sql(kind, name, schema)} OWNER TO {quote(owner)}"


def _let_read_new_tables(schema: str, names: dict[RoleName, str]) -> str:
    return (
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {quote(names['owner'])} IN SCHEMA {quote(schema)} "
        f"GRANT SELECT ON TABLES TO {quote(names['viewer'])}"
    )


def _show_activity(names: dict[RoleName, str]) -> str:
    return f"GRANT pg_read_all_stats TO {quote(names['viewer'])}"
