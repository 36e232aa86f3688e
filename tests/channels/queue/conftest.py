"""A queue on the emptied server."""

import pytest
import redis

from fixtures.queues import Probe


@pytest.fixture
def probe(redis_client: redis.Redis) -> Probe:
    return Probe(redis_client)
