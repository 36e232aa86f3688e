"""A channel for the sources of Spark to read."""

import pytest

from fixtures.constants import SetConstants
from fixtures.flow import Publish


@pytest.fixture(autouse=True)
def _hurried(set_constants: SetConstants) -> None:
    """A reader that has nothing to read says so soon: Spark asks again."""
    set_constants("spark.sources.record_readers", LONG_POLL_S=0.01)
    set_constants("spark.sources.dirty_members", LONG_POLL_S=0.02)


@pytest.fixture
def where(publish: Publish, database_url: str, redis_url: str) -> dict[str, str]:
    """Options for a channel with 100 records in two shards."""
    publish(100)
    return {"channel": "things", "databaseUrl": database_url, "redisUrl": redis_url}
