"""The roles of a pipeline in Postgres, and what each may do.

Group roles without a login: an application's login becomes a member of those that it needs.  The
SQL of ``penstock init --roles``, the check at the start of a worker, and ``penstock doctor`` come
from the tables below.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal, get_args

from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.database.tables import FUNCTIONS, TABLE_NAMES
from penstock.errors import PrivilegeMissing

RoleName = Literal["owner", "producer", "streamer", "consumer", "viewer", "monitor"]
"""A role without its prefix."""

ROLE_NAMES: tuple[RoleName, ...] = get_args(RoleName)

Kind = Literal["SCHEMA", "TABLE", "SEQUENCE", "FUNCTION"]

STAGED_COLUMNS = ("channel", "shard", "key", "action", "object", "data", "headers")
"""Columns that a producer may set.

Postgres sets the others: a producer's own ``id``, ``xid`` or ``created_at`` could hide a record
from the sequencer, or put it before others.
"""

_JOURNAL_BOUNDS = {"FUNCTION journal_bounds": "EXECUTE"}
_CHECK_CHANNEL = {"FUNCTION check_channel": "EXECUTE"}
_CANCEL_JOBS = {"FUNCTION cancel_jobs": "EXECUTE"}
_STAGING_BY_SQL = {
    f"FUNCTION {name}": "EXECUTE" for name in ("stage", "stage_job", "mark_dirty", "cancel_job")
}
_REGISTERING = {
    "alembic_version": "SELECT",
    "channels": "SELECT, INSERT, UPDATE (keep, streams, hand, entries, redis_memory, max_bytes, "
    "limits)",
    "retired_channels": "SELECT",
    "former_consumers": "SELECT",
    **_JOURNAL_BOUNDS,
    **_CHECK_CHANNEL,
}
"""Privileges of each worker: it registers what it declares."""

WORKING: Mapping[RoleName, Mapping[str, str]] = {
    "producer": {
        "staged_records": f"INSERT ({', '.join(STAGED_COLUMNS)}), SELECT (id)",
        "dead_letters": "SELECT (channel, record_id), UPDATE (retry_requested_at)",
        "job_groups": "SELECT, INSERT",
        "job_notes": "SELECT",
        "job_results": "SELECT",
        "queue_limits": "SELECT, INSERT, UPDATE, DELETE",
        **_CHECK_CHANNEL,
        **_CANCEL_JOBS,
        **_STAGING_BY_SQL,
    },
    "streamer": {
        **_REGISTERING,
        "staged_records": "SELECT, DELETE",
        "journal": "SELECT, INSERT, DELETE",
        "FUNCTION journal_entries": "EXECUTE",
        "ticks": "SELECT, INSERT, DELETE",
        "isolated_records": "SELECT, INSERT, UPDATE, DELETE",
        "stopped_shards": "SELECT, INSERT, UPDATE, DELETE",
        "waiting_records": "SELECT, INSERT, UPDATE, DELETE",
        "unique_names": "SELECT, INSERT, UPDATE, DELETE",
        "queue_limits": "SELECT",
        "cancellations": "SELECT, UPDATE, DELETE",
        **_CANCEL_JOBS,
        "epochs": "SELECT, INSERT",
        "checkpoints": "SELECT, INSERT",
        "troubles": "SELECT, INSERT, UPDATE, DELETE",
        "schedules": "SELECT, INSERT, UPDATE",
        "pauses": "SELECT",
        "job_groups": "SELECT, UPDATE, DELETE",
        "job_notes": "SELECT, DELETE",
        "job_results": "SELECT, DELETE",
    },
    "consumer": {
        **_REGISTERING,
        "staged_records": "SELECT",
        "journal": "SELECT",
        "ticks": "SELECT",
        "epochs": "SELECT",
        "checkpoints": "SELECT, INSERT, UPDATE",
        "barriers": "SELECT",
        "pauses": "SELECT",
        "schedules": "SELECT",
        "isolated_records": "SELECT",
        "stopped_shards": "SELECT",
        "dead_letters": "SELECT, INSERT, UPDATE, DELETE",
    },
}
"""Privileges for the work itself, by object: a worker without one of these does not start."""

_SEE_IDS = {"SEQUENCE staged_records_id_seq": "SELECT"}
"""Privilege to see which ids were drawn, without drawing one.

