"""Slices: a tick that is too large for one statement, as several smaller ones.

A tick takes everything that was committed since the last one.  After a long stop of the streamer
that can be more than a statement may do: a timeout, a memory or disk limit, an administrator or a
proxy ends it, and would end it again for ever.  Only after such a failure the sequencer plans
slices: a chain of snapshots from the last tick to now.

    last tick  ⊂  S(1)  ⊂  S(2)  ⊂ … ⊂  S(k) = now

Each is the snapshot of an ordinary tick, which finds what it shows and its predecessor does not:
nothing is missed, and nothing found twice.  S(k) is a snapshot that Postgres has taken.  The others
are made of it: they call transactions open that have been committed.  Two rules say which.

Whole transactions.  Slice i takes transactions up to an id X(i), such that each step has about
``max_records`` records.

Order of a key.  Transaction ids are given at the first write, not at commit: a transaction before
X(i) may have waited for the row of one beyond X(i), and its record of that row's key comes second.
Such a transaction waits for a later slice.  Let ``last`` be the greatest record id of a
transaction, and M(i) the least ``last`` of all transactions beyond X(i):

    S(i) shows a transaction T  if  xid(T) ≤ X(i)  and  last(T) < M(i)

Let T2 be in S(i), and have waited for a row that T1 had locked.  It drew the id of its record after
T1 had committed, when all ids of T1 were drawn: last(T1) < last(T2) < M(i).  So T1 is not beyond
X(i), or M(i) would be last(T1) at most.  Hence xid(T1) ≤ X(i) and last(T1) < M(i): T1 is in S(i) as
well, and its records in the same slice, with smaller ids, or in an earlier one.  X and M grow with
i, so each snapshot shows all that the one before shows.

The plan is made in statements of about ``max_records`` each, from the newest transaction back,
since M(i) depends on what comes later.  It is valid as long as no other tick comes between: each
slice's statement names the tick that it must follow.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import structlog

from penstock.database.driver_errors import ErrorKind, classify, first_line, sqlstate

log = structlog.get_logger("penstock.streamer")

MAX_RECORDS = 1 << 19
"""Records per slice after the first failure of a tick; halved at each further one, doubled after
each success."""

MIN_RECORDS = 1000
"""Lower limit of that number: a tick of 1,000 records takes some milliseconds."""

_NOT_ABOUT_SIZE = {"25006", "25P03", "55006", "55P03"}
"""Codes of a read-only server, a suspended client, and locks."""

Execute = Callable[[str, Mapping[str, Any]], list[tuple[Any, ...]]]
"""Executes a named statement in a separate transaction."""


@dataclass(frozen=True, slots=True)
class TickSlice:
    """A step of the chain: its tick's snapshot, as Postgres writes it, and number of records."""

    target: str
    records: int


