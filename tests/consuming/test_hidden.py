"""Errors of the servers hold no parameters of statements and no passwords."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from penstock.database.connections import connect_postgres, make_engine
from penstock.errors import PenstockError

CANARY = "canary-in-the-mine"


def test_an_error_of_a_handlers_statement_does_not_show_its_parameters(database_url: str) -> None:
    engine = make_engine(database_url, application="test")
    with engine.connect() as connection, pytest.raises(DBAPIError) as raised:
        connection.execute(text("SELECT nothing FROM nowhere WHERE a = :a"), {"a": CANARY})
    engine.dispose()

    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{CANARY}@127.0.0.1:1/database",
        f"postgresql://127.0.0.1:1/database?user=user&password={CANARY}",
    ],
)
def test_an_error_of_connecting_does_not_show_the_password(url: str) -> None:
    with pytest.raises(PenstockError) as raised:
        connect_postgres(url, application="test")

    assert CANARY not in str(raised.value)
