"""What a job of a pipeline costs: microseconds of processor time from the queue in Redis to the committed effect."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any

from sqlalchemy.orm import Session

from benchmarks.application import EACH, NOTE, total_each
from benchmarks.backlogs import ACCOUNTS, Backlog, Scale, unsequence
from benchmarks.cases.cpu import describe_costs, measure
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.peer_scripts import find_peers
from benchmarks.processor import Costs
from benchmarks.servers import BenchServers
from penstock import Pipeline, Queue, stage_many
from penstock.cli.command import spared_from_garbage_collection
from penstock.consuming import make_worker
from penstock.streaming import Streamer

JOBS = Queue("bench-jobs")
TENANTS = 100
SLOTS = (1, 8)
TOGETHER = 20
FEWER = 50
"""Jobs cost more than records of a log: so many times fewer."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """One at a time, and several; and how many one process does."""
    count = scale.records // FEWER
    return [
        Case(
            name="jobs",
            unit="jobs/s",
            sentence="jobs of a pipeline without a session, which do nothing, by one process (-cpu: its processor time for one, in µs); with one statement each, and with that together",
            ours=partial(_measure_rate, servers, count, SLOTS[-1], _read_cents),
            variants={
                "a statement": partial(_measure_rate, servers, count, SLOTS[-1], _add_cents),
                "statements together": partial(_measure_rate, servers, count, SLOTS[-1], _add_cents, together=TOGETHER),
            },
            peers=find_peers("jobs", servers, Backlog(count)),
            rounds=scale.few_rounds,
        ),
        *(
            Case(
                name=f"cost-cpu-jobs-{slots}",
                unit="µs",
                sentence=f"processor time per job of a pipeline that a worker does, {slots} at a time, each with one statement: the sum, the worker, Postgres, Redis; with {TOGETHER} in a transaction; and of a job without a session, which does nothing",
                ours=partial(_measure_costs, servers, count, slots, _add_cents),
                variants={
                    "together": partial(_measure_costs, servers, count, slots, _add_cents, together=TOGETHER),
                    "without-a-session": partial(_measure_costs, servers, count, slots, _read_cents),
                },
                better="less",
                rounds=scale.few_rounds,
            )
            for slots in SLOTS
        ),
    ]


def _add_cents(session: Session, job: Any) -> None:
    total_each(session, job)


def _read_cents(job: Any) -> None:
    job.data["cents"]


def _measure_rate(
    servers: BenchServers, count: int, slots: int, handler: Callable[..., None], **options: int
) -> Figures:
    costs, took_s = _do_jobs(servers, count, slots, handler, **options)
    return {"": count / took_s, "-cpu": costs["worker"] / count * 1e6}


def _measure_costs(
    servers: BenchServers, count: int, slots: int, handler: Callable[..., None], **options: int
) -> Figures:
    costs, _ = _do_jobs(servers, count, slots, handler, **options)
    return describe_costs(costs, count)


def _do_jobs(
    servers: BenchServers, count: int, slots: int, handler: Callable[..., None], **options: int
) -> tuple[Costs, float]:
    """One worker, which has connected; nothing is staged meanwhile.

    Raises:
        NotMeasured: It did a different number of jobs.
    """
    pipeline = Pipeline([JOBS])
    pipeline.worker(reads=JOBS, name=EACH, concurrency=slots, **options)(handler)  # type: ignore[call-overload]  # options of several kinds
    url = servers.database("jobs")
    servers.empty_redis()
    with servers.postgres(url) as connection:
        connection.execute("TRUNCATE penstock.staged_records, bench.totals")
        unsequence(connection)
        jobs = ({"account": n % ACCOUNTS, "cents": n, "note": NOTE} for n in range(count))
        records = [
            {"tenant": f"tenant-{n % TENANTS}", "action": "add", "object": "movement", "data": data}
            for n, data in enumerate(jobs)
        ]
        with connection.transaction():
            stage_many(connection, records, to=JOBS, pipeline=pipeline)  # type: ignore[arg-type]  # a plain dict a job
    with closing(Streamer(pipeline, url, servers.redis_url)) as streamer:
        streamer.drain()
    with make_worker(pipeline, pipeline.get_consumer(EACH), url, servers.redis_url) as worker:
        worker.open()

        def drain() -> None:
            if (done := worker.drain()) != count:
                raise NotMeasured(f"{done} of {count} jobs were done")

        with spared_from_garbage_collection():  # as ``penstock work``
            began = perf_counter()
            costs = measure(servers, url, drain)
            return costs, perf_counter() - began
