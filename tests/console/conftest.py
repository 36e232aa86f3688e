"""A console on a pipeline with something in every state, and visitors with any rights."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from penstock import Ick, Log, Pipeline, Queue
from penstock.console import Visitor, make_console
from penstock.console.access import Entrance, Right, User
from penstock.console.serving import served
from penstock.console.web_application import Console
from penstock.consuming import make_worker
from penstock.database.connections import Connection
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.streaming import Streamer

THINGS, INDEX, JOBS = Log("things", shards=2, keep=timedelta(hours=1)), Ick("index", shards=1), Queue("jobs")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m'\"{{7*7}}"
"""A key that would do something if it were not escaped."""

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
VALUES (%s, 0, %s, %s, 'thing', '{"secret": "payload"}', %s) RETURNING id
"""


@pytest.fixture
def flow() -> Pipeline:
    """Consumers of which one dead-letters, one halts, one applies all; an Ick's and a queue's."""
    made = Pipeline([THINGS, INDEX, JOBS])

    @made.consumer(reads=THINGS, name="applies")
    def _(_session: Any, _records: Any) -> None: ...

    @made.consumer(reads=THINGS, name="refuses", attempts=1)
    def _(_session: Any, records: Sequence[Any]) -> None:
        for record in records:
            raise ValueError(f"said of {record.key}")

    @made.consumer(reads=THINGS, name="halts", attempts=1, on_poison="halt")
    def _(_session: Any, records: Sequence[Any]) -> None:
        raise LookupError(f"said of {records[0].key}")

    @made.consumer(reads=INDEX, name="search")
    def _(_session: Any, _members: Sequence[str]) -> None: ...

    @made.worker(reads=JOBS, name="work")
    def _(_session: Any, _job: Any) -> None: ...

    return made


@pytest.fixture
def scene(flow: Pipeline, connection: Connection, streamer: Streamer, database_url: str, redis_url: str) -> int:
    """One record in the log, applied, dead-lettered and halted at; a member and a job that wait.  Returns the record's number."""
    [(record,)] = connection.execute(STAGE, ("things", HOSTILE, "insert", None)).fetchall()
    connection.execute(STAGE, ("index", HOSTILE, "dirty", None))
    connection.execute(STAGE, ("jobs", "k", "message", '{"tenant": "a"}'))
    connection.execute(
        "INSERT INTO penstock.schedules (name, channel, every, timezone) VALUES ('sweep', 'jobs', '1h', 'UTC')"
    )
    for name in flow.consumers:
        register_consumer(Store(connection, flow.scope), flow.get_consumer(name))
    streamer.drain()
    for name in ("applies", "refuses", "halts"):
        worker = make_worker(flow, flow.get_consumer(name), database_url, redis_url)
        worker.drain()
        worker.close()
    return int(record)


class Visitors:
    """The access of a mounted console: a test sets the visitor.

    Attributes:
        visitor: None for nobody.
    """

    visitor: Visitor | None = None

    def __call__(self, _: Request) -> Visitor | None:
        return self.visitor


As = Callable[..., TestClient]
"""A client with some rights, or with none: ``see_as("see", "keys")``."""


@pytest.fixture
def visitors() -> Visitors:
    return Visitors()


@pytest.fixture
def console(flow: Pipeline, visitors: Visitors, database_url: str, redis_url: str) -> Iterator[Console]:
    made = make_console(flow, database_url, redis_url, access=visitors, acting_database_url=database_url)
    yield made
    made.close()


@pytest.fixture
def see_as(console: Console, visitors: Visitors) -> Iterator[As]:
    made = TestClient(
        console, base_url="http://console", headers={"Sec-Fetch-Site": "same-origin"}, follow_redirects=False
    )
    with made as client:  # one event loop for all requests

        def become(*rights: Right) -> TestClient:
            visitors.visitor = Visitor("ann", frozenset(rights)) if rights else None
            return client

        yield become


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """A browser."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    if not (CHROMIUM and DRIVER):
        pytest.skip("apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture
def address(driver: Any, flow: Pipeline, scene: int, database_url: str, redis_url: str) -> Iterator[str]:
    """The console's, in which the browser has come in by the link."""
    assert scene
    console = make_console(
        flow,
        database_url,
        redis_url,
        access=Entrance({"ann": User(Visitor("ann"), None)}, token="once"),
        acting_database_url=database_url,
        hosts={"127.0.0.1"},
    )
    with served(console) as port:
        driver.get_log("performance")
        driver.get(f"http://127.0.0.1:{port}/enter?token=once")
        yield f"http://127.0.0.1:{port}"
