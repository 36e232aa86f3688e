"""Pinned keys and locks on the run's server; a test file overrides ``url`` to use Debian's as well."""

from collections.abc import Iterator

import pytest

from fixtures.clients import RedisClient, connect_redis
from penstock.clients import PinnedKeys


@pytest.fixture
def url(redis_url: str) -> str:
    return redis_url


@pytest.fixture
def pins(url: str) -> Iterator[PinnedKeys]:
    made = PinnedKeys.connect(url, "reports")
    yield made
    made.close()


@pytest.fixture
def plain(url: str) -> Iterator[RedisClient]:
    """A plain client of the same server."""
    client = connect_redis(url)
    yield client
    client.close()
