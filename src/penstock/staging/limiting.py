"""Sets limits of a queue's tenants and keys in the application's transaction.

The streamer copies them to Redis.
"""

import json
from typing import TYPE_CHECKING, Any

from penstock.declaring.kinds import Queue
from penstock.declaring.unique import KeyLimits, TenantLimits, checked_text, limits_as_json
from penstock.errors import InvalidMessage
from penstock.staging.cancelling import run_statement, run_statement_async
from penstock.staging.explicit import Target, refuse_async
from penstock.staging.rules import Declarations

if TYPE_CHECKING:
    from penstock.staging.explicit import AsyncTarget

SET_LIMITS = """
    WITH given AS (
        SELECT CAST({channel} AS text) AS channel, CAST({kind} AS text) AS kind, CAST({name} AS text) AS name,
               CAST(CAST({limits} AS text) AS jsonb) AS limits
    ),
    removed AS (
        DELETE FROM {schema}.queue_limits l
        USING given g
        WHERE (l.channel, l.kind, l.name) = (g.channel, g.kind, g.name) AND g.limits IS NULL
    )
    INSERT INTO {schema}.queue_limits (channel, kind, name, limits)
    SELECT channel, kind, name, limits
    FROM given
    WHERE limits IS NOT NULL
    ON CONFLICT (channel, kind, name) DO UPDATE
    SET limits = excluded.limits, set_at = clock_timestamp()
    RETURNING name
"""  # noqa: E501  SQL
"""All values are sent as text, which every driver can."""


def limit(
    target: Target,
    limits: TenantLimits | KeyLimits | None,
    *,
    of: Queue,
    tenant: str | None = None,
    key: str | None = None,
    pipeline: Declarations | None = None,
) -> None:
    """Limits a tenant or key of a queue, from a second after the commit, waiting jobs included.

    Overrides the declaration.

    Args:
        target: As ``cancel``, and so is ``pipeline``.
        limits: ``TenantLimits`` of a tenant, ``KeyLimits`` of a key; None restores the declared
            ones.
        of: The queue.
        tenant: The tenant; ``""`` stands for all without limits of their own.
        key: The key, likewise.
        pipeline: The pipeline.

    Raises:
        InvalidMessage: Neither or both of tenant and key are named; the limits are of the other
            kind; or they limit a key over all tenants, in a queue of several shards.
        NotAttached: As ``stage``.
    """
    refuse_async(target, "limit")
    run_statement(
        target,
        of,
        SET_LIMITS,
        limit_values(of.name, limits, tenant, key, parts=_parts(of)),
        pipeline,
        "limit",
    )


async def limit_async(
    target: "AsyncTarget",
    limits: TenantLimits | KeyLimits | None,
    *,
    of: Queue,
    tenant: str | None = None,
    key: str | None = None,
    pipeline: Declarations | None = None,
) -> None:
    """``limit`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

    Raises as it does.
    """
    values = limit_values(of.name, limits, tenant, key, parts=_parts(of))
    await run_statement_async(target, of, SET_LIMITS, values, pipeline, "limit")


def _parts(queue: Queue) -> int:
    return queue.shards if queue.keys_within == "queue" else 1


def limit_values(
    queue: str,
    limits: TenantLimits | KeyLimits | None,
    tenant: str | None,
    key: str | None,
    *,
    parts: int,
) -> dict[str, Any]:
    """Returns the values of ``SET_LIMITS``; a key's rate is divided by ``parts`` shards.

    Raises ``InvalidMessage``.
    """
    if (tenant is None) is (key is None):
        raise InvalidMessage("limit", "takes either a tenant or a key")
    kind, name, expected = (
        ("tenant", tenant, TenantLimits) if key is None else ("key", key, KeyLimits)
    )
    if limits is not None and not isinstance(limits, expected):
        raise InvalidMessage(
            "limits", f"is {type(limits).__name__}; a {kind} takes {expected.__name__}, or None"
        )
    if parts > 1 and isinstance(limits, KeyLimits) and not limits.is_paused:
        problem = (
            f"apply across all tenants of {queue}, and each of its {parts} shards counts only its "
            "own jobs"
        )
        raise InvalidMessage("limits", f"{problem}: declare keys_within='tenant', or pause the key")
    encoded = None if limits is None else json.dumps(limits_as_json(limits))
    return {
        "channel": queue,
        "kind": kind,
        "name": checked_text(kind, name, may_be_empty=True),
        "limits": encoded,
    }
