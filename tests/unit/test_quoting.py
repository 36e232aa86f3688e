"""Names and text in SQL are written as the driver writes them."""

import pytest
from psycopg import sql

from penstock.database.statements import quote, quote_literal

ODD = ["plain", "Two words", 'dou"ble', "sin'gle", "back\\slash", "ünï.code", '"']


@pytest.mark.parametrize("name", ODD)
def test_a_name_is_quoted_as_psycopg_does(name: str) -> None:
    assert quote(name) == sql.Identifier(name).as_string(None)
    assert quote(name, name) == sql.Identifier(name, name).as_string(None)
    assert quote(None, name) == quote("", name) == quote(name)


@pytest.mark.parametrize("text", ODD)
def test_text_is_quoted_as_psycopg_does(text: str) -> None:
    assert quote_literal(text) == sql.Literal(text).as_string(None)


def test_an_empty_name_stays_visible_for_postgres_to_refuse() -> None:
    assert quote("") == '""'
