"""Pausing: what reads is stopped by an operator, and goes on where it was; what writes does not notice.

See ``penstock.database.registry`` for where a pause is read.
"""

from dataclasses import dataclass
from datetime import datetime

import structlog

from penstock.database.connections import Connection, fetch
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import Pause, PauseKind, read_pauses
from penstock.database.statements import statements
from penstock.errors import Refused, Unknown
from penstock.operating.consumers import check_registered, list_consumers
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")

MAX_REASON = 500
"""Limit of a reason, in characters."""


def pause(
    connection: Connection, kind: PauseKind, name: str, *, reason: str, by: str, scope: Scope = DEFAULT_SCOPE
) -> Pause:
    """Pauses a consumer, or all consumers of a channel, also those that begin later; a second time, only the reason changes.

    What is being applied goes on to its end: a batch of records, a visit to an Ick, a job.  Nothing is begun after it: log
    and Ick read the pause with each transaction, the worker of a queue twice a second.

    Raises ``Unknown``, or ``Refused`` if the reason is empty or too long, or the consumer runs with another database.
    """
    if not reason.strip() or len(reason) > MAX_REASON:
        raise Refused(
            f"a pause needs a reason of 1 to {MAX_REASON} characters, which penstock status shows; this one has {len(reason)}"
        )
    with postgres_errors(f"pausing {kind} {name}"), connection.transaction():
        check_pausable(connection, kind, name, scope=scope)
        sql = statements("penstock.operating", scope.schema)["put_pause"]
        values = {"kind": kind, "name": name, "reason": reason, "by": by}
        row = connection.execute(sql, values).fetchone()
    assert row is not None
    paused = Pause(*row)
    log.warning("paused", kind=kind, name=name, by=by)
    return paused


def resume(connection: Connection, kind: PauseKind, name: str, *, scope: Scope = DEFAULT_SCOPE) -> Pause | None:
    """Ends a pause, and returns it; None if there was none.  Raises ``Unknown``."""
    with postgres_errors(f"resuming {kind} {name}"), connection.transaction():
        sql = statements("penstock.operating", scope.schema)["remove_pause"]
        row = connection.execute(sql, {"kind": kind, "name": name}).fetchone()
        if row is None:
            check_pausable(connection, kind, name, scope=scope)
            return None
    log.warning("resumed", kind=kind, name=name)
    return Pause(*row)


@dataclass(frozen=True, slots=True)
class DoneAction:
    """Something that was done in the console."""

    done_at: datetime
    done_by: str
    title: str
    command: str  # the command that does the same


def note_action(connection: Connection, by: str, title: str, command: str, *, scope: Scope = DEFAULT_SCOPE) -> None:
    """Writes into the log of actions, in the transaction of what is done."""
    sql = statements("penstock.operating", scope.schema)["note_action"]
    with postgres_errors("noting what is done in penstock.actions"):
        connection.execute(sql, {"by": by, "title": title, "command": command})


def find_last_action(connection: Connection, title: str, *, scope: Scope = DEFAULT_SCOPE) -> int | None:
    """The number of the last action of a title; None if there was none."""
    [(number,)] = fetch(connection, scope, "penstock.operating.last_action", "reading the log", {"title": title})
    return None if number is None else int(number)


def list_actions(connection: Connection, *, limit: int = 200, scope: Scope = DEFAULT_SCOPE) -> list[DoneAction]:
    """What was done last, the newest first."""
    with postgres_errors("reading the log of actions"):
        rows = connection.execute(
            statements("penstock.operating", scope.schema)["actions"], {"limit": limit}, binary=True
        )
        return [DoneAction(*row) for row in rows]


def find_pauses(connection: Connection, kind: PauseKind, name: str, scope: Scope = DEFAULT_SCOPE) -> list[Pause]:
    """The pauses that hold a consumer, or the consumers of a channel: its own, and those of what it reads, or is read by."""
    with postgres_errors("reading the pauses"):
        readers = [each for each in list_consumers(connection, scope=scope) if name in {each.consumer, each.channel}]
        own = {(kind, name), *(("channel", each.channel) for each in readers)}
        return [found for found in read_pauses(connection, scope) if (found.kind, found.name) in own]


def check_pausable(connection: Connection, kind: PauseKind, name: str, *, scope: Scope = DEFAULT_SCOPE) -> None:
    """Checks that a pause of that name would stop something here; raises as ``pause``."""
    sql = statements("penstock.operating", scope.schema)
    if kind == "consumer":
        check_registered(connection, name, scope=scope)
        if connection.execute(sql["reported_names"], {"consumer": name, "successor": name}).fetchall():
            raise Refused(
                f"{name} is a consumer of another database, which reports its checkpoints here. Pause it there"
            )
        return
    known = [channel for (channel,) in connection.execute(sql["readable_channels"])]
    if name not in known:
        raise Unknown(f"no channel {name!r} is registered; there are: {', '.join(known) or 'none'}")
