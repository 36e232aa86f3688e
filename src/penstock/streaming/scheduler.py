"""Stages the jobs of schedules, exactly one a slot, and those that follow groups of jobs, however many streamers run.

A slot is taken by moving the schedule's row on, in the transaction that stages its job.  What time it is, Postgres says; a streamer whose
clock is wrong changes nothing.  The row holds the schedule as the streamer that started last has declared it: after a deploy the new one
holds, and streamers of the old release leave it alone.

A member of a group is left as long as its staged row is there, whatever becomes of it: done, cancelled, a dead letter, or deleted by an
operator.  So no worker counts, and none waits for another one's count.  One statement marks groups that have ended and stages what
follows; streamers that run at the same time skip each other's.
"""

from datetime import datetime
from time import monotonic
from typing import Any

import psycopg
import structlog

from penstock.database.connections import Connection
from penstock.database.driver_errors import describe, postgres_errors
from penstock.database.statements import statements
from penstock.declaring.kinds import Queue
from penstock.declaring.schedules import ScheduleSpec
from penstock.errors import PenstockError, ServerUnavailable
from penstock.pipeline import Pipeline
from penstock.schema.roles import check_privileges
from penstock.staging.driver_connections import insert_directly
from penstock.staging.messages import make_message
from penstock.staging.rows import Insert, Row

log = structlog.get_logger("penstock.streamer")

SCHEDULED = "scheduled"
"""The action of the records that schedules stage."""

MAX_ENDED = 100
"""Limit of the groups that are ended in one statement."""

GROUPS_S = 0.1
"""Time budget of groups in one round, in seconds: records staged meanwhile wait for it."""


class Scheduler:
    """The schedules of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._specs, self._scope = pipeline.schedules, pipeline.scope
        self._sql = statements("penstock.streaming", self._scope.schema)
        self._failed: dict[str, str] = {}

    def declare(self, connection: Connection) -> None:
        """Registers the schedules; one that is declared otherwise than before begins anew."""
        if not self._specs:
            return
        check_privileges(connection, self._scope, "producer")
        for spec in self._specs.values():
            self._declare(connection, spec)

    def stage_due(self, connection: Connection) -> int:
        """Stages the jobs that are due; returns how many.  A schedule whose job cannot be staged is logged, and tried again."""
        if not self._specs:
            return 0
        with postgres_errors("reading schedules"):
            rows = connection.execute(self._sql["due_schedules"], {"names": list(self._specs)}).fetchall()
        staged = 0
        for name, is_late in rows:
            try:
                count = self._stage(connection, self._specs[name])
                if is_late and not count:
                    self._declare(connection, self._specs[name])
                staged += count
                self._failed.pop(name, None)
            except ServerUnavailable:
                raise
            except (PenstockError, psycopg.Error) as error:
                reason = str(error) if isinstance(error, PenstockError) else describe(error)
                if self._failed.get(name) != reason:  # once, and not every second
                    self._failed[name] = reason
                    log.error("schedule failed", schedule=name, reason=reason)  # noqa: TRY400  in words
        return staged

    def _declare(self, connection: Connection, spec: ScheduleSpec) -> None:
        with postgres_errors(f"registering schedule {spec.name}"):
            [(now,)] = connection.execute("SELECT clock_timestamp()", binary=True).fetchall()
            connection.execute(self._sql["declare_schedule"], self._values(spec, next_at=spec.next_slot(now)))

    def _stage(self, connection: Connection, spec: ScheduleSpec) -> int:
        with postgres_errors(f"staging the job of schedule {spec.name}"), connection.transaction():
            row = connection.execute(self._sql["take_schedule"], self._values(spec), binary=True).fetchone()
            if row is None:  # another streamer has it, or it is declared otherwise
                return 0
            first, now = row
            slots = spec.due(first, now)
            if rows := [_make_row(spec, slot) for slot in slots]:
                insert_directly(connection, Insert(self._scope.schema, rows, [spec.queue]), "schedule")
            last = slots[-1] if slots else None
            after = last if spec.catch_up == "all" and last is not None else now
            connection.execute(
                self._sql["move_schedule"], {**self._values(spec, next_at=spec.next_slot(after)), "last_at": last}
            )
        return len(slots)

    @staticmethod
    def _values(spec: ScheduleSpec, **more: datetime | None) -> dict[str, Any]:
        own = {"name": spec.name, "channel": spec.queue.name, "every": spec.text, "timezone": spec.timezone}
        return {**own, **more}


def _make_row(spec: ScheduleSpec, slot: datetime) -> Row:
    """The job of a slot."""
    headers = {"slot": slot.isoformat()}
    tenant = spec.name if spec.tenant is None else spec.tenant
    return make_message(spec.queue, SCHEDULED, spec.name, spec.data, headers, {"tenant": tenant})


class JobGroups:
    """The groups of one schema's jobs."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._has_queues = any(isinstance(each, Queue) for each in pipeline.channels.values())
        self._sql = statements("penstock.streaming", pipeline.scope.schema)
        self._failed: dict[str, str] = {}

    def stage_following(self, connection: Connection) -> int:
        """Ends groups, for ``GROUPS_S``; returns how many.  What cannot be staged is logged once, and tried again."""
        if not self._has_queues:
            return 0
        ended, end = 0, monotonic() + GROUPS_S
        try:
            with postgres_errors("reading groups of jobs"):
                names = [name for (name,) in connection.execute(self._sql["groups_to_end"])]
            if not names:
                self._failed.clear()
            while names and monotonic() < end:
                ended += self._end(connection, names[:MAX_ENDED])
                del names[:MAX_ENDED]
        except ServerUnavailable:
            raise
        except PenstockError as error:
            self._log(error)
        return ended

    def _end(self, connection: Connection, names: list[str]) -> int:
        """Ends groups in one statement; if it fails because of one of them, each in its own."""
        try:
            with postgres_errors("ending groups of jobs"):
                [(ended,)] = connection.execute(self._sql["end_groups"], {"names": names})
        except psycopg.Error as error:
            if len(names) > 1:
                return sum(self._end(connection, [name]) for name in names)
            self._log(error, *names)
            return 0
        return int(ended)

    def _log(self, error: Exception, group: str = "") -> None:
        """Logs what is new; the text of an error of Postgres may hold what the group stages."""
        reason, named = describe(error), {"group": group} if group else {}
        if self._failed.get(group) != reason:
            log.error("group failed", reason=reason, **named)
        self._failed[group] = reason
