"""A channel for the sources of Spark to read."""

import pytest

from fixtures.flow import stage_rows
from penstock import Log
from penstock.database.connections import Connection
from penstock.streaming import Streamer


@pytest.fixture
def where(connection: Connection, streamer: Streamer, things: Log, database_url: str, redis_url: str) -> dict[str, str]:
    """Options for a channel with 100 records in two shards."""
    stage_rows(connection, things, 100)
    streamer.drain()
    return {"channel": "things", "databaseUrl": database_url, "redisUrl": redis_url}
