"""Parses the URL of a Redis, of a Cluster, or of Sentinels.

    redis://user:password@host:6379/0                     one server
    redis+cluster://host:6379,host2:6379                  a Cluster, found by any of its nodes
    redis+sentinel://host:26379,host2:26379/0?service=log the master that Sentinels name
    rediss://…, rediss+cluster://…, rediss+sentinel://…   the same with TLS
    unix:///run/redis.sock?db=0                           a Unix socket

The errors show neither the URL nor a part of it that could belong to a password.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from penstock.errors import InvalidSetting

Kind = Literal["server", "socket", "cluster", "sentinel"]

_KINDS: Mapping[str, Kind] = {
    "redis": "server",
    "rediss": "server",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "unix": "socket",
}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=://)", re.IGNORECASE)
_HOSTS = re.compile(r"(?<=://)((?:[^/?#]*@)?)([^/?#]*)")
_OPTION_NAME = re.compile(r"[a-z_]{1,40}")
_PORTS = range(1, 65536)
_SENTINEL_PORT, _PORT = 26379, 6379
_ENCODED = "In a user or a password, write %2F for /, %3F for ?, %23 for #, %40 for @, %25 for %"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL."""

    kind: Kind  # what it names
    is_tls: bool = False  # whether connections are encrypted
    # names and ports: of the server, of the Cluster's nodes, or of Sentinels; none for a socket
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""  # path of the Unix socket
    service: str = "mymaster"  # the master's name at the Sentinels
    # user, password, database, and options for the client library
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # user and password for the Sentinels themselves
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def with_timeouts(self, connect_s: float, reply_s: float) -> "RedisUrl":
        """Returns the URL with timeouts, in seconds, unless it names others."""
        timeouts = {"socket_connect_timeout": connect_s, "socket_timeout": reply_s}
        return replace(self, options={**timeouts, **self.options})


def parse_redis_url(url: str) -> RedisUrl:
    """Returns the parts of ``redis_url``.  Raises ``InvalidSetting``."""
    url = url.strip()  # a secret in a file ends with a newline
    scheme = _parse_scheme(url)
    kind, is_tls = _KINDS[scheme], scheme.startswith("rediss")
    hosts = "" if kind == "socket" else _HOSTS.findall(url)[0][1]
    try:
        # Newer releases of Python refuse an address in brackets among several hosts: those are
        # parsed below.
        parts = urlsplit(_HOSTS.sub(r"\1", url, count=1) if "," in hosts else url)
    except ValueError:
        raise _invalid(f"the host cannot be parsed. {_ENCODED}") from None
    if parts.fragment:
        raise _invalid(f"it contains a #. {_ENCODED}")
    options = _parse_options(parts, kind, is_tls=is_tls) | _parse_database(parts, kind)
    service = options.pop("service", "mymaster")
    return RedisUrl(
        kind,
        is_tls,
        () if kind == "socket" else _parse_hosts(hosts, kind),
        _parse_path(parts) if kind == "socket" else "",
        service,
        _parse_user(parts)
        | {name: value for name, value in options.items() if not name.startswith("sentinel_")},
        {
            name.removeprefix("sentinel_"): value
            for name, value in options.items()
            if name.startswith("sentinel_")
        },
    )


def _invalid(problem: str) -> InvalidSetting:
    return InvalidSetting(f"redis_url: {problem}")


def _parse_scheme(url: str) -> str:
    match = _SCHEME.match(url)
    scheme = match[0].lower() if match else ""
    if scheme not in _KINDS:
        problem = f"the scheme {scheme}:// is not Redis'" if scheme else "it has no scheme"
        raise _invalid(f"{problem}; there are: {', '.join(f'{name}://' for name in _KINDS)}")
    return scheme


def _parse_user(parts: SplitResult) -> dict[str, Any]:
    login = {"username": parts.username, "password": parts.password}
    return {name: unquote(value) for name, value in login.items() if value}


def _parse_hosts(hosts: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    listed = hosts.split(",")
    if kind == "server" and len(listed) > 1:
        raise _invalid(
            "it has several hosts; that takes redis+cluster:// or redis+sentinel://. " + _ENCODED
        )
    default = _SENTINEL_PORT if kind == "sentinel" else _PORT
    return tuple(_parse_host(host, default) for host in listed)


def _parse_host(listed: str, default_port: int) -> tuple[str, int]:
    """Returns a host and its port; an IPv6 address is in brackets."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]*))(?::([^:]*))?", listed)
    if match is None:
        raise _invalid(f"a host cannot be parsed; an IPv6 address is [in brackets]. {_ENCODED}")
    host, port = match[1] or match[2] or "localhost", match[3]
    if not port:
        return unquote(host), default_port
    if not (port.isascii() and port.isdigit() and int(port) in _PORTS):
        raise _invalid(f"a port is not a number from 1 to {_PORTS[-1]}. {_ENCODED}")
    return unquote(host), int(port)


def _parse_path(parts: SplitResult) -> str:
    if parts.netloc.rpartition("@")[2] or not parts.path.startswith("/"):
        raise _invalid("unix:// takes an absolute path: unix:///run/redis.sock")
    return unquote(parts.path)


def _parse_database(parts: SplitResult, kind: Kind) -> dict[str, int]:
    """Returns the number after the host; ``?db=`` for a socket."""
    path = parts.path.strip("/")
    if kind == "socket" or not path:
        return {}
    if not (path.isascii() and path.isdigit()):
        raise _invalid(f"the database after the host is not a number. {_ENCODED}")
    if kind == "cluster" and int(path) != 0:
        raise _invalid("a Cluster has database 0 only")
    return {} if kind == "cluster" else {"db": int(path)}


def _parse_options(parts: SplitResult, kind: Kind, *, is_tls: bool) -> dict[str, Any]:
    values = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        parsers = _known_options(kind, is_tls=is_tls)
        if name not in parsers:
            if name in _TLS_OPTIONS:
                raise _invalid(f"the option {name} needs TLS: rediss:// in place of redis://")
            if not _OPTION_NAME.fullmatch(name):
                raise _invalid(f"it contains a ? that begins no option. {_ENCODED}")
            raise _invalid(f"option {name} is unknown; there are: {', '.join(parsers)}")
        try:
            values[name] = parsers[name](text)
        except ValueError as error:
            raise _invalid(f"option {name}: {error}") from None
    return values


def _known_options(kind: Kind, *, is_tls: bool) -> Mapping[str, Callable[[str], Any]]:
    return {
        **(_SENTINEL_OPTIONS if kind == "sentinel" else {}),
        **({} if kind == "cluster" else {"db": _number}),
        **_OPTIONS,
        **(_TLS_OPTIONS if is_tls else {}),
    }


def _text(text: str) -> str:
    if not text:
        raise ValueError("its value is missing")
    return text


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("not a whole number from 0 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("not a number of seconds above 0")
    return value


def _choice(**values: Any) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text.lower() not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return values[text.lower()]

    return parse


_switch = _choice(true=True, false=False)

_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "username": _text,
    "password": _text,
    "client_name": _text,
    "protocol": _choice(**{"2": 2, "3": 3}),
    "socket_timeout": _seconds,
    "socket_connect_timeout": _seconds,
    "socket_keepalive": _switch,
    "health_check_interval": _number,
}
_SENTINEL_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "service": _text,
    "sentinel_username": _text,
    "sentinel_password": _text,
}
_TLS_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "ssl_ca_certs": _text,
    "ssl_ca_path": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_password": _text,
    "ssl_check_hostname": _switch,
    "ssl_cert_reqs": _choice(required="required", optional="optional", none="none"),
}
