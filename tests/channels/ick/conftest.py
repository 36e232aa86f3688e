"""An Ick on the emptied server."""

import pytest
import redis

from penstock.clients import DirtyList, Reservation


@pytest.fixture
def ick(redis_client: redis.Redis) -> DirtyList:
    return DirtyList(redis_client, "ride-index")


def reserved(answer: object) -> Reservation:
    assert isinstance(answer, Reservation)
    return answer
