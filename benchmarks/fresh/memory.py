"""Private memory of a process that has loaded what a web process has, in MB; with arguments, of one that recruits.

memory.py                                FastAPI and SQLAlchemy
memory.py enlist                         the same, after many calls of enlist, one of which had a job done
memory.py chore DATABASE_URL REDIS_URL   the same, after a chore that loaded the drivers
"""

import gc
import json
import re
import sys
from pathlib import Path
from threading import Event

import fastapi  # noqa: F401  what the application has
import sqlalchemy.orm  # noqa: F401  the same


def enlist() -> None:
    """Enlists until a job was done, and many times more."""
    from penstock.engines.stealing import Recruiter  # noqa: PLC0415

    recruiter, done = Recruiter(), Event()
    recruiter.install(done.set, "job", 1.0)
    recruiter.enlist()
    done.wait()
    for _ in range(10_000):
        recruiter.enlist()


def chore(database_url: str, redis_url: str) -> None:
    """Has a chore done."""
    from penstock import Log, Pipeline  # noqa: PLC0415
    from penstock.engines.stealing import Chores, Recruiter  # noqa: PLC0415

    pipeline = Pipeline(channels=[Log("movements")])
    recruiter, done = Recruiter(report=lambda *_: done.set()), Event()
    recruiter.install(Chores(pipeline, database_url, redis_url).stream(), "stream", 1.0)
    recruiter.enlist()
    done.wait()


match sys.argv[1:]:
    case ["enlist"]:
        enlist()
    case ["chore", database_url, redis_url]:
        chore(database_url, redis_url)
    case _:
        pass
gc.collect()
private = re.findall(r"^Private_\w+: +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
print(json.dumps(sum(map(int, private)) / 1024))
