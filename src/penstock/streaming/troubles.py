"""Calls an application's functions when something needs a person: ``pipeline.on_trouble``.

A streamer looks every five seconds at what Postgres has of halts, dead letters, stopped shards and
the epoch; so it does not matter which process a trouble happened in, or on which engine.  What was
reported is noted after the functions have returned: each trouble is reported at least once, across
restarts and whichever streamer looks.  One that has ended is forgotten, and reported again when it
comes back.

It all runs in a thread of its own, on a connection of its own: a function that hangs, or a Slack
that is down, stops no record.
"""

import threading
from collections.abc import Sequence
from time import monotonic

import structlog

from penstock.database.connections import connect_postgres
from penstock.database.driver_errors import describe
from penstock.database.store import Store
from penstock.errors import PenstockError
from penstock.observer import TroubleHandler, TroubleReport, fresh_context
from penstock.parallel import Backoff
from penstock.records import Scope

log = structlog.get_logger("penstock.streamer")

LOOK_EVERY_S = 5.0
"""Interval, in seconds, at which troubles are looked for."""

WAITING_S = 60
"""Seconds for which a shard may wait for a server before it is a trouble."""

HANG_S = 10.0
"""Seconds after which a function that has not returned is logged; until it has, nothing is
reported."""

MAX_BACKOFF_S = 300.0
"""Longest pause, in seconds, after a function failed; then all unreported troubles are reported
again."""

CLOSE_S = 1.0
"""Seconds for which a streamer that ends waits for a function."""


class TroubleWatch:
    """Looks for troubles, and reports them, while a streamer runs."""

    def __init__(self, handlers: Sequence[TroubleHandler], database_url: str, scope: Scope) -> None:
        """Does not begin yet; see ``open``."""
        self._handlers, self._database_url, self._scope = handlers, database_url, scope
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_at: float | None = None

    def open(self, *, once: bool = False) -> None:
        """Begins, if there is a function to call.

        A thread that a function still holds continues instead of a new one.
        """
        if not self._handlers:
            return
        self._stopping.clear()
        if self._thread is None or not self._thread.is_alive():
            target = self._attempt if once else self._run
            self._thread = threading.Thread(target=target, name="penstock troubles", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends, once the running function has returned."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def note_hanging(self) -> None:
        """Logs, once, that a function does not return."""
        if self._began_at is not None and monotonic() - self._began_at > HANG_S:
            self._began_at = None
            log.warning("trouble handler hangs")

    def _run(self) -> None:
        backoff, pause_s = Backoff(LOOK_EVERY_S, MAX_BACKOFF_S), 0.0
        while not self._stopping.wait(pause_s):
            if self._attempt():
                backoff.reset()
                pause_s = LOOK_EVERY_S
            else:
                pause_s = backoff.next_s()

    def _attempt(self) -> bool:
        """Does as ``look``, and returns whether it succeeded: functions may raise anything."""
        try:
            self.look()
        except PenstockError as error:
            log.debug("troubles not read", reason=describe(error))
        except BaseException as error:  # noqa: BLE001  the application's; its text may quote a record
            log.warning("trouble handler failed", error=type(error).__name__)
        else:
            return True
        return False

    def look(self) -> int:
        """Reports new troubles, unless another process does; returns how many.

        Raises what a function has raised, after the rest was reported: that trouble is reported
        again.
        """
        failed: BaseException | None = None
        with (
            connect_postgres(self._database_url, application="troubles") as connection,
            (store := Store(connection, self._scope)).transaction("looking for troubles"),
        ):
            if not (store.value("lock_troubles") and self._handlers):
                return 0
            store.execute("forget_troubles")
            rows = store.rows("new_troubles", {"waiting_s": WAITING_S})
            for kind, subject, detail, *fields, is_first in rows:
                try:
                    self._report(make_report(kind, *fields, is_first=is_first))
                except BaseException as error:  # noqa: BLE001  raised below
                    failed = failed or error
                    continue
                store.execute("note_trouble", {"kind": kind, "subject": subject, "detail": detail})
        if failed is not None:
            raise failed
        return len(rows)

    def _report(self, report: TroubleReport | None) -> None:
        if report is None:
            return
        self._began_at = monotonic()
        try:
            for handler in self._handlers:
                fresh_context().run(handler, report)
        finally:
            self._began_at = None


def make_report(
    kind: str,
    consumer: str | None,
    channel: str | None,
    shard: int | None,
    count: int,
    *,
    is_first: bool,
) -> TroubleReport | None:
    """Returns the report of a row; None if it is only noted.

    That is the first epoch, and dead letters that have become fewer.
    """
    match kind:
        case "halted":
            text, fix = f"{consumer} is halted in {channel}/{shard}", "penstock status"
        case "dead-lettered" if count > 0:
            text = f"{consumer} has {count:,} new dead letters in {channel}"
            fix = f"penstock dead-letters list {consumer}"
        case "stopped":
            text, fix = f"the streamer leaves {channel}/{shard} out", "penstock status"
        case "waiting":
            text = f"{consumer} has waited for a server in {channel}/{shard} for a minute"
            fix = "penstock status"
        case "epoch" if not is_first:
            text, fix = f"epoch {count} has begun", "penstock doctor"
        case _:
            return None
    return TroubleReport(kind, text, fix, consumer, channel, shard, count)
