"""Which revisions of the schema this release works with, and which one a database has.

    OLDEST … the newest shipped        this release works with these
    penstock_0009_since_0005           a newer one: releases that ship penstock_0005 or a later one
                                       work with it, too
    penstock_0009                      a newer one that no older release works with

The database holds its revision in a version table of Alembic: in ``penstock init``'s own, or in
that of an application whose Alembic runs our migrations as a branch.
"""

import re
from dataclasses import dataclass
from functools import cache

import psycopg
import structlog

from penstock.database.driver_errors import postgres_errors
from penstock.database.executor import Executor
from penstock.database.statements import directory, quote
from penstock.database.store import Store
from penstock.errors import SchemaMissing
from penstock.records import DEFAULT_SCOPE

log = structlog.get_logger("penstock.schema")

OLDEST = "penstock_0001"
"""The oldest revision whose tables and functions are enough for the statements of this release.

A test runs them on it.
"""

_REVISION = re.compile(r"penstock_(?P<number>\d{4})(?:_since_(?P<since>\d{4}))?")
_FILE = re.compile(r"\d{4}_(?:expand|contract)_\w+\.py")
_NAMED = re.compile(r'^revision = "(\w+)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FoundRevision:
    """The revision of a schema."""

    # its name; empty if the schema has our tables and no version table names their revision
    revision: str
    table: str = ""  # the version table that names it, as SQL
    # true if that table lies in the schema itself, where ``penstock init`` keeps it
    is_own: bool = True


def find_revision(store: Store[Executor]) -> FoundRevision | None:
    """Finds the revision of a schema in any version table; None if the schema lacks our tables."""
    schema = {"schema": store.scope.schema}
    for table, is_own in store.rows("version_tables", schema):
        row = store.connection.execute(_select_version(table)).fetchone()
        if row is not None:
            return FoundRevision(row[0], table, is_own)
    return FoundRevision("") if store.value("has_tables", schema) else None


def check_revision(store: Store[Executor]) -> None:
    """Checks that this release works with the schema.

    One round trip, if the version table is the schema's own.
    """
    with postgres_errors("reading the revision of the schema"):
        try:
            current = _read_own(store) or find_revision(store)
        except psycopg.errors.InsufficientPrivilege:
            table = f"{store.scope.schema}.alembic_version"
            log.warning("schema revision not checked", fix=f"GRANT SELECT ON {table} TO this role")
            return
    if (unusable := why_unusable(current, store.scope.schema)) is not None:
        raise SchemaMissing(str(unusable))


def _read_own(store: Store[Executor]) -> FoundRevision | None:
    """Returns the revision in the version table of the schema; None if there is none."""
    table = quote(store.scope.schema, "alembic_version")
    try:
        row = store.connection.execute(_select_version(table)).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    return None if row is None else FoundRevision(row[0], table)


def _select_version(table: str) -> bytes:
    return (
        rf"SELECT version_num FROM {table} WHERE version_num LIKE 'penstock\_%' ORDER BY 1 DESC"
    ).encode()


@dataclass(frozen=True, slots=True)
class UnusableSchema:
    """The reason why this release does not work with a schema, and the remedy."""

    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason}. What to do: {self.fix}"


def why_unusable(current: FoundRevision | None, schema: str) -> UnusableSchema | None:
    """Returns the reason why this release does not work with a schema; None if it does."""
    if current is None:
        return UnusableSchema(f"schema {schema} has no Penstock tables", init_command(schema))
    if not current.revision:
        reason = (
            f"schema {schema} has Penstock's tables, but no version table of Alembic names "
            "their revision"
        )
        return UnusableSchema(reason, f"see docs: {SchemaMissing.page}")
    position = f"schema {schema} is at {current.revision}"
    if _number(current.revision) < _number(OLDEST):
        reason = f"{position}; this release needs {OLDEST} or newer"
        return UnusableSchema(reason, upgrade_command(current, schema))
    if is_newer(current.revision) and _since(current.revision) > _number(newest_shipped()):
        reason = (
            f"{position}, of a newer release or an unreleased version; this release ships "
            f"{newest_shipped()}"
        )
        fix = (
            "pip install --upgrade penstock-outbox, here too; tables of an unreleased version have "
            "to be created again"
        )
        return UnusableSchema(reason, fix)
    return None


def is_newer(revision: str) -> bool:
    """True if a revision is newer than all that this release ships."""
    return _number(revision) > _number(newest_shipped())


def upgrade_command(current: FoundRevision, schema: str) -> str:
    """Returns the command that upgrades a schema.

    Ours, or that of the Alembic that keeps its revision.
    """
    return (
        init_command(schema)
        if current.is_own
        else f"alembic upgrade heads, with the Alembic that keeps {current.table}"
    )


def init_command(schema: str) -> str:
    """Returns the command that creates or upgrades a schema."""
    return "penstock init" + ("" if schema == DEFAULT_SCOPE.schema else f" --schema {schema}")


@cache
def newest_shipped() -> str:
    """Returns the newest revision that this release ships, from the newest file.

    Alembic would import each of them.
    """
    versions = directory("migrations") / "versions"
    newest = max(entry.name for entry in versions.iterdir() if _FILE.fullmatch(entry.name))
    match = _NAMED.search((versions / newest).read_text("utf-8"))
    assert match is not None
    return match[1]


def _number(revision: str) -> int:
    match = _REVISION.fullmatch(revision)
    # A name that we never gave: of a newer release.
    return int(match["number"]) if match else 9999


def _since(revision: str) -> int:
    """Returns the oldest release, by its newest revision, that works with a revision."""
    match = _REVISION.fullmatch(revision)
    return int(match["since"] or match["number"]) if match else 9999
