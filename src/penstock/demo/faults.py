"""The demo's faults: installed in every process that imports the application, if its environment asks for them.

The crashes are real: the process exits at once, between effect and checkpoint.
"""

import os
import random
from time import monotonic

from penstock.crashpoints import install_crashpoint

CRASH_EVERY = "PENSTOCK_DEMO_CRASH_EVERY"
"""Environment variable: average time between two crashes of a process, in seconds."""

APPLIED = ("consumer.after_apply", "together.after_apply", "members.after_apply", "jobs.after_apply")
"""Crash points between the effects and the checkpoint."""

CRASHED = 70
"""Exit code of a process that crashed on purpose."""


def install() -> None:
    """Installs the crash points, if the environment asks for them."""
    seconds = float(os.environ.get(CRASH_EVERY, "0"))
    if not seconds:
        return
    lifetime = seconds * random.uniform(0.5, 1.5)  # noqa: S311  not for secrets
    first: list[float] = []

    def crash(point: str) -> None:
        if point == "publisher.before_resend":
            _record("resent")
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
