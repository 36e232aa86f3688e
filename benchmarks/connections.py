"""Connections of the benchmark's own: an application's, without the settings of Penstock's workers."""

import psycopg

from penstock.database.connections import Connection, plain_url


def connect(database_url: str) -> Connection:
    """A connection in autocommit mode."""
    return psycopg.connect(plain_url(database_url), autocommit=True, application_name="penstock bench")
