"""Who comes in, from where, and under which name.  ``test_console_attacks`` has who does not."""

from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from fixtures.clocks import Clock
from fixtures.constants import SetConstants
from fixtures.documents import ROOT, run_page
from penstock import Pipeline
from penstock.console import Visitor, make_console
from penstock.console.access import (
    COOKIE,
    MAX_FAILURES,
    RIGHTS,
    SESSION_S,
    Entrance,
    Sessions,
    User,
    hash_password,
    read_users,
)
from penstock.console.serving import served
from penstock.console.web_application import Console
from penstock.errors import InvalidSetting

CONSOLE = "http://127.0.0.1:8787"
SAME = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def entrance() -> Entrance:
    return Entrance(token="once")


@pytest.fixture
def console(flow: Pipeline, entrance: Entrance, database_url: str, redis_url: str) -> Console:
    return make_console(flow, database_url, redis_url, access=entrance, hosts={"127.0.0.1", "console.example"})


def client(console: Console, host: str = "127.0.0.1:8787") -> TestClient:
    return TestClient(console, base_url=f"http://{host}", follow_redirects=False, headers=SAME)


def test_a_link_works_once_and_its_cookie_is_for_this_site_alone(console: Console) -> None:
    first, second = client(console), client(console)

    entered = first.get("/enter?token=once")
    again = second.get("/enter?token=once")

    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert first.get("/actions").status_code == 200
    assert (again.status_code, "was used already" in again.text) == (403, True)
    assert second.get("/").headers["location"] == "/enter"
    assert second.get("/index.json").status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "CONSOLE.example", "console.example:443"])
def test_under_a_name_that_was_allowed_it_is(console: Console, host: str) -> None:
    assert client(console).get("/enter", headers={"Host": host}).status_code == 200


def test_a_probe_is_answered_under_any_name_and_without_a_server(flow: Pipeline) -> None:
    nowhere = make_console(
        flow, "postgresql://127.0.0.1:1/d", "redis://127.0.0.1:1", access=lambda _: None, hosts={"127.0.0.1"}
    )
    answer = client(nowhere).get("/healthz", headers={"Host": "10.1.2.3:8787"})

    assert (answer.status_code, answer.text) == (200, "ok\n")
    assert client(nowhere).get("/", headers={"Host": "10.1.2.3:8787"}).status_code == 421


def test_below_the_path_of_a_proxy_links_and_cookies_have_it(console: Console) -> None:
    with served(console, root_path="/penstock") as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as browser:
        entered = browser.get("/enter?token=once")
        cookie = entered.headers["set-cookie"].partition(";")[0]
        shown = browser.get("/actions", headers={"Cookie": cookie})

    assert entered.headers["location"] == "/penstock/"
    assert "path=/penstock/" in entered.headers["set-cookie"].lower()
    assert shown.status_code == 200
    assert 'href="/penstock/jobs"' in shown.text
    assert 'href="/jobs"' not in shown.text


def test_a_form_of_ours_is_taken_from_a_browser_that_sends_no_more_than_its_origin(console: Console) -> None:
    visitor = TestClient(console, base_url=CONSOLE, follow_redirects=False)

    assert visitor.post("/leave", headers={"Origin": CONSOLE}).status_code == 303


def write_users(path: Path, mode: int = 0o600) -> Path:
    path.write_text(
        f'[ann]\nrights = ["see", "keys"]\npassword = "{hash_password("correct horse")}"\n\n[bob]\nrights = ["see"]\n'
    )
    path.chmod(mode)
    return path


