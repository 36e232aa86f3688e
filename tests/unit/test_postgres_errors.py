"""Errors of Postgres that come without an SQLSTATE."""

import psycopg
import pytest

from penstock.database.driver_errors import ErrorKind, classify


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # What psycopg raises in a pipeline when the connection is cut: neither a code nor a class of its own.
        (psycopg.DatabaseError("server closed the connection unexpectedly"), ErrorKind.UNAVAILABLE),
        (psycopg.OperationalError("the connection is closed"), ErrorKind.UNAVAILABLE),
        (psycopg.InterfaceError("the cursor is closed"), ErrorKind.UNAVAILABLE),
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL"), ErrorKind.STATEMENT),
        (psycopg.ProgrammingError("the query has 0 placeholders"), ErrorKind.STATEMENT),
        (ZeroDivisionError(), None),
    ],
)
def test_a_lost_connection_is_no_fault_of_a_statement(error: Exception, kind: ErrorKind | None) -> None:
    assert classify(error) is kind
