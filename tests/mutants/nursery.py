"""Runs pytest in a process that is forked with everything loaded but what is tested: loading takes longer than most tests."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path

LOADED = (
    "mutants.nursery",
    "pytest",
    "_pytest.assertion.rewrite",
    "hypothesis.strategies",
    "hypothesis.stateful",
    "hypothesis.internal.conjecture.engine",
    "pyspark.sql",
    "pyarrow",
    "sqlalchemy.ext.asyncio",
    "sqlalchemy.orm",
    "sqlalchemy.dialects.postgresql",
    "psycopg",
    "psycopg.types.json",
    "redis.asyncio",
    "redis.cluster",
    "redis.sentinel",
    "alembic.command",
    "pydantic",
    "structlog",
    "rich.console",
    "rich.table",
    "typer",
    "opentelemetry.trace",
)


def prepare() -> None:
    """Says what the process loads from which others are forked."""
    multiprocessing.set_start_method("forkserver")
    set_forkserver_preload(list(LOADED))


def run_pytest(copy: Path, arguments: Sequence[str], output: Path, limit_s: float) -> int | None:
    """The exit status of pytest on a copy of the checkout; None if it took longer.  What it has started is ended."""
    process = multiprocessing.Process(target=_run, args=(copy, arguments, output))
    process.start()
    process.join(limit_s)
    code = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return code


def _run(copy: Path, arguments: Sequence[str], output: Path) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(copy)
    places = [str(copy / "src"), str(copy / "tests")]
    sys.path[:0] = places
    os.environ |= {"PYTHONPATH": ":".join(places), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    import pytest  # noqa: PLC0415  loaded before

    status = pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments])
    sys.stdout.flush()
    os._exit(int(status))
