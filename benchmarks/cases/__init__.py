"""The cases, in the order in which they are measured: limits first, then the path of a record."""

from benchmarks.backlogs import Backlog, Scale
from benchmarks.cases import (
    consuming,
    costs,
    cpu,
    draining,
    growing,
    icks,
    jobs,
    latency,
    limits,
    publishing,
    queues,
    recruiting,
    seeking,
    spark,
    staging,
    steady,
    stealing,
)
from benchmarks.measuring import Case
from benchmarks.servers import BenchServers


def all_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Every case.  Starts nothing."""
    return [
        *_make_limit_cases(servers, Backlog(scale.records)),
        *staging.make_cases(servers, scale),
        *draining.make_cases(servers, scale),
        *publishing.make_cases(servers, scale),
        *growing.make_cases(servers, scale),
        *consuming.make_cases(servers, scale),
        *steady.make_cases(servers, scale),
        *latency.make_cases(servers, scale),
        *seeking.make_cases(servers, scale),
        *icks.make_cases(servers, scale),
        *queues.make_cases(servers, scale),
        *stealing.make_cases(servers, scale),
        *recruiting.make_cases(servers, scale),
        *spark.make_cases(servers, scale),
        *cpu.make_cases(servers, scale),
        *jobs.make_cases(servers, scale),
        *costs.make_cases(servers, scale),
    ]


def _make_limit_cases(servers: BenchServers, backlog: Backlog) -> list[Case]:
    return [
        Case(
            "limit-select",
            "records/s",
            "Postgres: every staged row by binary COPY, discarded",
            lambda: limits.select_rows(servers, backlog),
        ),
        Case(
            "limit-insert",
            "records/s",
            "Postgres: the same rows inserted, 1,000 per transaction, without Penstock",
            lambda: limits.insert_rows(servers, backlog),
        ),
        Case(
            "limit-commit",
            "commits/s",
            "Postgres: commits that write almost nothing, one after another",
            lambda: limits.measure_commit_rate(servers),
        ),
        Case(
            "limit-xadd",
            "records/s",
            "Redis: the same records appended by a script that only calls XADD, 1,000 per call",
            lambda: limits.append_records(servers, backlog),
        ),
        Case(
            "limit-xrange",
            "records/s",
            "Redis: the same records, an entry each, read by XRANGE, as the client's parser returns them",
            lambda: limits.read_entries(servers, backlog.kept_as("plain")),
            variants={"packed entries": lambda: limits.read_entries(servers, backlog)},
        ),
    ]
