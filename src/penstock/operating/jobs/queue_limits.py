"""Limits of a queue's tenants and keys, as they are declared and as they were set while it runs; operators set them, too."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import statements
from penstock.declaring.unique import KeyLimits, TenantLimits
from penstock.operating.channels import find_channel
from penstock.operating.jobs.browsing import check_queue
from penstock.records import DEFAULT_SCOPE, Scope
from penstock.staging.driver_connections import read_rows
from penstock.staging.limiting import SET_LIMITS, limit_values

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """Limits of a tenant or a key; the name ``""`` is all others.  ``set_at`` is None if they are declared."""

    kind: str
    name: str
    limits: dict[str, Any]
    set_at: datetime | None


def list_limits(
    connection: Connection,
    queue: str,
    *,
    name: str | None = None,
    limit: int | None = None,
    scope: Scope = DEFAULT_SCOPE,
) -> tuple[list[QueueLimit], int]:
    """The limits that hold, of one name or of all: what was set comes before what is declared; and how many there are.

    Raises ``Unknown`` or ``Refused``.
    """
    check_queue(connection, queue, scope=scope)
    values = {"channel": queue, "name": name, "limit": limit}
    with postgres_errors(f"reading limits of {queue}"):
        rows = connection.execute(statements("penstock.operating.jobs", scope.schema)["limits"], values).fetchall()
    return [QueueLimit(*row[:-1]) for row in rows], rows[0][-1] if rows else 0


def set_limits(
    connection: Connection,
    queue: str,
    limits: TenantLimits | KeyLimits | None,
    *,
    tenant: str | None = None,
    key: str | None = None,
    scope: Scope = DEFAULT_SCOPE,
) -> None:
    """Sets limits, or takes them back with None.  Raises ``InvalidMessage``, ``Unknown`` or ``Refused``."""
    channel = find_channel(connection, queue, scope=scope)
    parts = channel.shards if channel.limits.get("within", "queue") == "queue" else 1
    values = limit_values(queue, limits, tenant, key, parts=parts)
    with postgres_errors(f"limiting {queue}"):
        read_rows(connection, scope.schema, SET_LIMITS, values)
    log.warning("limits set", channel=queue, kind=values["kind"], limits=values["limits"])
