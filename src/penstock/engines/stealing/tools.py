"""What the chores of a pipeline work with, in one thread of one process.  Imported when the first chore runs.

The streamer and the workers are those of the other engines, in slices.  Each keeps its connections until the thread is idle
or a server fails.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import psycopg
import structlog

from penstock.channels.server import connect_redis
from penstock.consuming import Worker, make_worker
from penstock.database.connections import Database, connect_postgres, get_database_url
from penstock.database.errors import CONFLICTS, describe, sqlstate
from penstock.database.transactions import Timeouts
from penstock.declaring.declarations import ConsumerSpec
from penstock.engines.stealing.budget import time_left_s
from penstock.engines.stealing.counting import Outcome
from penstock.engines.stealing.gauges import Gauges
from penstock.engines.stealing.measuring import summarise
from penstock.errors import ServerUnavailable
from penstock.logs import follow_application
from penstock.operating.status import status
from penstock.pipeline import Pipeline
from penstock.streaming import Streamer

log = structlog.get_logger("penstock.chores")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""How long chores leave servers alone after one of them has failed, in seconds: doubled after each failure in a row."""

NOT_AWAY = {"55P03", "57014"}
"""SQLSTATE of a lock that could not be had in time, and of a statement that took too long: the server is there."""


class GaveUp(Exception):
    """Another process holds what a slice needs, or its time is up: nothing was begun."""


class Tools:
    """The connections of one thread, and what works on them.

    Attributes:
        process: Id of the process whose they are.
    """

    def __init__(
        self, pipeline: Pipeline, database: Database, redis_url: str, *, records: int, timeout_s: float, **options: Any
    ) -> None:
        """Connects to nothing; see ``Chores`` for the arguments."""
        follow_application()
        self.process = os.getpid()
        self._pipeline, self._records, self._options = pipeline, records, options
        self._database_url, self._redis_url = get_database_url(database), redis_url
        self._timeouts = Timeouts(reply_s=timeout_s, statement_s=timeout_s, handler_s=5 * timeout_s)
        self._streamer: Streamer | None = None
        self._workers: dict[str, Worker[Any]] = {}
        self._resume_at = self._pause_s = 0.0

    def attempt(self, step: Callable[["Tools"], bool]) -> Outcome:
        """Does a slice, unless a server has failed a moment ago.

        Raises:
            Exception: Whatever is neither a conflict nor an unavailable server.
        """
        if monotonic() < self._resume_at:
            return Outcome.GAVE_UP
        try:
            has_worked = step(self)
        except (GaveUp, *CONFLICTS):
            return Outcome.GAVE_UP
        except (ServerUnavailable, psycopg.Error) as error:
            if sqlstate(error.__cause__ or error) not in NOT_AWAY:
                self._leave_servers(error)
            if not isinstance(error, ServerUnavailable):
                raise
            return Outcome.GAVE_UP
        except BaseException as error:
            self._leave_servers(error)
            raise
        self._pause_s = 0.0
        return Outcome.FINISHED if has_worked else Outcome.NOTHING_TO_DO

    def stream(self) -> bool:
        """See ``Chores.stream``."""
        return not self._refreshed_streamer().stream().idle

    def retain(self) -> bool:
        """See ``Chores.retain``."""
        return self._refreshed_streamer().retain() > 0

    def reclaim(self) -> bool:
        """See ``Chores.reclaim``."""
        return self._refreshed_streamer().care() > 0

    def sweep(self) -> bool:
        """See ``Chores.sweep``."""
        self._refreshed_streamer().sweep()
        return True

    def consume(self, spec: ConsumerSpec) -> bool:
        """See ``Chores.consume``."""
        worker = self._worker(spec)
        _check_time()
        consumed = worker.slice(self._records, lambda: time_left_s() <= 0)
        if consumed.idle and consumed.left:
            raise GaveUp
        return not consumed.idle

    def measure(self) -> Gauges:
        """Reads how far the pipeline is behind."""
        with (
            connect_postgres(self._database_url, application="measuring", timeouts=self._timeouts) as connection,
            connect_redis(self._redis_url, timeouts=self._timeouts) as client,
        ):
            return summarise(status(connection, client, self._pipeline))

    def close(self) -> None:
        """Closes all connections; what is under way is rolled back, and begun again by the next slice."""
        opened: list[Streamer | Worker[Any]] = [*self._workers.values()]
        opened += [self._streamer] if self._streamer else []
        for each in opened:
            try:
                each.close()
            except Exception as error:  # noqa: BLE001  what it was to end has ended
                log.debug("closing failed", error=type(error).__name__)

    def _refreshed_streamer(self) -> Streamer:
        if self._streamer is None:
            self._streamer = Streamer(
                self._pipeline,
                self._database_url,
                self._redis_url,
                most=self._records,
                timeouts=self._timeouts,
                **self._options,
            )
        self._streamer.refresh()
        _check_time()
        return self._streamer

    def _worker(self, spec: ConsumerSpec) -> Worker[Any]:
        """The worker of a consumer, which remembers what has failed even after its connections were closed."""
        if spec.name not in self._workers:
            worker = make_worker(
                self._pipeline,
                replace(spec, batch=min(spec.batch, self._records)),
                self._database_url,
                self._redis_url,
                prepare=self._options.get("prepare", True),
                concurrency=1,
                timeouts=self._timeouts,
            )
            assert isinstance(worker, Worker)  # chores refuse consumers of several sources
            self._workers[spec.name] = worker
        return self._workers[spec.name]

    def _leave_servers(self, error: BaseException) -> None:
        """Closes the connections, and leaves the servers alone for a while."""
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._resume_at = monotonic() + self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311  spreads processes, no secret
        log.warning("chores wait", reason=describe(error), seconds=self._pause_s)
        self.close()


def _check_time() -> None:
    """Ends a slice that has spent its time on connecting: the next one finds the connections open.

    Raises:
        GaveUp: No time is left.
    """
    if time_left_s() <= 0:
        raise GaveUp