class Slices:
    """Limit of a tick, and the planned slices; there is no limit before a tick has failed.

    A streamer keeps it when it reconnects.
    """

    def __init__(self) -> None:
        self.max_records: int | None = None
        self._planned: deque[TickSlice] = deque()
        self._is_whole = False
        self._after = -1

    def next(self, execute: Execute) -> tuple[int, TickSlice] | None:
        """Returns the tick that the next slice must follow, and the slice.

        Returns None if there is nothing to sequence.
        """
        assert self.max_records is not None
        if not self._planned:
            self._after, planned = plan(execute, self.max_records)
            self._planned.extend(planned)
            self._is_whole = len(planned) == 1
        if not self._planned:
            self.max_records = None
            return None
        return self._after, self._planned[0]

    def succeeded(self, tick: int) -> None:
        """Continues after the tick of a slice."""
        assert self.max_records is not None
        finished, self._after = self._planned.popleft(), tick
        self.max_records = (
            None
            if self._is_whole
            else max(self.max_records, min(2 * self.max_records, 2 * finished.records))
        )

    def failed(self, error: psycopg.Error) -> None:
        """Makes slices smaller."""
        if not _is_about_size(error) or (
            self.max_records is not None and self._is_least(self.max_records)
        ):
            raise error
        self.drop_plan()
        self.max_records = (
            MAX_RECORDS if self.max_records is None else max(MIN_RECORDS, self.max_records // 2)
        )
        log.warning("tick failed", reason=first_line(error), records=self.max_records)

    def _is_least(self, max_records: int) -> bool:
        return max_records <= MIN_RECORDS or (
            bool(self._planned) and self._planned[0].records > 2 * max_records
        )

    @property
    def doing(self) -> str:
        """Returns the current activity, for an error's text."""
        if not self._planned:
            return "sequencing"
        return f"sequencing {self._planned[0].records:,} records, which only one tick can take"

    def drop_plan(self) -> None:
        """Drops the plan, since another tick has come between; the next slice makes a new one."""
        self._planned.clear()


def _is_about_size(error: psycopg.Error) -> bool:
    """Returns whether a tick failed for a reason that a smaller one may escape.

    That is a limit, or a lost connection.
    """
    return classify(error) is ErrorKind.UNAVAILABLE and sqlstate(error) not in _NOT_ABOUT_SIZE


@dataclass(frozen=True, slots=True)
class _Step:
    """Part of the plan, which begins at the newest transaction: those before the id ``end``.

    ``bound`` is M, the least last id of the transactions beyond it, if there are any; ``waiting``
    are its transactions whose last id is greater than M: id, records, last record id.
    """

    end: int
    bound: int | None
    records: int
    waiting: list[tuple[int, int, int]]


def plan(execute: Execute, max_records: int) -> tuple[int, list[TickSlice]]:
    """Plans slices of about ``max_records`` records, from the last tick to now."""
    [(tick, baseline, target, begin, open_then, end, open_now)] = execute("plan_slices", {})
    parameters = {
        "baseline": baseline,
        "target": target,
        "begin": str(begin),
        "max_records": max_records,
    }
    steps = [*_steps_backwards(execute, parameters, end)][::-1]
    return tick, [*_slices(steps, begin, set(open_then), set(open_now), target)]


def _steps_backwards(execute: Execute, parameters: dict[str, Any], end: int) -> Iterator[_Step]:
    before_xid: int | None = end
    bound: int | None = None
    while before_xid is not None:
        rows = execute("plan_slice", {**parameters, "before": str(before_xid), "bound": bound})
        [(first, records, least_last, waiting)] = rows
        yield _Step(before_xid, bound, records, [(xid, n, last) for xid, n, last in waiting])
        bound = min(
            (xid_bound for xid_bound in (bound, least_last) if xid_bound is not None), default=None
        )
        before_xid = first


def _slices(
    steps: list[_Step], begin: int, open_then: set[int], open_now: set[int], target: str
) -> Iterator[TickSlice]:
    """Yields the snapshots of the steps, oldest first."""
    bounds = [step.bound for step in steps[:-1] if step.bound is not None]
    taken_later: dict[int, list[tuple[int, int]]] = {}
    waiting: set[int] = set()
    records = 0
    for number, step in enumerate(steps):
        for xid, count, last in step.waiting:
            taken_later.setdefault(bisect_right(bounds, last), []).append((xid, count))
            waiting.add(xid)
        due = taken_later.pop(number, [])
        waiting.difference_update(xid for xid, _ in due)
        records += step.records + sum(n for _, n in due) - sum(n for _, n, _ in step.waiting)
        if number == len(steps) - 1:
            snapshot = target
        else:
            end = max(begin, step.end)
            later = {xid for xid in open_then if xid >= step.end}
            snapshot = _snapshot(end, open_now | waiting | later)
        if records:
            yield TickSlice(snapshot, records)
            records = 0


def _snapshot(end: int, in_progress: set[int]) -> str:
    """Returns a snapshot, as Postgres writes it.

    It shows all transactions before ``end`` except those in progress.
    """
    listed = sorted(xid for xid in in_progress if xid < end)
    return f"{listed[0] if listed else end}:{end}:{','.join(map(str, listed))}"
