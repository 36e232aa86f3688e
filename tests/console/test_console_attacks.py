"""Attacks on the console, as bytes on its socket.  None of them gets in, changes anything, or learns anything.

One console is attacked by all: after each, the tables are as they were, and those who have come in still are in.
"""

import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPResponse
from itertools import count
from typing import Any
from urllib.parse import urlencode

import pytest

from penstock.console import Visitor, make_console
from penstock.console.access import COOKIE, MAX_FAILURES, RIGHTS, Entrance, User, hash_password
from penstock.console.serving import MAX_HEADS, served
from penstock.console.web_application import HEADERS
from penstock.database.connections import Connection, connect_postgres
from penstock.embedded import EmbeddedPostgres

XSS = "<script>alert(1)</script>"
LETTER = {"consumer": "reads", "channel": "things", "shard": "0", "offset": "1"}
PAUSE = {"kind": "consumer", "name": "reads", "reason": "none of yours"}
OURS = {"Sec-Fetch-Site": "same-origin"}
ACTED_ON = """
SELECT (SELECT json_agg(p ORDER BY p) FROM penstock.pauses p), (SELECT json_agg(d ORDER BY "offset") FROM penstock.dead_letters d),
       (SELECT json_agg(c) FROM penstock.checkpoints c), (SELECT count(*) FROM penstock.actions)
"""
SEED = f"""
INSERT INTO penstock.channels (channel, kind, shards, keep) VALUES ('things', 'log', 1, '1 h');
INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch) VALUES ('reads', 'things', 0, 1, 1);
INSERT INTO penstock.pauses (kind, name, reason, paused_by) VALUES ('channel', 'things', '{XSS}', '{XSS}');
INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts)
SELECT 'reads', 'things', 0, n, n, '{XSS}', 'insert', 'thing', '{{"secret": 1}}', now(), 'Error: {XSS}', 1
FROM generate_series(1, 2) AS n
"""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Target:
    """The console, and those who have come in: ``ann`` may all, ``bob`` only see, ``eve`` is nobody."""

    connection: Connection
    entrance: Entrance
    port: int
    cookies: dict[str, str] = field(default_factory=dict)

    def ask(
        self,
        line: str,
        headers: dict[str, str] | None = None,
        form: dict[str, str] | bytes | None = None,
        *,
        by: str = "ann",
        wire: str = "",
    ) -> Answer:
        """The answer to a request; ``wire``: further lines of its head, as they are sent."""
        body = urlencode(form).encode() if isinstance(form, dict) else form or b""
        given = {"Host": f"127.0.0.1:{self.port}", "Connection": "close", "Content-Length": str(len(body))}
        if by in self.cookies:
            given["Cookie"] = f"{COOKIE}_{self.port}={self.cookies[by]}"
        if isinstance(form, dict):
            given["Content-Type"] = "application/x-www-form-urlencoded"
        head = [f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in (given | (headers or {})).items() if value)]
        with socket.create_connection(("127.0.0.1", self.port), 30) as peer:
            peer.sendall(("\r\n".join(head) + f"\r\n{wire}\r\n").encode("latin-1") + body)
            read = HTTPResponse(peer, method=line.partition(" ")[0])
            read.begin()
            return Answer(read.status, {name.lower(): value for name, value in read.getheaders()}, read.read().decode())

    def plan(self, action: str, given: dict[str, str]) -> dict[str, str]:
        """The fields of the form in which ``ann`` would confirm it."""
        shown = self.ask(f"GET /act/{action}?{urlencode(given)}").text
        return given | dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', shown))

    def state(self) -> list[Any]:
        return self.connection.execute(ACTED_ON).fetchall()


