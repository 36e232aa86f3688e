"""Without URLs, a command runs an embedded Postgres and Valkey, which other commands can share."""

import json
import signal
import stat
from collections.abc import Iterator

import pytest

from fixtures.command_line import CommandLine
from fixtures.forking import Forked
from penstock.testing import eventually


@pytest.fixture
def own(bare: CommandLine) -> CommandLine:
    bare.environment |= {"PENSTOCK_APP": "shop:pipeline", "PENSTOCK_DATA_DIRECTORY": ".penstock"}
    return bare


@pytest.fixture
def running(own: CommandLine) -> Iterator[Forked]:
    process = own.start("run", "--engine", "inline")
    yield process
    process.end()


@pytest.mark.slow
def test_a_second_command_attaches_to_the_servers_of_the_first(own: CommandLine, running: Forked) -> None:
    eventually(lambda: own("status", "--json").returncode == 0, "status finds them", timeout_s=180, interval_s=0.3)
    found = eventually(lambda: json.loads(own("status", "--json").stdout)["consumers"], "the consumer is registered")
    doctor = own("doctor", "--json")
    noted = [own.directory / ".penstock" / part / "url" for part in ("postgres", "redis")]

    running.send_signal(signal.SIGTERM)

    assert found[0]["consumer"] == "reader"
    assert doctor.returncode == 0, doctor.stdout
    assert [stat.S_IMODE(path.stat().st_mode) for path in noted] == [0o600, 0o600]
    assert running.wait(60) == 0
    assert "stop with this command" in (running.stderr.read())


def test_inspecting_commands_start_no_servers(own: CommandLine) -> None:
    done = own("status")

    assert done.returncode == 3
    assert "--database-url" in done.stderr
    assert not (own.directory / ".penstock").exists()


@pytest.mark.slow
def test_embedded_servers_keep_their_data(own: CommandLine) -> None:
    first = own("init")
    second = own("init")
    inspected = own("status", "--json")

    assert (first.returncode, second.returncode, inspected.returncode) == (0, 0, 0)
    assert "already" in second.stderr
    assert json.loads(inspected.stdout)["epoch"] == 1


@pytest.mark.parametrize("command", [("stream", "--drain"), ("consume", "reader", "--drain"), ("init",), ("verify",)])
def test_without_a_terminal_servers_are_started_only_when_asked_for(own: CommandLine, command: tuple[str, ...]) -> None:
    """A worker whose secrets are missing ends: it would publish into a database of its own."""
    del own.environment["PENSTOCK_DATA_DIRECTORY"]
    (own.directory / ".penstock" / "postgres").mkdir(parents=True)  # left from a trial

    done = own(*command)

    assert done.returncode == 2
    assert "PENSTOCK_DATABASE_URL" in done.stderr
    assert "--data-directory .penstock" in done.stderr
    assert list((own.directory / ".penstock" / "postgres").iterdir()) == []
