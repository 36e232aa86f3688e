"""The console is closed by default: who comes in, from where, and under which name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from fixtures.documents import ROOT, run_page
from penstock import Pipeline
from penstock.console import Visitor, make_console
from penstock.console.access import COOKIE, MAX_FAILURES, RIGHTS, Entrance, hash_password, read_users
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


@pytest.mark.parametrize("token", ["", "Once", "once2", "onc\u00e9", "o" * 5000])
def test_another_token_does_not_open(console: Console, token: str) -> None:
    visitor = client(console)

    assert visitor.get("/enter", params={"token": token}).status_code in {200, 403}
    assert visitor.get("/").status_code == 303


def test_a_forged_cookie_and_one_that_has_left_are_nobodys(console: Console) -> None:
    visitor = client(console)
    visitor.cookies.set(COOKIE, "forged")
    assert visitor.get("/").status_code == 303

    visitor.cookies.clear()
    visitor.get("/enter?token=once")
    kept = visitor.cookies[COOKIE]
    visitor.post("/leave")
    visitor.cookies.set(COOKIE, kept)

    assert visitor.get("/").status_code == 303


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.", "", "evil.example:8787", "[::1]", "["]
)
def test_under_another_name_nothing_is_answered(console: Console, host: str) -> None:
    answer = client(console).get("/enter?token=once", headers={"Host": host})

    assert answer.status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "CONSOLE.example", "console.example:443"])
def test_under_a_name_that_was_allowed_it_is(console: Console, host: str) -> None:
    assert client(console).get("/enter", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Origin": CONSOLE},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8788"},
        {},
    ],
)
def test_a_form_of_another_site_changes_nothing(console: Console, headers: dict[str, str]) -> None:
    visitor = TestClient(console, base_url=CONSOLE, follow_redirects=False)
    visitor.get("/enter?token=once")

    assert visitor.post("/leave", headers=headers).status_code == 403
    assert visitor.get("/actions").status_code == 200
    assert visitor.post("/leave", headers={"Origin": CONSOLE}).status_code == 303


def test_every_answer_forbids_what_is_not_ours(console: Console) -> None:
    visitor = client(console)
    answers = [
        visitor.get("/"),
        visitor.get("/enter"),
        visitor.get("/static/console.js"),
        visitor.get("/nothing"),
        visitor.get("/enter", headers={"Host": "evil.example"}),
        visitor.post("/leave", headers={"Sec-Fetch-Site": "cross-site"}),
        visitor.put("/"),
    ]

    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../access.py",
        "/static/%2e%2e/access.py",
        "/static//etc/passwd",
        "/static/parts.html",
        "/channels/..%2f..%2fx",
    ],
)
def test_no_path_leads_to_another_file(console: Console, path: str) -> None:
    visitor = client(console)
    visitor.get("/enter?token=once")

    assert visitor.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/find?q=%00", "/dead-letters?consumer=a%00", "/channels/%00"])
def test_a_character_that_postgres_does_not_have_is_refused(console: Console, path: str) -> None:
    visitor = client(console)
    visitor.get("/enter?token=once")

    assert visitor.get(path).status_code == 400


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


def test_passwords_are_not_tried_for_ever(tmp_path: Path) -> None:
    entrance = Entrance(read_users(write_users(tmp_path / "users.toml")))

    for _ in range(MAX_FAILURES):
        assert entrance.log_in("ann", "wrong", "10.0.0.1") is None

    assert entrance.log_in("ann", "correct horse", "10.0.0.1") is None
    assert entrance.log_in("ann", "correct horse", "10.0.0.2") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[ann]\n", "needs rights"),
        ('[ann]\nrights = "see"\n', "needs rights"),
        ('[ann]\nrights = ["see", "everything"]\n', "unknown rights: everything"),
        ('[ann]\nrights = ["see"]\npassword = "secret"\n', "is no hash"),
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


def test_a_proxys_header_is_believed_from_the_proxy_alone(
    flow: Pipeline, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    users = read_users(write_users(tmp_path / "users.toml"))

    def answer(proxy: str, *headers: tuple[str, str]) -> int:
        entrance = Entrance(users, proxy_header="X-User", proxy=proxy)
        made = make_console(flow, database_url, redis_url, access=entrance, hosts={"127.0.0.1"})
        visitor = TestClient(made, base_url=CONSOLE, client=("10.0.0.7", 1), follow_redirects=False)
        return int(visitor.get("/actions", headers=[*headers]).status_code)

    assert answer("10.0.0.7", ("X-User", "ann")) == 200
    assert answer("10.0.0.7", ("X-User", "eve")) == 401
    assert answer("10.0.0.7") == 401
    assert answer("10.0.0.7", ("X-User", "bob"), ("X-User", "ann")) == 401
    assert answer("10.0.0.8", ("X-User", "ann")) == 401
    assert answer("10.0.0.8", ("X-User", "ann"), ("X-Forwarded-For", "10.0.0.8")) == 401


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