@pytest.fixture(scope="module")
def target(postgres: EmbeddedPostgres, _template: str) -> Iterator[Target]:
    name = "attacked"
    database_url = postgres.create_database(name, template=_template)
    password = hash_password("correct horse")
    visitors = {"ann": Visitor("ann", RIGHTS), "bob": Visitor("bob", frozenset({"see"}))}
    entrance = Entrance({each: User(visitor, password) for each, visitor in visitors.items()}, token="once")
    nowhere = "redis://127.0.0.1:1/0"
    made = make_console(
        None, database_url, nowhere, access=entrance, acting_database_url=database_url, hosts={"127.0.0.1"}
    )
    with connect_postgres(database_url, application="test") as connection, served(made) as port:
        for statement in SEED.split(";\n"):
            connection.execute(statement.encode())
        yield Target(connection, entrance, port, {each: entrance.sessions.begin(visitors[each]) for each in visitors})
    postgres.drop_database(name)


Attack = Callable[[Target], None]
ATTACKS: dict[str, Attack] = {}
_numbers = count(1)


def attack(title: str) -> Callable[[Attack], Attack]:
    def add(function: Attack) -> Attack:
        ATTACKS[f"{next(_numbers):02} {title}"] = function
        return function

    return add


def refused(title: str, status: int, *requests: Any, form: dict[str, str] | None = None, by: str = "ann") -> None:
    """An attack of requests that are all answered so: a line, or a line and headers."""

    def carry_out(target: Target) -> None:
        for each in requests:
            line, headers = each if isinstance(each, tuple) else (each, {})
            given = target.plan("pause", PAUSE) if form is PAUSE else form
            answer = target.ask(line, headers, given, by=by)
            assert answer.status == status, each
            check(answer)

    attack(title)(carry_out)


def check(answer: Answer) -> None:
    """What holds for every answer of ours."""
    assert {name: answer.headers.get(name.lower()) for name in HEADERS} == HEADERS
    assert "server" not in answer.headers
    assert not re.search(r"<script>alert|secret|correct horse", answer.text)
    assert not re.match(r"(https?:)?//(?!127\.0\.0\.1:)", answer.headers.get("location", "/"))


POST = "POST /act/pause"
refused("a form, or a script, of another site", 403, (POST, {"Sec-Fetch-Site": "cross-site"}), form=PAUSE)
refused("a form of a sibling site, and one that is sent by no page", 403,
        (POST, {"Sec-Fetch-Site": "same-site"}), (POST, {"Sec-Fetch-Site": "none"}), form=PAUSE)  # fmt: skip
refused("a form without the browser's word for where it comes from", 403, POST, form=PAUSE)
refused("another origin, of an older browser", 403, *((POST, {"Origin": origin}) for origin in (
    "http://evil.example", "null", "http://127.0.0.1", "http://127.0.0.1:1", "http://127.0.0.1:80@evil.example")),
    form=PAUSE)  # fmt: skip
refused("our origin, and the browser's word that it is not", 403,
        (POST, {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "cross-site"}), form=PAUSE)  # fmt: skip
refused("a name of another site that points here", 421, *(("GET /actions", {"Host": host}) for host in (
    "evil.example", "127.0.0.1.evil.example", "localhost.", "evil.example:8787", "[::1]", "[", "127.0.0.1%00.evil.example")))  # fmt: skip
refused("a name with a user, a path or a query", 421, *(("GET /actions", {"Host": host}) for host in (
    "evil.example@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1/x?", "127.0.0.1#x", "127.0.0.1\\@evil.example")))  # fmt: skip
refused("the address of another site, as a proxy is asked", 404,
        "GET http://evil.example/actions", "GET //evil.example/actions", "GET /actions//evil.example/%2e%2e")  # fmt: skip


@attack("two names, or none")
def _(target: Target) -> None:
    assert target.ask("GET /actions", wire="Host: evil.example\r\n").status == 400
    assert target.ask("GET /actions", {"Host": ""}).status == 400


@attack("a link that was used, or is guessed")
def _(target: Target) -> None:
    kept, target.entrance.token = target.entrance.token, "short-lived"
    first = target.ask("GET /enter?token=short-lived", by="eve")
    assert first.status == 303
    for token in ("short-lived", "", "Once", "once2", "onc%C3%A9", "%ed%a0%80", "o" * 5000):
        answer = target.ask(f"GET /enter?token={token}", by="eve")
        assert answer.status == (403 if token else 200)
        assert "set-cookie" not in answer.headers
        check(answer)
    target.entrance.token = kept


