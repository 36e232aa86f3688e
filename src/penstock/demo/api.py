"""The HTTP API: each request is a SERIALIZABLE transaction, retried if serialization fails."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import tenacity
import uvicorn
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.database.connections import connect_postgres, make_engine
from penstock.database.driver_errors import ErrorKind, classify
from penstock.demo.rides import LATE_CONSUMER, Booking, Ride, assign_driver, late_pipeline, pipeline
from penstock.demo.supervision import RATE
from penstock.engines.stealing import ASGIEnlister, Chores, Outcome, Recruiter
from penstock.parsing import parse_json
from penstock.pipeline import Pipeline

CENTS_A_METRE = 2


class RefusedError(Exception):
    """The request fails with an HTTP status; its transaction and its records are rolled back."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Work = Callable[[Session, Request, bytes], Response]
"""What a request does in its transaction; it is given the body."""


def create(session: Session, _: Request, body: bytes) -> Response:
    """Handles POST /rides: books a ride."""
    distance, ride = _distance(body), Ride(amount_cents=0)
    ride.charge(round(distance * CENTS_A_METRE))
    session.add(ride)
    session.flush()
    session.add(Booking(ride_id=ride.id, driver=assign_driver()))
    message = f"Payment accepted. Your pilot is on their way! distance={distance:.2f}m"
    return JSONResponse({"message": message, "id": ride.id}, 201)


def correct(session: Session, request: Request, body: bytes) -> Response:
    """Handles PATCH /rides/ID: corrects the distance."""
    cents = round(_distance(body) * CENTS_A_METRE)
    _ride(session, request).charge(cents)
    return PlainTextResponse("", 204)


def cancel(session: Session, request: Request, _: bytes) -> Response:
    """Handles DELETE /rides/ID: cancels the ride."""
    ride = _ride(session, request)
    ride.delta_cents = -ride.amount_cents  # type: ignore[misc]  # an instance's own
    session.delete(ride)
    return PlainTextResponse("", 204)


def application(engine: Engine, extra_routes: Sequence[Route] = ()) -> Starlette:
    """Makes the API on a database that has the demo's tables, with ``extra_routes``."""
    sessions = sessionmaker(engine.execution_options(isolation_level="SERIALIZABLE"))
    pipeline.attach(sessions)
    return Starlette(
        routes=[
            *extra_routes,
            Route("/rides", partial(_answer, sessions, create), methods=["POST"]),
            Route("/rides/{id:int}", partial(_answer, sessions, correct), methods=["PATCH"]),
            Route("/rides/{id:int}", partial(_answer, sessions, cancel), methods=["DELETE"]),
        ]
    )


async def _answer(sessions: sessionmaker[Session], work: Work, request: Request) -> Response:
    return await run_in_threadpool(_retry, sessions, work, request, await request.body())


def _retry(sessions: sessionmaker[Session], work: Work, request: Request, body: bytes) -> Response:
    """Runs one transaction, up to 20 times; the response carries the number of attempts."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: classify(error) is ErrorKind.CONFLICT),
        stop=tenacity.stop_after_attempt(20),
        wait=tenacity.wait_random(0, 0.02),
        reraise=True,
    )
    try:
        answer = attempts(_transact, sessions, work, request, body)
    except RefusedError as refused:
        answer = JSONResponse({"error": str(refused)}, refused.status)
    answer.headers["x-attempts"] = str(attempts.statistics["attempt_number"])
    return answer


def _transact(
    sessions: sessionmaker[Session], work: Work, request: Request, body: bytes
) -> Response:
    with sessions.begin() as session:
        answer = work(session, request, body)
        if "x-decline" in request.headers:
            session.flush()  # stages the record, which the rollback removes
            raise RefusedError(402, "Your card was declined.")
    return answer


def _ride(session: Session, request: Request) -> Ride:
    ride = session.get(Ride, request.path_params["id"], with_for_update=True)
    if ride is None:
        raise RefusedError(404, "There is no such ride.")
    return ride


def _distance(body: bytes) -> float:
    """Parses the distance of a request: JSON, or a form, as ``curl -d distance=123.0`` posts it."""
    value: Any
    try:
        value = parse_json(body.decode()).get("distance")
    except (ValueError, AttributeError):
        value = dict(parse_qsl(body.decode(errors="replace"))).get("distance")
    if value in (None, ""):
        raise RefusedError(422, "Please specify parameter 'distance'.")
    try:
        distance = float(value)
    except (TypeError, ValueError, OverflowError):
        distance = float("nan")
    if not 0 <= distance < 1e9:  # noqa: PLR2004  farther than any pilot flies
        raise RefusedError(422, "Parameter 'distance' must be a floating-point number.")
    return distance


RECORDS = 200
"""Most records of one slice."""


class Recruits:
    """The recruiter of one process of the API."""

    def __init__(self) -> None:
        """Installs the chores, as the environment says."""
        self.recruiter = Recruiter()
        rate = float(os.environ[RATE])
        chores = self._chores(pipeline)
        all_chores = chores.all()
        weight = max(chore.weight for chore in all_chores)
        chores.install(self.recruiter, rate=rate * sum(c.weight for c in all_chores) / weight)
        self._late = self._chores(late_pipeline).consume(LATE_CONSUMER)
        self._has_begun = False
        self.recruiter.install(self._consume_late, LATE_CONSUMER, rate)

    def wrap(self, application: ASGIApp) -> ASGIApp:
        """Wraps the application, so that its responses enlist."""
        return ASGIEnlister(application, self.recruiter)

    @property
    def routes(self) -> list[Route]:
        """Routes of a cheap request and of the counters."""
        return [Route("/health", _health), Route("/recruits", self._count)]

    def _chores(self, owner: Pipeline) -> Chores:
        return Chores(
            owner,
            os.environ["PENSTOCK_DATABASE_URL"],
            os.environ["PENSTOCK_REDIS_URL"],
            records=RECORDS,
        )

    def _consume_late(self) -> Outcome:
        """Consumes once the late consumer has begun with the tables.

        Before that, it would begin with the log.
        """
        self._has_begun = self._has_begun or _has_begun()
        return self._late() if self._has_begun else Outcome.NOTHING_TO_DO

    async def _count(self, _: Request) -> Response:
        counters = self.recruiter.counters().values()
        names = ("recruited", "finished", "aborted", "failed")
        sums = {name: sum(getattr(counter, name) for counter in counters) for name in names}
        return JSONResponse({"process": os.getpid(), **sums})


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok")


def _has_begun() -> bool:
    """True if the late consumer has begun with the tables."""
    with connect_postgres(os.environ["PENSTOCK_DATABASE_URL"], application="demo") as connection:
        rows = connection.execute(
            "SELECT FROM rocket_rides_log.checkpoints WHERE consumer = %s LIMIT 1", (LATE_CONSUMER,)
        )
        return rows.rowcount > 0


def main() -> None:
    """Serves on the port given by ``PORT``; the demo runs this in processes of its own."""
    engine = make_engine(os.environ["PENSTOCK_DATABASE_URL"], application="rides")
    served: ASGIApp
    if RATE in os.environ:
        recruits = Recruits()
        served = recruits.wrap(application(engine, recruits.routes))
    else:
        served = application(engine)
    uvicorn.run(served, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="error")


if __name__ == "__main__":
    main()
