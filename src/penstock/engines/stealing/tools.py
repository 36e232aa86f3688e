"""Tools of the chores of a pipeline, in one thread of one process.

Imported when the first chore runs.

The streamer and the workers are those of the other engines, in slices.  Each keeps its connections
until the thread is idle or a server fails.
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
from penstock.database.driver_errors import CONFLICTS, describe, sqlstate
from penstock.database.store import Store
from penstock.database.transactions import Timeouts
from penstock.declaring.declarations import ConsumerSpec
from penstock.declaring.kinds import get_traits
from penstock.engines.stealing.advice import ConsumerLag, Gauges
from penstock.engines.stealing.job_threads import time_left_s
from penstock.engines.stealing.sampler import Outcome
from penstock.errors import ServerUnavailable
from penstock.logs import Repeats, follow_application
from penstock.operating.status.gathering import status
from penstock.operating.status.snapshot import ChannelStatus, ConsumerStatus, Status
from penstock.parallel import Backoff
from penstock.pipeline import Pipeline
from penstock.streaming import Streamer


def summarise(status: Status) -> Gauges:
    """Summarises the pipeline's lag in a few numbers."""
    shards = [shard for channel in status.channels for shard in channel.shards]
    behind = (shard.sequenced - shard.published for shard in shards if shard.published is not None)
    channels = {channel.channel: channel for channel in status.channels}
    return Gauges(
        unsequenced=sum(shard.staged for shard in shards),
        oldest_s=max((shard.staged_s for shard in shards if shard.staged), default=0.0),
        unpublished=sum(max(0, records) for records in behind),
        sequenced=sum(shard.sequenced for shard in shards),
        ticked_s=status.tick_s,
        consumers={
            consumer.consumer: _lag(consumer, channels.get(consumer.channel))
            for consumer in status.consumers
        },
        queued={
            name: _queued(channel)
            for name, channel in channels.items()
            if get_traits(channel.kind).has_jobs
        },
    )


def _lag(consumer: ConsumerStatus, channel: ChannelStatus | None) -> ConsumerLag:
    """Returns the lag of a consumer and its channel's records.

    Of a source, those that it has passed or will.
    """
    shards = consumer.shards
    ever = sum(shard.checkpoint + shard.lag for shard in shards)
    if channel is not None:
        ever = sum(shard.sequenced for shard in channel.shards)
    seconds = max((shard.lag_s for shard in shards), default=0.0)
    return ConsumerLag(sum(shard.lag for shard in shards), seconds, ever)


def _queued(channel: ChannelStatus) -> int:
    queues = [shard.queue for shard in channel.shards if shard.queue is not None]
    in_redis = sum(queue.waiting + queue.leased + queue.delayed for queue in queues)
    return in_redis + sum(shard.in_postgres for shard in channel.shards)


log = structlog.get_logger("penstock.chores")

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Seconds that chores leave servers alone after one of them has failed.

Doubled after each failure in a row.
"""

NOT_AWAY = {"55P03", "57014"}
"""SQLSTATE of a lock that could not be had in time, and of a statement that took too long.

The server is there.
"""


class GaveUp(Exception):
    """Another process holds what a slice needs, or its time is up: nothing was begun."""


class Tools:
    """The connections of one thread, and the streamer and workers that use them."""

    def __init__(
        self,
        pipeline: Pipeline,
        database: Database,
        redis_url: str,
        *,
        records: int,
        timeout_s: float,
        **options: Any,
    ) -> None:
        """Connects to nothing; see ``Chores`` for the arguments."""
        follow_application()
        self.process = os.getpid()
        self._pipeline, self._records, self._options = pipeline, records, options
        self._database_url, self._redis_url = get_database_url(database), redis_url
        self._timeouts = Timeouts(reply_s=timeout_s, statement_s=timeout_s, handler_s=5 * timeout_s)
        self._streamer: Streamer | None = None
        self._workers: dict[str, Worker] = {}
        self._resume_at = 0.0
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._repeats = Repeats()

    def attempt(self, step: Callable[["Tools"], bool]) -> Outcome:
        """Does a slice, unless a server has just failed.

        Raises errors other than conflicts and unavailable servers.
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
        self._backoff.reset()
        self._repeats.end("servers")
        return Outcome.FINISHED if has_worked else Outcome.NOTHING_TO_DO

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
            connect_postgres(
                self._database_url, application="measuring", timeouts=self._timeouts
            ) as connection,
            connect_redis(self._redis_url, timeouts=self._timeouts) as client,
        ):
            return summarise(status(Store(connection), client, self._pipeline))

    def close(self) -> None:
        """Closes all connections; the next slice begins again what is rolled back."""
        opened: list[Streamer | Worker] = [*self._workers.values()]
        opened += [self._streamer] if self._streamer else []
        for part in opened:
            try:
                part.close()
            except Exception as error:  # noqa: BLE001  what it was to end has ended
                log.debug("closing failed", error=type(error).__name__)

    def refreshed_streamer(self) -> Streamer:
        """Returns the streamer, refreshed with the work of other processes."""
        if self._streamer is None:
            self._streamer = Streamer(
                self._pipeline,
                self._database_url,
                self._redis_url,
                max_records=self._records,
                timeouts=self._timeouts,
                **self._options,
            )
        self._streamer.refresh()
        _check_time()
        return self._streamer

    def _worker(self, spec: ConsumerSpec) -> Worker:
        """Returns the worker of a consumer.

        It remembers failures after its connections were closed.
        """
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
        pause_s = self._backoff.next_s()
        self._resume_at = monotonic() + pause_s * random.uniform(0.5, 1.0)  # noqa: S311  spreads processes, no secret
        if self._repeats.is_due("servers", reason := describe(error)):
            log.warning("chores waiting", reason=reason, retry_s=pause_s)
        self.close()


def _check_time() -> None:
    """Ends a slice that has spent its time on connecting.

    The next one finds the connections open.
    """
    if time_left_s() <= 0:
        raise GaveUp
