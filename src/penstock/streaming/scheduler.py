"""Stages the jobs of schedules, one per slot, and those after groups, with any number of streamers.

A slot is taken by moving the schedule's row on, in the transaction that stages its job.  What time
it is, Postgres says; a streamer whose clock is wrong changes nothing.  If Postgres' was ahead for a
while, the next time is moved back to what is due.  The row holds the schedule as the streamer that
started last has declared it: after a deploy the new one holds, and streamers of the old release
leave it alone.

A member of a group is left as long as its staged row is there, whatever becomes of it: done,
cancelled, a dead letter, or deleted by an operator.  So no worker counts, and none waits for
another one's count.  One statement marks groups that have ended and stages what follows; streamers
that run at the same time skip each other's.
"""

import json
from datetime import datetime, timedelta
from hashlib import sha256
from math import inf
from time import monotonic
from typing import Any, NamedTuple

import psycopg
import structlog

from penstock.database.driver_errors import describe, postgres_errors
from penstock.database.store import Store
from penstock.declaring.outcomes import RESERVED
from penstock.declaring.schedules import LATE_S, ScheduleSpec
from penstock.errors import PenstockError, PrivilegeMissing, ServerUnavailable
from penstock.pipeline import Pipeline
from penstock.schema.roles import check_privileges
from penstock.staging.driver_connections import insert_directly
from penstock.staging.messages import make_scheduled
from penstock.staging.rows import Insert

log = structlog.get_logger("penstock.streamer")

MAX_ENDED = 100
"""Limit of the groups that one statement ends."""

GROUPS_S = 0.1
"""Time budget of groups in one round, in seconds: records staged meanwhile wait for it."""


class _Row(NamedTuple):
    """A schedule as registered, and Postgres' time."""

    name: str
    channel: str
    every: str
    timezone: str
    digest: str
    next_at: datetime | None
    last_at: datetime | None
    now: datetime

    @property
    def declaration(self) -> tuple[str, ...]:
        return self.channel, self.every, self.timezone, self.digest

    @property
    def is_due(self) -> bool:
        return self.next_at is not None and self.next_at <= self.now

    @property
    def is_late(self) -> bool:
        return self.next_at is not None and self.now - self.next_at > timedelta(seconds=LATE_S)


class Scheduler:
    """Schedules of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._specs = pipeline.schedules
        self._declared = {name: make_declaration(spec) for name, spec in self._specs.items()}
        # next slots after a moment
        self._expected: dict[str, tuple[datetime, datetime | None]] = {}
        self._others: dict[str, float] = {}  # since when schedules are declared otherwise
        self._failed: dict[str, str] = {}

    def declare(self, store: Store) -> None:
        """Registers the schedules; one with other times than before begins anew."""
        if not self._specs:
            return
        check_privileges(store, "producer")
        rows = {row.name: row for row in self._read(store)}
        for name in self._specs:
            if name not in rows or rows[name].declaration != self._declared[name]:
                self._declare(store, name, rows.get(name))

    def stage_due(self, store: Store) -> int:
        """Stages the jobs that are due; returns how many.

        A schedule whose job cannot be staged is logged, and tried again.
        """
        if not self._specs:
            return 0
        staged = 0
        for row in self._read(store):
            try:
                staged += self._run(store, row)
                self._failed.pop(row.name, None)
            except (PenstockError, psycopg.Error) as error:
                if _is_away(error):
                    raise
                reason = str(error) if isinstance(error, PenstockError) else describe(error)
                if self._failed.get(row.name) != reason:  # once, and not every second
                    self._failed[row.name] = reason
                    log.error("schedule failed", schedule=row.name, reason=reason)  # noqa: TRY400  in words
        return staged

    def _read(self, store: Store) -> list[_Row]:
        return store.objects(
            _Row, "read_schedules", {"names": list(self._specs)}, doing="reading schedules"
        )

    def _run(self, store: Store, row: _Row) -> int:
        """Does what a schedule needs now; returns the number of staged jobs."""
        if row.declaration != self._declared[row.name]:
            self._note_other(row)
            if row.is_late:  # a streamer of another release, which is gone, has declared it
                self._declare(store, row.name, row)
            return 0
        self._others.pop(row.name, None)
        if row.is_due:
            return self._stage(store, self._specs[row.name])
        self._move_back(store, row)
        return 0

    def _note_other(self, row: _Row) -> None:
        """Logs once that another service has a schedule of this name.

        Another release is not reported: it soon is the only one.
        """
        since = self._others.setdefault(row.name, monotonic())
        if monotonic() - since >= LATE_S:
            self._others[row.name] = inf
            log.warning(
                "schedule declared elsewhere", schedule=row.name, queue=row.channel, every=row.every
            )

    def _declare(self, store: Store, name: str, previous: _Row | None) -> None:
        with postgres_errors(f"registering schedule {name}"):
            [(now,)] = store.connection.execute("SELECT clock_timestamp()", binary=True).fetchall()
            next_at = self._specs[name].next_slot(now)
            store.execute("declare_schedule", self._values(name, next_at=next_at))
        if previous is not None:
            log.info(
                "schedule changed", schedule=name, queue=previous.channel, every=previous.every
            )

    def _stage(self, store: Store, spec: ScheduleSpec) -> int:
        with store.transaction(f"staging the job of schedule {spec.name}"):
            row = store.row("take_schedule", self._values(spec.name), binary=True)
            if row is None:  # another streamer has it, or it is declared otherwise
                return 0
            first, now = row
            slots = spec.due(first, now)
            if rows := [make_scheduled(spec, slot) for slot in slots]:
                insert_directly(
                    store.connection, Insert(store.scope.schema, rows, [spec.queue]), "schedule"
                )
            last = slots[-1] if slots else None
            since = last if spec.catch_up == "all" and last is not None else now
            times: dict[str, datetime | None] = {"next_at": spec.next_slot(since), "last_at": last}
            skipped = (first, slots[0] if slots else now) if slots[:1] != [first] else (None, None)
            times |= zip(("skipped_since", "skipped_until"), skipped, strict=True)
            store.execute("move_schedule", self._values(spec.name, **times))
        if any(skipped):
            log.warning(
                "schedule skipped times",
                schedule=spec.name,
                since=str(skipped[0]),
                until=str(skipped[1]),
            )
        return len(slots)

    def _move_back(self, store: Store, row: _Row) -> None:
        """Moves a schedule back to what is due next, if Postgres' clock was ahead."""
        expected = self._find_expected(row)
        if expected is None or (
            row.next_at is not None and row.next_at - expected <= timedelta(seconds=LATE_S)
        ):
            return
        values = {"name": row.name, "next_at": expected, "ahead": row.next_at}
        store.execute("move_schedule_back", values, doing=f"moving schedule {row.name}")
        log.warning(
            "schedule moved back", schedule=row.name, ahead=str(row.next_at), next=str(expected)
        )

    def _find_expected(self, row: _Row) -> datetime | None:
        """Returns the first slot after Postgres' time that has no job yet.

        The first may have its job already, if a clock was ahead.
        """
        since, slot = self._expected.get(row.name, (row.now, row.now))
        if not since <= row.now or (slot is not None and (slot <= row.now or slot == row.last_at)):
            spec = self._specs[row.name]
            slot = spec.next_slot(row.now)
            if slot is not None and slot == row.last_at:
                slot = spec.next_slot(slot)
            self._expected[row.name] = row.now, slot
        return slot

    def _values(self, name: str, **times: datetime | None) -> dict[str, Any]:
        declared = dict(
            zip(("channel", "every", "timezone", "digest"), self._declared[name], strict=True)
        )
        return {"name": name, **declared, **times}


