"""The meaning of an error of Postgres: the one classification that workers, Spark tasks and commands share.

It goes by SQLSTATE, the server's own five characters, and not by the driver's classes: psycopg files a full disk, a cut
connection and a value that is too long for an index under the same ``OperationalError``.

    CONFLICT       the transaction lost against another one; nothing of it happened; run it again
    UNAVAILABLE    the server or the connection cannot do it now, and will: cut, restarting, full, locked, read-only
    SCHEMA         a table, column or function is not there
    STATEMENT      everything else: the statement or its values are at fault, and will be again
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from penstock.errors import (
    HiddenRows,
    InvalidSetting,
    PenstockError,
    PrivilegeMissing,
    SchemaMissing,
    ServerUnavailable,
)

CONFLICTS = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.TransactionRollback,
    psycopg.errors.TransactionIntegrityConstraintViolation,
    psycopg.errors.StatementCompletionUnknown,
)
"""Errors of psycopg that mean: the transaction lost against another one, and nothing of it happened."""

_CONNECTING = ("connection failed: ", "connection is bad: ", "failed to resolve host ")
"""Beginning of the driver's errors when it cannot connect."""

_INVALID_OPTION = re.compile(r"connection is bad: (invalid (?:\w+ value|port number): .*)")
"""libpq's error about an option, before it connects."""

_WRONG_LOGIN = re.compile(
    r"password|authentication|pg_hba|no such (?:user|database)|does not exist|not permitted|denied"
)
"""In the refusals of Postgres and PgBouncer for which database_url is to blame; a server that starts or is full says others."""

READ_ONLY = "25006"
IN_FAILED_TRANSACTION = "25P02"
LACKS_PRIVILEGE = "42501"
IDLE_IN_TRANSACTION = "25P03"

_SCHEMA = {"42P01", "42703", "42883", "3F000"}
_UNAVAILABLE_CLASSES = {
    "08",  # the connection
    "53",  # out of disk, memory or connections
    "57",  # an administrator, a restart, statement_timeout
    "58",  # the server's operating system
}
_UNAVAILABLE = {
    READ_ONLY,
    IDLE_IN_TRANSACTION,  # idle_in_transaction_session_timeout
    "25P04",  # transaction_timeout
    "55006",  # the object is in use
    "55P03",  # lock_timeout, NOWAIT
}


class ErrorKind(Enum):
    """The reaction to an error of Postgres."""

    CONFLICT = auto()
    UNAVAILABLE = auto()
    SCHEMA = auto()
    STATEMENT = auto()


def driver_error(error: BaseException) -> BaseException:
    """The driver's error below SQLAlchemy's or Django's, or the error itself."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig
    if type(error).__module__ == "django.db.utils" and isinstance(error.__cause__, psycopg.Error):
        return error.__cause__
    return error


def sqlstate(error: BaseException) -> str | None:
    """The server's code for an error; None if the error did not come from the server."""
    found = getattr(driver_error(error), "sqlstate", None)
    return found if isinstance(found, str) else None


def classify(error: BaseException) -> ErrorKind | None:
    """The kind of an error of Postgres; None if it is another's, such as an exception of the application."""
    if isinstance(error, PoolTimeout):
        return ErrorKind.UNAVAILABLE
    cause, code = driver_error(error), sqlstate(error)
    if code is None:
        return _without_code(error, cause)
    if code.startswith("40"):
        return ErrorKind.CONFLICT
    # A migration changed a table under a prepared statement: a new connection has a new plan.
    is_stale_plan = code == "0A000" and "cached plan" in str(cause)
    if code in _UNAVAILABLE or code[:2] in _UNAVAILABLE_CLASSES or is_stale_plan:
        return ErrorKind.UNAVAILABLE
    return ErrorKind.SCHEMA if code in _SCHEMA else ErrorKind.STATEMENT


