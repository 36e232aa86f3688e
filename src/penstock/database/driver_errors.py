"""Meaning of an error of Postgres: the one classification for workers, Spark tasks and commands.

It goes by SQLSTATE, the server's own five characters, and not by the driver's classes: psycopg
files a full disk, a cut connection and a value that is too long for an index under the same
``OperationalError``.

    CONFLICT       the transaction lost against another one; nothing of it happened; run it again
    UNAVAILABLE    the server or the connection cannot do it now, and will: cut, restarting, full,
                   locked, read-only
    PRIVILEGE      the role lacks a right
    SCHEMA         a table, column, type, function or index is not there, or not as the statement
                   expects it
    STATEMENT      everything else: the statement or its values are at fault, and will be again

All but the last are states of the server: they end without a change of the statement or of its
values.  Codes that a value can cause are STATEMENT, even if a schema can cause them too: what a
missing value or a wrong type of one does must not be waited for.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from penstock.errors import (
    HiddenRows,
    InvalidSetting,
    ObjectMissing,
    PenstockError,
    PrivilegeMissing,
    ServerUnavailable,
    Unknown,
)

CONFLICTS = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.TransactionRollback,
    psycopg.errors.TransactionIntegrityConstraintViolation,
    psycopg.errors.StatementCompletionUnknown,
)
"""Errors of psycopg that mean: the transaction lost against another one, and had no effect."""

_CONNECTING = ("connection failed: ", "connection is bad: ", "failed to resolve host ")
"""Beginning of the driver's errors when it cannot connect."""

_INVALID_OPTION = re.compile(r"connection is bad: (invalid (?:\w+ value|port number): .*)")
"""libpq's error about an option, before it connects."""

_WRONG_LOGIN = re.compile(
    r"password|authentication|pg_hba|no such (?:user|database)|does not exist|not permitted|denied"
)
"""Words in refusals of Postgres and PgBouncer that blame database_url; a server that starts or is
full uses others."""

READ_ONLY = "25006"
IN_FAILED_TRANSACTION = "25P02"
LACKS_PRIVILEGE = "42501"
IDLE_IN_TRANSACTION = "25P03"
LOCK_NOT_AVAILABLE = "55P03"


class ErrorKind(Enum):
    """The reaction to an error of Postgres."""

    CONFLICT = auto()
    UNAVAILABLE = auto()
    PRIVILEGE = auto()
    SCHEMA = auto()
    STATEMENT = auto()


_CLASSES: Mapping[str, ErrorKind] = {
    "08": ErrorKind.UNAVAILABLE,  # the connection; a pooler's own errors
    "28": ErrorKind.UNAVAILABLE,  # a login that is refused: a password is being replaced
    "3D": ErrorKind.UNAVAILABLE,  # a database that is being created, or restored
    "40": ErrorKind.CONFLICT,
    "53": ErrorKind.UNAVAILABLE,  # out of disk, memory or connections
    "57": ErrorKind.UNAVAILABLE,  # an administrator, a restart, statement_timeout
    "58": ErrorKind.UNAVAILABLE,  # the server's operating system
    "72": ErrorKind.UNAVAILABLE,  # a snapshot that is too old
    "F0": ErrorKind.UNAVAILABLE,  # the server's configuration file
}
"""By the first two characters of a code; the others are STATEMENT."""

