"""The demo as a whole: servers given, everything else started, broken on purpose, settled, and accounted for."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import httpx

from penstock.channels.server import RedisClient, connect_redis
from penstock.database.connections import Connection, connect_postgres, make_engine
from penstock.database.initialise import initialise
from penstock.demo.drift import Drift, Reconciling, mark_all_dirty, plant
from penstock.demo.mischief import CRASH_EVERY
from penstock.demo.processes import Supervised, busy_workers, end, leashed
from penstock.demo.rides import CONSUMER_TABLES, SCHEMA, Base, pipeline
from penstock.demo.simulator import Simulator
from penstock.demo.verdict import NEWCOMER, Account, account
from penstock.errors import DemoFailed

READY_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 120.0
CRASH_EVERY_S = 6.0
RESEND_CHANCE = 0.05
DRIFT_AT = 0.1
"""When drift is planted: after this part of the time."""
EXTRA_S = 90.0
"""How much longer there is traffic at most, in seconds, if the newcomer has not yet applied anything."""


@dataclass
class Progress:
    """What the demo shows while it runs."""

    engine: str
    account: Account
    seconds: float
    rolled_back: int = 0
    retried: int = 0
    kills: int = 0
    drift: Drift | None = None
    under_traffic: bool = False
    phase: str = "running"

    @property
    def equal(self) -> bool:
        """The account is, and what was planted was found and mended, and who came later has the same."""
        return self.account.equal and (
            self.drift is None or (self.drift.gone and not self.account.newcomer.different)
        )


@dataclass
class Demo:
    """One run of the demo.

    Attributes:
        engine: ``spark`` or ``inline``.
        seconds: How long clients make traffic.
        database_url: Postgres; the demo's schemas in it are made anew.
        redis_url: Redis or Valkey; the demo's keys in it are deleted.
        stop: True once the demo is to end early.
        show: Told how it goes.
        reconcile: Whether drift is planted and mended, and a consumer comes later.
    """

    engine: str
    seconds: float
    database_url: str
    redis_url: str
    stop: Callable[[], bool]
    show: Callable[[Progress], None] = lambda _: None
    reconcile: bool = True
    kills: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _started: list[Supervised] = field(default_factory=list)
    _reconciling: Reconciling | None = None
    _drift: Drift | None = None
    _newcomer_works: bool = False
    _under_traffic: bool = False

    def run(self) -> Progress:
        """Runs it; the last progress carries the account.

        Raises:
            DemoFailed: Something did not start, or records did not arrive in time.
            KeyboardInterrupt: It was told to stop.
        """
        self._reset()
        api, url = self._start_api()
        simulator = Simulator(url)
        client = connect_redis(self.redis_url)
        try:
            with connect_postgres(self.database_url, application="demo") as connection:
                self._start_pipeline()
                self._wait_until_ready(connection, client, url)
                began = monotonic()
                simulator.start()
                self._watch(connection, client, simulator, began)
                simulator.stop()
                return self._settle(connection, client, simulator, began)
        finally:
            simulator.stop()
            self._ended.set()
            end(api, 1)
            for process in self._processes():
                process.end(5)
            client.close()

    def _reset(self) -> None:
        """Makes the demo's schemas and tables anew, and empties its log."""
        with connect_postgres(self.database_url, application="demo") as connection:
            connection.execute(
                f"DROP SCHEMA IF EXISTS {SCHEMA}, {pipeline.schema} CASCADE".encode()
            )
            connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
        initialise(self.database_url, pipeline.schema)
        engine = make_engine(self.database_url, application="demo")
        Base.metadata.create_all(engine)
        engine.dispose()
        with connect_postgres(self.database_url, application="demo") as connection:
            connection.execute(CONSUMER_TABLES.encode())
        client = connect_redis(self.redis_url)
        for key in list(client.scan_iter(f"{pipeline.namespace}:*")):
            client.delete(key)
        client.close()

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PENSTOCK_DATABASE_URL": self.database_url,
            "PENSTOCK_REDIS_URL": self.redis_url,
            **more,
        }

    def _start_api(self) -> tuple[subprocess.Popen[bytes], str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = leashed(["penstock.demo.api"], self._environment(PORT=str(port)))
        return process, f"http://127.0.0.1:{port}"

    def _start_pipeline(self) -> None:
        command = ["run", "--app", "penstock.demo.rides:pipeline", "--engine", self.engine]
        command += ["--resend-chance", str(RESEND_CHANCE)]
        # A worker that crashes on purpose is no news: Spark need not print its stack.
        command += ["--conf", "spark.log.level=OFF"] if self.engine == "spark" else []
        self._start(command)

    def _start(self, command: list[str]) -> None:
        """Keeps a command of Penstock running, that crashes now and then."""
        environment = self._environment(**{CRASH_EVERY: str(CRASH_EVERY_S)})
        self._started.append(Supervised([*command, "--log-level", "error"], environment))
        self._started[-1].start()

    def _wait_until_ready(self, connection: Connection, client: RedisClient, url: str) -> None:
        """Until the API answers and a first ride has come all the way."""
        deadline, booked = monotonic() + READY_TIMEOUT_S, False
        while monotonic() < deadline:
            self._check_stop()
            if not booked:
                booked = _books(url)
            elif (now := account(connection, client)).staged and now.settled:
                connection.execute("DELETE FROM rocket_rides.mischief")
                connection.execute("UPDATE rocket_rides.effects SET latency_us = 0")
                return
            self._ended.wait(0.2)
        raise DemoFailed(f"the {self.engine} engine was not ready within {READY_TIMEOUT_S:.0f} s")

    def _watch(
        self, connection: Connection, client: RedisClient, simulator: Simulator, began: float
    ) -> None:
        """Shows how it goes until the time is over, and kills a process on the way."""
        while (passed := monotonic() - began) < self.seconds or self._awaits_newcomer(passed):
            self._check_stop()
            if not self.kills and passed > self.seconds / 2:
                self._kill()
            if self.reconcile and passed > self.seconds * DRIFT_AT:
                self._mend_drift(connection, traffic=True)
                self._under_traffic = self._drift is not None
            progress = self._progress(connection, client, simulator, passed)
            self._newcomer_works = progress.account.newcomer.applied > 0
            self.show(progress)
            self._ended.wait(0.5 if passed >= self.seconds else min(0.5, self.seconds - passed))

    def _awaits_newcomer(self, passed: float) -> bool:
        """Whether the traffic goes on a little, so that who comes later has something to do."""
        return self.reconcile and not self._newcomer_works and passed < self.seconds + EXTRA_S

    def _settle(
        self, connection: Connection, client: RedisClient, simulator: Simulator, began: float
    ) -> Progress:
        """Waits until every record has come to every consumer."""
        deadline = monotonic() + SETTLE_TIMEOUT_S
        while True:
            self._check_stop()
            if self.reconcile:
                self._mend_drift(connection, traffic=False)
            progress = self._progress(connection, client, simulator, monotonic() - began)
            if self._settled(progress.account):
                progress.phase = "settled"
                return progress
            if monotonic() > deadline:
                raise DemoFailed(
                    f"not every record arrived within {SETTLE_TIMEOUT_S:.0f} s after the last request"
                )
            self.show(progress)
            self._ended.wait(0.5)

    def _settled(self, now: Account) -> bool:
        arrived = self._drift is not None and now.newcomer.position == now.newcomer.told
        return now.settled and (arrived or not self.reconcile)

    def _mend_drift(self, connection: Connection, *, traffic: bool) -> None:
        """Plants drift, has it reconciled, and then lets one more consumer begin with the tables: a step each time."""
        if self._reconciling is None:
            # Soon after the start, rides are few on a slow machine: there will be more of them.
            if planted := plant(connection, all_of_it=traffic):
                self._reconciling = Reconciling(planted, self._environment())
        elif self._drift is None and self._reconciling.drift is not None:
            self._drift = self._reconciling.drift
            mark_all_dirty(self.database_url)
            app = "penstock.demo.newcomer:pipeline"
            self._start(["consume", NEWCOMER, "--app", app, "--from", "tables"])

    def _processes(self) -> list[Supervised | Reconciling]:
        return [*self._started, *([self._reconciling] if self._reconciling else [])]

    def _progress(
        self, connection: Connection, client: RedisClient, simulator: Simulator, seconds: float
    ) -> Progress:
        declined = simulator.answers[httpx.codes.PAYMENT_REQUIRED]
        now = account(connection, client)
        return Progress(
            self.engine,
            now,
            seconds,
            rolled_back=declined,
            retried=simulator.retried,
            kills=self.kills,
            drift=self._drift,
            under_traffic=self._under_traffic,
            phase=self._phase(now, seconds),
        )

    def _phase(self, now: Account, seconds: float) -> str:
        """What everybody waits for."""
        if seconds < self.seconds:
            return "running"
        if self.reconcile and self._drift is None:
            return "reconciling"
        if (
            self.reconcile
            and not self._newcomer_works
            and now.newcomer.position < now.newcomer.told
        ):
            return "newcomer begins"
        return "settling"

    def _kill(self) -> None:
        """SIGKILL: to the whole process of the inline engine, to a worker process of Spark's."""
        pid = self._started[0].pid
        if pid is None:
            return
        victims = [pid] if self.engine == "inline" else busy_workers(pid)
        with contextlib.suppress(
            ProcessLookupError
        ):  # it has just crashed: another one, in the next round
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
