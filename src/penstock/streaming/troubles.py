"""Calls an application's functions when something needs a person: ``pipeline.on_trouble``.

A streamer looks every two seconds at what Postgres has of halts, dead letters, stopped shards and the epoch; so it does not matter
which process a trouble happened in, or on which engine.  What was reported is noted after the functions have returned: each trouble is
reported at least once, across restarts, and once if nothing fails in between.  One that has ended is forgotten, and reported again when it
comes back.

It all runs in a thread of its own, on a connection of its own: a function that hangs, or a Slack that is down, stops no record.
"""

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import structlog

from penstock.database.connections import connect_postgres
from penstock.database.driver_errors import describe, postgres_errors
from penstock.database.statements import statements
from penstock.errors import PenstockError
from penstock.observer import TroubleHandler, TroubleReport
from penstock.parallel import Backoff
from penstock.records import Scope

log = structlog.get_logger("penstock.streamer")

LOOK_EVERY_S = 2.0
"""Interval, in seconds, at which troubles are looked for."""

HANG_S = 10.0
"""Seconds after which a function that has not returned is logged; nothing is reported until it has."""

MAX_BACKOFF_S = 300.0
"""Longest pause, in seconds, after a function that failed; then all that is not reported is reported again."""

CLOSE_S = 1.0
"""Seconds that a streamer that ends waits for a function."""


class TroubleWatch:
    """Looks for troubles, and tells them, while a streamer runs."""

    def __init__(self, handlers: Sequence[TroubleHandler], database_url: str, scope: Scope) -> None:
        """Does not begin yet; see ``open``."""
        self._handlers, self._database_url, self._scope = handlers, database_url, scope
        self._sql = statements("penstock.streaming", scope.schema)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_at: float | None = None

    def open(self) -> None:
        """Begins, if there is a function to call and it has not begun."""
        if self._handlers and self._thread is None:
            self._stopping = threading.Event()
            run = threading.Thread(target=self._run, args=(self._stopping,), name="penstock troubles", daemon=True)
            self._thread = run
            run.start()

    def close(self) -> None:
        """Ends; a function that does not return is left behind."""
        thread, self._thread = self._thread, None
        self._stopping.set()
        if thread is not None:
            thread.join(CLOSE_S)

    def note_hanging(self) -> None:
        """Logs, once, that a function does not return."""
        if self._began_at is not None and monotonic() - self._began_at > HANG_S:
            self._began_at = None
            log.warning("trouble handler hangs")

    def _run(self, stopping: threading.Event) -> None:
        backoff, pause_s = Backoff(LOOK_EVERY_S, MAX_BACKOFF_S), 0.0
        while not stopping.wait(pause_s):
            try:
                self.look()
                backoff.reset()
                pause_s = LOOK_EVERY_S
            except PenstockError as error:
                pause_s = backoff.next_s()
                log.debug("troubles not read", reason=describe(error), retry_s=pause_s)
            except Exception as error:  # noqa: BLE001  the application's; its text may quote a record
                pause_s = backoff.next_s()
                log.warning("trouble handler failed", error=type(error).__name__, retry_s=pause_s)

    def look(self) -> int:
        """Tells what is new; returns how much.  Raises what a function raises: it is reported again."""
        with (
            connect_postgres(self._database_url, application="troubles") as connection,
            postgres_errors("looking for troubles"),
        ):
            connection.execute(self._sql["forget_troubles"])
            rows = connection.execute(self._sql["new_troubles"]).fetchall()
            for kind, subject, detail, *named, is_first in rows:
                if (report := make_report(kind, *named, is_first=is_first)) is not None:
                    self._tell(report)
                connection.execute(self._sql["note_trouble"], {"kind": kind, "subject": subject, "detail": detail})
        return len(rows)

    def _tell(self, report: TroubleReport) -> None:
        self._began_at = monotonic()
        try:
            for handler in self._handlers:
                handler(report)
        finally:
            self._began_at = None


def make_report(
    kind: str, consumer: str | None, channel: str | None, shard: int | None, count: int, *, is_first: bool
) -> TroubleReport | None:
    """What is reported of a row; None of the epoch in which the first streamer begins."""
    make: Callable[..., TroubleReport] = TroubleReport
    where: dict[str, Any] = {"consumer": consumer, "channel": channel, "shard": shard, "count": count}
    match kind:
        case "halted":
            return make(kind, f"{consumer} is halted in {channel}/{shard}", "penstock status", **where)
        case "dead-lettered":
            text = f"{consumer} has {count:,} new dead letters in {channel}"
            return make(kind, text, f"penstock dead-letters list {consumer}", **where)
        case "stopped":
            return make(kind, f"the streamer leaves {channel}/{shard} out", "penstock status", **where)
        case _ if is_first:
            return None
        case _:
            return make("epoch", f"epoch {count} has begun", "penstock doctor", **where)
