"""The cases, in the order in which they are measured: limits first, then the way of a record."""

from penstock.bench.cases import (
    consuming,
    costs,
    draining,
    growing,
    icks,
    latency,
    limits,
    spark,
    staging,
    steady,
)
from penstock.bench.measuring import Case
from penstock.bench.plant import Backlog, Plant, Scale


def all_cases(plant: Plant, scale: Scale) -> list[Case]:
    """Every case; nothing is started yet."""
    return [
        *_limits(plant, Backlog(scale.records)),
        *staging.cases(plant, scale),
        *draining.cases(plant, scale),
        *growing.cases(plant, scale),
        *consuming.cases(plant, scale),
        *steady.cases(plant, scale),
        *latency.cases(plant, scale),
        *icks.cases(plant, scale),
        *spark.cases(plant, scale),
        *costs.cases(plant, scale),
    ]


def _limits(plant: Plant, backlog: Backlog) -> list[Case]:
    return [
        Case(
            "limit-select",
            "records/s",
            "Postgres: every staged row by binary COPY, thrown away",
            lambda: limits.select(plant, backlog),
        ),
        Case(
            "limit-insert",
            "records/s",
            "Postgres: the same rows inserted, 1,000 a transaction, without Penstock",
            lambda: limits.insert(plant, backlog),
        ),
        Case(
            "limit-commit",
            "commits/s",
            "Postgres: commits that write next to nothing, one after the other",
            lambda: limits.commit_rate(plant),
        ),
        Case(
            "limit-xadd",
            "records/s",
            "Redis: the same records appended by a script of nothing but XADD, 1,000 a call",
            lambda: limits.append(plant, backlog),
        ),
        Case(
            "limit-xrange",
            "records/s",
            "Redis: the same entries read by XRANGE, as the client's parser leaves them",
            lambda: limits.entries(plant, backlog),
        ),
    ]