def test_users_come_in_by_name_and_password_with_their_rights(
    flow: Pipeline, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    entrance = Entrance(read_users(write_users(tmp_path / "users.toml")))
    visitor = client(make_console(flow, database_url, redis_url, access=entrance, hosts={"127.0.0.1"}))

    wrong = visitor.post("/enter", data={"name": "ann", "password": "wrong"})
    nobody = visitor.post("/enter", data={"name": "eve", "password": "correct horse"})
    without = visitor.post("/enter", data={"name": "bob", "password": ""})
    right = visitor.post("/enter", data={"name": "ann", "password": "correct horse"})

    assert [each.status_code for each in (wrong, nobody, without, right)] == [403, 403, 403, 303]
    assert visitor.get("/actions").status_code == 200
    assert visitor.get("/act/pause?kind=consumer&name=applies").status_code == 403


@pytest.mark.parametrize(
    ("url", "headers", "is_secure"),
    [
        ("http://127.0.0.1", {}, False),
        ("https://127.0.0.1", {}, True),
        ("http://127.0.0.1", {"X-Forwarded-Proto": "https"}, True),
        ("http://127.0.0.1", {"X-Forwarded-Proto": "http"}, False),
        ("http://127.0.0.1", {"Origin": "https://127.0.0.1"}, True),
        ("http://127.0.0.1", {"Origin": "http://127.0.0.1"}, False),
    ],
)
def test_a_cookie_is_secure_where_the_browser_speaks_tls_also_to_a_proxy(
    url: str, headers: dict[str, str], *, is_secure: bool, flow: Pipeline, database_url: str, redis_url: str
) -> None:
    """And is the console's at this port; redirects are paths, whatever the scheme is."""
    made = make_console(flow, database_url, redis_url, access=Entrance(token="once"), hosts={"127.0.0.1"})
    with TestClient(made, base_url=f"{url}:8800", follow_redirects=False) as visitor:
        entered = visitor.get("/enter?token=once", headers=headers)
        assert entered.headers["set-cookie"].startswith(f"{COOKIE}_8800=")
        assert ("secure" in entered.headers["set-cookie"].lower()) is is_secure
        assert entered.headers["location"] == "/"
        assert visitor.get("/channels/").status_code == 404


def test_log_ins_are_logged_without_what_may_be_a_password(
    flow: Pipeline, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    entrance = Entrance(read_users(write_users(tmp_path / "users.toml")))
    visitor = client(make_console(flow, database_url, redis_url, access=entrance, hosts={"127.0.0.1"}))
    with capture_logs() as logged:
        for name, password in (("ann", "correct horse"), ("ann", "wrong"), ("correct horse", "ann")):
            visitor.post("/enter", data={"name": name, "password": password})

    events = [(each["visitor"], each["refused"]) for each in logged if each["event"] == "log-in"]
    assert events == [("ann", False), ("ann", True), ("unknown", True)]
    assert "correct horse" not in str(logged)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[ann]\n", "needs rights"),
        ('[ann]\nrights = "see"\n', "needs rights"),
        ('[ann]\nrights = ["see", "everything"]\n', "unknown rights: everything"),
        ('[ann]\nrights = ["see"]\npassword = "secret"\n', "is not a hash"),
        ('[ann]\nrights = ["see"]\npassword = "scrypt:secret:secret"\n', "is not a hash"),
        ("ann = 3", "needs rights"),
        ("[ann", "cannot be read"),
    ],
)
def test_a_file_of_users_that_is_not_whole_is_refused_without_its_secrets(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "users.toml"
    path.write_text(text)
    path.chmod(0o600)

    with pytest.raises(InvalidSetting, match=says) as refused:
        read_users(path)

    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidSetting, match="chmod 640"):
        read_users(write_users(path, 0o644))
    with pytest.raises(InvalidSetting, match="cannot be read"):
        read_users(tmp_path / "missing.toml")


PASSWORD = "correct horse"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(clock: Clock) -> Entrance:
    """An entrance for ann, and for bob who has no password."""
    users = {"ann": User(Visitor("ann"), hash_password(PASSWORD)), "bob": User(Visitor("bob"), None)}
    return Entrance(users, sessions=Sessions(clock))


def find_visitor(entrance: Entrance, cookie: str | None) -> Visitor | None:
    return entrance(Request({"type": "http", "headers": [(b"cookie", f"{COOKIE}={cookie}".encode())]}))


def test_a_session_lasts_twelve_hours_and_ends_alone(known: Entrance, clock: Clock) -> None:
    first, second = (known.log_in("ann", PASSWORD, "here") for _ in range(2))
    clock.now += SESSION_S - 1
    assert [find_visitor(known, each) for each in (first, second, "", None, "other")] == [Visitor("ann")] * 2 + [
        None
    ] * 3
    known.sessions.end(Request({"type": "http", "headers": [(b"cookie", f"{COOKIE}={first}".encode())]}))
    assert [find_visitor(known, each) for each in (first, second)] == [None, Visitor("ann")]
    third = known.log_in("ann", PASSWORD, "here")
    clock.now += 1
    known.log_in("ann", PASSWORD, "here")
    assert [find_visitor(known, each) for each in (second, third)] == [None, Visitor("ann")]


