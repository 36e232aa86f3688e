"""No log, error or table shows a password or a payload; a payload is printed only on request."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fixtures.clients import connect_redis
from fixtures.command_line import CommandLine
from penstock.channels.server import redis_errors
from penstock.cli.render import show_error
from penstock.database.connections import Connection, connect_postgres, make_engine
from penstock.display import MASK, mask
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis
from penstock.errors import Unknown

PASSWORD = "canary-in-the-mine"
PAYLOAD = "canary-in-the-payload"
DATA = f'{{"text": "{PAYLOAD}", "bad": true}}'

COMMANDS = [
    ("stream", "--drain"),
    ("consume", "reader", "--drain"),
    ("status",),
    ("status", "--by-shard", "--json"),
    ("doctor",),
    ("doctor", "--json"),
    ("dead-letters", "list"),
    ("dead-letters", "retry", "reader", "--all"),
    ("consumers", "list"),
    ("reset", "checkpoint", "reader", "--to", "earliest"),
    ("reset", "epoch"),
    ("init",),
]


@pytest.fixture
def secret_redis(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path / "redis", port=0, password=PASSWORD)
    server.start()
    yield server.url
    server.remove()


@pytest.fixture
def guarded(
    penstock: CommandLine, postgres: EmbeddedPostgres, connection: Connection, secret_redis: str
) -> Iterator[CommandLine]:
    """A pipeline on servers with that password, a record with that payload, and a handler that fails on it."""
    connection.execute("CREATE TABLE public.effects (record_id bigint)")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i %% 2, 'k', 'insert', 'thing', %s::jsonb FROM generate_series(1, 4) AS i",
        (DATA,),
    )
    connection.execute("DROP ROLE IF EXISTS canary")
    connection.execute(f"CREATE ROLE canary SUPERUSER LOGIN PASSWORD '{PASSWORD}'".encode())
    database = connection.info.dbname
    port = postgres.tcp_url.rpartition(":")[2].partition("/")[0]
    penstock.environment |= {
        "PENSTOCK_DATABASE_URL": f"postgresql://canary:{PASSWORD}@127.0.0.1:{port}/{database}",
        "PENSTOCK_REDIS_URL": secret_redis,
    }
    yield penstock
    connection.execute("DROP ROLE canary")


@pytest.mark.slow
def test_neither_password_nor_payload_is_shown(guarded: CommandLine) -> None:
    for command in COMMANDS:
        assert_silent(guarded(*command, "--log-level", "debug"))


def connect_engine(url: str) -> None:
    engine = make_engine(url, application="test")
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def ping(url: str) -> None:
    with connect_redis(url) as client, redis_errors("looking"):
        client.ping()


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/d",
        f"postgresql://127.0.0.1:1/d?user=u&password={PASSWORD}",
        f"postgresql://u:{PASSWORD}@[broken/d",
        f"postgresql://u:a@{PASSWORD}@127.0.0.1:1/d",
        f"postgresql://u:a/{PASSWORD}@127.0.0.1:1/d",
        f"postgresql://u:1?{PASSWORD}@127.0.0.1:1/d",
        f"postgresql://u:%{PASSWORD}@127.0.0.1:1/d",
        f"postgresql://127.0.0.1:1/d?sslpassword={PASSWORD}&sslmode=x",
        f"host=127.0.0.1 port=1 password={PASSWORD}",
        f"nonsense://u:{PASSWORD}@h",
        f"redis://u:{PASSWORD}@127.0.0.1:1/0",
    ],
)
def test_an_unreachable_server_is_named_without_its_password(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in what a command prints of the error, nor in its traceback."""
    connects: list[Callable[[str], object]] = [ping]
    if not url.startswith("redis"):
        connects += [lambda url: connect_postgres(url, application="test"), connect_engine]
    for connect in connects:
        with pytest.raises(Exception) as refused:
            connect(url)
        show_error(refused.value, debug=True)

        assert "error: " in (shown := capsys.readouterr().err)
        assert PASSWORD not in shown


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("PENSTOCK_DATABASE_URL", f"postgresql://u:{PASSWORD}@127.0.0.1:1/d"),
        ("PENSTOCK_DATABASE_URL", f"postgresql://u:a/{PASSWORD}@127.0.0.1:1/d"),
        ("PENSTOCK_REDIS_URL", f"redis://u:{PASSWORD}@127.0.0.1:1/0"),
    ],
)
def test_commands_name_it_without_its_password(guarded: CommandLine, variable: str, url: str) -> None:
    for command in COMMANDS[:5]:
        done = guarded(*command, "--log-level", "debug", **{variable: url})

        assert done.returncode in (2, 3), done.stderr
        assert_silent(done)


