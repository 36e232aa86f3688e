"""Pinned keys and locks on the run's server and on Debian's."""

from collections.abc import Iterator

import pytest

from penstock.channels.server import RedisClient, connect_redis
from penstock.structures import PinnedKeys


@pytest.fixture(params=["redis_url", "debian_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


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
