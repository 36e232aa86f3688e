"""Following a page: its commands are run as it shows them, on the application of ``examples/shop``."""

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine

from fixtures.clients import RedisClient
from fixtures.command_line import CommandLine
from fixtures.documents import ROOT, Command, commands
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.streaming import Streamer
from penstock.testing import drained, eventually

ENDLESS = {"run", "stream", "consume", "work"}
"""Commands that run until they are stopped, unless they drain."""

WAITING = {"blpop", "xread"}
"""Commands of Redis in which a process of Penstock's waits for work."""

ELSEWHERE = {
    ("README", ""): "tests/documents/test_documented_commands.py",  # there, on the application that the page declares
    ("work-stealing", "penstock demo"): "tests/demo",
    ("put-the-migrations-beside-yours", ""): "tests/migrations/test_beside_your_own.py",
    ("test-your-application", ""): "tests/testing_plugin/test_plugin.py",
    ("a-copy-that-is-right", ""): "tests/documents/test_tutorial.py",
    ("a-queue-of-jobs", ""): "tests/documents/test_tutorial.py",
    ("first-pipeline", ""): "tests/documents/test_tutorial.py",
    ("bench", ""): "tests/bench/test_bench.py",  # compares options and cases: they take minutes
    ("watch-with-prometheus", "penstock metrics --listen"): "tests/observing/test_state_metrics.py",
    ("open-the-console", "penstock console"): "tests/console/test_console_command.py",
    ("watch-it-from-outside", "penstock probe"): "tests/observing/test_probes.py",  # of a process that runs meanwhile
    ("deploy", ""): "tests/packaging/test_deployment.py",  # its files are read there; nobody has a cluster
    ("use-with-django", ""): "tests/django_app/test_django_project.py",
    ("engines", "penstock run"): "tests/cli/test_run_on_spark.py",  # options of Java
    ("run-on-your-cluster", ""): "tests/cli/test_commands_on_a_cluster.py",  # with a cluster of its own
    ("read-several-sources", "export"): "tests/documents/test_documented_commands.py",  # there, in the environment
}
"""Commands that ``follow`` leaves out, by their page and their first words: where they are run, or why they are not."""


class Follower:
    """Runs the commands of a page in a directory with an application.

    Attributes:
        penstock: The command line.
        client: A client of its Redis.
    """

    def __init__(self, penstock: CommandLine, client: RedisClient) -> None:
        (penstock.directory / "shop.py").unlink()
        penstock.environment |= {"PENSTOCK_APP": "shop.events:pipeline", "PENSTOCK_ENGINE": "inline"}
        self.penstock, self.client = penstock, client

    @property
    def database_url(self) -> str:
        return self.penstock.environment["PENSTOCK_DATABASE_URL"]

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def follow(
        self,
        page: str,
        *,
        exits: Mapping[str, int] | None = None,
        before: Mapping[str, Callable[[], object]] | None = None,
        replaced: Mapping[str, str] | None = None,
    ) -> None:
        """Runs the page's commands.

        Args:
            page: Its path below the checkout.
            exits: What a command exits with, if not with 0, by its first words.
            before: What is done before a command, by its first words.
            replaced: What a reader puts in place of what is shown.
        """
        shown = [c for c in commands(ROOT / page) if elsewhere(ROOT / page, c) is None]
        assert shown
        done: set[str] = set()
        for command in shown:
            for words, prepare in (before or {}).items():
                if command.line.startswith(words) and words not in done:
                    done.add(words)
                    prepare()
            line = command.line
            for words, real in (replaced or {}).items():
                line = line.replace(words, real)
            status = [code for words, code in (exits or {}).items() if line.startswith(words)]
            printed = self._run(line, status[-1] if status else 0)
            unlike = [each for each in command.printed if not is_printed(each, printed)]
            assert unlike == [], f"{line} prints otherwise:\n{printed}"
        assert done == (before or {}).keys()

    def _run(self, line: str, status: int) -> str:
        """What a command prints, or one that runs until it is stopped has printed once it works."""
        line, _, pipe = line.partition(" | ")
        line, _, file = line.partition(" > ")
        program, *words = shlex.split(line)
        if program == "redis-cli":
            return str(self.client.execute_command(*words))
        assert program == "penstock", line
        before = self._at_work()
        process = self.penstock.begin(*words)
        is_endless = (words[0] in ENDLESS and "--drain" not in words) or "--follow" in words
        if is_endless and status == 0:
            eventually(lambda: self._at_work() - before, f"{line} works")
            process.terminate()
        ended = self.penstock.wait(process, tuple(words))
        assert ended.returncode == status, (line, ended.stdout, ended.stderr)
        if file:
            (self.penstock.directory / file).write_text(ended.stdout)
        if pipe == "redis-cli":
            for each in ended.stdout.splitlines():
                self.client.execute_command(*shlex.split(each))
        return ended.stdout + ended.stderr

    def _at_work(self) -> set[str]:
        """Numbers of the connections to Postgres of Penstock's processes, and of clients that wait for Redis."""
        clients = {each["id"] for each in self.client.client_list() if each["cmd"] in WAITING}
        with psycopg.connect(self.database_url) as connection:
            found = connection.execute(
                "SELECT pid::text FROM pg_stat_activity WHERE application_name LIKE 'penstock %' AND datname = current_database()"
            )
            return clients | {pid for (pid,) in found}


