"""Code that the peers share: a backlog, a producer at a given rate, a reader of the stream, and the figures.

A peer defines how its tables are created and filled, and what one round of its relay does.  The payloads are those of
Penstock's own backlog; everything that a peer writes goes to one stream.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from time import monotonic, perf_counter, sleep
from typing import Any

import psycopg
import redis

STREAM = "peer:outbox"
BATCH = 1000
ACCOUNTS = 1000
NOTE = "x" * 145
IDLE_S = 0.001
POLL_S, POLLS = 0.005, 10
"""Interval of polling a library's worker, and how often it is polled in one round."""

READY_S = 60.0
LATE_S = 30.0
KEPT_UP = 0.9
"""Share of the intended rate below which a run's latency is marked."""

WARM_UP = 10
"""The first one in this many of the records is not counted."""

Connection = psycopg.Connection[Any]


def make_fields(row: Sequence[Any]) -> dict[Any, Any]:
    """The fields of an entry, the same as Penstock's own."""
    record_id, key, action, obj, payload, created_at = row
    return {
        "id": record_id,
        "key": key,
        "action": action,
        "object": obj,
        "data": payload,
        "headers": "",
        "ts": int(created_at.timestamp() * 1_000_000),
    }


@dataclass(frozen=True)
class Peer:
    """Another way to get from a transaction into a stream.

    Attributes:
        create: Creates its tables, in a database that is dropped after the run.
        fill: Copies the rows of ``penstock.staged_records``, in their order, as they would have been staged.
        settle: What happens to a backlog long before it is relayed, in a transaction of its own.
        stage: Writes ``%(ids)s``, ``%(keys)s`` and ``%(payloads)s``, arrays of one length, in one statement.
        relay: Runs one round, and returns the number of records that it has sent.
        start: Starts what reads by itself; before the tables are filled, and in no figure.
        serve: Starts what the relay needs while there is a producer; a backlog does not need it.
    """

    create: str
    fill: str
    stage: str
    relay: Callable[[Connection, redis.Redis], int]
    start: Callable[[Connection, redis.Redis], None] | None = None
    serve: Callable[[Connection, redis.Redis], None] | None = None
    settle: str = "SELECT"


