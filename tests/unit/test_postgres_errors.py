"""Every SQLSTATE has a meaning, and so has every error of Postgres that comes without one."""

import psycopg
import pytest
from django.db.utils import DatabaseError as DjangoError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from penstock.consuming.delivery import Conflict, Failed, Outcome, Unavailable
from penstock.consuming.failures import find_outcome
from penstock.database.driver_errors import ErrorKind, classify

CODES = sorted(
    {
        each.sqlstate
        for each in vars(psycopg.errors).values()
        if isinstance(each, type) and issubclass(each, psycopg.Error) and each.sqlstate
    }
)
"""Those of Postgres' appendix, as far as psycopg knows them."""

MEANINGS: dict[ErrorKind, str] = {
    ErrorKind.CONFLICT: "40000 40001 40002 40003 40P01",
    ErrorKind.UNAVAILABLE: """
        08000 08001 08003 08004 08006 08007 08P01  25006 25P03 25P04  26000  28000 28P01  3D000  42P05
        53000 53100 53200 53300 53400  55006 55P03  57000 57014 57P01 57P02 57P03 57P04 57P05
        58000 58030 58P01 58P02 58P03  72000  F0000 F0001  HV001 HV00N  XX001 XX002
    """,
    ErrorKind.PRIVILEGE: "0L000 0LP01 0P000 42501",
    ErrorKind.SCHEMA: "2200H 3F000 42703 42704 42883 428C9 42P01 42P10 55000 HV005 HV00P HV00Q HV00R",
    ErrorKind.STATEMENT: """
        02000 02001  03000  09000  0A000  0B000  0F000 0F001  0Z000 0Z002  10608  20000  21000
        22000 22001 22002 22003 22004 22005 22007 22008 22009 2200B 2200C 2200D 2200F 2200G 2200L 2200M 2200N 2200S 2200T
        22010 22011 22012 22013 22014 22015 22016 22018 22019 2201B 2201E 2201F 2201G 2201W 2201X 22021 22022 22023 22024
        22025 22026 22027 2202E 2202G 2202H 22030 22031 22032 22033 22034 22035 22036 22037 22038 22039 2203A 2203B 2203C
        2203D 2203E 2203F 2203G 22P01 22P02 22P03 22P04 22P05 22P06
        23000 23001 23502 23503 23505 23514 23P01  24000
        25000 25001 25002 25003 25004 25005 25007 25008 25P01 25P02  27000  2B000 2BP01  2D000
        2F000 2F002 2F003 2F004 2F005  34000  38000 38001 38002 38003 38004
        39000 39001 39004 39P01 39P02 39P03  3B000 3B001
        42000 42601 42602 42611 42622 42701 42702 42710 42712 42723 42725 42803 42804 42809 42830 42846 42939
        42P02 42P03 42P04 42P06 42P07 42P08 42P09 42P11 42P12 42P13 42P14 42P15 42P16 42P17 42P18 42P19 42P20 42P21 42P22
        44000  54000 54001 54011 54023  55P02 55P04
        HV000 HV002 HV004 HV006 HV007 HV008 HV009 HV00A HV00B HV00C HV00D HV00J HV00K HV00L HV00M HV010 HV014 HV021 HV024
        HV090 HV091  P0000 P0001 P0002 P0003 P0004  XX000
    """,
}
"""Meaning of each code.  A code that psycopg learns of has to be added here."""

OUTCOMES: dict[ErrorKind, Outcome] = {
    ErrorKind.CONFLICT: Conflict(),
    ErrorKind.UNAVAILABLE: Unavailable(is_stated=True),
    ErrorKind.PRIVILEGE: Unavailable(is_stated=True),
    ErrorKind.SCHEMA: Unavailable(is_stated=True),
    ErrorKind.STATEMENT: Failed(),
}


def raise_through_libraries(error: psycopg.Error) -> list[Exception]:
    """The error as psycopg, SQLAlchemy and Django raise it, and as SQLAlchemy does for a driver that has other names."""
    from_django, of_psycopg2 = DjangoError(), Exception()
    from_django.__cause__ = error
    vars(of_psycopg2)["pgcode"] = error.sqlstate
    return [error, DBAPIError("", None, error), from_django, DBAPIError("", None, of_psycopg2)]


@pytest.mark.parametrize("code", CODES)
def test_every_sqlstate_has_a_meaning_for_the_record(code: str) -> None:
    """Guarantee 48: a state of the server is no fault of the record."""
    [meaning] = [kind for kind, codes in MEANINGS.items() if code in codes.split()]
    errors = raise_through_libraries(psycopg.errors.lookup(code)())

    assert [classify(each) for each in errors] == [meaning] * 4
    assert [find_outcome(each) for each in errors] == [OUTCOMES[meaning]] * 4


@pytest.mark.parametrize("code", ["P1234", "MY001", "22ZZZ"])
def test_a_code_that_an_application_has_made_up_is_the_records_fault(code: str) -> None:
    error = psycopg.DatabaseError()
    error.sqlstate = code

    assert find_outcome(error) == Failed()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # What psycopg raises in a pipeline when the connection is cut: neither a code nor a class of its own.
        (psycopg.DatabaseError("server closed the connection unexpectedly"), ErrorKind.UNAVAILABLE),
        (psycopg.OperationalError("the connection is closed"), ErrorKind.UNAVAILABLE),
        (psycopg.InterfaceError("the cursor is closed"), ErrorKind.UNAVAILABLE),
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL"), ErrorKind.STATEMENT),
        (psycopg.ProgrammingError("the query has 0 placeholders"), ErrorKind.STATEMENT),
    ],
)
def test_a_lost_connection_is_no_fault_of_a_statement(error: psycopg.Error, kind: ErrorKind) -> None:
    outcome = Failed() if kind is ErrorKind.STATEMENT else Unavailable()

    assert classify(error) is kind
    assert [find_outcome(each) for each in raise_through_libraries(error)[:3]] == [outcome] * 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PoolTimeout(), ErrorKind.UNAVAILABLE),
        (DBAPIError("", None, Exception(), connection_invalidated=True), ErrorKind.UNAVAILABLE),
        (DBAPIError("", None, Exception()), ErrorKind.STATEMENT),
        (DjangoError(), None),
        (ZeroDivisionError(), None),
    ],
)
def test_an_error_without_an_error_of_the_server(error: Exception, kind: ErrorKind | None) -> None:
    assert classify(error) is kind