@attack("a cookie that is forged, was set before the login, has expired, or has left")
def _(target: Target) -> None:
    target.cookies["eve"] = "chosen-by-eve"
    entered = target.ask("POST /enter", OURS, {"name": "bob", "password": "correct horse"}, by="eve")
    given = entered.headers["set-cookie"].partition("=")[2].partition(";")[0]
    assert given != "chosen-by-eve"
    assert target.ask("GET /actions", by="eve").status == 303
    target.cookies["eve"] = given
    assert target.ask("GET /actions", by="eve").status == 200
    assert target.ask("POST /leave", OURS, {}, by="eve").status == 303
    assert target.ask("GET /actions", by="eve").status == 303
    target.cookies["eve"] = target.entrance.sessions.begin(Visitor("eve", RIGHTS))
    known = target.entrance.sessions._visitors
    [*_, last] = known
    known[last] = known[last][0], 0.0
    assert target.ask("GET /actions", by="eve").status == 303
    del target.cookies["eve"]
    for value in ("\xff\xfe", "a; b", '"', "x" * 4000):
        assert target.ask("GET /actions", {"Cookie": f"{COOKIE}_{target.port}={value}"}, by="eve").status == 303


@attack("a form with more rights than its sender")
def _(target: Target) -> None:
    form = target.plan("drop", LETTER) | {"confirm": "reads", "rights": "drop", "visitor": "ann", "name": "ann"}
    answer = target.ask("POST /act/drop", OURS, form, by="bob")
    assert answer.status == 403
    check(answer)
    assert target.ask("POST /act/drop", OURS, form, by="eve").status == 401


@attack("the plan of one letter with the digest of another")
def _(target: Target) -> None:
    form = target.plan("drop", LETTER) | {"confirm": "reads"}
    assert target.ask("POST /act/drop", OURS, form | {"offset": "2"}).status == 409
    assert target.ask("POST /act/drop", OURS, form | {"digest": ""}).status == 409


@attack("the digest of what was done already")
def _(target: Target) -> None:
    target.connection.execute("INSERT INTO penstock.pauses VALUES ('consumer', 'reads', 'a', 'b')")
    form = target.plan("resume", {"kind": "consumer", "name": "reads"})
    answers = [target.ask("POST /act/resume", OURS, form) for _ in range(2)]
    target.connection.execute("DELETE FROM penstock.actions")
    assert [answer.status for answer in answers] == [303, 404]


@attack("a plan that changes before it is confirmed")
def _(target: Target) -> None:
    form = target.plan("retry", LETTER)
    target.connection.execute('UPDATE penstock.dead_letters SET parked = true WHERE "offset" = 1')
    answer = target.ask("POST /act/retry", OURS, form)
    target.connection.execute("UPDATE penstock.dead_letters SET parked = false")
    assert answer.status == 409
    assert "has changed since" in answer.text
    check(answer)


@attack("an address that acts when it is loaded, such as a picture's")
def _(target: Target) -> None:
    form = target.plan("drop", LETTER) | {"confirm": "reads"}
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"X-HTTP-Method-Override": "POST"},
        {"X-Method-Override": "POST"},
    ):
        answer = target.ask(f"GET /act/drop?{urlencode(form)}&_method=POST", headers)
        assert answer.status == 200
        check(answer)
    assert target.ask(f"HEAD /act/drop?{urlencode(form)}").status == 200


refused("other methods", 405, *((f"{method} /act/pause?{urlencode(PAUSE)}", OURS) for method in (
    "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")))  # fmt: skip
refused("other methods of another site", 403, "TRACE /actions", "OPTIONS /actions", "PUT /", "DELETE /channels/things")


