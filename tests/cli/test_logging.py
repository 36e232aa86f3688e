"""The log of a command: its own lines, the application's and those of Spark tasks, in one format at one level."""

import json
import os
import signal
from typing import Any, cast

import pytest

from fixtures.command_line import CommandLine, Started
from penstock.database.connections import Connection
from penstock.testing import eventually

LOGGING = """
import logging, structlog
logging.getLogger("shop").info("imported")
logging.basicConfig(level=logging.INFO)  # as many applications do
plain, structured = logging.getLogger("shop.events"), structlog.get_logger("shop.events")

@pipeline.consumer(reads=things, name="talker")
def talker(session, records):
    plain.debug("plain debug")
    plain.info("plain info %s", len(records))
    structured.info("structured info", records=len(records))
    logging.getLogger("py4j").info("noise")
    session.execute(text("INSERT INTO public.effects VALUES (:id)"), {"id": records[0].id})
"""


@pytest.fixture
def talking(penstock: CommandLine, connection: Connection) -> CommandLine:
    """A handler that logs, and a record for it."""
    application = penstock.directory / "shop.py"
    application.write_text(application.read_text() + LOGGING)
    connection.execute("CREATE TABLE public.effects (record_id bigint)")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, 'k', 'insert', 'thing', '{}')"
    )
    penstock("stream", "--drain")
    return penstock


def parsed(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


def events(stderr: str) -> list[str]:
    return [line["event"] for line in parsed(stderr) if line["logger"].startswith("shop")]


def test_the_applications_own_lines_are_in_the_log_once(talking: CommandLine) -> None:
    done = talking("consume", "talker", "--drain")

    assert events(done.stderr) == ["imported", "plain info 1", "structured info"]
    assert {line["level"] for line in parsed(done.stderr)} == {"info"}
    assert "noise" not in done.stderr


def test_the_level_holds_for_the_application_too(talking: CommandLine) -> None:
    debug = talking("consume", "talker", "--drain", "--log-level", "debug")

    assert "plain debug" in events(debug.stderr)
    assert talking("consume", "reader", "--drain", "--log-level", "warning").stderr.count("{") == 0


def test_the_console_format_is_for_the_application_too(talking: CommandLine) -> None:
    done = talking("consume", "talker", "--drain", "--log-format", "console")

    assert "plain info 1" in done.stderr
    assert parsed(done.stderr) == []


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_spark_task_logs_as_its_command_does(talking: CommandLine, started: Started, connection: Connection) -> None:
    process = started("run", "--consumer", "talker", "--log-format", "json")
    eventually(
        lambda: connection.execute("SELECT FROM public.effects").fetchall(), "the record is applied", timeout_s=150
    )
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)

    javas_own = "WARNING: Using incubator modules"
    others = [line for line in stderr.splitlines() if not line.startswith(("{", javas_own))]
    assert others == ["stopped"]
    assert {"plain info 1", "structured info"} <= set(events(stderr))
    assert "running" in {line["event"] for line in parsed(stderr)}
    assert "plain debug" not in stderr


TAKES_THE_PROCESS = """
import logging.config, signal
logging.config.dictConfig({"version": 1, "root": {"level": "INFO", "handlers": ["h"]}, "handlers": {"h": {"class": "logging.StreamHandler"}}})
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_an_application_that_sets_up_signals_and_logging_takes_neither_from_the_command(
    talking: CommandLine, connection: Connection, stop: signal.Signals
) -> None:
    """``dictConfig`` disables the loggers that exist, unless ``disable_existing_loggers`` is false."""
    application = talking.directory / "shop.py"
    application.write_text(application.read_text() + TAKES_THE_PROCESS)

    worker = talking.begin("consume", "talker")
    eventually(lambda: connection.execute("SELECT 1 FROM public.effects").fetchall() == [(1,)], "the record is applied")
    os.kill(cast(int, worker.pid), stop)
    done = talking.wait(worker)

    assert done.returncode == 0
    assert "'event': 'consuming'" in done.stderr