def _without_code(error: BaseException, cause: BaseException) -> ErrorKind | None:
    """The driver itself gave up: it lost the connection, or was used wrongly."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return ErrorKind.UNAVAILABLE
    if isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError)):
        return ErrorKind.UNAVAILABLE
    # In a pipeline, libpq's own errors have neither a code nor a class of their own: it has lost the connection.
    if type(cause) is psycopg.DatabaseError:
        return ErrorKind.UNAVAILABLE
    return ErrorKind.STATEMENT if isinstance(error, (DBAPIError, psycopg.Error)) else None


@contextmanager
def postgres_errors(what: str) -> Iterator[None]:
    """Translates errors of Postgres, raised by psycopg or through SQLAlchemy, that are not about a statement."""
    try:
        yield
    except (psycopg.Error, DBAPIError, PoolTimeout) as error:
        cause = driver_error(error)
        # Row-level security applies to a statement that runs with ``row_security = off``; the text is translated.
        if isinstance(cause, psycopg.Error) and cause.diag.source_function == "check_enable_rls":
            raise HiddenRows(f"{what}: {hidden_rows(first_line(cause))}") from error
        if sqlstate(error) == LACKS_PRIVILEGE:
            raise PrivilegeMissing(
                f"{what}: {first_line(cause)}. Connect as a role that may, or see what this one lacks: penstock doctor"
            ) from error
        match classify(error):
            case ErrorKind.UNAVAILABLE if str(cause).startswith(_CONNECTING):
                raise _not_connected(what, cause) from error
            case ErrorKind.UNAVAILABLE:
                raise ServerUnavailable(f"{what}: {_why_unavailable(cause)}") from error
            case ErrorKind.SCHEMA:
                raise SchemaMissing(
                    f"{what}: {first_line(cause)}. Create or upgrade Penstock's tables: penstock init"
                ) from error
            case ErrorKind.CONFLICT:
                raise cause from error if cause is not error else None
            case _:
                raise


def hidden_rows(said: str) -> str:
    """The remedy for row-level security."""
    return (
        f"{said}. Rows that a policy hides would be lost silently. Give the role BYPASSRLS, or connect as the table's owner, or: "
        "ALTER TABLE … DISABLE ROW LEVEL SECURITY"
    )


def _why_unavailable(cause: BaseException) -> str:
    if sqlstate(cause) is None or isinstance(cause, psycopg.errors.ConnectionException):
        return f"Postgres does not answer: {first_line(cause)}"
    return f"Postgres cannot do it now: {type(cause).__name__}: {first_line(cause)}"


@contextmanager
def connection_errors() -> Iterator[None]:
    """Translates the driver's errors while it connects; nothing has been sent yet, so their texts hold no payload."""
    try:
        yield
    except psycopg.Error as error:
        raise _not_connected("connecting to Postgres", error) from error


def _not_connected(what: str, error: BaseException) -> InvalidSetting | ServerUnavailable:
    said = _why_not_connected(error)
    if (invalid := _INVALID_OPTION.match(said)) is not None:
        return InvalidSetting(f"database_url: {invalid[1]}")
    said = said.removeprefix("connection failed: ")
    if "FATAL:" not in said:
        return ServerUnavailable(f"{what}: Postgres does not answer: {said}")
    advice = ". Check user, password and database of database_url" if _WRONG_LOGIN.search(said) else ""
    return ServerUnavailable(f"{what}: Postgres refuses: {said}{advice}")


def _why_not_connected(error: BaseException) -> str:
    """Of several attempts the one that a server has answered, because it says more."""
    lines = [" ".join(line.strip("- ").split()) for line in str(error).splitlines()]
    return next((line for line in lines if "FATAL:" in line), (lines or [type(error).__name__])[0])


def describe(error: BaseException) -> str:
    """An error for logs and tables: its class, and its text where that is ours and holds no payload."""
    return f"{type(error).__name__}: {error}" if isinstance(error, PenstockError) else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text, which names the fault; values are in the lines after it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
