"""A Redis URL is understood in full, or refused with the reason, and never shown."""

from typing import Any

import pytest

from penstock.channels.redis_urls import RedisUrl, parse_redis_url
from penstock.errors import InvalidSetting

UNDERSTOOD: dict[str, RedisUrl] = {
    "redis://": RedisUrl("server", hosts=(("localhost", 6379),)),
    "redis://db": RedisUrl("server", hosts=(("db", 6379),)),
    "REDIS://db:7000/3": RedisUrl("server", hosts=(("db", 7000),), options={"db": 3}),
    "redis://[::1]:7000/": RedisUrl("server", hosts=(("::1", 7000),)),
    "redis://app:p%40s%2Fs%25@db": RedisUrl(
        "server", hosts=(("db", 6379),), options={"username": "app", "password": "p@s/s%"}
    ),
    "redis://:p@ss@db": RedisUrl("server", hosts=(("db", 6379),), options={"password": "p@ss"}),
    "redis://db?db=2&client_name=a&socket_timeout=2.5": RedisUrl(
        "server", hosts=(("db", 6379),), options={"db": 2, "client_name": "a", "socket_timeout": 2.5}
    ),
    "rediss://db?ssl_ca_certs=%2Fca.pem&ssl_check_hostname=false": RedisUrl(
        "server", is_tls=True, hosts=(("db", 6379),), options={"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False}
    ),
    "unix:///run/a%20b.sock?db=1": RedisUrl("socket", path="/run/a b.sock", options={"db": 1}),
    "unix://app:pw@/run/redis.sock": RedisUrl(
        "socket", path="/run/redis.sock", options={"username": "app", "password": "pw"}
    ),
    "redis+cluster://:pw@a:1,b/0": RedisUrl("cluster", hosts=(("a", 1), ("b", 6379)), options={"password": "pw"}),
    "rediss+cluster://a": RedisUrl("cluster", is_tls=True, hosts=(("a", 6379),)),
    "redis+sentinel://app:pw@a,[::1]:5/2?service=log": RedisUrl(
        "sentinel",
        hosts=(("a", 26379), ("::1", 5)),
        service="log",
        options={"username": "app", "password": "pw", "db": 2},
    ),
    "redis+cluster://a,b:pw@a,b,[::1]/0": RedisUrl(
        "cluster", hosts=(("a", 6379), ("b", 6379), ("::1", 6379)), options={"username": "a,b", "password": "pw"}
    ),
    "rediss+sentinel://a?sentinel_username=s&sentinel_password=t%26": RedisUrl(
        "sentinel", is_tls=True, hosts=(("a", 26379),), sentinel_options={"username": "s", "password": "t&"}
    ),
}

SECRET = "canary"
REFUSED = {
    f"mysql://u:{SECRET}@h/1": "the scheme mysql:// is not Redis'; there are: redis://",
    f"http://u:{SECRET}@h": "http://",
    SECRET: "it has no scheme",
    "": "it has no scheme",
    f"redis://u:{SECRET}@h:port": "a port is not a number from 1 to 65535",
    f"redis://u:{SECRET}@h:0": "a port",
    f"redis://u:{SECRET}@h:65536": "a port",
    f"redis://u:{SECRET}@[::1/0": "the host cannot be parsed",
    f"redis://u:{SECRET}@::1/0": "a host cannot be parsed; an IPv6 address is [in brackets]",
    f"redis://u:{SECRET}@h/name": "the database after the host is not a number",
    f"redis://u:{SECRET}@h?db=-1": "option db: not a whole number from 0 on",
    f"redis://u:{SECRET}@h?retries=5": "option retries is unknown; there are: db, username",
    f"redis://u:{SECRET}@h?client_name=": "option client_name: its value is missing",
    f"redis://u:{SECRET}@h?socket_timeout=never": "option socket_timeout: not a number of seconds above 0",
    f"redis://u:{SECRET}@h?protocol=4": "option protocol: one of 2, 3",
    f"redis://u:{SECRET}@h?ssl_ca_certs=/ca": "the option ssl_ca_certs needs TLS: rediss://",
    f"rediss://u:{SECRET}@h?ssl_cert_reqs=no": "option ssl_cert_reqs: one of required, optional, none",
    f"redis://u:{SECRET}@h?service=log": "option service is unknown",
    f"redis://u:{SECRET}@a,b": "several hosts",
    f"redis+cluster://u:{SECRET}@a/1": "a Cluster has database 0 only",
    f"unix://{SECRET}/redis.sock": "unix:// takes an absolute path",
    "unix://": "unix:// takes an absolute path",
    # A password that is not percent-encoded.
    f"redis://:pa/{SECRET}@h/0": "write %2F for /",
    f"redis://:pa?{SECRET}@h/0": "write %2F for /, %3F for ?",
    f"redis://:pa#{SECRET}@h/0": "it contains a #",
}


@pytest.mark.parametrize("url", UNDERSTOOD)
def test_a_url_is_understood(url: str) -> None:
    assert parse_redis_url(url) == UNDERSTOOD[url]


@pytest.mark.parametrize("url", REFUSED)
def test_an_invalid_url_is_refused_with_the_reason_and_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        parse_redis_url(url)

    assert str(raised.value).startswith("redis_url: ")
    assert REFUSED[url] in str(raised.value)
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert _chain(raised.value) == [raised.value]


def test_a_parsed_url_does_not_show_its_password() -> None:
    assert SECRET not in repr(parse_redis_url(f"redis://u:{SECRET}@h"))


def _chain(error: Any) -> list[BaseException]:
    """The errors that a traceback would show."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return [error, *(_chain(cause) if cause else [])]
