"""Every address of the console, for every visitor, in every state: what it answers, what it says, and what it hides.

The addresses are those of the console's own routes: one that is added has to be added to ``EXAMPLES``.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from console.conftest import HOSTILE, Visitors
from penstock import Pipeline
from penstock.console import Visitor, make_console
from penstock.console.access import RIGHTS
from penstock.console.reading import HIDDEN
from penstock.console.web_application import Console
from penstock.database.connections import Connection

NAME = "<img src=x onerror=steal()>\u202e\x1b[31m'\"{{7*7}}"
"""A name that somebody has written into the tables: Penstock takes none like it."""

LETTER = "/dead-letters/refuses/things/0/1"
LETTER_FIELDS = "consumer=refuses&channel=things&shard=0&offset=1"

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "/": ("/",),
    "/charts": ("/charts", "/charts?period=day"),
    "/channels": ("/channels",),
    "/channels/{name}": ("/channels/things", "/channels/index", "/channels/jobs"),
    "/channels/{name}/contents": tuple(f"/channels/{name}/contents" for name in ("things", "index", "jobs")),
    "/channels/{name}/tenants": ("/channels/jobs/tenants",),
    "/channels/{name}/limits": ("/channels/jobs/limits",),
    "/jobs": ("/jobs", "/jobs?queue=jobs&state=waiting", "/jobs?queue=jobs&before=1h"),
    "/jobs/{queue}/{id:int}": ("/jobs/jobs/3", "/jobs/jobs/3?payload"),
    "/consumers": ("/consumers",),
    "/consumers/{name}": ("/consumers/halts", "/consumers/work", "/consumers/search"),
    "/dead-letters": ("/dead-letters", "/dead-letters?consumer=refuses&error=ValueError"),
    "/dead-letters/{consumer}/{channel}/{shard:int}/{offset:int}": (LETTER, f"{LETTER}?payload"),
    "/workers": ("/workers",),
    "/schedules": ("/schedules",),
    "/icks": ("/icks",),
    "/reconciliations": ("/reconciliations",),
    "/doctor": ("/doctor",),
    "/actions": ("/actions",),
    "/find": ("/find", "/find?q=1", "/find?q=things/0+offset+1", "/find?q=some-key", "/find?q=1&payload"),
    "/act/pause": ("/act/pause?kind=consumer&name=search",),
    "/act/resume": ("/act/resume?kind=channel&name=jobs",),
    "/act/run": ("/act/run?name=sweep",),
    "/act/go-on": ("/act/go-on?name=halts",),
    "/act/retry": (f"/act/retry?{LETTER_FIELDS}",),
    "/act/retry-all": ("/act/retry-all?consumer=refuses",),
    "/act/drop": (f"/act/drop?{LETTER_FIELDS}",),
    "/act/drop-all": ("/act/drop-all?consumer=refuses",),
    "/act/cancel": ("/act/cancel?channel=jobs&tenant=k",),
    "/act/retry-jobs": ("/act/retry-jobs?channel=jobs&tenant=k",),
    "/act/move-due": ("/act/move-due?channel=jobs&id=3&due=2h",),
    "/act/limit": ("/act/limit?channel=jobs&tenant=k&in_flight=2",),
}
"""Addresses of each route; those of a page are those of its twin in JSON, too."""

PATHS = tuple(path for route, paths in EXAMPLES.items() if not route.startswith("/act/") for path in paths)

VISITORS = {
    "nobody": None,
    "may not see": Visitor("ann", RIGHTS - {"see"}),
    "sees": Visitor("ann", frozenset({"see"})),
    "reads": Visitor("ann", frozenset({"see", "keys", "payloads"})),
    "acts": Visitor("ann", RIGHTS),
}


@dataclass(frozen=True)
class State:
    """A state of the pipeline.

    Attributes:
        has_scene: False if nothing was ever staged.
        sql: Makes the state.
        away: The server that is away.
        paths: Further addresses.
        says: What pages have to say: what is wrong, and what to do.
        statuses: What is answered to somebody with all rights: by address, route or its beginning; otherwise 200.
    """

    has_scene: bool = True
    sql: str = ""
    away: str = ""
    paths: tuple[str, ...] = ()
    says: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    statuses: Mapping[str, int] = field(default_factory=dict)

    def find_status(self, route: str, path: str) -> int:
        for name, status in self.statuses.items():
            if name in {route, path} or (name.endswith("*") and path.startswith(name[:-1])):
                return status
        return 200


NOT_PAUSED = {"/act/resume": 404}

STATES = {
    "empty": State(
        has_scene=False,
        says={
            "/": ("No consumer is registered yet", "penstock run"),
            "/reconciliations": ("penstock reconcile",),
            "/actions": ("No action was taken here yet",),
            "/dead-letters": ("There is no dead letter",),
            "/channels/things/contents": ("penstock stream",),
            LETTER: ("penstock dead-letters list",),
        },
        statuses={
            **dict.fromkeys(("/channels/{name}/contents", "/channels/{name}/tenants", "/channels/{name}/limits"), 404),
            **dict.fromkeys(("/consumers/{name}", f"{LETTER}*", "/find?q=things/0+offset+1", "/act/*"), 404),
            **dict.fromkeys(("/jobs?*", "/jobs/{queue}/{id:int}"), 404),
        },
    ),
    "halted": State(
        says={
            "/": ("halts is halted in things/0", "penstock reset checkpoint halts --resume"),
            "/consumers/halts": ("halts is halted in things/0", "penstock reset checkpoint halts --resume"),
            "/doctor": ("penstock reset checkpoint halts --resume",),
            LETTER: ("penstock dead-letters retry refuses", "after 1 attempt<"),
        },
        statuses=NOT_PAUSED,
    ),
    "paused": State(
        sql="""
            INSERT INTO penstock.pauses (kind, name, reason, paused_by)
            VALUES ('consumer', 'search', {hostile}, 'bob'), ('channel', 'jobs', {hostile}, 'bob')
        """,
        says={
            "/": ("search is paused", "penstock consumers resume search", "penstock channels resume jobs"),
            "/consumers/search": ("search is paused", "penstock consumers resume search"),
            "/channels/jobs": ("jobs is paused",),
            "/consumers/work": ("paused",),
        },
    ),
    "redis": State(
        away="redis",
        says={
            "/": ("Redis does not answer", "records wait in Postgres"),
            "/doctor": ("Redis does not answer",),
            "/channels/things/contents": ("Redis does not answer", "retries by itself"),
            "/jobs": ("Redis does not answer", ">unknown<", "Choose job 3", "act/cancel"),
            "/jobs?queue=jobs&state=waiting": ("Redis does not answer", ">unknown<", "Choose job 3"),
            "/jobs/jobs/3?payload": ("Redis does not answer", ">unknown<", "secret", "not known:"),
        },
        statuses={  # what Redis alone knows, and an action that needs it
            **dict.fromkeys(
                ("/channels/{name}/contents", "/channels/{name}/tenants", "/act/retry-jobs", "/act/move-due"), 503
            ),
            **NOT_PAUSED,
        },
    ),
    "postgres": State(
        away="postgres",
        says={
            "/": ("Postgres", "retries by itself", "penstock doctor"),
            "/find": ("Its number",),
            "/channels/things/contents": ("things/0 offset 1",),
            "/channels/jobs/tenants": ("Cancel its jobs",),
        },
        statuses={
            **dict.fromkeys(("/channels/{name}/contents", "/channels/{name}/tenants"), 200),
            "/find?*": 503,
            "/find": 200,
            "/*": 503,
        },
    ),
    "wide": State(
        sql="""
            INSERT INTO penstock.channels (channel, kind, shards, keep) VALUES ('wide', 'log', 256, '1 h');
            INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted)
            SELECT 'reads', 'wide', shard, 0, 1, {hostile} FROM generate_series(0, 255) AS shard
        """,
        paths=("/channels/wide", "/channels/wide/contents", "/consumers/reads"),
        says={
            "/": ("reads is halted in wide/0", "more: <code>penstock doctor"),
            "/channels/wide": ("192 more shards",),
        },
        statuses=NOT_PAUSED,
    ),
    "hostile": State(
        sql="""
            INSERT INTO penstock.channels (channel, kind, shards, keep) VALUES ({name}, 'log', 1, '1 h');
            INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted, waiting)
            VALUES ({name}, {name}, 0, 0, 1, {hostile}, {hostile});
            INSERT INTO penstock.schedules (name, channel, every, timezone) VALUES ({name}, 'jobs', {name}, {name});
            INSERT INTO penstock.reconciliations (name, consumer, intent, engine, outcome) VALUES ({name}, {name}, {name}, {name}, {name});
            INSERT INTO penstock.pauses (kind, name, reason, paused_by) VALUES ('consumer', {name}, {hostile}, {name});
            INSERT INTO penstock.actions (done_by, title, command) VALUES ({name}, {name}, {name});
            INSERT INTO penstock.queue_limits (channel, kind, name, limits)
            SELECT 'jobs', 'key', {hostile} || n, CASE n WHEN 1 THEN to_jsonb({name}::text) ELSE '{{"rate": 5}}' END
            FROM generate_series(1, 60) AS n;
            INSERT INTO penstock.stopped_shards (channel, shard, reason) VALUES ({name}, 0, {name});
            INSERT INTO penstock.isolated_records (record_id, xid, channel, shard, reason)
            SELECT id, xid, channel, shard, {hostile} FROM penstock.staged_records;
            INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts)
            VALUES ({name}, {name}, 0, 1, 1, {hostile}, {name}, {name}, '{{"secret": 1}}', now(), {hostile}, 1)
        """,
        paths=(
            f"/channels/{quote(NAME)}",
            f"/channels/{quote(NAME)}/contents",
            f"/consumers/{quote(NAME)}",
            f"/dead-letters?consumer={quote(NAME)}&error=Error&channel={quote(NAME)}",
            f"/dead-letters/{quote(NAME)}/{quote(NAME)}/0/1",
            f"/act/go-on?name={quote(NAME)}",
            f"/act/retry-all?consumer={quote(NAME)}",
            f"/act/limit?channel=jobs&key={quote(HOSTILE)}1",
        ),
        says={"/channels/jobs/limits": ("10 more: <code>penstock queues limits jobs",)},
        statuses=NOT_PAUSED,
    ),
}


class Markup(HTMLParser):
    """Collects what is left open, and what could run or load something."""

    VOID = frozenset({"meta", "link", "input", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.dangerous: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        given = dict(attributes)
        if any(name.startswith("on") or name == "style" for name in given):
            self.dangerous.append(f"{tag} {given}")
        for name in ("src", "href", "action"):
            if (given.get(name) or "/").partition(":")[1] and not (given[name] or "").startswith("/"):
                self.dangerous.append(f"{tag} {given}")
        if tag in {"style", "iframe", "object", "base"} or (tag == "script" and not given.get("src")):
            self.dangerous.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if self.open.pop() != tag:
            self.dangerous.append(f"</{tag}>")


@pytest.fixture(params=STATES)
def state(request: pytest.FixtureRequest, connection: Connection) -> State:
    made = STATES[request.param]
    if made.has_scene:
        request.getfixturevalue("scene")
    for statement in filter(None, made.sql.split(";\n")):
        connection.execute(statement.format(name="%(name)s", hostile="%(hostile)s"), {"name": NAME, "hostile": HOSTILE})
    return made


@pytest.fixture
def made_console(
    state: State, flow: Pipeline, visitors: Visitors, database_url: str, redis_url: str
) -> Iterator[Console]:
    if state.away == "postgres":
        database_url = "postgresql://nobody@127.0.0.1:1/none"
    elif state.away == "redis":
        redis_url = "redis://127.0.0.1:1/0"
    made = make_console(flow, database_url, redis_url, access=visitors, acting_database_url=database_url)
    yield made
    made.close()


@pytest.fixture
def get(made_console: Console) -> Iterator[Callable[[str], httpx.Response]]:
    """Asks in one event loop, in this thread."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(made_console), base_url="http://console")
    with asyncio.Runner() as runner:
        yield lambda address: runner.run(client.get(address))


