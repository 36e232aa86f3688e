"""What goes wrong in the demo, on purpose: installed in any process that imports the application, if asked by environment.

The crashes are real: the process is gone between apply and commit, without a word to anybody.
"""

import os
import random
from time import monotonic

from penstock.crashpoints import install_crashpoint

CRASH_EVERY = "PENSTOCK_DEMO_CRASH_EVERY"
"""Environment variable: seconds between the crashes of a process, on average."""

APPLIED = ("consumer.after_apply", "together.after_apply", "members.after_apply")
"""Between the effects and the checkpoint."""

CRASHED = 70
"""Exit code of a process that crashed on purpose."""


def begin() -> None:
    """Installs the crash points, if the environment asks for them."""
    seconds = float(os.environ.get(CRASH_EVERY, "0"))
    if not seconds:
        return
    lifetime = seconds * random.uniform(0.5, 1.5)  # noqa: S311  not for secrets
    first: list[float] = []

    def strike(point: str) -> None:
        if point == "publisher.before_resend":
            _note("resent")
        if point in APPLIED:
            first.append(monotonic()) if not first else None
            if monotonic() - first[0] > lifetime:
                _note("crash")
                os._exit(CRASHED)

    install_crashpoint(strike)


def _note(kind: str) -> None:
    """Writes it down on a connection of its own: what crashes takes nothing else with it."""
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  an application that stages needs no psycopg

    with connect_postgres(
        os.environ["PENSTOCK_DATABASE_URL"], application="mischief"
    ) as connection:
        connection.execute("INSERT INTO rocket_rides.mischief (kind) VALUES (%s)", (kind,))
