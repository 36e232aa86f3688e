"""What docs/how-to/keep-things-for-a-time.md and docs/explanation/pinned-keys.md show and say."""

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text

from fixtures.clients import RedisClient, connect_redis
from penstock.clients import check_eviction
from penstock.errors import UnsafeSetting
from penstock.structures import calls, pinned_keys, queue_tracker
from penstock.structures import volatile_hash as volatile

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "keep-things-for-a-time.md").read_text()


def test_the_pages_examples_run(
    engine: Engine, database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        url = engine.url.render_as_string(hide_password=False)
        exec(
            block.replace("redis://localhost:6379", redis_url)
            .replace("postgresql+psycopg://localhost/shop", url)
            .replace("postgresql://localhost/shop", database_url),
            names,
        )
        if "Task" in names:
            names["Base"].metadata.create_all(engine)

    printed = capsys.readouterr().out
    assert re.match(r"1800\.0\S* 3 \{b'token-17'", printed) or re.match(r"1799\.\d+ 3 ", printed)
    assert "the lock is mine for 29.9" in printed
    assert "work for 17" in printed
    assert names["report"] == b"dear"
    with engine.begin() as connection:
        connection.execute(insert(names["Task"]), [{"customer": n, "state": "queued"} for n in range(1, 60)])
        connection.execute(text("UPDATE tasks SET state = 'done' WHERE customer > 55"))
    slices = [names["tracker"].add_slice().added for _ in range(2)]
    assert slices == [49, 5]  # 17 is there already
    assert names["tracker"].remove_slice().removed == 0
    for made in ("sessions", "pins", "tracker"):
        names[made].close()
    names["connection"].close()
    names["engine"].dispose()


def test_the_limits_are_those_of_the_page() -> None:
    assert f"{calls.MIN_TTL_S:g} to {calls.MAX_TTL_S:,.0f} seconds (ten years)" in PAGE
    assert f"1 to {calls.MAX_FIELD_BYTES:,} bytes; text" in PAGE
    assert f"up to {calls.MAX_VALUE_BYTES // 2**20} MiB" in PAGE
    assert f"in one call | {calls.MAX_FIELDS:,} |" in PAGE
    assert f"1 to {calls.MAX_FIELDS:,}; {calls.SLICE} by default" in PAGE
    walk, sample = queue_tracker.MAX_WALK, queue_tracker.MAX_SAMPLE
    assert f"`tracker.add_slice(limit)`, `tracker.remove_slice(limit)` | 1 to {walk}; 1 to {sample} |" in PAGE
    assert f"1 to {calls.MAX_NAME_BYTES} bytes, without braces" in PAGE


def test_a_user_with_the_rights_of_the_page_may_use_everything(redis_client: RedisClient) -> None:
    [rights] = re.findall(r"`(~penstock:\S+ \+.*?)`", PAGE)
    redis_client.execute_command("ACL", "SETUSER", "web", "reset", "on", "nopass", *rights.split())
    path = redis_client.connection_pool.connection_kwargs["path"]
    client = connect_redis(f"unix://{path}?username=web&password=x")
    hash_ = volatile.VolatileHash(client, "sessions")
    hash_.hset("ann", "1", 60)
    assert hash_._native == bool(redis_client.execute_command("COMMAND INFO", "HSETEX")[0])
    hash_.hexpire("ann", 90)
    hash_.hpersist("ann")
    assert (hash_.hlen(), hash_.hgetall(), hash_.gc(), hash_.hdel("ann")) == (1, {b"ann": b"1"}, 0, 1)
    pins = pinned_keys.PinnedKeys(client, "reports")
    assert pins.compute("monthly", lambda: "1", 60) == b"1"
    assert pins.reap() == 0
    source = queue_tracker.QueuedIds(lambda *_: ["ann"], lambda _: [])
    tracked = queue_tracker.QueueTracker(client, "jobs", source)
    assert tracked.add_slice().added == 1
    assert tracked.remove_slice().removed == 1
    assert (tracked.size(), tracked.sample(1), tracked.contains("ann")) == (0, [], False)
    client.close()
    redis_client.execute_command("ACL", "DELUSER", "web")


def test_a_policy_that_evicts_pins_is_named(redis_client: RedisClient) -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(UnsafeSetting, match=r"allkeys-lru.*locks and pinned values too"):
            check_eviction(redis_client)
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")
    for policy in ("noeviction", "volatile-lru", "volatile-ttl"):
        redis_client.config_set("maxmemory-policy", policy)
        check_eviction(redis_client)
    redis_client.config_set("maxmemory-policy", "noeviction")