def list_addresses(console: Any, state: State) -> Iterator[tuple[str, str, str]]:
    """Route, page and address of everything that shows something."""
    app = console._app
    for route in app.routes:
        assert isinstance(route, Route)
        if route.path.startswith("/static/") or route.path == "/healthz":
            continue
        bare = re.sub(r"\.(json|csv|ndjson)$", "", route.path)
        page = "/" if bare == "/index" else bare
        more = tuple(path for path in state.paths if route.path_regex.match(path.partition("?")[0]))
        for path in EXAMPLES[page] + more:
            bare, _, query = path.partition("?")
            address = route.path if page == "/" else bare + route.path.removeprefix(page)
            yield page, path, f"{address}?{query}" if query else address


def check_answer(address: str, answer: httpx.Response, who: str) -> None:
    """What holds for every answer, whatever its status."""
    text = answer.text
    form = address.partition("?")[0].rpartition(".")[2]
    if form in {"json", "csv", "ndjson"}:
        kind = {"csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"}.get(form, "application/json")
        assert answer.headers["content-type"] in {kind, "application/json"}, address
        if answer.headers["content-type"] != kind or form == "json":
            json.loads(text)
    else:
        markup = Markup(text)
        assert (markup.open, markup.dangerous) == ([], []), address
        assert not re.search(r"[\u202e\x1b]|<script>alert|<img src=x", text), address
        assert "49" not in re.findall(r"alert\(1\).{0,40}?(49)|steal\(\).{0,40}?(49)", text)
    if who not in {"reads", "acts"}:
        assert not re.search(r"alert\(1\)|said of", text), address
    if not (who in {"reads", "acts"} and address.endswith("payload")):
        assert "secret" not in text, address
    if who != "acts":
        assert "/act/" not in text, address