class LibraryWorker:
    """A library's own worker, in a thread of this process; it starts with the first round, and counts what it has sent."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.moved = 0
        self._reported = 0
        self._thread = threading.Thread(target=run, daemon=True)

    def relay(self, _connection: Connection, _client: redis.Redis) -> int:
        """Number of records sent since the last round; waits for some, and for a backlog without a limit."""
        if self._thread.ident is None:
            self._thread.start()
        for _ in range(POLLS) if sys.argv[1] != "drain" else count():
            if self.moved != self._reported or not self._thread.is_alive():
                break
            sleep(POLL_S)
        if not self._thread.is_alive():
            raise SystemExit("the worker ended")
        some, self._reported = self.moved - self._reported, self.moved
        return some


def main(peer: Peer) -> None:
    """Does the work that the first argument names, and prints its figures as JSON."""
    work = {"drain": _drain, "latency": _latency, "relay": _relay, "produce": _produce}[sys.argv[1]]
    print(json.dumps(work(peer)))


def consume(create: str, run_once: Callable[[Connection, redis.Redis, str], int]) -> None:
    """Runs a consumer on the streams of a published backlog, and prints its rate as JSON.

    Args:
        create: Creates its tables.
        run_once: Applies the next entries of a stream, and returns their number.
    """
    wanted, streams = int(os.environ["PEER_RECORDS"]), os.environ["PEER_STREAMS"].split()
    with _postgres() as connection, _redis() as client:
        connection.execute(create.encode())

        def apply_all() -> None:
            applied = 0
            while some := sum(run_once(connection, client, stream) for stream in streams):
                applied += some
            if applied != wanted:
                raise SystemExit(f"{applied} of {wanted} records were applied")

        if _counts_costs():
            figures = _costs_of_a_record(_measure_costs(connection, client, apply_all))
        else:
            figures = {"": wanted / _time(apply_all)}
    print(json.dumps(figures))


def _postgres() -> Connection:
    return psycopg.connect(os.environ["PEER_DATABASE_URL"], autocommit=True)


def _redis() -> redis.Redis:
    return redis.Redis.from_url(os.environ["PEER_REDIS_URL"])


def _counts_costs() -> bool:
    """Whether processor time is wanted instead of a rate."""
    return "PEER_COSTS" in os.environ


def _drain(peer: Peer) -> dict[str, float]:
    wanted = int(os.environ["PEER_RECORDS"])
    with _postgres() as connection, _redis() as client:
        connection.execute(peer.create.encode())

        def relay_all() -> None:
            moved = 0
            while moved < wanted:
                some = peer.relay(connection, client)
                if not some:
                    raise SystemExit(f"{moved} of {wanted} records were sent")
                moved += some

        run = _drain_for_costs if _counts_costs() else _drain_for_rate
        figures = run(peer, connection, client, relay_all)
        if client.xlen(STREAM) != wanted:
            raise SystemExit(f"the stream has {client.xlen(STREAM)} of {wanted} records")
    return figures


def _drain_for_rate(
    peer: Peer, connection: Connection, client: redis.Redis, relay_all: Callable[[], None]
) -> dict[str, float]:
    if peer.start:
        peer.start(connection, client)  # it starts to send when the next statement commits
        connection.execute(peer.fill.encode())
    else:
        connection.execute(peer.fill.encode())
        _settle(peer, connection)
    return {"": int(os.environ["PEER_RECORDS"]) / _time(relay_all)}


def _drain_for_costs(
    peer: Peer, connection: Connection, client: redis.Redis, relay_all: Callable[[], None]
) -> dict[str, float]:
    """Processor time of a record: until it is in the stream, without that of staging it, which is a figure of its own."""

    def fill() -> None:
        connection.execute(peer.fill.encode())

    staged = _measure_costs(connection, client, fill)["postgres"]
    if peer.start:  # it reads while rows are written: those of another fill, since it begins with the next one
        peer.start(connection, client)

        def fill_and_relay() -> None:
            fill()
            relay_all()

        costs = _measure_costs(connection, client, fill_and_relay)
        costs["postgres"] -= staged
    else:
        _settle(peer, connection)
        costs = _measure_costs(connection, client, relay_all)
    return {**_costs_of_a_record(costs), **_costs_of_a_record({"staged": staged}, total=False)}


def _settle(peer: Peer, connection: Connection) -> None:
    for statement in (peer.settle, "VACUUM ANALYZE", "CHECKPOINT"):
        connection.execute(statement.encode())


def _time(work: Callable[[], None]) -> float:
    """How long it takes, in seconds."""
    began = perf_counter()
    work()
    return perf_counter() - began


def _measure_costs(connection: Connection, client: redis.Redis, work: Callable[[], None]) -> dict[str, float]:
    """Seconds of processor time that this process and each server use while it runs."""
    processes = (os.getpid(), connection.info.backend_pid, client.info("server")["process_id"])
    meter = [*shlex.split(os.environ["PEER_METER"]), *map(str, processes)]

    def read() -> dict[str, float]:
        found: dict[str, float] = json.loads(subprocess.check_output(meter))  # noqa: S603  the benchmark's
        return found

    before = read()
    work()
    return {who: after - before[who] for who, after in read().items()}


def _costs_of_a_record(costs: dict[str, float], *, total: bool = True) -> dict[str, float]:
    """Microseconds, as figures; the first of them is their sum."""
    records = int(os.environ["PEER_RECORDS"])
    figures = {f"-{who}": 1e6 * seconds / records for who, seconds in costs.items()}
    return {"": sum(figures.values()), **figures} if total else figures


def _latency(peer: Peer) -> dict[str, float]:
    with _postgres() as connection, _redis() as client, ExitStack() as ending:
        connection.execute(peer.create.encode())
        client.set("peer:running", 1)
        ending.callback(client.delete, "peer:running")  # which ends the relay
        output = ending.enter_context(tempfile.TemporaryFile("w+"))  # more than a pipe holds
        relay = _start_child("relay", subprocess.DEVNULL)
        deadline = monotonic() + READY_S
        while not client.exists("peer:ready"):
            if relay.poll() is not None or monotonic() > deadline:
                raise SystemExit("the relay did not start")
            sleep(0.01)
        producer = _start_child("produce", output)
        arrived: dict[int, float] = {}
        after: Any = b"0"
        last = monotonic()
        while producer.poll() is None or (
            len(arrived) < int(client.get("peer:sent") or 0) and monotonic() - last < LATE_S
        ):
            if relay.poll() is not None:
                raise SystemExit("the relay ended")
            answer = client.xread({STREAM: after}, count=1000, block=50)
            last = now = monotonic() if answer else last
            for _, entries in answer or ():
                for after, fields in entries:  # noqa: B007  the last id is the next position
                    arrived[json.loads(fields[b"data"])["id"]] = now
        client.delete("peer:running")
        output.seek(0)
        produced = json.load(output)
        relay.wait(LATE_S)
    wanted = float(os.environ["PEER_RATE"])
    rate = min(wanted, produced["rate"])
    began = {int(number): at for number, at in produced["began"].items()}
    if missing := len(began) - len(arrived):
        return {"skipped": f"{missing} records did not arrive"}  # type: ignore[dict-item]
    if (came := len(arrived) / (max(arrived.values()) - min(began.values()))) < KEPT_UP * rate:
        return {"skipped": f"does not keep up: {came:.0f} of {rate:.0f} records/s arrived"}  # type: ignore[dict-item]
    counted = sorted(began)[len(began) // WARM_UP :]
    took = sorted((arrived[number] - began[number]) * 1000 for number in counted)
    figures = {"": took[len(took) // 2], "-p99": took[len(took) * 99 // 100]}
    if rate < KEPT_UP * wanted:
        figures["mark"] = f"the producer reached {rate:.0f} of {wanted:.0f} records/s"
    return figures


def _start_child(work: str, output: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, sys.argv[0], work], stdout=output)  # noqa: S603  this script


def _relay(peer: Peer) -> dict[str, float]:
    moved = 0
    with _postgres() as connection, _redis() as client:
        for begin in filter(None, (peer.start, peer.serve)):
            begin(connection, client)
        client.set("peer:ready", 1)
        polled_at = monotonic()
        while True:
            some = peer.relay(connection, client)
            moved += some
            if not some:
                sleep(IDLE_S)
            if monotonic() - polled_at > 0.1:  # noqa: PLR2004  one round trip less per round
                polled_at = monotonic()
                if not client.exists("peer:running"):
                    return {"moved": moved}


def _produce(peer: Peer) -> dict[str, Any]:
    rate, at_once = float(os.environ["PEER_RATE"]), int(float(os.environ["PEER_AT_ONCE"]))
    began: dict[int, float] = {}
    with _postgres() as connection, _redis() as client:
        transactions = max(1, int(rate * float(os.environ["PEER_SECONDS"])) // at_once)
        client.set("peer:sent", transactions * at_once)
        statement = (_CHANGE + peer.stage).encode()
        start = monotonic()
        for number in range(transactions):
            if (left := start + number * at_once / rate - monotonic()) > 0:
                sleep(left)
            ids = list(range(number * at_once, (number + 1) * at_once))
            accounts = [n % ACCOUNTS for n in ids]
            payloads = [json.dumps({"id": n, "account": n % ACCOUNTS, "cents": n % 977, "note": NOTE}) for n in ids]
            now = monotonic()
            began.update(dict.fromkeys(ids, now))
            connection.execute(
                statement,
                {
                    "ids": ids,
                    "accounts": accounts,
                    "keys": list(map(str, accounts)),
                    "payloads": payloads,
                    "note": NOTE,
                },
                prepare=True,
            )
        took = max(monotonic() - start, transactions * at_once / rate)
    return {"rate": len(began) / took, "began": began}


_CHANGE = """
WITH change AS (
    INSERT INTO bench.movements
    SELECT id, account, id %% 977, %(note)s
    FROM unnest(%(ids)s::bigint[], %(accounts)s::bigint[]) AS r (id, account)
)
"""