With it a streamer on another cluster, as ``pg_upgrade`` makes, sees that no id is given out again,
and goes on.
"""

_DOING_JOBS = {
    "waiting_records": "SELECT",
    "queue_limits": "SELECT",
    "cancellations": "SELECT, INSERT, UPDATE (has_no_effect)",
    "job_groups": "SELECT",
    "job_notes": "SELECT, INSERT, UPDATE",
    "job_results": "SELECT, INSERT, UPDATE",
    "FUNCTION finish_records": "EXECUTE",
}
"""Privileges of the worker of a queue beside those of a consumer."""

_REPAIRING = {
    "barriers": "INSERT, UPDATE, DELETE",
    "reconciliations": "SELECT, INSERT, UPDATE",
    "repairs": "SELECT, INSERT",
}
"""Privileges for reconciling beside those of streamer and consumer."""

_OPERATING = {
    "pauses": "INSERT, UPDATE, DELETE",
    "schedules": "UPDATE (next_at)",
    "actions": "SELECT, INSERT",
    "queue_limits": "SELECT, INSERT, UPDATE, DELETE",
    "FUNCTION move_jobs": "EXECUTE",
    **_CANCEL_JOBS,
}
"""Privileges for pausing, resuming and cancelling, and for the log of what was done."""

_WITHOUT_PAYLOADS = {
    "staged_records": "SELECT (id, xid, channel, shard, key, action, object, created_at)",
    "dead_letters": "SELECT (consumer, channel, shard, offset, record_id, key, action, object, "
    "staged_at, reason, attempts, parked, later_shard, later_offset, failed_at, "
    "retry_requested_at)",
    "repairs": "SELECT (reconciliation, number, key, kind, repaired_at)",
    "job_notes": "SELECT (record_id, channel, attempts, progress, noted_at)",
    "job_groups": "SELECT (name, channel, members, waits_for, staged_at, ended_at)",
    "job_results": "SELECT (record_id, channel, done_at)",
}
"""Columns that a monitor may read of tables that have payloads, or rows of the application.