class Shop(Follower):
    """The application of ``examples/shop``, with its tables."""

    def __init__(self, penstock: CommandLine, engine: Engine, redis_url: str, client: RedisClient) -> None:
        super().__init__(penstock, client)
        shutil.copytree(ROOT / "examples" / "shop", penstock.directory / "shop")
        self.engine, self.redis_url = engine, redis_url
        from shop import events, models  # noqa: PLC0415  on the path for this test

        self.events, self.models = events, models
        models.Base.metadata.create_all(engine)
        self.sessions = models.SessionLocal
        self.sessions.configure(bind=engine)

    def book(self, rides: int) -> None:
        with self.sessions.begin() as session:
            session.add_all(self.models.Ride(account=f"account-{n % 3}", fare=n) for n in range(1, rides + 1))

    def drain(self, *consumers: str) -> None:
        """Publishes, and applies what the named consumers read; without names, what all do."""
        chosen = consumers or None
        drained(self.events.pipeline, self.database_url, self.redis_url, consumers=chosen)

    def register(self, channel: Log, *consumers: str) -> None:
        """Registers what an older release declared."""
        former = Pipeline([channel])
        for name in consumers:
            former.consumer(reads=channel, name=name)(lambda _session, _records: None)
        with closing(Streamer(former, self.database_url, self.redis_url)) as streamer:
            streamer.drain()
        for name in consumers:
            with LogWorker(WorkerSetup(former, former.get_consumer(name), self.database_url, self.redis_url)) as worker:
                worker.drain()


def elsewhere(page: Path, command: Command) -> str | None:
    """Where the command is run, if not here."""
    for (stem, words), where in ELSEWHERE.items():
        if page.stem == stem and command.line.startswith(words):
            return where
    return None


def is_printed(line: str, printed: str) -> bool:
    """Whether something like a line that a page shows is among what was printed."""
    if "…" in line or not line.strip():
        return True
    return _masked(line) in {_masked(each) for each in printed.splitlines()}


def _masked(line: str) -> str:
    """The words of a line: numbers, times and durations are as good as each other."""
    line = re.sub(r" · oldest transaction .*", "", line)  # somebody's, at that moment
    numbers = re.sub(r"[-+]?\d[\d,.:T+-]*", "#", line)
    return " ".join(re.sub(r"# (ms|s|min|h|d)\b", "# s", numbers).split())


@pytest.fixture
def shop(
    penstock: CommandLine, engine: Engine, redis_url: str, redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shop]:
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield Shop(penstock, engine, redis_url, redis_client)
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


@pytest.fixture
def follower(penstock: CommandLine, redis_client: RedisClient) -> Follower:
    """For a page that declares its own application."""
    return Follower(penstock, redis_client)
