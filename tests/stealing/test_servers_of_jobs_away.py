"""Requests are answered as ever while the servers that jobs need are away, silent or slow; afterwards jobs are done again."""

import asyncio
from collections.abc import Callable, Iterable
from wsgiref.util import setup_testing_defaults

import psycopg
import pytest
import redis

from fixtures.proxy import Proxy, behind
from fixtures.recruiting import MakeRecruiter
from penstock.engines.stealing import JobCounters, Outcome, Recruiter, WSGIEnlister
from penstock.testing import eventually

FAULTS = {
    "away": lambda proxy: proxy.refuse(),
    "silent": lambda proxy: proxy.hold_back(),
    "slow": lambda proxy: proxy.delay(0.03),  # each piece; a job takes longer than its budget
}


def answer(_: object, start_response: Callable[..., object]) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"answer"]


class Requests:
    """Requests to an application that recruits after each of them."""

    def __init__(self, recruiter: Recruiter) -> None:
        self._app, self._recruiter = WSGIEnlister(answer, recruiter), recruiter
        self.statuses: list[str] = []

    def until(self, reached: Callable[[dict[str, JobCounters]], bool], what: str) -> None:
        """Requests, one after the other, until the counters are as they should be."""
        eventually(lambda: self._one() and reached(dict(self._recruiter.counters())), what)

    def _one(self) -> bool:
        environ: dict[str, object] = {}
        setup_testing_defaults(environ)
        response = self._app(environ, lambda status, _: self.statuses.append(status))
        assert b"".join(response) == b"answer"
        getattr(response, "close")()  # noqa: B009  what a server does
        return True


@pytest.mark.parametrize("fault", FAULTS)
def test_requests_are_answered_whatever_the_servers_of_jobs_do(
    make_recruiter: MakeRecruiter,
    redis_proxy: Proxy,
    postgres_proxy: Proxy,
    redis_url: str,
    database_url: str,
    fault: str,
) -> None:
    recruiter = make_recruiter(hangs_s=100)
    patience_s = 60.0

    def ping() -> Outcome:
        url = behind(redis_proxy, redis_url)
        with redis.Redis.from_url(url, socket_timeout=patience_s, retry=None) as client:
            return Outcome.FINISHED if client.ping() else Outcome.GAVE_UP

    async def select() -> None:
        url = behind(postgres_proxy, database_url)
        async with asyncio.timeout(patience_s), await psycopg.AsyncConnection.connect(url) as connection:
            await connection.execute("SELECT 1")

    recruiter.install(ping, "redis", 0.5)
    recruiter.install(select, "postgres", 0.5)
    requests = Requests(recruiter)
    requests.until(lambda c: all(each.finished for each in c.values()), "jobs are done")

    patience_s = 0.2 if fault == "silent" else 60.0
    for proxy in (redis_proxy, postgres_proxy):
        FAULTS[fault](proxy)
    if fault == "slow":
        requests.until(lambda c: min(e.finished for e in c.values()) > 1, "jobs are done slowly")
    else:
        requests.until(lambda c: all(each.failed for each in c.values()), "jobs of both fail")
    if fault != "away":  # those jobs fail at once
        requests.until(lambda c: sum(e.dismissed for e in c.values()) > 5, "draws are dismissed")
    for proxy in (redis_proxy, postgres_proxy):
        proxy.heal()
    patience_s = 60.0
    finished = {name: each.finished for name, each in recruiter.counters().items()}
    requests.until(lambda c: all(each.finished > finished[name] for name, each in c.items()), "jobs are done again")

    assert set(requests.statuses) == {"200 OK"}
    assert {each.enlisted for each in recruiter.counters().values()} == {len(requests.statuses)}
