"""The demo's faults: installed in every process that imports the application, if its environment asks for them.

The crashes are real: the process exits at once, between effect and checkpoint.
"""

import os
import random
from time import monotonic

from penstock.crashpoints import install_crashpoint, install_repeats

CRASH_EVERY = "PENSTOCK_DEMO_CRASH_EVERY"
"""Environment variable: average time between two crashes of a process, in seconds."""

REPEAT_CHANCE = "PENSTOCK_DEMO_REPEAT_CHANCE"
"""Environment variable: probability, 0 to 1, that a streamer sends, and a consumer reads, its last records again."""

APPLIED = ("consumer.after_apply", "together.after_apply", "members.after_apply", "jobs.after_apply")
"""Crash points between the effects and the checkpoint."""

CRASHED = 70
"""Exit code of a process that crashed on purpose."""


def install() -> None:
    """Installs the faults that the environment asks for."""
    if chance := float(os.environ.get(REPEAT_CHANCE, "0")):
        install_repeats(lambda point: _repeats(point, chance))
    if seconds := float(os.environ.get(CRASH_EVERY, "0")):
        _install_crashes(seconds)


def _repeats(point: str, chance: float) -> bool:
    repeats = random.random() < chance  # noqa: S311  not for secrets
    if repeats and point == "streamer.after_publish":
        _record("resent")
    return repeats


def _install_crashes(seconds: float) -> None:
    lifetime = seconds * random.uniform(0.5, 1.5)  # noqa: S311  not for secrets
    first: list[float] = []

    def crash(point: str) -> None:
        if point in APPLIED:
            first.append(monotonic()) if not first else None
            if monotonic() - first[0] > lifetime:
                _record("crash")
                os._exit(CRASHED)

    install_crashpoint(crash)


def _record(kind: str) -> None:
    """Records a fault on a connection of its own, so that it survives the crash."""
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  an application that stages needs no psycopg

    with connect_postgres(os.environ["PENSTOCK_DATABASE_URL"], application="faults") as connection:
        connection.execute("INSERT INTO rocket_rides.faults (kind) VALUES (%s)", (kind,))