_CODES: Mapping[str, ErrorKind] = {
    "0L000": ErrorKind.PRIVILEGE,  # of who grants
    "0LP01": ErrorKind.PRIVILEGE,
    "0P000": ErrorKind.PRIVILEGE,  # the role of SET ROLE is not there
    LACKS_PRIVILEGE: ErrorKind.PRIVILEGE,
    READ_ONLY: ErrorKind.UNAVAILABLE,
    IDLE_IN_TRANSACTION: ErrorKind.UNAVAILABLE,  # idle_in_transaction_session_timeout
    "25P04": ErrorKind.UNAVAILABLE,  # transaction_timeout
    "26000": ErrorKind.UNAVAILABLE,  # a prepared statement that a pooler's other session has
    "42P05": ErrorKind.UNAVAILABLE,
    "55006": ErrorKind.UNAVAILABLE,  # the object is in use
    "55P03": ErrorKind.UNAVAILABLE,  # lock_timeout, NOWAIT
    "XX001": ErrorKind.UNAVAILABLE,  # a damaged page, until it is repaired
    "XX002": ErrorKind.UNAVAILABLE,  # a damaged index
    "HV001": ErrorKind.UNAVAILABLE,  # a foreign server: out of memory
    "HV00N": ErrorKind.UNAVAILABLE,  # a foreign server that does not answer
    "2200H": ErrorKind.SCHEMA,  # a sequence is at its end
    "3F000": ErrorKind.SCHEMA,
    "42703": ErrorKind.SCHEMA,  # a column
    "42704": ErrorKind.SCHEMA,  # a type, a collation, a publication …
    "42883": ErrorKind.SCHEMA,  # a function or an operator
    "428C9": ErrorKind.SCHEMA,  # a column that has become generated
    "42P01": ErrorKind.SCHEMA,  # a table
    "42P10": ErrorKind.SCHEMA,  # the unique index of an ON CONFLICT
    # a view that was not refreshed yet, a table without replica identity …
    "55000": ErrorKind.SCHEMA,
    "HV005": ErrorKind.SCHEMA,  # a foreign table's column
    "HV00P": ErrorKind.SCHEMA,
    "HV00Q": ErrorKind.SCHEMA,
    "HV00R": ErrorKind.SCHEMA,
}
"""By the whole code."""


def driver_error(error: BaseException) -> BaseException:
    """Returns the driver's error below SQLAlchemy's or Django's, or the error itself."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig
    if type(error).__module__ == "django.db.utils" and isinstance(error.__cause__, psycopg.Error):
        return error.__cause__
    return error


def sqlstate(error: BaseException) -> str | None:
    """Returns the server's code for an error; None if the error did not come from the server."""
    cause = driver_error(error)
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return code if isinstance(code, str) else None


def raised_in(error: BaseException) -> str | None:
    """Returns the function of the server's source that raised an error.

    Unlike the text, it is not translated.
    """
    cause = driver_error(error)
    return cause.diag.source_function if isinstance(cause, psycopg.Error) else None


def classify(error: BaseException) -> ErrorKind | None:
    """Returns the kind of an error of Postgres; None for another's, such as the application's."""
    if isinstance(error, PoolTimeout):
        return ErrorKind.UNAVAILABLE
    cause, code = driver_error(error), sqlstate(error)
    if code is None:
        return _without_code(error, cause)
    match raised_in(error):
        # A migration changed a table under a prepared statement: a new connection has a new plan.
        case "RevalidateCachedQuery":
            return ErrorKind.UNAVAILABLE
        # A row that a policy of row-level security does not take has the code of a missing right.
        case "ExecWithCheckOptions":
            return ErrorKind.STATEMENT
        case _:
            return _CODES.get(code) or _CLASSES.get(code[:2], ErrorKind.STATEMENT)


def is_doubtful(error: BaseException) -> bool:
    """Returns whether a statement's values may have caused an error that looks like the server's.

    A server that dies of a statement ends the connection silently; an operator is missing for a
    value of another type.
    """
    return sqlstate(error) is None or raised_in(error) == "op_error"


