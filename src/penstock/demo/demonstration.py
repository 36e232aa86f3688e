"""The whole demo: starts everything but the servers, injects faults, waits, and audits."""

import contextlib
import os
import random
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any

import httpx

from penstock.channels.commands import RedisClient
from penstock.channels.server import connect_redis
from penstock.database.connections import Connection, connect_postgres, make_engine
from penstock.demo.audit import Audit, audit
from penstock.demo.drift import Beginning, Drift, ReconcileProcess, mark_all_dirty, seed_drift
from penstock.demo.rides import (
    CONSUMER_TABLES,
    CRASH_EVERY,
    LATE_CONSUMER,
    REPEAT_CHANCE,
    SCHEMA,
    Base,
    pipeline,
)
from penstock.demo.supervision import (
    RATE,
    ApiProcesses,
    SupervisedProcess,
    busy_workers,
    check_health,
)
from penstock.errors import DemoFailed
from penstock.logs import quieten
from penstock.schema.initialise import initialise

CLIENTS = 4
PAUSE_S = 0.03
"""Average pause of a client between two requests, in seconds."""

CHEAP_PAUSE_S = 0.01
"""The same between two health checks."""

RIDES_AT_HAND = 20
"""Number of latest rides that clients correct and cancel."""


class Simulator:
    """Several clients, one thread each.

    They share their rides, so that two of them sometimes change the same one.

    Attributes:
        retried: Transactions that the API retried after a serialization failure.
        cut: Requests whose process of the API ended before it had answered.
        health_checks: Cheap requests after the traffic.
    """

    def __init__(self, *urls: str, clients: int = CLIENTS) -> None:
        self.answers: Counter[int] = Counter()
        self.retried = self.cut = self.health_checks = 0
        self._urls, self._halt = urls, threading.Event()
        self._is_traffic_over = False
        self._booked: deque[int] = deque(maxlen=RIDES_AT_HAND)
        self._threads = [
            threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(clients)
        ]

    def start(self) -> None:
        """Starts the clients."""
        for thread in self._threads:
            thread.start()

    @property
    def requests(self) -> int:
        """Requests that were answered, health checks included."""
        return sum(self.answers.values()) + self.health_checks

    def only_check_health(self) -> None:
        """Has the clients send only cheap requests from now on, which change nothing."""
        self._is_traffic_over = True

    def stop(self) -> None:
        """Stops the clients after their current requests."""
        self._halt.set()
        deadline = monotonic() + 15
        for thread in self._threads:
            if thread.ident is not None:  # if it was started
                thread.join(max(0.0, deadline - monotonic()))

    def _client(self, number: int) -> None:
        dice = random.Random(number)  # noqa: S311  not for secrets
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(httpx.Client(base_url=url, timeout=30)) for url in self._urls
            ]
            while not self._halt.wait(self._pause_s * dice.random() * 2):
                try:
                    self._once(dice.choice(clients), dice)
                except httpx.TransportError:  # it is started again
                    self.cut += 1

    @property
    def _pause_s(self) -> float:
        return CHEAP_PAUSE_S if self._is_traffic_over else PAUSE_S

    def _once(self, client: httpx.Client, dice: random.Random) -> None:
        if self._is_traffic_over:
            client.get("/health")
            self.health_checks += 1
            return
        answer = self._request(client, dice)
        self.answers[answer.status_code] += 1
        self.retried += int(answer.headers.get("x-attempts", "1")) - 1
        if answer.status_code == httpx.codes.CREATED:
            self._booked.append(answer.json()["id"])

    def _request(self, client: httpx.Client, dice: random.Random) -> httpx.Response:
        chance, body = dice.random(), {"distance": round(dice.uniform(5, 1000), 2)}
        headers = {"x-decline": "1"} if dice.random() < 0.1 else {}  # noqa: PLR2004  one card in ten
        booked = list(self._booked)
        if booked and chance < 0.3:  # noqa: PLR2004  three requests in ten correct
            return client.patch(f"/rides/{dice.choice(booked)}", json=body, headers=headers)
        if booked and chance < 0.4:  # noqa: PLR2004  one in ten cancels; it may be cancelled already
            return client.delete(f"/rides/{dice.choice(booked)}")
        if chance > 0.98:  # noqa: PLR2004  one in fifty is wrong
            return client.post("/rides", json={"distance": "far"})
        return client.post("/rides", json=body, headers=headers)


