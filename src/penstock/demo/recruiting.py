"""The demo without a streamer and without consumer processes: requests to the API do all chores of the pipeline."""

import os
from collections.abc import Sequence

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.demo import late_consumer
from penstock.demo.audit import LATE_CONSUMER
from penstock.demo.processes import SupervisedProcess
from penstock.demo.rides import pipeline
from penstock.demo.simulator import free_port
from penstock.engines.stealing import ASGIEnlister, Chores, Outcome, Recruiter
from penstock.pipeline import Pipeline

RATE = "PENSTOCK_DEMO_RATE"
"""Environment variable: the share of requests that are recruited for each chore that moves records."""

RECORDS = 200
"""Most records of one slice."""

PROCESSES = 2
"""Processes of the API: while one of them is started again, the other one answers."""


class Recruits:
    """The recruiter of one process of the API."""

    def __init__(self) -> None:
        """Installs the chores, as the environment says."""
        self.recruiter = Recruiter()
        each = float(os.environ[RATE])
        chores = self._chores(pipeline)
        every = chores.all()
        weight = max(chore.weight for chore in every)
        chores.install(self.recruiter, rate=each * sum(c.weight for c in every) / weight)
        self._late = self._chores(late_consumer.pipeline).consume(LATE_CONSUMER)
        self._has_begun = False
        self.recruiter.install(self._consume_late, LATE_CONSUMER, each)

    def wrap(self, application: ASGIApp) -> ASGIApp:
        """The application, whose responses enlist."""
        return ASGIEnlister(application, self.recruiter)

    @property
    def routes(self) -> list[Route]:
        """A cheap request, and the counters."""
        return [Route("/health", _health), Route("/recruits", self._count)]

    def _chores(self, of: Pipeline) -> Chores:
        return Chores(of, os.environ["PENSTOCK_DATABASE_URL"], os.environ["PENSTOCK_REDIS_URL"], records=RECORDS)

    def _consume_late(self) -> Outcome:
        """Consumes once the late consumer has begun with the tables; before that, it would begin with the log."""
        self._has_begun = self._has_begun or late_consumer.has_begun()
        return self._late() if self._has_begun else Outcome.NOTHING_TO_DO

    async def _count(self, _: Request) -> Response:
        counters = self.recruiter.counters().values()
        return JSONResponse(
            {
                "process": os.getpid(),
                "recruited": sum(each.recruited for each in counters),
                "finished": sum(each.finished for each in counters),
                "aborted": sum(each.aborted for each in counters),
                "failed": sum(each.failed for each in counters),
            }
        )


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


class ApiProcesses:
    """The processes of the API: supervised, and counted.

    Attributes:
        urls: Where they answer.
    """

    def __init__(self, environment: dict[str, str], rate: float) -> None:
        """Starts nothing yet."""
        more = {**environment, RATE: str(rate)}
        ports = [free_port() for _ in range(PROCESSES)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.processes = [SupervisedProcess(["penstock.demo.api"], {**more, "PORT": str(port)}) for port in ports]
        self._counts: dict[int, dict[str, int]] = {}

    def start(self) -> None:
        """Starts them."""
        for process in self.processes:
            process.start()

    def count(self) -> dict[str, int]:
        """What recruits have done so far; what a process did right before it was killed is missing."""
        for url in self.urls:
            try:
                found = httpx.get(f"{url}/recruits", timeout=2).json()
            except httpx.TransportError:
                continue
            self._counts[found.pop("process")] = found
        names = ("recruited", "finished", "aborted", "failed")
        return {name: sum(each[name] for each in self._counts.values()) for name in names}


def check_health(urls: Sequence[str], times: int = 20) -> None:
    """Sends cheap requests, which recruit like all others."""
    for number in range(times):
        try:
            httpx.get(f"{urls[number % len(urls)]}/health", timeout=10)
        except httpx.TransportError:
            return