It reads a column or table of a later release once ``penstock init --roles`` has granted it: a
default privilege cannot leave columns out.
"""

_KINDS = get_args(Kind)
_PRIVILEGES = ("USAGE", "CREATE", "EXECUTE", "SELECT", "INSERT", "UPDATE", "DELETE")


@dataclass(frozen=True, slots=True)
class Right:
    """One privilege on one object of the Penstock schema."""

    kind: Kind  # the kind of object
    name: str  # its name; empty for the schema
    privilege: str  # ``SELECT``, ``INSERT`` …
    column: str = ""  # the column, if it is limited to one; else empty

    @property
    def place(self) -> tuple[int, str, int, int, str]:
        """Sort key for statements: by object, then in the order of SQL."""
        column = STAGED_COLUMNS.index(self.column) if self.column in STAGED_COLUMNS else -1
        is_known = self.privilege in _PRIVILEGES
        privilege = _PRIVILEGES.index(self.privilege) if is_known else len(_PRIVILEGES)
        return _KINDS.index(self.kind), self.name, privilege, column, self.column


@cache
def working_rights(role: RoleName) -> frozenset[Right]:
    """Returns the rights for the work of a producer, streamer or consumer."""
    return frozenset({Right("SCHEMA", "", "USAGE"), *_parse(WORKING[role])})


@cache
def rights(role: RoleName) -> frozenset[Right]:
    """Returns all rights that a role is granted; the owner owns its tables."""
    match role:
        case "owner":
            return frozenset({Right("SCHEMA", "", "USAGE"), Right("SCHEMA", "", "CREATE")})
        case "consumer":
            return working_rights(role) | frozenset(
                _parse({**_DOING_JOBS, **_REPAIRING, **_OPERATING})
            )
        case "streamer":
            return working_rights(role) | frozenset(_parse(_SEE_IDS))
        case "viewer" | "monitor":
            tables = dict.fromkeys(TABLE_NAMES, "SELECT") | (
                _WITHOUT_PAYLOADS if role == "monitor" else {}
            )
            usage = Right("SCHEMA", "", "USAGE")
            return frozenset({usage, *_parse({**tables, **_SEE_IDS, **_JOURNAL_BOUNDS})})
        case _:
            return working_rights(role)


def _parse(short_form: Mapping[str, str]) -> Iterator[Right]:
    """Parses rights from their short form: ``{"channels": "SELECT, UPDATE (keep)"}``."""
    for target, privileges in short_form.items():
        kind, _, name = target.rpartition(" ")
        for privilege, columns in re.findall(r"([A-Z]+)(?: \(([^)]*)\))?", privileges):
            for column in columns.split(", "):
                yield Right(kind or "TABLE", name, privilege, column)  # type: ignore[arg-type]  # of WORKING


def grant_sql(granted: Iterable[Right], schema: str, to: str) -> list[str]:
    """Renders ``GRANT`` statements, one for each object."""
    return _render("GRANT", "TO", granted, schema, to)


def revoke_sql(surplus: Iterable[Right], schema: str, role: str) -> list[str]:
    """Renders ``REVOKE`` statements, one for each object."""
    return _render("REVOKE", "FROM", surplus, schema, role)


def _render(
    verb: str, preposition: str, chosen: Iterable[Right], schema: str, role: str
) -> list[str]:
    return [
        f"{verb} {privileges} ON {object_sql(kind, name, schema)} {preposition} "
        f"{'PUBLIC' if role == 'public' else quote(role)}"
        for kind, name, privileges in _by_object(chosen)
    ]


def _by_object(chosen: Iterable[Right]) -> Iterator[tuple[Kind, str, str]]:
    """Groups rights by object; yields its kind, its name and the privileges.

    ``SELECT, UPDATE (keep)``.
    """
    ordered = sorted(chosen, key=lambda right: right.place)
    for (kind, name), group in groupby(ordered, key=lambda right: (right.kind, right.name)):
        privileges = []
        for privilege, same_privilege in groupby(group, key=lambda right: right.privilege):
            # a word of SQL
            columns = [
                '"offset"' if right.column == "offset" else right.column for right in same_privilege
            ]
            privileges.append(privilege if "" in columns else f"{privilege} ({', '.join(columns)})")
        yield kind, name, ", ".join(privileges)


def object_sql(kind: str, name: str, schema: str) -> str:
    """Renders an object for a statement: ``TABLE "penstock".ticks``."""
    if kind == "SCHEMA":
        return f"SCHEMA {quote(schema)}"
    arguments = FUNCTIONS[name] if kind == "FUNCTION" and name in FUNCTIONS else ""
    return f"{kind} {quote(schema)}.{name}{arguments}"


def lacking(store: Store, needed: Iterable[Right], role: str | None = None) -> list[Right]:
    """Returns the rights that a role lacks, in one round trip.

    Ignores objects that do not exist.
    """
    listed = sorted(needed, key=lambda right: right.place)
    values = {
        "schema": store.scope.schema,
        "role": role,
        "kinds": [right.kind for right in listed],
        "names": [right.name for right in listed],
        "privileges": [right.privilege for right in listed],
        "columns": [right.column for right in listed],
    }
    rows = store.rows("lacking", values, doing="reading privileges")
    return [listed[number - 1] for (number,) in rows]


def check_privileges(store: Store, role: RoleName, *, does_jobs: bool = False) -> None:
    """Checks that the connection's role may do the work of a producer, streamer or consumer."""
    needed = working_rights(role) | frozenset(_parse(_DOING_JOBS if does_jobs else {}))
    missing = lacking(store, needed)
    if missing:
        login = store.connection.info.user
        grants = "; ".join(grant_sql(missing, store.scope.schema, login))
        raise PrivilegeMissing(
            f"the role {login} lacks {describe(missing)}, which a {role} needs. Grant it: "
            f"{grants}; or, with the roles of penstock init --roles: "
            f"GRANT {store.scope.schema}_{role} TO {quote(login)}"
        )


def describe(chosen: Iterable[Right]) -> str:
    """Describes rights: ``INSERT on journal, UPDATE (keep) on channels``."""
    return "; ".join(
        f"{privileges} on {name or 'the schema'}" for _, name, privileges in _by_object(chosen)
    )
