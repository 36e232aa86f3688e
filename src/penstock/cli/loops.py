"""Runs a streamer or a consumer as commands do, with a line of progress.

It runs until a stop signal, or until nothing is left.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

import structlog
import typer
from rich.console import Console

from penstock.cli.connecting import open_connections
from penstock.consuming import Consumed
from penstock.consuming.dead_lettering import how_to_resume
from penstock.display import format_count
from penstock.errors import Halted, Paused
from penstock.observer import Observer
from penstock.observing.listener import Answer, Listener, Routes
from penstock.observing.probes import Probes, notified_systemd
from penstock.operating.status.gathering import status
from penstock.parallel import Runner, abandon
from penstock.pipeline import Pipeline
from penstock.settings import Settings
from penstock.streaming import RoundResult
from penstock.streaming.share import WHOLE, Share, parse_share

GRACE_S = 8.0
"""Limit of the seconds to stop; below the ten seconds that containers are given."""

INTERRUPTED = 130
"""Exit code of a process ended by SIGINT, as in shells."""


class Stop:
    """``stop()`` is true after SIGTERM or SIGINT; loops call it between two rounds."""

    def __init__(self) -> None:
        """Installs the handlers of SIGTERM and SIGINT; from the main thread only."""
        self._requested, self._is_interrupted = threading.Event(), False
        signal.signal(signal.SIGTERM, self._request)
        signal.signal(signal.SIGINT, self._request)

    def __call__(self) -> bool:
        """Returns whether a signal has arrived."""
        return self._requested.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for that time or until a signal arrives; returns whether one has."""
        return self._requested.wait(seconds)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self._requested.is_set():
            if number == signal.SIGINT and not self._is_interrupted:
                self._is_interrupted = True
                threading.Thread(target=_end, args=(INTERRUPTED,), daemon=True).start()
            return
        self._requested.set()
        timer = threading.Timer(GRACE_S, _abandon)
        timer.daemon = True
        timer.start()


def _abandon() -> None:
    structlog.get_logger("penstock.cli").warning(
        "batch abandoned",
        after_s=GRACE_S,
        reason="its transaction is rolled back, and the batch is applied again later",
    )
    _end(0)


def _end(code: int) -> NoReturn:
    abandon()
    os._exit(code)


@contextmanager
def observed(settings: Settings, pipeline: Pipeline) -> Iterator[Observer | None]:
    """Answers probes, has metrics with ``--listen``, and notifies systemd, while a command runs.

    Yields the observer that has the metrics.
    """
    if settings.listen is None and "NOTIFY_SOCKET" not in os.environ:
        yield None
        return
    probes, metrics = Probes(), None
    pipeline.observe(probes)
    with ExitStack() as stack:
        stack.enter_context(notified_systemd(probes))
        if settings.listen is not None:
            metrics, answer = _make_metrics(pipeline)
            routes: Routes = {
                "/livez": lambda _: probes.livez(),
                "/readyz": lambda _: probes.readyz(),
                "/metrics": answer,
            }
            listener = stack.enter_context(Listener(settings.listen, routes))
            structlog.get_logger("penstock.cli").info(
                "listening", port=listener.port, paths=list(routes)
            )
        yield metrics


def _make_metrics(pipeline: Pipeline) -> tuple[Observer | None, Callable[[str], Answer]]:
    try:
        from penstock.observing.process_metrics import ProcessMetrics  # noqa: PLC0415  an extra
    except ModuleNotFoundError:
        return None, lambda _: Answer(
            501, "metrics need prometheus_client: pip install 'penstock-outbox[prometheus]'\n"
        )
    metrics = ProcessMetrics(pipeline)
    return metrics, metrics.answer


EVERY_S = 0.2


class ProgressLine(ExitStack):
    """``1,234 records published · 56/s``, on stderr, rewritten in place."""

    def __init__(self, verb: str) -> None:
        """Shows the line on a terminal; ``verb`` tells what was done: ``published``."""
        super().__init__()
        self.count = 0
        self._what = verb
        self._began = self._shown = monotonic()
        status = Console(stderr=True).status("", spinner="dots")
        self._line = self.enter_context(status) if sys.stderr.isatty() else None

    def add(self, result: RoundResult | Consumed | int) -> None:
        """Adds records, or those that a round published, applied or cancelled.

        Updates the line every ``EVERY_S`` seconds.
        """
        match result:
            case int():
                self.count += result
            case RoundResult():
                self.count += result.added
            case _:
                self.count += result.applied + result.cancelled
        now = monotonic()
        if self._line is not None and now - self._shown > EVERY_S:
            self._shown = now
            self._line.update(
                f"{format_count(self.count, 'record')} {self._what} · "
                f"{self.count / (now - self._began):,.0f}/s"
            )


def choose_share(settings: Settings) -> Share:
    """Returns the chosen share; everything if none was chosen."""
    return WHOLE if settings.share is None else parse_share(settings.share)


def run_loop(loop: Runner[Any], stop: Stop, report: Callable[[Any], None], *, drain: bool) -> None:
    """Runs rounds until a stop signal, reports each, and closes the connections."""

    def report_and_stop(result: RoundResult | Consumed) -> None:
        report(result)
        if stop():
            raise typer.Exit(0)

    if not drain:
        loop.run(stop, report)
        return
    try:
        loop.drain(report_and_stop)
    finally:
        loop.close()


def raise_if_stopped(settings: Settings, pipeline: Pipeline, name: str) -> None:
    """Raises ``Halted`` or ``Paused``.

    A drain that leaves stopped shards behind is not a success.
    """
    with open_connections(settings, f"consumer {name}") as servers:
        snapshot = status(servers.store, servers.client, pipeline)
    for row in snapshot.consumers:
        if row.consumer == name and (pause := snapshot.find_pause(row)) is not None:
            raise Paused(f"{pause}. Nothing was applied since; to resume: {pause.how_to_resume}")
    halted = {shard: reason for consumer, shard, reason in snapshot.halted if consumer == name}
    if halted:
        has_letters = snapshot.has_letters(name)
        ways = dict.fromkeys(how_to_resume(name, *row, has_letters) for row in halted.items())
        # Without the reason: it may quote a payload, which belongs on stdout, in the status.
        raise Halted(
            f"{name} is halted in {', '.join(map(str, halted))}; penstock status shows why. Fix "
            "the cause, "
            f"{'; '.join(ways)}"
        )
