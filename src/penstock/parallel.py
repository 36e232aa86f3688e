"""Loops side by side in one process, a thread each."""

import threading
from collections.abc import Callable, Mapping

import structlog

log = structlog.get_logger("penstock.parallel")

Loop = Callable[[Callable[[], bool]], None]
"""Runs until the function that it is given returns true."""


def run_together(loops: Mapping[str, Loop], stop: Callable[[], bool]) -> None:
    """Runs loops until ``stop()`` is true, or one of them fails; the others are stopped then.

    Args:
        loops: By name, for threads and the log.
        stop: Called by every thread.

    Raises:
        BaseException: What the first loop that failed has raised.
    """
    failures: list[BaseException] = []

    def stopped() -> bool:
        return bool(failures) or stop()

    def guarded(name: str, loop: Loop) -> threading.Thread:
        def body() -> None:
            try:
                loop(stopped)
            except BaseException as error:  # noqa: BLE001  raised again by the main thread, for the exit code
                log.error("stopped", who=name, error=type(error).__name__)  # noqa: TRY400  shown once, by the caller
                failures.append(error)

        return threading.Thread(target=body, name=name, daemon=True)

    threads = [guarded(name, loop) for name, loop in loops.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # in steps, so that the main thread takes signals
    if failures:
        raise failures[0]
