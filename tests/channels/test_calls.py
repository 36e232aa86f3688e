"""Script calls give their connection back, whatever happens to them."""

from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fixtures.proxy import Harm, Proxy, behind
from penstock.channels.batch_outcomes import Unusable, parse_reply
from penstock.channels.scripts import Call, _declarations, script

APPEND = script("log/append")
CALL = Call(("{things/0}:log", "{things/0}:epoch"), (1, 1, 1, 7, "k", "insert", "thing", "{}", "", 1))


@pytest.fixture
def single(redis_proxy: Proxy, redis_url: str) -> Iterator[redis.Redis]:
    """A client that has one connection, waits for no second, and sends nothing again by itself."""
    pool = redis.ConnectionPool.from_url(behind(redis_proxy, redis_url), max_connections=1, retry=Retry(NoBackoff(), 0))
    with redis.Redis(connection_pool=pool) as client:
        yield client


def test_calls_together_use_one_connection_again_and_again(single: redis.Redis) -> None:
    for _ in range(3):
        APPEND.call_together(single, [CALL, CALL])

    assert single.ping()


def test_calls_together_give_back_a_connection_that_failed(single: redis.Redis, redis_proxy: Proxy) -> None:
    APPEND.call_together(single, [CALL])
    redis_proxy.harm(b"EVALSHA", Harm.LOSE_REPLY)

    with pytest.raises(redis.ConnectionError):
        APPEND.call_together(single, [CALL])
    assert APPEND.call_together(single, [CALL])


@pytest.mark.parametrize("text", ["-- keys: a\n", "-- args: b:int\n", "\n"])
def test_a_script_whose_header_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lua/one\.lua"):
        _declarations("one", text)


@pytest.mark.parametrize("answer", [[b"odd", 1], b"odd", None, []])
def test_an_unknown_reply_is_foreign(answer: object) -> None:
    reply = parse_reply(answer, "appending to things/0")

    assert isinstance(reply, Unusable)
    assert "things/0: the script returned an unknown reply" in str(reply.error)