@attack("a proxy's header that no proxy, or somebody beside it, has set")
def _(target: Target) -> None:
    forwarded = "X-User: ann\r\nX-Forwarded-For: 10.0.0.7\r\nForwarded: for=10.0.0.7\r\n"
    doubled, listed, other = "X-User: bob\r\nX-User: ann\r\n", "X-User: bob, ann\r\n", "X_User: ann\r\n"
    for proxy, sent, status in (
        ("10.0.0.7", ("X-User: ann\r\n", forwarded), 401),
        ("127.0.0.1", (doubled, listed, other, "X-User: eve\r\n", "X-User:\r\n", ""), 401),
        ("127.0.0.1", ("X-User: ann\r\n", "x-user: bob\r\n"), 200),
    ):
        entrance = Entrance(target.entrance.users, proxy_header="X-User", proxy=proxy)
        database_url = target.connection.info.dsn
        made = make_console(None, database_url, "redis://127.0.0.1:1", access=entrance, hosts={"127.0.0.1"})
        with served(made) as port:
            asked = replace(target, entrance=entrance, port=port)
            assert [asked.ask("GET /find", wire=lines).status for lines in sent] == [status] * len(sent)
            assert asked.ask("GET /enter").status == 404


@attack("passwords, one after another, and whether a name exists, by what a wrong one costs")
def _(target: Target) -> None:
    compared = []
    scrypt: Any = hashlib.scrypt

    def counted(*given: Any, **options: Any) -> Any:
        compared.append(given)
        return scrypt(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "scrypt", counted)
        texts = {
            target.ask("POST /enter", OURS, {"name": name, "password": "wrong"}, by="eve").text
            for name in ("bob", "nobody", "", "a\nb", XSS)
        }
    assert len(texts) == 1
    assert len(compared) == 5
    form = {"name": "ann", "password": "wrong"}
    statuses = [target.ask("POST /enter", OURS, form, by="eve").status for _ in range(MAX_FAILURES)]
    right = target.ask("POST /enter", OURS, form | {"password": "correct horse"}, by="eve")
    assert {*statuses, right.status} == {403}
    assert target.entrance.log_in("ann", "correct horse", "10.0.0.2") is not None
    target.entrance._failures.clear()


@attack("an address to go on to")
def _(target: Target) -> None:
    for query in ("next=//evil.example", "next=https://evil.example", "url=//evil.example", "back=//evil.example"):
        form = {"name": "bob", "password": "correct horse", "next": "//evil.example"}
        assert target.ask(f"POST /enter?{query}", OURS, form, by="eve").headers["location"] == "/"
        assert target.ask(f"POST /leave?{query}", OURS, {}, by="eve").headers["location"] == "/enter"
    target.connection.execute("INSERT INTO penstock.pauses VALUES ('consumer', '/evil.example', 'a', 'b')")
    form = target.plan("resume", {"kind": "consumer", "name": "/evil.example"}) | {"back": "//evil.example"}
    answer = target.ask("POST /act/resume", OURS, form)
    target.connection.execute("DELETE FROM penstock.actions")
    assert answer.headers["location"] == "/consumers/%2Fevil.example"


refused("a path to another file", 404, *(f"GET {path}" for path in (
    "/static/../access.py", "/static/%2e%2e/access.py", "/static/..%2faccess.py", "/static/..%5caccess.py",
    "/static//etc/passwd", "/static/parts.html", "/channels/..%2f..%2fx")))  # fmt: skip
refused("a character that Postgres does not have", 400, *(f"GET {path}" for path in (
    "/find?q=%00", "/dead-letters?consumer=a%00", "/channels/%00", "/act/pause?kind=consumer&name=%00")))  # fmt: skip
refused("numbers that no column takes", 404, *(f"GET {path}" for path in (
    f"/dead-letters/a/b/0/{10**30}", f"/dead-letters/a/b/{10**11}/1", f"/find?q=things/{10**11}+offset+1",
    f"/act/drop?consumer=a&channel=b&shard=0&offset={10**30}", "/act/drop?consumer=a&channel=b&shard=%d9%a3&offset=1")))  # fmt: skip
