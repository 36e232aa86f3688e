"""Runs the checks.  A check that fails is reported, and the others still run."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import psycopg
import redis

from penstock.channels.acl import acl_grant, get_user
from penstock.channels.commands import RedisClient
from penstock.database.connections import WorkerConnection
from penstock.database.driver_errors import describe, first_line
from penstock.database.store import Store
from penstock.database.transactions import Timeouts
from penstock.errors import PenstockError, PrivilegeMissing, SchemaMissing, ServerUnavailable
from penstock.journal.journal_reader import known_shards
from penstock.operating.doctor import database_checks, pipeline_checks, redis_checks
from penstock.operating.doctor.check import Check, CheckContext, CheckResult, Grade, warning
from penstock.pipeline import Pipeline

CHECK_TIMEOUT_S = 20
"""Longest that a statement of a check may take in Postgres, in seconds."""

_SEE_PRIVILEGES = "see the check of privileges, or run penstock doctor as a viewer"


def diagnose(
    store: Store, client: RedisClient, pipeline: Pipeline | None = None
) -> list[CheckResult]:
    """Runs all checks."""
    store = store if pipeline is None else Store(store.connection, pipeline.scope)
    context = CheckContext(store, client, pipeline)
    if not isinstance(store.connection, WorkerConnection):
        return _check_servers(context)
    timeouts = store.connection.timeouts
    store.connection.timeouts = Timeouts(statement_s=CHECK_TIMEOUT_S, lock_s=CHECK_TIMEOUT_S)
    try:
        return _check_servers(context)
    finally:
        store.connection.timeouts = timeouts


def worst(results: Iterable[CheckResult]) -> Grade:
    """Returns the worst grade among them."""
    grades = {result.grade for result in results}
    return "error" if "error" in grades else "warning" if "warning" in grades else "ok"


def _check_servers(context: CheckContext) -> list[CheckResult]:
    """Checks both servers, then what is in them as far as they answer."""
    results = _run(database_checks.SERVER, context)
    if any(result.unreachable for result in results):
        return results + _check_contents(context)
    results += _run((pipeline_checks.schema, database_checks.privileges), context)
    declared = context.pipeline.shard_names if context.pipeline else ()
    try:
        shards = known_shards(context.store, declared)
    except (SchemaMissing, ServerUnavailable):
        # Reported above.  Redis can still be checked.
        return results + _check_redis(context)
    return results + _check_contents(replace(context, shards=tuple(shards)))


def _check_contents(context: CheckContext) -> list[CheckResult]:
    """Checks the tables, and the keys if Redis answers."""
    redis_results = _check_redis(context)
    results = _run(pipeline_checks.CHECKS, context) + redis_results
    if not any(result.unreachable for result in redis_results):
        results += _run(redis_checks.CHECKS, context)
    return results


def _check_redis(context: CheckContext) -> list[CheckResult]:
    """Checks Redis as a server; that it does not answer is reported once."""
    results = _run((redis_checks.redis,), context)
    if any(result.unreachable for result in results):
        return results
    return results + _run(redis_checks.SERVER, context)


def _run(checks: Sequence[Check], context: CheckContext) -> list[CheckResult]:
    return [result for check in checks for result in _run_one(check, context)]


def _run_one(check: Check, context: CheckContext) -> list[CheckResult]:
    """Returns the results that a check yields, or that all is well."""
    name, results = check.__name__.replace("_", " "), check(context)
    reported: list[CheckResult] = []
    try:
        while True:
            result = next(results)
            reported.append(replace(result, check=result.check or name))
    except StopIteration as ended:
        return reported or ([CheckResult(name, "ok", ended.value)] if ended.value else [])
    except PrivilegeMissing as error:
        return [warning(str(error), _SEE_PRIVILEGES, name)]
    except PenstockError as error:
        if grant := acl_grant(str(error), context.scope.namespace, get_user(context.client)):
            return [warning(str(error), grant, name)]
        away = error.exit_code == ServerUnavailable.exit_code
        return [CheckResult(name, "error", str(error), f"see docs: {error.page}", unreachable=away)]
    except (psycopg.Error, redis.RedisError) as error:
        return [_report_failure(name, error)]


def _report_failure(name: str, error: psycopg.Error | redis.RedisError) -> CheckResult:
    match error:
        case psycopg.errors.QueryCanceled():
            message = f"took longer than {CHECK_TIMEOUT_S} s and was cancelled"
            return CheckResult(name, "warning", message, "run penstock doctor when load is lower")
        case psycopg.errors.InsufficientPrivilege():
            message = f"this role lacks the privileges: {first_line(error)}"
            return CheckResult(name, "warning", message, _SEE_PRIVILEGES)
        case psycopg.OperationalError() | redis.ConnectionError():
            server = "Redis" if isinstance(error, redis.RedisError) else "Postgres"
            fix = "see docs: errors#serverunavailable"
            return CheckResult(name, "error", f"{server} does not answer", fix, unreachable=True)
        case _:
            return CheckResult(name, "warning", f"could not be checked: {describe(error)}")
