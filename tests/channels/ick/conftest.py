"""An Ick on the emptied server."""

import pytest
import redis

from penstock.clients import DirtyList


@pytest.fixture
def ick(redis_client: redis.Redis) -> DirtyList:
    return DirtyList(redis_client, "ride-index")