refused("a position in a list that is none", 400, *(f"GET /dead-letters?after={after}" for after in (
    f"2026-01-01T00:00:00%20x%20things/0%20offset%20{10**30}", "x", "%ff", "1%20x%20things/0%20offset%201")))  # fmt: skip


@attack("bytes that are no text, and what is too long")
def _(target: Target) -> None:
    statuses = {
        path: target.ask(f"GET {path}").status
        for path in (
            f"/dead-letters?after=2026-01-01T00:00:00%20x%20things/{10**11}%20offset%201",
            "/dead-letters?after=0001-01-01T00:00:00%2B14:00%20x%20things/0%20offset%201",
            "/dead-letters?key=%ff&consumer=%ed%a0%80",
            f"/dead-letters?key={'x' * 14_000}",
            f"/index.json?{'a&' * 7_000}",
        )
    }
    assert set(statuses.values()) == {200}, statuses
    assert target.ask(f"GET /channels/{'%ff' * 1_000}").status == 404
    for line, headers in ((f"GET /find?q={'x' * 200_000}", {}), ("GET /actions", {"X-Long": "x" * 200_000})):
        with suppress(ConnectionError):  # it may be closed before all is sent
            assert target.ask(line, headers).status == 400


@attack("a form that is too long, has too many fields, or is no form")
def _(target: Target) -> None:
    for form, kind, status in (
        (b"reason=" + b"x" * 11_000, "application/x-www-form-urlencoded", 413),
        (b"a=1&" * 100, "application/x-www-form-urlencoded", 400),
        (b"a=\xff", "application/x-www-form-urlencoded", 400),
        (json.dumps(target.plan("pause", PAUSE)).encode(), "application/json", 415),
        (b"[" * 9_000, "application/json", 415),
        (urlencode(target.plan("pause", PAUSE)).encode(), "text/plain", 415),
        (b"", "multipart/form-data; boundary=x", 415),
    ):
        answer = target.ask(POST, {**OURS, "Content-Type": kind}, form)
        assert answer.status == status, kind
        check(answer)


@attack("markup in a name, a key, a reason, an address")
def _(target: Target) -> None:
    shown = {
        path: target.ask(f"GET {path}")
        for path in (
            f"/find?{urlencode({'q': XSS})}",
            f"/dead-letters?{urlencode({'key': XSS})}",
            f"/channels/{XSS.replace(' ', '%20').replace('/', '%2f')}",
            f"/{XSS}",
            f"/act/pause?{urlencode({'kind': 'consumer', 'name': XSS})}",
            f"/act/pause?{urlencode({'kind': XSS, 'name': 'reads'})}",
            f"/enter?{urlencode({'token': XSS})}",
            "/channels/things",
        )
    }
    for answer in shown.values():
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        check(answer)
    assert "&lt;script&gt;" in shown["/channels/things"].text
    assert target.ask("GET /dead-letters.json").headers["content-type"] == "application/json"


@attack("a line break in what becomes a header")
def _(target: Target) -> None:
    name = "x\r\nSet-Cookie: stolen=1"
    target.connection.execute("INSERT INTO penstock.pauses VALUES ('consumer', %s, 'a', 'b')", (name,))
    answers = [
        target.ask(
            "POST /act/resume", OURS, target.plan("resume", {"kind": "consumer", "name": name}) | {"name": name}
        ),
        target.ask(f"GET /enter?{urlencode({'token': name})}", by="eve"),
        target.ask("GET /channels/x%0d%0aSet-Cookie:%20stolen=1"),
    ]
    target.connection.execute("DELETE FROM penstock.pauses WHERE kind = 'consumer'")
    target.connection.execute("DELETE FROM penstock.actions")
    assert answers[0].status == 303
    assert [each.headers.get("set-cookie") for each in answers] == [None] * 3