def _without_code(error: BaseException, cause: BaseException) -> ErrorKind | None:
    """Returns the kind of an error of the driver itself: a lost connection, or wrong use."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return ErrorKind.UNAVAILABLE
    if isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError)):
        return ErrorKind.UNAVAILABLE
    # In a pipeline, libpq's own errors have neither a code nor a class of their own: it has lost
    # the connection.
    if type(cause) is psycopg.DatabaseError:
        return ErrorKind.UNAVAILABLE
    return ErrorKind.STATEMENT if isinstance(error, (DBAPIError, psycopg.Error)) else None


@contextmanager
def postgres_errors(activity: str, *, is_own: bool = True) -> Iterator[None]:
    """Translates errors of Postgres that are not about a statement.

    psycopg or SQLAlchemy raises them.  Without ``is_own`` the statements have a query of the
    application's, or use its tables: ``penstock init`` does not make what is missing there.
    """
    try:
        yield
    except (psycopg.Error, DBAPIError, PoolTimeout) as error:
        cause = driver_error(error)
        # Row-level security applies to a statement that runs with ``row_security = off``; the text
        # is translated.
        if raised_in(error) == "check_enable_rls":
            raise HiddenRows(f"{activity}: {hidden_rows(first_line(cause))}") from error
        match classify(error):
            case ErrorKind.PRIVILEGE:
                raise PrivilegeMissing(
                    f"{activity}: {first_line(cause)}. Connect as a role that may, or see what "
                    "this one lacks: penstock doctor"
                ) from error
            case ErrorKind.UNAVAILABLE if str(cause).startswith(_CONNECTING):
                raise _not_connected(activity, cause) from error
            case ErrorKind.UNAVAILABLE:
                raise ServerUnavailable(f"{activity}: {_why_unavailable(cause)}") from error
            case ErrorKind.SCHEMA if not is_own:
                raise Unknown(
                    f"{activity}: {first_line(cause)}. The name comes from the application's "
                    "query, or from its table"
                ) from error
            case ErrorKind.SCHEMA:
                raise ObjectMissing(
                    f"{activity}: {first_line(cause)}. Create or upgrade Penstock's tables: "
                    "penstock init"
                ) from error
            case ErrorKind.CONFLICT:
                raise cause from error if cause is not error else None
            case _:
                raise


def hidden_rows(reason: str) -> str:
    """Returns the reason with the remedy for row-level security."""
    return (
        f"{reason}. Rows that a policy hides would be lost silently. Give the role BYPASSRLS, or "
        "connect as the table's owner, or: "
        "ALTER TABLE … DISABLE ROW LEVEL SECURITY"
    )


def _why_unavailable(cause: BaseException) -> str:
    if sqlstate(cause) is None or isinstance(cause, psycopg.errors.ConnectionException):
        return f"Postgres does not answer: {first_line(cause)}"
    return f"Postgres cannot do it now: {type(cause).__name__}: {first_line(cause)}"


@contextmanager
def connection_errors() -> Iterator[None]:
    """Translates the driver's errors while it connects.

    Nothing has been sent yet, so their texts hold no payload.
    """
    try:
        yield
    except psycopg.Error as error:
        raise _not_connected("connecting to Postgres", error) from error


def _not_connected(activity: str, error: BaseException) -> InvalidSetting | ServerUnavailable:
    reason = _why_not_connected(error)
    if (invalid := _INVALID_OPTION.match(reason)) is not None:
        return InvalidSetting(f"database_url: {invalid[1]}")
    reason = reason.removeprefix("connection failed: ")
    if "FATAL:" not in reason:
        return ServerUnavailable(f"{activity}: Postgres does not answer: {reason}")
    advice = (
        ". Check user, password and database of database_url" if _WRONG_LOGIN.search(reason) else ""
    )
    return ServerUnavailable(f"{activity}: Postgres refuses: {reason}{advice}")


def _why_not_connected(error: BaseException) -> str:
    """Returns the error of an attempt that a server answered, if there is one: it says more."""
    lines = [" ".join(line.strip("- ").split()) for line in str(error).splitlines()]
    return next((line for line in lines if "FATAL:" in line), (lines or [type(error).__name__])[0])


def describe(error: BaseException) -> str:
    """Returns an error for logs and tables: its class, and our text, which holds no payload."""
    return (
        f"{type(error).__name__}: {error}"
        if isinstance(error, PenstockError)
        else type(error).__name__
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, which names the fault; values come after it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