READY_TIMEOUT_S = 240.0
STANDSTILL_S = 300.0
"""Longest time, in seconds, without any arrival after the traffic; Spark may start anew in it."""
FAULTS = {CRASH_EVERY: "6.0", REPEAT_CHANCE: "0.1"}
STEALING_RATE = 0.05
"""The share of requests that are recruited for each chore that moves records."""
DRIFT_AT = 0.1
"""Fraction of the time after which drift is seeded."""
EXTRA_S = 90.0
"""Longest additional traffic, in seconds, if the late consumer has not applied any record yet."""


@dataclass
class DemoProgress:
    """State of a running demo."""

    engine: str  # ``spark``, ``inline`` or ``stealing``
    audit: Audit
    seconds: float  # time since the start, in seconds
    rolled_back: int = 0  # requests whose transaction was rolled back on purpose
    retried: int = 0  # transactions retried after a serialization failure
    kills: int = 0
    drift: Drift | None = None  # the seeded drift; None until it was reconciled
    under_traffic: bool = False  # true if it was reconciled under traffic
    phase: str = "running"
    requests: int = 0  # requests that were answered, health checks included
    health_checks: int = 0  # cheap requests after the traffic
    recruits: dict[str, int] | None = None  # counters of the API's recruits, if they do the work

    @property
    def equal(self) -> bool:
        """True if the audit is equal, the drift is repaired, and the late consumer is complete."""
        drift, late = self.drift, self.audit.late_consumer
        is_repaired = drift is None or (
            drift.seeded == drift.found == drift.repaired and not late.different
        )
        return self.audit.equal and is_repaired


