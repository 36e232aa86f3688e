"""A queue: messages worked off, how soon one is read that arrives at an idle reader, and what many streams cost.

The limits are a plain stream with a group: ``XADD``, ``XREADGROUP``, ``XACK`` and ``XDEL``, without tenants, without
attempts, without delays, and without a lease that ends by itself.
"""

import threading
from collections.abc import Callable
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

from benchmarks.backlogs import Scale
from benchmarks.measuring import Case, Figures, NotMeasured, percentile
from benchmarks.servers import BenchServers
from penstock.channels.queue import NewMessage
from penstock.clients import FairQueue

QUEUE, STREAM, GROUP = "bench-queue", "bench-stream", "bench-group"
TENANTS = 100
AT_ONCE = 100
PAYLOAD = b"x" * 200
FEWER = 5
"""Messages cost more than records of a log: so many times fewer."""

PICKUPS = 100
PAUSE_S = 0.02
"""Pause before the next message for an idle reader, in seconds."""

ROUNDS = 200
STREAMS = 64

MICE, MICE_A_SECOND = 50, 50
READERS, JOB_S = 4, 0.005
"""Readers beside elephants, and how long each of them works on a message, in seconds."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Jobs, pick-up, and rounds over many streams."""
    count = scale.records // FEWER
    return [
        Case(
            name="queue-write",
            unit="messages/s",
            sentence=f"messages of {TENANTS} tenants are written, {AT_ONCE} in a call",
            ours=lambda: _measure_writing(servers, count),
            limits={"xadd": lambda: _measure_xadd(servers, count)},
            rounds=scale.few_rounds,
        ),
        Case(
            name="queue-jobs",
            unit="jobs/s",
            sentence=f"jobs that do nothing, worked off by one process, up to {AT_ONCE} read and settled in a call (-cpu: its processor time for one, in µs)",
            ours=lambda: _measure_jobs(servers, count, AT_ONCE),
            limits={"xreadgroup": lambda: _measure_xreadgroup(servers, count, AT_ONCE)},
            rounds=scale.few_rounds,
        ),
        Case(
            name="queue-jobs-single",
            unit="jobs/s",
            sentence="the same, one read and settled in a call",
            ours=lambda: _measure_jobs(servers, count // 10, 1),
            limits={"xreadgroup": lambda: _measure_xreadgroup(servers, count // 10, 1)},
            rounds=scale.few_rounds,
        ),
        Case(
            name="queue-pickup",
            unit="ms",
            sentence="from the write of a message to the end of the read that waited for it, nothing else to do (p50, p99)",
            ours=lambda: _measure_pickup(servers),
            limits={"xreadgroup": lambda: _measure_plain_pickup(servers)},
            better="less",
            rounds=scale.few_rounds,
        ),
        Case(
            name="queue-mice",
            unit="ms",
            sentence=f"from write to read of a message of one of {MICE} tenants, each writing one a second, beside a tenant with {scale.records:,} messages and one with as many of 100 keys; {READERS} readers work {JOB_S * 1000:g} ms on each (p50, p99)",
            ours=lambda: _measure_mice(servers, scale.records, scale.seconds),
            limits={"without the two": lambda: _measure_mice(servers, 0, scale.seconds)},
            better="less",
            rounds=scale.few_rounds,
        ),
        Case(
            name="queue-streams",
            unit="ms",
            sentence=f"a read that finds nothing in a queue of {STREAMS} streams",
            ours=lambda: _measure_rounds(servers, STREAMS),
            limits={"1 stream": lambda: _measure_rounds(servers, 1)},
            better="less",
            rounds=scale.few_rounds,
        ),
    ]


def _write(queue: FairQueue, count: int) -> None:
    for first in range(0, count, AT_ONCE):
        queue.write_many([NewMessage(f"tenant-{n % TENANTS}", PAYLOAD) for n in range(first, first + AT_ONCE)])


def _fill_stream(client: Any, count: int) -> None:
    client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    for _ in range(0, count, AT_ONCE):
        pipeline = client.pipeline(transaction=False)
        for _ in range(AT_ONCE):
            pipeline.xadd(STREAM, {"payload": PAYLOAD})
        pipeline.execute()


def _measure_writing(servers: BenchServers, count: int) -> Figures:
    servers.empty_redis()
    with servers.redis() as client:
        began = perf_counter()
        _write(FairQueue(client, QUEUE), count)
        return {"": count / (perf_counter() - began)}


def _measure_xadd(servers: BenchServers, count: int) -> Figures:
    servers.empty_redis()
    with servers.redis() as client:
        began = perf_counter()
        _fill_stream(client, count)
        return {"": count / (perf_counter() - began)}


def _measure_jobs(servers: BenchServers, count: int, at_once: int) -> Figures:
    servers.empty_redis()
    with servers.redis() as client:
        queue = FairQueue(client, QUEUE)
        _write(queue, count)
        with queue.reader() as reader:

            def work() -> int:
                leases = reader.read(at_once)
                if not all(reader.done(leases)):
                    raise NotMeasured("a lease was stale")
                return len(leases)

            return _rate(work, count)


def _measure_xreadgroup(servers: BenchServers, count: int, at_once: int) -> Figures:
    servers.empty_redis()
    with servers.redis() as client:
        _fill_stream(client, count)

        def work() -> int:
            found = client.xreadgroup(GROUP, "reader", {STREAM: ">"}, count=at_once)
            entries = found[0][1] if found else []
            if entries:
                ids = [id_ for id_, _ in entries]
                pipeline = client.pipeline(transaction=False)
                pipeline.xack(STREAM, GROUP, *ids)
                pipeline.xdel(STREAM, *ids)
                pipeline.execute()
            return len(entries)

        return _rate(work, count)


def _rate(work: Callable[[], int], count: int) -> Figures:
    began, processor, done = perf_counter(), process_time(), 0
    while some := work():
        done += some
    took, busy = perf_counter() - began, process_time() - processor
    if done != count:
        raise NotMeasured(f"{done} of {count} jobs were done")
    return {"": count / took, "-cpu": busy / count * 1e6}


def _measure_pickup(servers: BenchServers) -> Figures:
    servers.empty_redis()
    with servers.redis() as client, servers.redis() as writing:
        queue, written = FairQueue(client, QUEUE), FairQueue(writing, QUEUE)
        with queue.reader() as reader:

            def read() -> float:
                [lease] = reader.read(block_s=30.0)
                at = monotonic()
                lease.done()
                return at

            return _pickups(read, lambda: written.write("tenant", PAYLOAD))


def _measure_plain_pickup(servers: BenchServers) -> Figures:
    servers.empty_redis()
    with servers.redis() as client, servers.redis() as writing:
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)

        def read() -> float:
            [[_, [[id_, _]]]] = client.xreadgroup(GROUP, "reader", {STREAM: ">"}, count=1, block=10_000)
            at = monotonic()
            client.xack(STREAM, GROUP, id_)
            return at

        return _pickups(read, lambda: writing.xadd(STREAM, {"payload": PAYLOAD}))


def _pickups(read: Callable[[], float], write: Callable[[], object]) -> Figures:
    """Time from each write to the end of the read, in ms."""
    read_at: list[float] = []

    def read_all() -> None:
        for _ in range(PICKUPS):
            read_at.append(read())  # noqa: PERF401  the other thread sees each as it comes

    reader = threading.Thread(target=read_all)
    reader.start()
    written_at: list[float] = []
    for number in range(PICKUPS):
        sleep(PAUSE_S)
        written_at.append(monotonic())
        write()
        while len(read_at) <= number and reader.is_alive():
            sleep(PAUSE_S / 10)
    reader.join()
    return _quantiles([(b - a) * 1000 for a, b in zip(written_at, read_at, strict=True)])


def _quantiles(values: list[float]) -> Figures:
    return {"": percentile(values, 0.5), "-p99": percentile(values, 0.99)}


def _measure_mice(servers: BenchServers, elephants: int, seconds: float) -> Figures:
    servers.empty_redis()
    done = threading.Event()
    took: list[float] = []
    with servers.redis() as client:
        queue = FairQueue(client, QUEUE, streams=STREAMS)
        for first in range(0, elephants, AT_ONCE):
            some = range(first, min(first + AT_ONCE, elephants))
            queue.write_many(
                [
                    *(NewMessage("elephant", PAYLOAD) for _ in some),
                    *(NewMessage("other elephant", PAYLOAD, key=f"{n % 100}") for n in some),
                ]
            )
        threads = [threading.Thread(target=_work_beside, args=(servers, done, took)) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        end, number = monotonic() + seconds, 0
        while monotonic() < end:
            number += 1
            queue.write(f"mouse-{number % MICE}", repr(monotonic()))
            sleep(1 / MICE_A_SECOND)
        done.set()
        for thread in threads:
            thread.join()
    if len(took) < number / 2:
        raise NotMeasured(f"{len(took)} of {number} messages were read")
    return _quantiles(took)


def _work_beside(servers: BenchServers, done: threading.Event, took: list[float]) -> None:
    """Reads one message after the other, and notes how long those of mice have waited, in ms."""
    with servers.redis() as client, FairQueue(client, QUEUE, streams=STREAMS).reader() as reader:
        while not done.is_set():
            for lease in reader.read(block_s=0.2):
                if lease.message.tenant.startswith("mouse"):
                    took.append((monotonic() - float(lease.message.payload)) * 1000)
                sleep(JOB_S)
                lease.done()


def _measure_rounds(servers: BenchServers, streams: int) -> Figures:
    servers.empty_redis()
    with servers.redis() as client:
        queue = FairQueue(client, QUEUE, streams=streams)
        queue.write("tenant", PAYLOAD)
        with queue.reader() as reader:
            [lease] = reader.read()
            lease.done()
            began = perf_counter()
            for _ in range(ROUNDS):
                reader.read()
            return {"": (perf_counter() - began) / ROUNDS * 1000}
