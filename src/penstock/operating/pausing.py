"""Pauses what reads, which goes on where it was; what writes does not notice.

A schedule that is paused stages no job; once it is resumed, it catches up as after an outage.  See
``penstock.database.registry`` for where a pause is read.
"""

from dataclasses import dataclass
from datetime import datetime

import structlog

from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import Pause, PauseKind, read_pauses
from penstock.database.store import Store
from penstock.errors import Refused, Unknown
from penstock.operating.consumers import check_registered, list_consumers

log = structlog.get_logger("penstock.operator")

MAX_REASON = 500
"""Limit of a reason, in characters."""


def pause(store: Store, kind: PauseKind, name: str, *, reason: str, by: str) -> Pause:
    """Pauses a consumer, all consumers of a channel, also later ones, or a schedule.

    A second time, only the reason changes.  What is being applied goes on to its end: a batch of
    records, a visit to an Ick, a job.  Nothing is begun after it: log and Ick read the pause with
    each transaction, the worker of a queue twice a second, a streamer with each round.

    Raises ``Unknown``, or ``Refused`` if the reason is empty or too long, or the consumer runs with
    another database.
    """
    if not reason.strip() or len(reason) > MAX_REASON:
        raise Refused(
            f"a pause needs a reason of 1 to {MAX_REASON} characters, which penstock status shows; "
            f"this one has {len(reason)}"
        )
    with store.transaction(f"pausing {kind} {name}"):
        check_pausable(store, kind, name)
        values = {"kind": kind, "name": name, "reason": reason, "by": by}
        row = store.row("put_pause", values)
    assert row is not None
    paused = Pause(*row)
    log.warning("paused", kind=kind, name=name, by=by)
    return paused


def resume(store: Store, kind: PauseKind, name: str) -> Pause | None:
    """Ends a pause, and returns it; None if there was none.  Raises ``Unknown``."""
    with store.transaction(f"resuming {kind} {name}"):
        row = store.row("remove_pause", {"kind": kind, "name": name})
        if row is None:
            check_pausable(store, kind, name)
            return None
    log.warning("resumed", kind=kind, name=name)
    return Pause(*row)


def run_schedule(store: Store, name: str) -> None:
    """Makes a schedule due now, for one job more.  A streamer stages it within a second.

    Raises ``Unknown``, or ``Refused`` if the schedule is paused.
    """
    with store.transaction(f"running schedule {name}"):
        check_pausable(store, "schedule", name)
        if (paused := find_pause(store, "schedule", name)) is not None:
            raise Refused(f"{paused}. Resume it first: {paused.how_to_resume}")
        store.execute("run_schedule", {"name": name})
    log.warning("schedule made due", name=name)


@dataclass(frozen=True, slots=True)
class DoneAction:
    """An action that was done in the console."""

    done_at: datetime
    done_by: str
    title: str
    command: str  # the command that does the same


def note_action(store: Store, by: str, title: str, command: str) -> None:
    """Writes into the log of actions, in the transaction of what is done."""
    store.execute(
        "note_action",
        {"by": by, "title": title, "command": command},
        doing="writing to penstock.actions",
    )


def find_last_action(store: Store, title: str) -> int | None:
    """Returns the number of the last action of a title; None if there was none."""
    number = store.value("last_action", {"title": title}, doing="reading the log")
    return None if number is None else int(number)


def list_actions(store: Store, *, limit: int = 200) -> list[DoneAction]:
    """Returns the last actions, newest first."""
    rows = store.rows("actions", {"limit": limit}, binary=True, doing="reading the log of actions")
    return [DoneAction(*row) for row in rows]


def find_pause(store: Store, kind: PauseKind, name: str) -> Pause | None:
    """Returns the pause of that kind and name; None if there is none."""
    return next(
        (entry for entry in read_pauses(store) if (entry.kind, entry.name) == (kind, name)), None
    )


def find_pauses(store: Store, kind: PauseKind, name: str) -> list[Pause]:
    """Returns the pauses that hold a consumer, or a channel's consumers; not only its own."""
    with postgres_errors("reading the pauses"):
        readers = [row for row in list_consumers(store) if name == getattr(row, kind, None)]
        subjects = {(kind, name), *(("channel", row.channel) for row in readers)}
        return [
            held_by for held_by in read_pauses(store) if (held_by.kind, held_by.name) in subjects
        ]


def check_pausable(store: Store, kind: PauseKind, name: str) -> None:
    """Checks that a pause of that name would stop something here; raises as ``pause``."""
    if kind == "consumer":
        check_registered(store, name)
        if store.rows("reported_names", {"consumer": name, "successor": name}):
            raise Refused(
                f"{name} is a consumer of another database, which reports its checkpoints here. "
                "Pause it there"
            )
        return
    rows = store.execute("readable_channels" if kind == "channel" else "schedule_names")
    names = [registered for (registered,) in rows]
    if name not in names:
        raise Unknown(f"no {kind} {name!r} is registered; there are: {', '.join(names) or 'none'}")