def make_declaration(spec: ScheduleSpec) -> tuple[str, str, str, str]:
    """Returns a schedule as registered: queue, times, time zone, and digest.

    The digest is of its jobs, and how it catches up.
    """
    *fields, headers = json.loads(make_scheduled(spec))
    text = json.dumps([fields, headers.get(RESERVED), spec.catch_up], sort_keys=True)
    return spec.queue.name, spec.text, spec.timezone, sha256(text.encode()).hexdigest()[:16]


def _is_away(error: Exception) -> bool:
    """Returns whether Postgres cannot do anything now.

    A producer's right that is missing stops nothing else.
    """
    return isinstance(error, ServerUnavailable) and not isinstance(error, PrivilegeMissing)


class JobGroups:
    """Groups of one schema's jobs."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._has_queues = any(channel.traits.has_jobs for channel in pipeline.channels.values())
        self._failed: dict[str, str] = {}

    def stage_following(self, store: Store) -> int:
        """Ends groups, for ``GROUPS_S``; returns how many.

        An error is logged once, and the group tried again.
        """
        if not self._has_queues:
            return 0
        group_count, end = 0, monotonic() + GROUPS_S
        try:
            names = [
                name for (name,) in store.rows("groups_to_end", doing="reading groups of jobs")
            ]
            if not names:
                self._failed.clear()
            while names and monotonic() < end:
                group_count += self._end(store, names[:MAX_ENDED])
                del names[:MAX_ENDED]
        except PenstockError as error:
            if _is_away(error):
                raise
            self._log(error)
        return group_count

    def _end(self, store: Store, names: list[str]) -> int:
        """Ends groups in one statement; if one of them makes it fail, each in its own."""
        try:
            group_count = store.value("end_groups", {"names": names}, doing="ending groups of jobs")
        except psycopg.Error as error:
            if len(names) > 1:
                return sum(self._end(store, [name]) for name in names)
            self._log(error, *names)
            return 0
        return int(group_count)

    def _log(self, error: Exception, group: str = "") -> None:
        """Logs new errors.

        The text of an error of Postgres may hold what the group stages.
        """
        reason, fields = describe(error), {"group": group} if group else {}
        if self._failed.get(group) != reason:
            log.error("group failed", reason=reason, **fields)
        self._failed[group] = reason
