"""``penstock console`` as it is typed."""

import signal
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from fixtures.command_line import CommandLine
from penstock.cli.app import app
from penstock.console.access import Entrance, User, Visitor


def test_it_prints_a_link_answers_and_ends_with_a_signal(penstock: CommandLine) -> None:
    process = penstock.start("console", "--listen", "127.0.0.1:0")
    link = process.stdout.readline().strip().removeprefix("The console: ")

    with httpx.Client(follow_redirects=True, timeout=60) as client:
        shown = client.get(link)
        again = httpx.get(link, timeout=60)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(60)

    assert shown.status_code == 200
    assert "The path of the records" in shown.text
    assert again.status_code == 403
    assert process.returncode in {0, -signal.SIGTERM}
    assert "token" not in out + err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--listen", "0.0.0.0:0"), "--users FILE"),
        (("--listen", "8787"), "give HOST:PORT"),
        (("--listen", "192.0.2.1:0", "--users", "users.toml"), "cannot be listened to"),
        (("--proxy", "X-User@10.0.0.1"), "--users FILE"),
        (("--trace-url", "javascript:alert('{trace_id}')"), "give an address of https or http"),
        (("--trace-url", "https://{trace_id}.example/"), "give an address of https or http"),
        (("--trace-url", "https://traces.example/"), "such as https://traces.example/trace/{trace_id}"),
        (("--prometheus-url", "file:///etc/passwd"), "give an address of http or https"),
        (("--prometheus-url", "http://ann:secret@prometheus:9090"), "such as http://prometheus:9090"),
        (("--proxy", "X-User", "--users", "users.toml"), "give HEADER@ADDRESS"),
        (("--root-path", "penstock/"), "give a path such as /penstock"),
        (("--users", "missing.toml"), "cannot be read"),
        (("--users", "empty.toml", "--listen", "0.0.0.0:0"), "has no user"),
    ],
)
def test_what_would_let_anybody_in_is_refused(penstock: CommandLine, given: tuple[str, ...], says: str) -> None:
    users = Path(penstock.directory, "users.toml")
    users.write_text('[ann]\nrights = ["see"]\n')
    empty = Path(penstock.directory, "empty.toml")
    empty.touch()
    for path in (users, empty):
        path.chmod(0o600)

    done = penstock("console", *given)

    assert done.returncode == 2
    assert says in done.stderr


def test_a_hash_is_printed_for_the_file_of_users() -> None:
    done = CliRunner().invoke(app, ["console", "--hash-password"], input="correct horse\n")

    entrance = Entrance({"ann": User(Visitor("ann"), done.stdout.strip())})
    assert entrance.log_in("ann", "correct horse", "") is not None
    assert entrance.log_in("ann", "another", "") is None
    assert "horse" not in done.output
