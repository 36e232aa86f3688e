"""Connections to Redis or Valkey, and the translation of their errors.

The client library's own retries are off, because only the caller knows whether a write may be
repeated.  Every new connection checks that the server is new enough: an older one lacks commands of
the scripts.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    MovedError,
    RedisClusterException,  # a cluster that is not whole; no RedisError
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from penstock.channels.commands import AsyncRedisClient, RedisClient
from penstock.channels.redis_urls import RedisUrl, parse_redis_url
from penstock.database.transactions import Timeouts
from penstock.errors import (
    AppendRefused,
    ForeignLog,
    PenstockError,
    ServerUnavailable,
    UnsafeSetting,
)

Subject = TypeVar("Subject")
Client = TypeVar("Client")

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 15.0
"""Longest wait for a reply, in seconds: longer than any blocking read, so that it detects a
half-open connection."""

OLDEST: dict[str, tuple[int, int]] = {"Redis": (6, 2), "Valkey": (7, 2)}
"""Oldest versions that have every command of the scripts."""

REDIS_ERRORS = (redis.RedisError, RedisClusterException)
"""Every error of the client library."""

RedisFailure = redis.RedisError | RedisClusterException

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

_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


def connect_redis(url: str, *, timeouts: Timeouts | None = None) -> RedisClient:
    """Returns a client for a server, a Cluster or Sentinels: see ``penstock.channels.redis_urls``.

    It connects on the first command; to a Cluster at once.  With TLS it verifies the server's
    certificate and name.  Timeouts in the URL come before ``timeouts``, those of a caller that
    cannot wait as long as a worker.  Raises ``InvalidSetting``, ``ServerUnavailable`` or
    ``UnsafeSetting``.
    """
    parsed = parse_redis_url(url)
    if timeouts is not None:
        parsed = parsed.with_timeouts(timeouts.connect_s, timeouts.reply_s)
    _check_files(parsed.options)
    retry = Retry(NoBackoff(), 0)
    with redis_errors("connecting to Redis"):
        match parsed.kind:
            case "cluster":  # whose client calls the check once it has set up the connection
                node: Any = ClusterNode  # untyped in redis-py
                return _connect_cluster(
                    parsed, redis.RedisCluster, node, retry=retry, redis_connect_func=_check_version
                )
            case "sentinel":
                client: RedisClient = _connect_sentinels(
                    parsed, _Sentinels, retry=retry, redis_connect_func=_set_up_and_check
                )
                return client
            case _:
                return _connect_server(parsed, retry=retry, redis_connect_func=_set_up_and_check)


def _check_files(options: Mapping[str, Any]) -> None:
    """Checks the files for TLS: the client library's error does not say which is missing."""
    for name in _FILES:
        if name in options and not os.access(options[name], os.R_OK):
            raise ServerUnavailable(f"redis_url: {name}: {options[name]} cannot be read")


def _timeouts_and_tls(parsed: RedisUrl) -> dict[str, Any]:
    """Returns options of every connection, unless the URL has others."""
    options: dict[str, Any] = {
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }
    if parsed.is_tls:
        options |= {"ssl_cert_reqs": "required"}
        # Verifying no certificate, there is no name to compare.
        options |= {"ssl_check_hostname": parsed.options.get("ssl_cert_reqs") != "none"}
    names = {*options, *_FILES, "ssl_password", "socket_keepalive", "protocol"}
    return options | {name: value for name, value in parsed.options.items() if name in names}


def _connect_server(parsed: RedisUrl, **overrides: Any) -> RedisClient:
    address: dict[str, Any] = {"path": parsed.path}
    kind: Any = redis.UnixDomainSocketConnection
    if parsed.kind == "server":
        [(host, port)] = parsed.hosts
        address = {"host": host, "port": port}
        kind = redis.SSLConnection if parsed.is_tls else redis.Connection
    options = {**_timeouts_and_tls(parsed), **parsed.options, **address, **overrides}
    return redis.Redis.from_pool(redis.ConnectionPool(connection_class=kind, **options))


