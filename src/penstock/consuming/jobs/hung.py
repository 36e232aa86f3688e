"""Lanes whose handlers do not return: others get their jobs, and the worker ends once too many hang."""

import structlog

from penstock.consuming.jobs.book import Running
from penstock.consuming.jobs.lanes import Lane
from penstock.declarations import WorkerSpec
from penstock.errors import HandlerHung

CANCELLING_S = 1.0
"""How long a task may take to end at its time limit, in seconds, before it counts as one that hangs."""

log = structlog.get_logger("penstock.consumer")


class HungLanes:
    """Those of one worker."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._lanes: list[Lane] = []

    @property
    def limit_s(self) -> float:
        """After so many seconds a handler hangs."""
        return self._spec.limit_s + (CANCELLING_S if self._spec.is_async else 0.0)

    def abandon(self, running: Running) -> None:
        """Nobody waits for this lane any more; its handler has no effect."""
        log.error("handler hangs", consumer=self._spec.name, job=running.lease.message.id, limit_s=self._spec.limit_s)
        running.lane.is_abandoned = True
        running.lease.held.is_stale = True
        self._lanes.append(running.lane)

    def check(self) -> None:
        """Forgets lanes that have ended after all.

        Raises:
            HandlerHung: More of them hang than the worker has lanes.
        """
        self._lanes = [lane for lane in self._lanes if not lane.has_ended]
        if len(self._lanes) > self._spec.concurrency:
            raise HandlerHung(
                f"consumer {self._spec.name}: {len(self._lanes)} handlers have hung for longer than limit_s "
                f"({self._spec.limit_s:g} s), and Python cannot end them: the process has to be started anew. Give what the handler "
                "waits for a timeout"
            )
