"""Reads and sets limits of a queue's tenants and keys: declared, or set while it runs."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog

from penstock.database.driver_errors import postgres_errors
from penstock.database.store import Store
from penstock.declaring.unique import KeyLimits, TenantLimits
from penstock.errors import Unknown
from penstock.operating.channels import find_channel
from penstock.operating.jobs.browsing import check_queue
from penstock.staging.driver_connections import read_rows
from penstock.staging.limiting import SET_LIMITS, limit_values

KINDS: Mapping[str, type[TenantLimits | KeyLimits]] = {"tenant": TenantLimits, "key": KeyLimits}

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """Limits of a tenant or a key; the name ``""`` is all others.

    ``set_at`` is None if they are declared.
    """

    kind: str
    name: str
    limits: dict[str, Any]
    set_at: datetime | None

    @property
    def text(self) -> str:
        """Returns the limits for people."""
        return describe_limits(self.limits)


def describe_limits(limits: object) -> str:
    """Returns limits for people; ``none`` for those that keep nothing back, such as a weight of 1.

    What somebody wrote and is none, it returns as it is.
    """
    if not isinstance(limits, Mapping):
        return str(limits)
    return (
        ", ".join(
            "paused" if name == "is_paused" else f"{name} {value}" for name, value in limits.items()
        )
        or "none"
    )


def list_limits(
    store: Store, queue: str, *, name: str | None = None, limit: int | None = None
) -> tuple[list[QueueLimit], int]:
    """Returns the limits that hold, of one name or all, and their number.

    What was set comes before what is declared.

    Raises ``Unknown`` or ``Refused``.
    """
    check_queue(store, queue)
    values = {"channel": queue, "name": name, "limit": limit}
    rows = store.rows("limits", values, doing=f"reading limits of {queue}")
    return [QueueLimit(*row[:-1]) for row in rows], rows[0][-1] if rows else 0


@dataclass(frozen=True, slots=True)
class LimitChange:
    """Limits for a tenant or a key, in place of present ones; none take back what was set."""

    queue: str
    kind: str
    name: str
    limits: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Returns what is done, without the name, which not everyone may see."""
        return f"{'Limit' if self.limits else 'Remove the limits of'} a {self.kind} of {self.queue}"

    @property
    def command(self) -> str:
        """Returns the command that does it."""
        words = [
            word
            for name, value in self.limits.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        options = " ".join(words or ["--remove"]).replace("--is-paused True", "--pause")
        return (
            f"penstock queues limit {shlex.join([self.queue, f'--{self.kind}', self.name])} "
            f"{options} --apply"
        )

    def find(self, store: Store) -> QueueLimit | None:
        """Returns the limits that hold now, if it has any of its own.

        Raises as ``list_limits``, ``InvalidMessage`` for the new ones, or ``Unknown`` if there are
        none to take back.
        """
        limits, _ = list_limits(store, self.queue, name=self.name)
        self._make_values(store)
        present = next((limit for limit in limits if limit.kind == self.kind), None)
        if not self.limits and (present is None or present.set_at is None):
            raise Unknown(
                f"that {self.kind} of {self.queue} has no limits that were set; to list those: "
                f"penstock queues limits {self.queue}"
            )
        return present

    def describe(self, present: QueueLimit | None) -> str:
        """Returns both limits for people."""
        owner = f"{self.kind} {self.name!r}" if self.name else f"all other {self.kind}s"
        now = present.text if present else "no limits of its own"
        return (
            f"{owner} of {self.queue}: {now} → "
            f"{describe_limits(self.limits) if self.limits else 'what is declared'}"
        )

    def apply(self, store: Store) -> None:
        """Sets the limits; they hold within a second or two.

        Raises as ``find``.
        """
        with postgres_errors(f"limiting {self.queue}"):
            read_rows(store.connection, store.scope.schema, SET_LIMITS, self._make_values(store))
        log.warning("limits set", channel=self.queue, kind=self.kind, limits=dict(self.limits))

    def _make_values(self, store: Store) -> dict[str, Any]:
        channel = find_channel(store, self.queue)
        parts = channel.shards if channel.limits.get("within", "queue") == "queue" else 1
        limits = KINDS[self.kind](**self.limits) if self.limits else None
        tenant, key = (self.name, None) if self.kind == "tenant" else (None, self.name)
        return limit_values(self.queue, limits, tenant, key, parts=parts)