def connect_redis_async(url: str) -> AsyncRedisClient:
    """Returns a client of ``redis.asyncio``, which connects on the first command.

    See ``connect_redis``. It does not check the server's version: a client for threads does that
    first. Raises ``InvalidSetting`` or ``ServerUnavailable``.
    """
    parsed = parse_redis_url(url)
    _check_files(parsed.options)
    retry = AsyncRetry(NoBackoff(), 0)
    options: dict[str, Any] = {
        **_timeouts_and_tls(parsed),
        **parsed.options,
        "ssl": parsed.is_tls,
        "retry": retry,
    }
    match parsed.kind:
        case "cluster":
            return _connect_cluster(
                parsed, redis.asyncio.RedisCluster, AsyncClusterNode, retry=retry
            )
        case "sentinel":
            client: AsyncRedisClient = _connect_sentinels(parsed, AsyncSentinel, retry=retry)
            return client
        case "server":
            [(host, port)] = parsed.hosts
            return redis.asyncio.Redis(host=host, port=port, **options)
        case _:
            return redis.asyncio.Redis(unix_socket_path=parsed.path, **options)


def _connect_cluster(
    parsed: RedisUrl,
    client: Callable[..., Client],
    node: Callable[[str, int], Any],
    **overrides: Any,
) -> Client:
    nodes = [node(host, port) for host, port in parsed.hosts]
    options = {**_timeouts_and_tls(parsed), **parsed.options, "ssl": parsed.is_tls}
    return client(startup_nodes=nodes, **options, **overrides)


def _connect_sentinels(parsed: RedisUrl, sentinels: Any, *, retry: Any, **overrides: Any) -> Any:
    common = {**_timeouts_and_tls(parsed), "retry": retry, "ssl": parsed.is_tls}
    manager = sentinels(parsed.hosts, sentinel_kwargs={**common, **parsed.sentinel_options})
    return manager.master_for(parsed.service, **{**common, **parsed.options}, **overrides)


class _Sentinels(Sentinel):
    """Sentinels whose error says why they name no master."""

    def discover_master(self, service_name: str) -> Any:
        """Returns address and port of the master."""
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]  # untyped in redis-py
        except MasterNotFoundError:
            raise MasterNotFoundError(
                f"the Sentinels name no master {service_name!r}; {self._why()}"
            ) from None

    def _why(self) -> str:
        """Asks the first Sentinel again: they are mostly set up alike."""
        try:
            self.sentinels[0].ping()
        except redis.RedisError as error:
            return f"the first: {_reason(error)}{_advice(error)}"
        return "they answer: is the name after service= right, and is the master up?"


def _set_up_and_check(connection: Any) -> None:
    """Authenticates and selects the database, as the client does; checks the version."""
    try:
        connection.on_connect()
    except redis.ResponseError as error:
        if "unknown command" not in str(error):
            raise
        # It is too old for the greeting, which the check below tells better.
    except redis.ConnectionError as error:
        if not _CUT.search(str(error)):
            raise
        explanation = _CLOSED_TLS if isinstance(connection, redis.SSLConnection) else _CLOSED
        raise redis.ConnectionError(f"{explanation}: {error}") from error
    _check_version(connection)


def _check_version(connection: Any) -> None:
    """Refuses a server that is too old; one that hides its version counts as new enough."""
    name, version = _server_version(connection)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST[name]:
        connection.disconnect()
        needed = " or ".join(f"{product} {a}.{b}" for product, (a, b) in OLDEST.items())
        raise UnsafeSetting(
            f"{name} {version} is too old: it lacks commands that Penstock's scripts call. Upgrade "
            f"it to {needed}, or newer"
        )


def _server_version(connection: Any) -> tuple[str, str]:
    """Returns name and version of the server, from its greeting or, without one, on request."""
    greeting = getattr(connection, "handshake_metadata", None) or _ask(connection, "HELLO")
    if greeting:
        pairs = (
            greeting.items()
            if isinstance(greeting, dict)
            else zip(greeting[::2], greeting[1::2], strict=False)
        )
        properties = {_as_text(key): _as_text(value) for key, value in pairs}
        name = "Valkey" if properties.get("server") == "valkey" else "Redis"
        return name, properties.get("version", "")
    # Before Redis 6, or behind a proxy.
    info = _as_text(_ask(connection, "INFO", "server") or "")
    found_version = re.search(r"^redis_version:(\S+)", info, re.MULTILINE)
    return "Redis", found_version[1] if found_version else ""


