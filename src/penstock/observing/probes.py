"""Probes: whether a process lives, and whether it is ready, by the events of its loops.

No server is asked.

alive    each loop's thread lives, and was heard of within a minute, unless it is in a handler or
         waits for a server's reply
ready    each loop has connected, and its last round reached both servers, and does not wait for a
         reply for long

A shard that is halted or stopped makes neither false: another process would stop at the same
record.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic

from penstock.observer import Event, HandlerBegan, HandlerEnded, LoopBegan, RoundEnded, ServerAway
from penstock.observing.listener import Answer

SILENT_S = 60.0
"""Seconds without an event after which a loop counts as hanging.

One that waits for a reply does not: the first tick after a long outage is a statement of minutes,
which ends at limits of its own.
"""

REPLY_S = 10.0
"""Seconds without an event after which a loop that waits for a reply is not ready.

Rounds without work last half a second.
"""

READY_EVERY_S = 0.2


@dataclass(slots=True)
class _Loop:
    """The loop of a thread, as last heard of."""

    worker: str  # whose it is
    heard_at: float  # when, by the monotonic clock
    is_handling: bool = False  # a handler is running
    waits_for: str | None = "has not begun"  # why it is not ready; None if it is


class Probes:
    """An observer that answers probes."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._loops: dict[threading.Thread, _Loop] = {}

    def __call__(self, event: Event) -> None:
        """Notes an event of the thread that calls.

        Those of threads without a loop, such as slots, are ignored.
        """
        thread, now = threading.current_thread(), self._clock()
        if isinstance(event, LoopBegan | RoundEnded | ServerAway) and thread not in self._loops:
            self._loops[thread] = _Loop(event.worker, now)
        if (loop := self._loops.get(thread)) is None:
            return
        loop.heard_at = now
        match event:
            case RoundEnded():
                loop.waits_for = None
            case ServerAway(server=server):
                loop.waits_for = f"waits for {server}"
            case HandlerBegan() | HandlerEnded():
                loop.is_handling = isinstance(event, HandlerBegan)
            case _:
                pass

    def livez(self) -> Answer:
        """Answers 200 if the process is alive, else 503 with the loops that are not."""
        return _answer(self.dead())

    def readyz(self) -> Answer:
        """Answers 200 if the process is ready, else 503 with what it waits for."""
        return _answer(self.unready())

    def dead(self) -> list[str]:
        """Describes each loop that has ended or hangs, in a line."""
        now, lines = self._clock(), []
        for thread, loop in list(self._loops.items()):
            if not thread.is_alive():
                lines.append(f"{loop.worker}: its thread has ended")
            elif now - loop.heard_at > SILENT_S and not (
                loop.is_handling or _waits_for_reply(thread)
            ):
                lines.append(f"{loop.worker}: no round for {now - loop.heard_at:.0f} s")
        return lines

    def unready(self) -> list[str]:
        """Describes each loop that waits, in a line."""
        if not self._loops:
            return ["starting"]
        now, lines = self._clock(), []
        for thread, loop in list(self._loops.items()):
            silent_s = now - loop.heard_at
            if loop.waits_for:
                lines.append(f"{loop.worker}: {loop.waits_for}")
            elif silent_s > REPLY_S and not loop.is_handling and _waits_for_reply(thread):
                lines.append(f"{loop.worker}: has waited for a server's reply for {silent_s:.0f} s")
        return lines


def _waits_for_reply(thread: threading.Thread) -> bool:
    """True if the thread is in a driver's call to a server or to Spark."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  documented
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in {"psycopg", "redis", "py4j"}:
            return True
        frame = frame.f_back
    return False


def _answer(lines: list[str]) -> Answer:
    return Answer(503 if lines else 200, "".join(f"{line}\n" for line in lines or ["ok"]))


def watchdog_interval_s(environment: Mapping[str, str]) -> float:
    """Returns the seconds between two watchdog messages.

    Half of systemd's watchdog interval, as it advises; 0 without one.
    """
    return int(environment.get("WATCHDOG_USEC", "0")) / 2_000_000


@contextmanager
def notified_systemd(probes: Probes, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Notifies systemd that the process is ready, alive, or stopping.

    Does nothing without ``NOTIFY_SOCKET``.
    """
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        yield
        return
    every_s = watchdog_interval_s(environment)
    stopping = threading.Event()

    def send(state: str) -> None:
        # Without systemd, as in a container that has inherited the variable, the work goes on.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(
                state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address
            )

    def watch() -> None:
        while probes.unready():
            if stopping.wait(READY_EVERY_S):
                return
        send("READY=1")
        while every_s and not stopping.wait(every_s):
            if not probes.dead():
                send("WATCHDOG=1")

    threading.Thread(target=watch, name="penstock-systemd", daemon=True).start()
    try:
        yield
    finally:
        stopping.set()
        send("STOPPING=1")