@attack("a frame around it, another type for it, a copy or an address of it that is left behind")
def _(target: Target) -> None:
    for path in ("/", "/index.json", "/dead-letters/reads/things/0/1?payload", "/actions", "/enter"):
        headers = target.ask(f"GET {path}").headers
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "private, no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
    script = target.ask("GET /static/console.js", by="eve")
    check(script)
    assert script.headers["cache-control"] == "private, no-cache"


@attack("a payload without the right for it, by every way to a letter")
def _(target: Target) -> None:
    letter = "/dead-letters/reads/things/0/1"
    for path in (letter, f"{letter}.json", "/dead-letters", "/dead-letters.json", "/find", "/find.json"):
        for query in ("payload", "payload=1&right=payloads", "q=1&payload"):
            check(target.ask(f"GET {path}?{query}", by="bob"))
    assert "secret" in target.ask(f"GET {letter}?payload").text


@attack("an address of another server, in every field")
def _(target: Target) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        url = f"http://127.0.0.1:{other.getsockname()[1]}/"
        for path in (
            "/find?q=",
            "/dead-letters?consumer=",
            "/channels/",
            "/act/pause?kind=consumer&name=",
            "/enter?token=",
        ):
            target.ask(f"GET {path}{url.replace('/', '%2f')}")
        with pytest.raises(BlockingIOError):
            other.accept()


@attack("a line of its own in the log, and words that belong in none")
def _(target: Target) -> None:
    form = {"name": "x\n2026-01-01 [error] forged", "password": "correct horse"}
    assert target.ask("POST /enter", OURS, form, by="eve").status == 403


@attack("the cookie of a console at another port")
def _(target: Target) -> None:
    for name in (COOKIE, f"{COOKIE}_1", f"{COOKIE}_{target.port}0"):
        assert target.ask("GET /actions", {"Cookie": f"{name}={target.cookies['ann']}"}, by="eve").status == 303


@attack("a character that Postgres does not take, in every field of a form")
def _(target: Target) -> None:
    planned = target.plan("pause", PAUSE)
    for name in planned:
        assert target.ask("POST /act/pause", OURS, planned | {name: "a\0b"}).status == 400
    assert target.ask("POST /act/pause", OURS, planned | {"a\0b": ""}).status == 400
    assert target.ask("POST /enter", OURS, {"name": "\0", "password": "\0"}, by="eve").status == 400


@attack("halves of heads, more than there may be connections")
def _(target: Target) -> None:
    halves = [socket.create_connection(("127.0.0.1", target.port), 30) for _ in range(3 * MAX_HEADS)]
    for each in halves:
        with suppress(OSError):  # the oldest have made room
            each.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert target.ask("GET /actions").status == 200
    with suppress(ConnectionResetError):  # it was closed before its half came, or afterwards
        assert halves[0].recv(1) == b""
    for each in halves:
        each.close()


@attack("log-ins at once, more than are compared")
def _(target: Target) -> None:
    form, ask = {"name": "eve", "password": "wrong"}, partial(target.ask, "POST /enter", OURS, by="eve")
    with ThreadPoolExecutor(40) as crowd:
        tried = [crowd.submit(ask, {**form, "name": f"eve{number}"}) for number in range(80)]
        while not all(each.done() for each in tried):
            assert target.ask("GET /static/console.css").status == target.ask("GET /actions").status == 200
    assert {each.result().status for each in tried} == {403, 429}


refused("another protocol on the same connection", 200, ("GET /actions", {
    "Upgrade": "websocket", "Connection": "Upgrade, close", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}))  # fmt: skip


@pytest.mark.parametrize("title", ATTACKS)
def test_the_console_withstands(target: Target, title: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = target.state()

    ATTACKS[title](target)

    assert target.state() == before
    assert [target.ask("GET /actions", by=each).status for each in ("ann", "bob", "eve")] == [200, 200, 303]
    out, err = capfd.readouterr()
    assert not re.search(r"secret|correct horse|once|^.{0,20}\[error\] forged", out + err, re.MULTILINE)
