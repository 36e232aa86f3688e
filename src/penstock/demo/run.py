"""The demo as a whole: servers given, everything else started, broken on purpose, settled, and accounted for."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import IO

import httpx
import psutil  # type: ignore[import-untyped]  # it ships no types

from penstock.channels.server import RedisClient, connect_redis
from penstock.demo.mischief import CRASH_EVERY, CRASHED
from penstock.demo.rides import CONSUMER_TABLES, SCHEMA, Base, pipeline
from penstock.demo.simulator import Simulator
from penstock.demo.verdict import Account, account
from penstock.errors import DemoFailed
from penstock.operating.initialise import initialise
from penstock.postgres import Connection, connect_postgres, engine_of

READY_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 120.0
CRASH_EVERY_S = 4.0
RESEND_CHANCE = 0.05
_DIES_WITH = (0, 1, CRASHED, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a pipeline that is started again: it crashed, was killed, or lost a worker too often."""


@dataclass
class Progress:
    """What the demo shows while it runs."""

    engine: str
    account: Account
    seconds: float
    rolled_back: int = 0
    retried: int = 0
    kills: int = 0
    phase: str = "running"


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
    """

    engine: str
    seconds: float
    database_url: str
    redis_url: str
    stop: Callable[[], bool]
    show: Callable[[Progress], None] = lambda _: None
    kills: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _pipeline: subprocess.Popen[bytes] | None = None
    _failure: str | None = None

    def run(self) -> Progress:
        """Runs it; the last progress carries the account.

        Raises:
            DemoFailed: Something did not start, or records did not arrive in time.
            KeyboardInterrupt: It was told to stop.
        """
        self._reset()
        api, url = self._start_api()
        supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        simulator = Simulator(url)
        client = connect_redis(self.redis_url)
        try:
            with connect_postgres(self.database_url, application="demo") as connection:
                supervisor.start()
                self._wait_until_ready(connection, client, url)
                began = monotonic()
                simulator.start()
                self._watch(connection, client, simulator, began)
                simulator.stop()
                return self._settle(connection, client, simulator, monotonic() - began)
        finally:
            simulator.stop()
            self._ended.set()
            _end(api, 1)
            _end(self._pipeline, 5)
            client.close()

    def _reset(self) -> None:
        """Makes the demo's schemas and tables anew, and empties its log."""
        with connect_postgres(self.database_url, application="demo") as connection:
            connection.execute(
                f"DROP SCHEMA IF EXISTS {SCHEMA}, {pipeline.schema} CASCADE".encode()
            )
            connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
        initialise(self.database_url, pipeline.schema)
        engine = engine_of(self.database_url, application="demo")
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
        process = _leashed(["penstock.demo.api"], self._environment(PORT=str(port)))
        return process, f"http://127.0.0.1:{port}"

    def _supervise(self) -> None:
        """Keeps ``penstock run`` running: what crashes or is killed is started again at once."""
        command = ["penstock", "run", "--app", "penstock.demo.rides:pipeline"]
        command += [
            "--engine",
            self.engine,
            "--resend-chance",
            str(RESEND_CHANCE),
            "--log-level",
            "error",
        ]
        # A worker that crashes on purpose is no news: Spark need not print its stack.
        command += ["--conf", "spark.log.level=OFF"] if self.engine == "spark" else []
        environment = self._environment(**{CRASH_EVERY: str(CRASH_EVERY_S)})
        while not self._ended.is_set():
            # Not to the terminal, which is ours: its last words are kept for the case that it cannot run.
            with tempfile.TemporaryFile() as words:
                self._pipeline = _leashed(command, environment, words)
                code = self._pipeline.wait()
                if code not in _DIES_WITH:
                    words.seek(0)
                    last = words.read().decode(errors="replace").strip().splitlines()[-5:]
                    self._failure = "\n".join(
                        [f"the {self.engine} engine ended with exit code {code}", *last]
                    )
                    return
            self._ended.wait(0.1)

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
        while (passed := monotonic() - began) < self.seconds:
            self._check_stop()
            if not self.kills and passed > self.seconds / 2:
                self._kill()
            self.show(self._progress(connection, client, simulator, passed))
            self._ended.wait(min(0.5, self.seconds - passed))

    def _settle(
        self, connection: Connection, client: RedisClient, simulator: Simulator, seconds: float
    ) -> Progress:
        """Waits until every record has come to every consumer."""
        deadline = monotonic() + SETTLE_TIMEOUT_S
        while True:
            self._check_stop()
            progress = self._progress(connection, client, simulator, seconds)
            if progress.account.settled:
                progress.phase = "settled"
                return progress
            if monotonic() > deadline:
                raise DemoFailed(
                    f"not every record arrived within {SETTLE_TIMEOUT_S:.0f} s after the last request"
                )
            progress.phase = "settling"
            self.show(progress)
            self._ended.wait(0.5)

    def _progress(
        self, connection: Connection, client: RedisClient, simulator: Simulator, seconds: float
    ) -> Progress:
        declined = simulator.answers[httpx.codes.PAYMENT_REQUIRED]
        return Progress(
            self.engine,
            account(connection, client),
            seconds,
            rolled_back=declined,
            retried=simulator.retried,
            kills=self.kills,
        )

    def _kill(self) -> None:
        """SIGKILL: to the whole process of the inline engine, to a worker process of Spark's."""
        if self._pipeline is None or self._pipeline.poll() is not None:
            return
        victim: psutil.Process | subprocess.Popen[bytes] = self._pipeline
        if self.engine == "spark":
            workers = [
                p
                for p in psutil.Process(self._pipeline.pid).children(recursive=True)
                if _is_busy_worker(p)
            ]
            if not workers:
                return
            victim = random.choice(workers)  # noqa: S311  not for secrets
        victim.kill()
        self.kills += 1

    def _check_stop(self) -> None:
        if self.stop():
            raise KeyboardInterrupt
        if self._failure is not None:
            raise DemoFailed(self._failure)


def _leashed(
    command: list[str], environment: dict[str, str], words: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """A process that ends with this one, whatever ends this one."""
    return subprocess.Popen(  # noqa: S603  our own
        [sys.executable, "-m", "penstock.demo.leashed", *command],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=words,
        start_new_session=True,
    )


def _is_busy_worker(process: psutil.Process) -> bool:
    """A Python worker on the leash: the one that a long task runs in."""
    try:
        is_worker = "pyspark.daemon" in process.cmdline() and not process.children()
        return is_worker and bool(process.net_connections("tcp"))
    except psutil.Error:
        return False


def _books(url: str) -> bool:
    try:
        return httpx.post(f"{url}/rides", json={"distance": 100.0}, timeout=10).is_success
    except httpx.TransportError:  # it is still starting
        return False


def _end(process: subprocess.Popen[bytes] | None, patience_s: float) -> None:
    """SIGTERM, and SIGKILL for what does not end in time: with all that it has started."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