def test_an_error_that_quotes_a_url_is_shown_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(Unknown(f"nothing at redis://u:{PASSWORD}@h/0"), debug=False)

    assert f"nothing at redis://u:{MASK}@h/0" in capsys.readouterr().err


def test_unreachable_sentinels_are_named_without_their_password(penstock: CommandLine, connection: Connection) -> None:
    penstock("stream", "--drain")

    done = penstock("status", PENSTOCK_REDIS_URL=f"redis+sentinel://:{PASSWORD}@127.0.0.1:1/0")

    assert done.returncode == 3
    assert_silent(done)


def test_a_wrong_password_is_not_shown(guarded: CommandLine) -> None:
    url = guarded.environment["PENSTOCK_DATABASE_URL"].replace(PASSWORD, f"{PASSWORD}-wrong")

    done = guarded("status", "--log-level", "debug", PENSTOCK_DATABASE_URL=url)

    assert done.returncode == 3
    assert_silent(done)


def test_an_invalid_setting_does_not_show_its_value(penstock: CommandLine) -> None:
    done = penstock("stream", PENSTOCK_IDLE=PASSWORD)

    assert done.returncode == 2
    assert_silent(done)


def test_a_payload_is_printed_on_request(guarded: CommandLine) -> None:
    guarded("stream", "--drain")

    done = guarded("tail", "things")

    assert PAYLOAD in done.stdout
    assert PAYLOAD not in done.stderr


def test_a_statement_that_fails_in_a_handler_does_not_show_its_parameters(
    guarded: CommandLine, connection: Connection
) -> None:
    """The driver's errors quote values; only their class and first line are kept."""
    application = guarded.directory / "shop.py"
    application.write_text(
        application.read_text()
        .replace('if record.data.get("bad"):', "if False:")
        .replace(
            'session.execute(text("INSERT INTO public.effects VALUES (:id)"), {"id": record.id})',
            'session.execute(text("INSERT INTO public.words VALUES (:w)"), {"w": record.data["text"]})',
        )
    )
    connection.execute("CREATE TABLE public.words (word text UNIQUE CHECK (length(word) < 3))")
    guarded("stream", "--drain")

    done = guarded("consume", "reader", "--drain", "--log-level", "debug")
    letters = guarded("dead-letters", "list")

    assert "handler failed" in done.stderr
    assert "CheckViolation" in letters.stdout
    assert_silent(done)
    assert_silent(letters)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("at redis://user:pw@host/0, and so on", "at redis://user:*@host/0, and so on"),
        ("postgresql://u:a@b/c?d#e@host/d and me@here", "postgresql://u:*@host/d and me@here"),
        ("redis+sentinel://:pw@h1:1,h2:2/0?service=s", "redis+sentinel://:*@h1:1,h2:2/0?service=s"),
        ("postgresql://h/d?password=pw&sslmode=x", "postgresql://h/d?password=*&sslmode=x"),
        ("postgresql://h/d?sslmode=x&sslpassword=pw", "postgresql://h/d?sslmode=x&sslpassword=*"),
        ("host=h password='p \\' w' user=u", "host=h password=* user=u"),
        ('{"url": "redis://u:p\\"w@h", "to": "me@here"}', '{"url": "redis://u:*@h", "to": "me@here"}'),
    ],
)
def test_a_password_is_masked_by_its_place_in_a_text(text: str, masked: str) -> None:
    assert mask(text) == masked.replace("*", MASK)


@pytest.mark.parametrize("text", ["http://host:80/a", "user@host", "a password: none", "postgresql://u@h/d", "a b c"])
def test_a_text_without_a_password_is_left_alone(text: str) -> None:
    assert mask(text) == text


def test_a_short_password_neither_blanks_ordinary_words_nor_is_given_away_by_it(penstock: CommandLine) -> None:
    for password in ("a", "status", "1"):
        url = f"postgresql://user:{password}@127.0.0.1:1/d"

        done = penstock("status", PENSTOCK_DATABASE_URL=url)

        assert done.returncode == 3
        assert MASK not in done.stderr
        assert "Connection refused" in done.stderr


def assert_silent(done: subprocess.CompletedProcess[str]) -> None:
    shown = done.stdout + done.stderr
    assert PASSWORD not in shown, done.args
    assert PAYLOAD not in shown, done.args