@pytest.mark.slow
def test_every_address_answers_every_visitor_in_every_state(
    state: State, made_console: Console, visitors: Visitors, get: Callable[[str], httpx.Response]
) -> None:
    expected: dict[tuple[str, str], int] = {}
    found: dict[tuple[str, str], int] = {}
    texts: dict[str, str] = {}

    for who, visitor in VISITORS.items():
        visitors.visitor = visitor
        for number, (route, path, address) in enumerate(list_addresses(made_console, state)):
            if state is not STATES["hostile"] and who == ("sees", "reads")[number % 2]:
                continue  # the other one asks
            answer = get(address)
            check_answer(address, answer, who)
            found[who, address] = answer.status_code
            expected[who, address] = state.find_status(route, path)
            if visitor is None or not visitor.may("see"):
                expected[who, address] = 401 if visitor is None else 403
            elif route.startswith("/act/") and who != "acts":
                expected[who, address] = 403
            elif path == "/find?q=some-key" and not visitor.may("keys"):
                expected[who, address] = 400
            if who == "acts" and path == address:
                texts[path] = answer.text

    assert {each: status for each, status in found.items() if status != expected[each]} == {}
    for path, words in state.says.items():
        assert [word for word in words if word not in texts[path]] == [], path


@pytest.mark.slow
@pytest.mark.parametrize("state", [name for name, made in STATES.items() if made.away], indirect=True)
def test_a_page_without_what_a_server_knows_asks_again(
    visitors: Visitors, get: Callable[[str], httpx.Response]
) -> None:
    """Otherwise it would be left so once the server is back."""
    visitors.visitor = VISITORS["acts"]
    paths = [path for paths in EXAMPLES.values() for path in paths]
    texts = {path: get(path).text for path in paths}

    failed = {path for path in paths if re.search("does not answer|>unknown<|not known:", texts[path])}
    assert len(failed) > 5
    assert {path for path in failed if "data-live" not in texts[path]} == set()


def test_what_is_hidden_is_shown_with_the_right_and_the_kind_of_an_error_without(
    scene: int, console: Console, visitors: Visitors
) -> None:
    assert scene
    client = TestClient(console, base_url="http://console")
    shown, found = [], []
    for visitor in (VISITORS["sees"], Visitor("ann", frozenset({"see", "keys"})), VISITORS["reads"]):
        assert visitor is not None
        visitors.visitor = visitor
        shown.append(client.get(f"{LETTER}?payload").text)
        lists = [client.get(f"/dead-letters.json?{query}").json() for query in ("key=other", f"key={quote(HOSTILE)}")]
        found.append([(len(each["letters"]), len(each["groups"])) for each in lists])
        assert client.get("/find.json?q=1&key").status_code == (200 if visitor.may("keys") else 400)

    assert found == [[(1, 1), (1, 1)], [(0, 0), (1, 1)], [(0, 0), (1, 1)]], "whose key it is, is not to be found out"

    assert [HIDDEN in text for text in shown] == [True, False, False]
    assert ["ValueError" in text for text in shown] == [True, True, True]
    assert ["&lt;script&gt;alert(1)" in text for text in shown] == [False, True, True]
    assert ["secret" in text for text in shown] == [False, False, True]
