"""Goes through the checks; one that cannot look says so, and the others go on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import psycopg
import redis

from penstock.channels.server import RedisClient
from penstock.database.connections import Connection
from penstock.database.errors import describe
from penstock.database.statements import DEFAULT_SCHEMA
from penstock.errors import PenstockError, SchemaMissing, ServerUnavailable
from penstock.journal import known_shards
from penstock.operating.doctor import flow, ick, log, server
from penstock.operating.doctor.finding import Check, Examined, Finding, Grade
from penstock.pipeline import Pipeline

PATIENCE_S = 20
"""Longest that one check may keep Postgres busy, in seconds."""


def examine(
    connection: Connection | None,
    client: RedisClient,
    pipeline: Pipeline | None = None,
    *,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
    prepare: bool = True,
) -> list[Finding]:
    """All findings.

    Args:
        connection: In autocommit mode; None if Postgres cannot be reached.
        client: The Redis that holds the log.
        pipeline: Gives schema and namespace, and what is declared; None looks at what is registered.
        schema: The Penstock schema, if there is no pipeline.
        namespace: First part of the keys, if there is no pipeline.
        prepare: Whether the workers prepare statements.
    """
    if pipeline is not None:
        schema, namespace = pipeline.schema, pipeline.namespace
    if connection is None:
        away = Finding(
            "postgres",
            "error",
            "Postgres cannot be reached",
            "see --database-url",
            unreachable=True,
        )
        return [away]
    examined = Examined(connection, client, pipeline, schema, namespace, prepare=prepare)
    connection.execute(f"SET statement_timeout = '{PATIENCE_S}s'".encode())
    try:
        findings = _all(server.CHECKS, examined)
        answers = not any(finding.unreachable for finding in findings)
        if answers:
            findings += _all(flow.SCHEMA, examined)
        try:
            shards = (
                known_shards(connection, schema, pipeline.shard_names if pipeline else ())
                if answers
                else []
            )
        except (SchemaMissing, ServerUnavailable):
            # Said above.  What Redis is like can still be seen.
            return findings + _redis(examined)
        examined = replace(examined, shards=tuple(shards))
        reached = _redis(examined)
        findings += _all(flow.CHECKS, examined) + reached
        if not any(finding.unreachable for finding in reached):
            findings += _all((*log.CHECKS, *ick.CHECKS), examined)
    finally:
        if not connection.closed:
            connection.execute("RESET statement_timeout")
    return findings


def worst(findings: Iterable[Finding]) -> Grade:
    """The worst grade among them."""
    grades = {finding.grade for finding in findings}
    return "error" if "error" in grades else "warning" if "warning" in grades else "ok"


def _redis(examined: Examined) -> list[Finding]:
    """Redis as a server; if it does not answer, that is said once."""
    reached = _all(log.REACHED, examined)
    if any(finding.unreachable for finding in reached):
        return reached
    return reached + _all(log.SERVER, examined)


def _all(checks: Sequence[Check], examined: Examined) -> list[Finding]:
    return [finding for check in checks for finding in _look(check, examined)]


def _look(check: Check, examined: Examined) -> list[Finding]:
    name = check.__name__.replace("_", " ")
    try:
        return list(check(examined))
    except PenstockError as error:
        away = isinstance(error, ServerUnavailable)
        return [Finding(name, "error", str(error), f"see docs: {error.page}", unreachable=away)]
    except (psycopg.Error, redis.RedisError) as error:
        return [_could_not_look(name, error)]


def _could_not_look(name: str, error: psycopg.Error | redis.RedisError) -> Finding:
    match error:
        case psycopg.errors.QueryCanceled():
            return Finding(
                name,
                "warning",
                f"took longer than {PATIENCE_S} s, and was left",
                "look at a quieter time",
            )
        case psycopg.errors.InsufficientPrivilege():
            return Finding(
                name,
                "warning",
                "this role may not look",
                "run it as the owner and a member of pg_monitor",
            )
        case psycopg.OperationalError() | redis.ConnectionError():
            where = "Redis" if isinstance(error, redis.RedisError) else "Postgres"
            return Finding(
                name,
                "error",
                f"{where} does not answer",
                "see docs: errors#serverunavailable",
                unreachable=True,
            )
        case _:
            return Finding(name, "warning", f"could not be looked at: {describe(error)}")