def test_failures_of_a_name_from_an_address_are_counted_for_a_minute(known: Entrance, clock: Clock) -> None:
    """Another name, and the same one from elsewhere, are not shut out with it; a success forgets what was before."""

    def can_enter(name: str = "ann", host: str = "here") -> bool:
        return known.log_in(name, PASSWORD, host) is not None

    def fail(count: int) -> None:
        for _ in range(count):
            assert known.log_in("ann", "wrong", "here") is None

    for _ in range(2):
        fail(MAX_FAILURES - 1)
        assert can_enter()
    fail(MAX_FAILURES)
    assert (can_enter(), can_enter(host="there"), can_enter("bob")) == (False, True, False)
    clock.now += 59
    assert not can_enter()
    clock.now += 1
    assert can_enter()


def test_of_many_names_that_failed_the_oldest_is_forgotten(known: Entrance, set_constants: SetConstants) -> None:
    set_constants("console.access", MAX_TRIED=1)
    for host in ("a", "b"):
        for _ in range(MAX_FAILURES):
            known.log_in("ann", "wrong", host)
    assert known.log_in("ann", PASSWORD, "b") is None, "kept"
    known.log_in("ann", "wrong", "c")
    assert known.log_in("ann", PASSWORD, "a") is not None, "forgotten"


@pytest.mark.parametrize(
    ("client", "headers", "name"),
    [
        ("10.0.0.1", ["ann"], "ann"),
        ("10.0.0.2", ["ann"], None),
        (None, ["ann"], None),
        ("10.0.0.1", [], None),
        ("10.0.0.1", ["ann", "ann"], None),
        ("10.0.0.1", ["eve"], None),
        ("10.0.0.1", [""], None),
    ],
)
def test_a_proxy_is_believed_from_its_address_and_names_one_user(
    known: Entrance, client: str | None, headers: list[str], name: str | None
) -> None:
    """A cookie is of no use then."""
    cookie = known.log_in("ann", PASSWORD, "here")
    behind = Entrance(known.users, proxy_header="X-User", proxy="10.0.0.1", sessions=known.sessions)
    given = [(b"x-user", each.encode()) for each in headers]
    request = Request(
        {
            "type": "http",
            "client": None if client is None else (client, 1),
            "headers": [*given, (b"cookie", f"{COOKIE}={cookie}".encode())],
        }
    )

    found = behind(request)

    assert (None if found is None else found.name) == name


def test_rights_are_known_ones() -> None:
    assert Visitor("ann", RIGHTS).may("drop")
    assert not Visitor("ann", frozenset({"drop"})).may("drop")
    with pytest.raises(InvalidSetting, match="unknown rights: all"):
        Visitor("ann", frozenset({"all"}))  # type: ignore[arg-type]  # of a file


def test_an_application_mounts_it_and_says_who_asks(
    database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/how-to/open-the-console.md shows it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    urls = {"postgresql://db/shop": database_url, "redis://redis": redis_url}
    names = run_page("docs/how-to/open-the-console.md", {}, urls)

    def visit(user: object) -> list[int]:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await Starlette(routes=[Mount("/penstock", names["console"])])({**scope, "user": user}, receive, send)

        visitor = TestClient(application, base_url="http://shop.example", follow_redirects=False, headers=SAME)
        answers = [
            visitor.get(f"/penstock{path}") for path in ("/", "/consumers.json", "/static/console.css", "/enter")
        ]
        assert 'href="/penstock/static/console.css"' in answers[0].text
        return [answer.status_code for answer in answers]

    assert visit(SimpleNamespace(name="ann", is_staff=True)) == [200, 200, 200, 404]
    assert visit(SimpleNamespace(name="eve", is_staff=False)) == [401, 401, 200, 404]
    assert visit(None) == [401, 401, 200, 404]
    names["console"].close()


@pytest.mark.usefixtures("scene")
def test_a_framework_that_cuts_its_own_path_off_mounts_it_as_well(
    flow: Pipeline, database_url: str, redis_url: str
) -> None:
    """As Litestar does: the rest of the path ends with a slash, and only ``raw_path`` says where it is mounted."""
    made = make_console(flow, database_url, redis_url, access=lambda _: Visitor("ann", RIGHTS))

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            rest = scope["path"].removeprefix("/inner")
            scope = {**scope, "path": rest if rest.endswith("/") else f"{rest}/", "root_path": ""}
        await made(scope, receive, send)

    inner = TestClient(cut, follow_redirects=False)
    try:
        assert 'href="/inner/channels/things"' in inner.get("/inner/channels").text
        answers = {
            path: inner.get(f"/inner{path}").status_code
            for path in ("", "/", "/channels/things", "/static/console.css")
        }
        assert answers == dict.fromkeys(answers, 200)
    finally:
        made.close()
