"""What a producer writes cannot command the operator's terminal, nor forge a line of what a command prints."""

import fcntl
import json
import os
import struct
import termios
from contextlib import suppress

import pytest

from fixtures.command_line import CommandLine, run_penstock
from fixtures.forking import Descriptor, fork
from penstock.database.connections import Connection
from penstock.display import escape, escape_lines

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u009b31m\u202e\u2028\x7f\r\nok       journal: forged"
COMMANDS = (
    ("tail", "things"),
    ("dead-letters", "list"),
    ("dead-letters", "show", "reader", "things/0 offset 1"),
    ("dead-letters", "drop", "reader", "--all"),
    ("status",),
    ("status", "--by-shard"),
    ("doctor",),
    ("dead-letters", "retry", "reader", "--all"),
)
AS_JSON = (*COMMANDS[:3], ("status",))


@pytest.fixture
def hostile(penstock: CommandLine, connection: Connection) -> CommandLine:
    """A dead letter and a halted shard, with a hostile key, action, object, payload and reason."""
    application = penstock.directory / "shop.py"
    application.write_text(
        application.read_text().replace('raise ValueError("bad")', "raise ValueError(record.data['text'])")
    )
    row = {"text": HOSTILE.replace("\n", "\t"), "bad": True}
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
        "VALUES ('things', 0, %(bad)s::text, %(bad)s::text, %(bad)s::text, %(data)s, %(data)s)",
        {"bad": HOSTILE, "data": json.dumps(row)},
    )
    penstock("stream", "--drain")
    penstock("consume", "reader", "--drain")
    connection.execute("UPDATE penstock.checkpoints SET halted = %s WHERE shard = 1", [HOSTILE])
    connection.execute("UPDATE penstock.checkpoints SET waiting = %s WHERE shard = 0", [HOSTILE])
    connection.execute("UPDATE penstock.dead_letters SET reason = %s", [HOSTILE])
    return penstock


def test_what_a_producer_writes_reaches_the_terminal_escaped(hostile: CommandLine) -> None:
    """The last command is the one that changes something."""
    for command in COMMANDS:
        done = hostile(*command)

        assert_harmless(done.stdout)
        assert_harmless(done.stderr)
        assert "\\u001b" in done.stdout, command
        assert "\\u202e" in done.stdout, command


def test_json_says_exactly_what_was_written(hostile: CommandLine) -> None:
    for command in AS_JSON:
        done = hostile(*command, "--json")

        assert HOSTILE in strings(json.loads(done.stdout)), command
        assert len(done.stdout.splitlines()) == 1


def test_a_log_line_on_a_terminal_is_one_line(hostile: CommandLine, connection: Connection) -> None:
    """The application's own lines and its errors, too."""
    application = hostile.directory / "shop.py"
    hostile_text = ascii(HOSTILE)
    application.write_text(
        application.read_text()
        + f"""
import logging, structlog
logging.getLogger("shop").warning("stdlib %s", {hostile_text})
structlog.get_logger("shop").warning({hostile_text}, value={hostile_text}, values=[{hostile_text}])
try:
    raise ValueError({hostile_text})
except ValueError:
    logging.getLogger("shop").exception("failed")
"""
    )

    shown = on_a_terminal(hostile, "status", width=100)

    assert "stdlib" in shown
    assert "ValueError" in shown
    assert_harmless(shown.replace("\r\n", "\n"), colours=True)


def test_an_error_cannot_forge_a_line() -> None:
    assert escape_lines("one\nerror: two\x1b") == "one\n    error: two\\u001b"


def test_what_people_read_is_left_as_it_is() -> None:
    text = "Zoë's straße — 東京, 👍, c:\\temp\\n"

    assert escape(text) == text
    assert json.loads(escape(json.dumps("\x9b" + text, ensure_ascii=False))) == "\x9b" + text


def test_what_the_terminals_encoding_lacks_is_escaped(penstock: CommandLine, connection: Connection) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, '東京 👍', 'insert', 'thing', '{}')"
    )
    penstock("stream", "--drain")
    text, as_json = (penstock("tail", "things", *form, PYTHONIOENCODING="latin-1") for form in ((), ("--json",)))

    for done in (text, as_json):
        assert (done.returncode, done.stderr) == (0, "")
        assert r"\u6771\u4eac \ud83d\udc4d" in done.stdout
    assert json.loads(as_json.stdout)["key"] == "東京 👍"


def test_no_column_is_missing_on_a_narrow_terminal(hostile: CommandLine, connection: Connection) -> None:
    connection.execute("UPDATE penstock.checkpoints SET halted = 'because' WHERE shard = 1")
    for width in (60, 20):
        shown = on_a_terminal(hostile, "status", width=width)

        header = next(line for line in shown.splitlines() if line.startswith("consumer"))
        row = next(line for line in shown.splitlines() if line.startswith("reader"))
        assert header.split()[:4] == ["consumer", "reads", "halted", "passed"]
        assert row.split()[:4] == ["reader", "things", "1", "1"]
        assert "halted: reader things/1: because" in shown


def on_a_terminal(penstock: CommandLine, *arguments: str, width: int) -> str:
    """What a command shows on a terminal of so many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {n: v for n, v in penstock.environment.items() if n not in ("COLUMNS", "NO_COLOR")}
    with Descriptor(theirs) as terminal:
        process = fork(
            run_penstock, penstock.directory, environment | {"TERM": "xterm"}, arguments, *(terminal, terminal)
        )
    shown = b"".join(iter(lambda: read_some(ours), b""))
    os.close(ours)
    process.join(250)
    return shown.decode()


def read_some(terminal: int) -> bytes:
    """Some bytes; none when the command has closed its end, which Linux reports as an error."""
    with suppress(OSError):
        return os.read(terminal, 65536)
    return b""


def assert_harmless(shown: str, *, colours: bool = False) -> None:
    """Every line is printable, but for colours of ours, and none begins as the forged one does."""
    for line in shown.split("\n"):
        plain = uncoloured(line) if colours else line
        assert plain.isprintable(), ascii(line)
        assert not plain.startswith("ok       journal: forged")


def uncoloured(line: str) -> str:
    for number in range(110):
        line = line.replace(f"\x1b[{number}m", "")
    return line


def strings(value: object) -> list[str]:
    """All strings in a JSON value."""
    if isinstance(value, dict):
        return [each for part in value.values() for each in strings(part)]
    if isinstance(value, list):
        return [each for part in value for each in strings(part)]
    return [value] if isinstance(value, str) else []