def _ask(connection: Any, *command: str) -> Any:
    """Returns the reply to a command; None if the server refuses it."""
    connection.send_command(*command, check_health=False)
    try:
        return connection.read_response()
    except redis.ResponseError:
        return None


def _as_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@contextmanager
def redis_errors(activity: str) -> Iterator[None]:
    """Translates the client library's errors into ours.

    ``activity`` is for their texts: ``appending to rides/2``. Raises ``ServerUnavailable``,
    ``AppendRefused`` or ``ForeignLog``.
    """
    try:
        yield
    except REDIS_ERRORS as error:
        raise translate_error(error, activity) from error


def pipelined(
    client: Any,
    subjects: Iterable[Subject],
    ask: Callable[[Any, Subject], object],
    activity: str,
    *,
    raises: bool = True,
) -> dict[Subject, Any]:
    """Returns the reply to one command for each subject, in one round trip.

    Unless ``raises``, it may be an error; otherwise raises as ``redis_errors``.
    """
    pipeline, listed = client.pipeline(transaction=False), list(subjects)
    for subject in listed:
        ask(pipeline, subject)
    with redis_errors(activity):
        return dict(zip(listed, pipeline.execute(raise_on_error=raises), strict=True))


def translate_error(error: RedisFailure, activity: str) -> PenstockError:
    """Returns our error for one of the client library's; error replies contain no payload."""
    if isinstance(error.__cause__, PenstockError):  # raised while a Cluster's client connected
        return error.__cause__
    return _translate_unavailable(error, activity) or _translate_reply(error, activity)


def _translate_unavailable(error: RedisFailure, activity: str) -> ServerUnavailable | None:
    """Returns the error of a server that cannot be reached; None if it has answered."""
    if isinstance(error, AuthenticationError) or _word(error) in ("WRONGPASS", "NOAUTH"):
        explanation = (
            f"Redis refuses the user or the password of redis_url: {_reason(error)}. "
            "Special characters in them are percent-encoded: %40 for @. Users that were not saved "
            "are lost when Redis restarts"
        )
    elif isinstance(error, InvalidResponse):
        explanation = (
            "the server at redis_url does not speak Redis' protocol. "
            "Does the port belong to another server?"
        )
    elif (
        isinstance(error, MovedError) or _word(error) == "MOVED"
    ):  # a plain error before redis-py 6
        explanation = "the server at redis_url belongs to a Cluster: redis+cluster://, not redis://"
    elif isinstance(error, RedisClusterException) or (
        isinstance(error, (redis.ConnectionError, redis.TimeoutError))
        and _word(error) not in REFUSALS
    ):
        explanation = (
            f"Redis does not answer ({type(error).__name__}: {_reason(error)}){_advice(error)}"
        )
    else:
        return None
    return ServerUnavailable(f"{activity}: {explanation}")


def _translate_reply(error: RedisFailure, activity: str) -> ForeignLog | AppendRefused:
    """Returns the error that an error reply stands for."""
    if "WRONGTYPE" in _text(error):
        return ForeignLog(
            f"{activity}: the key holds another type, not a stream; something else uses Penstock's "
            "names in this Redis. Rename the key, or give the pipeline another namespace"
        )
    return AppendRefused(f"{activity}: Redis refuses: {_reason(error)}{_advice(error)}")


def _reason(error: Exception) -> str:
    """Returns the text of an error in one line."""
    return " ".join(_text(error).split())[:300].rstrip(".")


def _text(error: Exception) -> str:
    """Returns the text of an error without a pipeline's command, which may hold a payload."""
    return _COMMAND.sub("", str(error))


