"""Declared limits of a queue.  Postgres has them, and Redis a copy.

Redis may lose the copy, or have an outdated one.  A call that hands messages over, or writes
records, therefore names the declaration that applies, and Redis refuses under another: the
declaration is then read and declared again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from typing import Any

import structlog

from penstock.declaring.unique import KeyLimits, TenantLimits, parse_limits

log = structlog.get_logger("penstock.queue")


@dataclass(frozen=True, slots=True)
class DeclaredLimits:
    """Limits of tenants and keys, as the arguments of ``declare.lua``."""

    version: str  # stands for all of them; empty if there are none
    within: str  # where keys are limited: ``queue``, ``tenant``, or empty for not at all
    items: Sequence[str]  # three for each: kind, name, limits
    counts: Mapping[str, int] = field(default_factory=dict)  # how many there are, for people


def encode_declaration(
    tenants: Mapping[str, TenantLimits], keys: Mapping[str, KeyLimits], within: str = "queue"
) -> DeclaredLimits:
    """Returns the limits of a declaration."""
    rows = [
        ("tenant", tenant, encode_limits(tenant_limits))
        for tenant, tenant_limits in sorted(tenants.items())
    ]
    rows += [("key", key, encode_limits(key_limits)) for key, key_limits in sorted(keys.items())]
    within = within if keys else ""
    version = sha256(repr((within, rows)).encode()).hexdigest()[:16] if rows else ""
    counts = {"tenants": len(tenants), "keys": len(keys)}
    return DeclaredLimits(version, within, tuple(chain.from_iterable(rows)), counts)


def parse_declaration(limits: Mapping[str, Any]) -> DeclaredLimits:
    """Returns the limits of a declaration, from ``Queue.limits_as_json``."""
    tenants = parse_limits(TenantLimits, limits.get("tenants", {}))
    keys = parse_limits(KeyLimits, limits.get("keys", {}))
    declared = encode_declaration(tenants, keys, limits.get("within", ""))
    ignored = (
        sum(len(limits.get(kind, {})) for kind in ("tenants", "keys")) - len(tenants) - len(keys)
    )
    return DeclaredLimits(
        declared.version, declared.within, declared.items, {**declared.counts, "ignored": ignored}
    )


def encode_limits(limits: TenantLimits | KeyLimits | None) -> str:
    """Returns the text of limits in Redis; empty for None."""
    if limits is None:
        return ""
    if isinstance(limits, KeyLimits):
        paused = limits.is_paused
        limits = TenantLimits(
            in_flight=limits.in_flight, rate=limits.rate, burst=limits.burst, is_paused=paused
        )
    values = (
        limits.weight,
        limits.elastic,
        limits.in_flight,
        limits.rate,
        limits.burst,
        limits.bytes,
        int(limits.is_paused),
    )
    return " ".join("-" if value is None else repr(value) for value in values)


class NewestLimits:
    """Limits that apply to a queue, as last read."""

    def __init__(self, queue: str, read: Callable[[], Mapping[str, Any]]) -> None:
        """Sets up; ``read`` returns what Postgres has."""
        self._queue, self._read = queue, read
        self._current: DeclaredLimits | None = None

    @property
    def current(self) -> DeclaredLimits:
        """Returns the limits; they are read at the first use."""
        return self._current or self.renew()

    def renew(self) -> DeclaredLimits:
        """Reads the limits again."""
        self._current = parse_declaration(self._read())
        return self._current

    def report(self, shard: int) -> None:
        """Logs that a shard did not have the limits."""
        log.info("limits declared", shard=f"{self._queue}/{shard}", **self.current.counts)
