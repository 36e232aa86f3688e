"""The encoding of the database."""

import psycopg

from penstock.errors import UnsafeSetting

NEEDED = "UTF8"


def check_encoding(connection: psycopg.Connection[object]) -> None:
    """Checks that the database can hold every character: of records, of keys, and of reasons why a handler failed.

    Raises:
        UnsafeSetting: It is not in UTF8.
    """
    found = connection.info.parameter_status("server_encoding")
    if found != NEEDED:
        raise UnsafeSetting(
            f"database {connection.info.dbname} has the encoding {found}; Penstock needs {NEEDED}, which has every character of a "
            "record. Create one with: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0, and restore a dump into it"
        )