@dataclass
class Demo:
    """One run of the demo."""

    engine: str  # ``spark``, ``inline`` or ``stealing``
    seconds: float  # seconds of traffic
    database_url: str  # Postgres; the demo's schemas in it are dropped and created
    redis_url: str  # Redis or Valkey; the demo's keys in it are deleted
    stop: Callable[[], bool]  # returns whether the demo is to end early
    show: Callable[[DemoProgress], None] = lambda _: None
    # called with what the demo waits for before the traffic begins
    wait: Callable[[str], None] = lambda _: None
    reconcile: bool = True  # true if drift is seeded and repaired, and a late consumer is added
    kills: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _started: list[SupervisedProcess] = field(default_factory=list)
    _beginning: Beginning | None = None
    _reconciling: ReconcileProcess | None = None
    _drift: Drift | None = None
    _late_consumer_works: bool = False
    _under_traffic: bool = False

    def run(self) -> DemoProgress:
        """Runs it; the returned progress has the final audit."""
        quieten(("httpx", "httpcore"))  # a line for each request of the simulated clients
        self._reset()
        self._api.start()
        simulator = Simulator(*self._api.urls)
        client = connect_redis(self.redis_url)
        try:
            with connect_postgres(self.database_url, application="demo") as connection:
                if not self._steals:
                    self._start_pipeline()
                self._wait_until_ready(connection, client)
                started = monotonic()
                simulator.start()
                self._watch(connection, client, simulator, started)
                # Where requests do the work, somebody has to come until all of it is done.
                simulator.only_check_health() if self._steals else simulator.stop()
                return self._settle(connection, client, simulator, started)
        finally:
            simulator.stop()
            self._ended.set()
            with ThreadPoolExecutor() as pool:  # each of them takes a while
                list(pool.map(lambda process: process.end(5), self._processes()))
            client.close()

    def _reset(self) -> None:
        """Recreates the demo's schemas and tables, and empties its log."""
        with connect_postgres(self.database_url, application="demo") as connection:
            connection.execute(
                f"DROP SCHEMA IF EXISTS {SCHEMA}, {pipeline.scope.schema} CASCADE".encode()
            )
            connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
        initialise(self.database_url, pipeline.scope.schema)
        engine = make_engine(self.database_url, application="demo")
        Base.metadata.create_all(engine)
        engine.dispose()
        with (
            connect_postgres(self.database_url, application="demo") as connection,
            connection.transaction(),
        ):
            connection.execute(CONSUMER_TABLES.encode())
        client: Any = connect_redis(self.redis_url)
        for key in list(client.scan_iter(f"{pipeline.scope.namespace}:*")):
            client.delete(key)
        client.close()

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PENSTOCK_DATABASE_URL": self.database_url,
            "PENSTOCK_REDIS_URL": self.redis_url,
            **more,
        }

    @property
    def _steals(self) -> bool:
        """True if the requests do the work."""
        return self.engine == "stealing"

    @cached_property
    def _api(self) -> ApiProcesses:
        """Processes of the API: two that do the work, so that one answers while the other restarts.

        Otherwise one.
        """
        if not self._steals:
            return ApiProcesses(self._environment(), 1)
        return ApiProcesses(self._environment(**FAULTS, **{RATE: str(STEALING_RATE)}), 2)

    def _start_pipeline(self) -> None:
        command = ["run", "--app", "penstock.demo.rides:pipeline", "--engine", self.engine]
        # Workers crash on purpose: Spark need not print their stack traces.
        command += ["--conf", "spark.log.level=OFF"] if self.engine == "spark" else []
        self._start(command)

    def _start(self, command: list[str]) -> None:
        """Starts a supervised command with ``FAULTS``."""
        words = ["penstock", *command, "--log-level", "error"]
        self._started.append(SupervisedProcess(words, self._environment(**FAULTS)))
        self._started[-1].start()

    def _wait_until_ready(self, connection: Connection, client: RedisClient) -> None:
        """Waits until the API answers and a first ride has reached every consumer."""
        started, booked = monotonic(), False
        while (passed := monotonic() - started) < READY_TIMEOUT_S:
            self._check_stop()
            awaited = f"the {self.engine} engine to apply a first ride" if booked else "the API"
            self.wait(f"{passed:5.1f} s  waiting for {awaited}")
            if not booked:
                booked = _books(self._api.urls[0])
            elif (now := audit(connection, client)).staged and now.settled:
                connection.execute("DELETE FROM rocket_rides.faults")
                connection.execute("UPDATE rocket_rides.effects SET latency_us = 0")
                return
            if self._steals:
                check_health(self._api.urls)
            self._ended.wait(0.2)
        raise DemoFailed(f"the {self.engine} engine was not ready within {READY_TIMEOUT_S:.0f} s")

    def _watch(
        self, connection: Connection, client: RedisClient, simulator: Simulator, started: float
    ) -> None:
        """Shows the progress until the time is over.

        Kills a process and reconciles drift meanwhile.
        """
        while (passed := monotonic() - started) < self.seconds or (
            # The traffic continues so that the late consumer has records to apply.
            self.reconcile and not self._late_consumer_works and passed < self.seconds + EXTRA_S
        ):
            self._check_stop()
            if not self.kills and passed > self.seconds / 2:
                self._kill()
            if self.reconcile and passed > self.seconds * DRIFT_AT:
                self._advance_drift(connection, traffic=True)
                self._under_traffic = self._drift is not None
            progress = self._progress(connection, client, simulator, passed)
            self._late_consumer_works = progress.audit.late_consumer.applied > 0
            self.show(progress)
            self._ended.wait(0.5 if passed >= self.seconds else min(0.5, self.seconds - passed))

    def _settle(
        self, connection: Connection, client: RedisClient, simulator: Simulator, started: float
    ) -> DemoProgress:
        """Waits until every record has reached every consumer, as long as records arrive."""
        arrived, deadline = -1, 0.0
        while True:
            self._check_stop()
            if self.reconcile:
                self._advance_drift(connection, traffic=False)
            progress = self._progress(connection, client, simulator, monotonic() - started)
            late = progress.audit.late_consumer
            has_arrived = self._drift is not None and late.position == late.records
            if progress.audit.settled and (has_arrived or not self.reconcile):
                progress.phase = "settled"
                return progress
            if progress.audit.arrived != arrived:
                arrived, deadline = progress.audit.arrived, monotonic() + STANDSTILL_S
            if monotonic() > deadline:
                raise DemoFailed(f"nothing arrived for {STANDSTILL_S:.0f} s: {progress.audit}")
            self.show(progress)
            self._ended.wait(0.5)

    def _advance_drift(self, connection: Connection, *, traffic: bool) -> None:
        """Seeds drift, reconciles it, then adds a consumer that begins with the tables.

        One step per call.
        """
        if self._reconciling is None:
            # On a slow machine there are few rides soon after the start; later calls find more.
            if seeded := seed_drift(connection, wait_for_all=traffic):
                self._reconciling = ReconcileProcess(seeded, self._environment())
        elif self._drift is None and self._reconciling.drift is not None:
            self._drift = self._reconciling.drift
            mark_all_dirty(self.database_url)
            if self._steals:
                self._beginning = Beginning(self.database_url)
                return
            app = "penstock.demo.rides:late_pipeline"
            self._start(["consume", LATE_CONSUMER, "--app", app, "--from", "tables"])

    def _processes(self) -> list[SupervisedProcess | ReconcileProcess | Beginning]:
        others = (self._reconciling, self._beginning)
        return [
            *self._api.processes,
            *self._started,
            *(process for process in others if process is not None),
        ]

    def _progress(
        self, connection: Connection, client: RedisClient, simulator: Simulator, seconds: float
    ) -> DemoProgress:
        declined = simulator.answers[httpx.codes.PAYMENT_REQUIRED]
        now = audit(connection, client)
        return DemoProgress(
            self.engine,
            now,
            seconds,
            rolled_back=declined,
            retried=simulator.retried,
            kills=self.kills,
            drift=self._drift,
            under_traffic=self._under_traffic,
            phase=self._phase(now, seconds),
            requests=simulator.requests,
            health_checks=simulator.health_checks,
            recruits=self._api.count() if self._steals else None,
        )

    def _phase(self, now: Audit, seconds: float) -> str:
        """Names the phase of the demo."""
        if seconds < self.seconds:
            return "running"
        if self.reconcile and self._drift is None:
            return "waiting for the reconciliation"
        if (
            self.reconcile
            and not self._late_consumer_works
            and now.late_consumer.position < now.late_consumer.records
        ):
            return "waiting for the late consumer"
        return "waiting for the last records"

    def _kill(self) -> None:
        """Sends SIGKILL to the inline engine's process, one of the API, or a worker of Spark."""
        pid = (self._api.processes if self._steals else self._started)[0].pid
        if pid is None:
            return
        victims = busy_workers(pid) if self.engine == "spark" else [pid]
        # If the process has just crashed by itself, the next round kills another one.
        with contextlib.suppress(ProcessLookupError):
            if victims:
                os.kill(random.choice(victims), signal.SIGKILL)  # noqa: S311  not for secrets
                self.kills += 1

    def _check_stop(self) -> None:
        if self.stop():
            raise KeyboardInterrupt
        for process in self._processes():
            if process.failure is not None:
                raise DemoFailed(process.failure)


def _books(url: str) -> bool:
    try:
        return httpx.post(f"{url}/rides", json={"distance": 100.0}, timeout=10).is_success
    except httpx.TransportError:  # it is still starting
        return False
