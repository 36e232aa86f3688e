"""A field is over at exactly its deadline, by the server's clock: neither a millisecond before nor after."""

import re
from typing import Any

import pytest
import redis

from fixtures.clients import RedisClient
from penstock.channels.scripts import script
from penstock.clients import VolatileHash

KEYS = ("penstock:{sessions}:volatile", "penstock:{sessions}:volatile-times")
TTL_MS = 20


def evaluate(client: RedisClient, name: str, arguments: tuple[Any, ...], now_us: int | None = None) -> Any:
    """Calls a script at a moment of our choice, or at the server's, and returns the moment with its reply."""
    text = script(f"volatile/{name}").text
    if now_us is not None:
        fixed = f"{{'{now_us // 1_000_000}', '{now_us % 1_000_000}'}}"
        text = text.replace('redis.call("TIME")', fixed)
        assert fixed in text
    body = f"local time = redis.call('TIME'); return {{time, (function() {text}\nend)()}}"
    time, reply = client.eval(body, len(KEYS), *KEYS, *arguments)
    return int(time[0]) * 1_000_000 + int(time[1]), reply


READS = {
    "get": (("ann",), [b"values", b"1"], [b"values", None]),
    "all": ((), [b"all", b"ann", b"1"], [b"all"]),
    "count": ((), [b"count", 1], [b"count", 0]),
    "ttl": (("ann",), None, [b"left", -2]),
}


@pytest.mark.parametrize("name", READS)
def test_the_servers_own_deadline_is_exact(redis_client: RedisClient, name: str) -> None:
    """Read many times in each millisecond: the server's own HGET returns a field in the millisecond of its deadline too."""
    if not redis_client.execute_command("COMMAND INFO", "HSETEX")[0]:
        pytest.skip("this server has no times to live of fields")
    arguments, live, over = READS[name]
    seen: dict[int, list[Any]] = {}
    while not {-1, 0} <= seen.keys():  # a busy machine may miss a millisecond
        evaluate(redis_client, "set", (1, TTL_MS, "ann", "1"))
        [deadline] = redis_client.execute_command("HPEXPIRETIME", KEYS[0], "FIELDS", 1, "ann")
        at = -TTL_MS
        while at < 3:
            now_us, reply = evaluate(redis_client, name, arguments)
            at = now_us // 1000 - deadline
            seen.setdefault(at, []).append(reply)

    for at, replies in seen.items():
        for reply in replies:
            assert reply == (over if at >= 0 else [b"left", -at] if live is None else live)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("server", ["redis_url", "debian_url"])
def test_a_deadline_in_the_sorted_set_is_exact(request: pytest.FixtureRequest, server: str, name: str) -> None:
    arguments, live, over = READS[name]
    written_us = 1_900_000_000_000_100  # a tenth of a millisecond after a full one
    with redis.Redis.from_url(request.getfixturevalue(server)) as client:
        evaluate(client, "set", (0, 5, "ann", "1"), written_us)
        at = [written_us + us for us in (0, 4_999, 5_000, 5_899, 5_900, 6_000, 9_000)]
        found = [evaluate(client, name, arguments, now_us)[1] for now_us in at]

    expected = [[b"left", n] for n in (6, 1, 1, 1)] if live is None else [live] * 4
    assert found == [*expected, over, over, over]


def test_a_renewal_in_the_millisecond_of_the_deadline_comes_too_late(debian_url: str) -> None:
    """And gc in the same millisecond deletes the field: both say the same."""
    at = 1_900_000_000_000_000
    with redis.Redis.from_url(debian_url) as client:
        evaluate(client, "set", (0, 5, "ann", "1", "bob", "2"), at)

        before = evaluate(client, "expire", (5, "ann"), at + 4_999)[1]
        late = evaluate(client, "expire", (5, "bob"), at + 5_000)[1]
        collected = evaluate(client, "collect", (10,), at + 5_000)[1]
        left = evaluate(client, "all", (), at + 5_000)[1]

    assert (before, late) == ([b"expires", 1], [b"expires", 0])
    assert collected == [b"collected", 1, 0, 2]
    assert left == [b"all", b"ann", b"1"]


def test_a_time_to_live_is_kept_whole(redis_url: str) -> None:
    sessions = VolatileHash.connect(redis_url, "sessions")
    with redis.Redis.from_url(redis_url) as client:
        for n in range(200):
            started_us = _now_us(client)
            sessions.hset("ann", str(n), 0.002)
            while sessions.hget("ann") is not None:
                pass

            assert _now_us(client) - started_us >= 2_000
    sessions.close()


def _now_us(client: RedisClient) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1_000_000 + int(micros)


def test_the_scripts_ask_the_clock_once() -> None:
    for name in ("set", "get", "all", "count", "ttl", "expire", "delete", "collect"):
        assert len(re.findall(r'"TIME"', script(f"volatile/{name}").text)) == 1