_COMMAND = re.compile(r"^Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)
_CUT = re.compile("closed by server|while (reading|writing)")
_CLOSED = "the server closed the connection at the first command"
_CLOSED_TLS = "the server closed the TLS connection at the first command"
_ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": "name the file of the CA's certificate: "
    "?ssl_ca_certs=/path/ca.pem",
    "WRONG_VERSION_NUMBER": "does this port speak TLS? Without TLS it is redis://, not rediss://",
    "record layer failure": "does this port speak TLS? Without TLS it is redis://, not rediss://",
    _CLOSED_TLS: "does it want a client's certificate? "
    "?ssl_certfile=/path/client.pem&ssl_keyfile=/path/client.key",
    _CLOSED: "does this port speak TLS, or another protocol? With TLS it is rediss://, not redis://",
    "Timeout connecting": "is the address right and, for rediss://, does the port speak TLS?",
    "o permissions": "the rights of users: penstock init --roles --acl setuser",
    "ACL failure": "the rights of users: penstock init --roles --acl setuser",
    "executing the script can't": "the rights of users: penstock init --roles --acl setuser",
    "luster mode is not enabled": "it is a single server: redis://, not redis+cluster://",
}


def _advice(error: Exception) -> str:
    """Returns advice on an error, by its text."""
    for fragment, advice in _ADVICE.items():
        if fragment in str(error):
            return f"; {advice}"
    return ""


def find_server(error: BaseException | None) -> Literal["postgres", "redis"]:
    """Returns the server that an error is about, from its causes."""
    while error is not None:
        if isinstance(error, redis.RedisError):
            return "redis"
        error = error.__cause__
    return "postgres"


def is_unavailable(error: BaseException) -> bool:
    """Returns whether an error passes: Redis is away, loading, full or read-only."""
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | RedisClusterException):
        return True
    return isinstance(error, redis.RedisError) and _word(error) in REFUSALS


def _word(error: Exception) -> str:
    """Returns the first word of a reply, which is the kind of error."""
    return _text(error).split(" ", 1)[0].rstrip(":")


def check_eviction(client: RedisClient) -> None:
    """Checks that Redis does not evict our keys when its memory is full.

    ``volatile-*`` is fine: it evicts only keys with a time to live, and ours have none.

    Raises:
        UnsafeSetting: ``maxmemory-policy`` is one of ``allkeys-*``.
        ServerUnavailable: Redis does not answer.
        AppendRefused: Redis refuses ``INFO``.
    """
    with redis_errors("reading Redis' memory settings"):
        policy = str(client.info("memory").get("maxmemory_policy", ""))
    if policy.startswith("allkeys-"):
        raise UnsafeSetting(
            f"Redis' maxmemory-policy is {policy}: when its memory is full it deletes any key: the "
            "log, locks and pinned values too. "
            "CONFIG SET maxmemory-policy noeviction, or give the log its own Redis"
        )


def find_refusal(client: RedisClient) -> str | None:
    """Returns why Redis refuses writes now, by what its servers report; None if they take them.

    Raises:
        ServerUnavailable: Redis does not answer.
        AppendRefused: Redis refuses ``INFO``.
    """
    with redis_errors("inspecting Redis"):
        # The client of a Cluster is asked for all of its primaries.
        info: Any = (
            client.info(target_nodes="primaries")
            if isinstance(client, RedisCluster)
            else client.info()
        )
    servers = (
        [*info.values()] if isinstance(client, RedisCluster) and "role" not in info else [info]
    )
    return next(filter(None, map(_find_refusal, servers)), None)


def _find_refusal(info: Mapping[str, Any]) -> str | None:
    used, maxmemory = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if maxmemory and used - int(info.get("mem_not_counted_for_evict", 0)) > maxmemory:
        return (
            f"Redis refuses writes: its memory is full, {used:,} bytes of maxmemory {maxmemory:,}"
        )
    if "err" in (info.get("rdb_last_bgsave_status"), info.get("aof_last_write_status")):
        return "Redis refuses writes: it cannot write to its disk, see its log"
    if info.get("min_slaves_good_slaves") == 0:
        return "Redis refuses writes: it has no replica, and min-replicas-to-write asks for one"
    return None if info.get("role") == "master" else "Redis refuses writes: it is a replica"
