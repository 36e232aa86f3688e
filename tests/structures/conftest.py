"""Structures on the run's server, which may have times to live of fields, and on Debian's, which has none."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from fixtures.clients import RedisClient, connect_redis
from penstock.clients import VolatileHash
from penstock.embedded import EmbeddedRedis
from penstock.structures.volatile_hash import Scheme


@dataclass(frozen=True)
class Where:
    """A server, and the scheme that clients are set up with."""

    url: str
    scheme: Scheme

    def hash(self, name: str = "sessions") -> VolatileHash:
        return VolatileHash(connect_redis(self.url), name, scheme=self.scheme)


@pytest.fixture(scope="session")
def debian_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server without times to live of fields."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("the system has no redis-server")
    server = EmbeddedRedis(tmp_path_factory.mktemp("debian"), settings={"appendonly": "no"}, binary=Path(binary))
    server.start()
    yield server
    server.remove()


@pytest.fixture
def debian_url(debian_redis: EmbeddedRedis) -> str:
    with redis.Redis.from_url(debian_redis.url) as client:
        client.flushall()
    return debian_redis.url


@pytest.fixture(params=["run's server, auto", "run's server, sorted-set", "Debian's server"])
def where(request: pytest.FixtureRequest) -> Where:
    if request.param == "Debian's server":
        return Where(request.getfixturevalue("debian_url"), "auto")
    scheme: Scheme = "auto" if request.param.endswith("auto") else "sorted-set"
    return Where(request.getfixturevalue("redis_url"), scheme)


@pytest.fixture
def sessions(where: Where) -> Iterator[VolatileHash]:
    """A volatile hash, in each scheme and on each server."""
    made = where.hash()
    yield made
    made.close()


@pytest.fixture
def plain(where: Where) -> Iterator[RedisClient]:
    """A plain client of the same server."""
    with redis.Redis.from_url(where.url) as client:
        yield client
