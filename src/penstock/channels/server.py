"""Connections to Redis or Valkey, and the translation of their errors.

The client library's own retries are off, because only the caller knows whether a write may be repeated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException  # a cluster that is not whole; no RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from penstock.errors import (
    AppendRefused,
    ForeignLog,
    PenstockError,
    ServerUnavailable,
    UnsafeSetting,
)

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 15.0
"""Longest wait for a reply, in seconds: longer than any blocking read, so that it detects a half-open connection."""

RedisClient = Any
"""``redis.Redis`` or ``redis.RedisCluster``: the same methods, but no common type."""

REFUSALS = (
    "OOM",
    "READONLY",
    "MISCONF",
    "NOREPLICAS",
    "LOADING",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "TRYAGAIN",
    "NOPERM",
)


def connect_redis(url: str) -> RedisClient:
    """A client for ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://`` or ``redis+sentinel://…?service=name``.

    It connects on the first command.

    Raises:
        ServerUnavailable: The URL cannot be understood.
    """
    options: dict[str, Any] = {
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        if url.startswith("redis+cluster://"):
            return redis.RedisCluster.from_url(
                url.replace("redis+cluster://", "redis://", 1), **options
            )
        if url.startswith("redis+sentinel://"):
            return _sentinel(url, options)
        return redis.Redis.from_url(url, **options)
    except (ValueError, redis.RedisError) as error:
        raise ServerUnavailable(
            f"Redis cannot be reached by the URL given: {type(error).__name__}"
        ) from error


def _sentinel(url: str, options: dict[str, Any]) -> RedisClient:
    """The master of a service: ``redis+sentinel://:password@host:26379,host2:26379/0?service=mymaster``."""
    parts = urlsplit(url)
    service = parse_qs(parts.query).get("service", ["mymaster"])[0]
    hosts = parts.netloc.rpartition("@")[2].split(",")
    sentinels = [(host, int(port or 26379)) for host, _, port in (h.partition(":") for h in hosts)]
    watchers: Any = Sentinel(  # type: ignore[no-untyped-call]  # untyped in redis-py
        sentinels, sentinel_kwargs=options, **options
    )
    return watchers.master_for(
        service, password=parts.password, db=int(parts.path.strip("/") or 0), **options
    )


@contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Translates the client library's errors into ours.

    Args:
        what: The activity, for the error text: ``appending to rides/2``.

    Raises:
        ServerUnavailable: No connection, or no reply in time.
        AppendRefused: The server answers, but refuses writes for now.
        ForeignLog: The key holds another type.
    """
    try:
        yield
    except (redis.RedisError, RedisClusterException) as error:
        raise translate_error(error, what) from error


def translate_error(error: redis.RedisError | RedisClusterException, what: str) -> PenstockError:
    """Our error for one of the client library's; error replies contain no payload."""
    text = str(error)
    if isinstance(error, RedisClusterException) or (
        isinstance(error, (redis.ConnectionError, redis.TimeoutError))
        and _word(error) not in REFUSALS
    ):
        return ServerUnavailable(f"{what}: Redis does not answer ({type(error).__name__})")
    if "WRONGTYPE" in text:
        return ForeignLog(
            f"{what}: the key holds another type, not a stream; something else uses Penstock's names in this Redis. "
            "Move it away, or give the pipeline another namespace"
        )
    return AppendRefused(f"{what}: Redis refuses: {text[:200]}")


def is_unavailable(error: BaseException) -> bool:
    """Whether an error of the client library says that Redis cannot do it now, and will: away, loading, full, read-only."""
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | RedisClusterException):
        return True
    return isinstance(error, redis.RedisError) and _word(error) in REFUSALS


def _word(error: redis.RedisError) -> str:
    """The first word of a reply, which says what kind of error it is."""
    return str(error).split(" ", 1)[0].rstrip(":")


def info_text(client: RedisClient, section: str) -> dict[str, Any]:
    """``INFO section`` of one server; of a Cluster's first node."""
    answer = client.info(section)
    return cast("dict[str, Any]", answer)


def check_eviction(client: RedisClient) -> None:
    """Checks that Redis does not evict our keys when its memory is full.

    ``volatile-*`` is fine: it evicts only keys with a time to live, and ours have none.

    Raises:
        UnsafeSetting: ``maxmemory-policy`` is one of ``allkeys-*``.
        ServerUnavailable: Redis does not answer.
        AppendRefused: Redis refuses ``INFO``.
    """
    with redis_errors("reading Redis' memory settings"):
        policy = str(info_text(client, "memory").get("maxmemory_policy", ""))
    if policy.startswith("allkeys-"):
        raise UnsafeSetting(
            f"Redis' maxmemory-policy is {policy}: when its memory is full it deletes any key, the log among them. "
            "CONFIG SET maxmemory-policy noeviction, or give the log its own Redis"
        )
