"""Each page answers in each state, shows a visitor what he may see, and runs nothing that a record holds."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import count
from typing import Any

import pytest
from starlette.testclient import TestClient

from console.conftest import HOSTILE, As, Visitors
from fixtures.roles import UrlFor
from penstock import Pipeline
from penstock.console import make_console, pages
from penstock.console.access import RIGHTS, Visitor
from penstock.console.pages import HIDDEN, LETTERS, PAGES, is_about
from penstock.console.status_sampler import StatusSampler
from penstock.database.connections import Connection
from penstock.operating.doctor import CheckResult, diagnose
from penstock.operating.pausing import pause
from penstock.operating.status import status
from penstock.testing import eventually

LETTER = "/dead-letters/refuses/things/0/1"
PATHS = [
    *(path for path in PAGES if "{" not in path),
    "/channels/things",
    "/channels/index",
    "/channels/jobs",
    "/channels/things/contents",
    "/channels/index/contents",
    "/channels/jobs/contents",
    "/channels/jobs/tenants",
    "/consumers/halts",
    "/consumers/work",
    LETTER,
    f"{LETTER}?payload",
    "/find?q=1",
    "/find?q=things/0+offset+1",
    "/find?q=nobody-has-this-key",
]


class Balanced(HTMLParser):
    """Checks that every element that is opened is closed, and collects what could run or load something."""

    VOID = frozenset({"meta", "link", "input", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.dangerous: list[str] = []
        self.feed(text)
        assert self.open == []

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
        assert self.open.pop() == tag


@pytest.mark.usefixtures("scene")
def test_every_page_shows_a_hostile_key_harmlessly(see_as: As, connection: Connection) -> None:
    client = see_as(*RIGHTS)
    pause(connection, "consumer", "search", reason=HOSTILE, by="ann")

    shown = {path: client.get(path) for path in PATHS}

    assert {path: answer.status_code for path, answer in shown.items()} == dict.fromkeys(PATHS, 200)
    for answer in shown.values():
        assert Balanced(answer.text).dangerous == []
        assert "<script>alert" not in answer.text
        assert not re.search("[\u202e\x1b]", answer.text)
        untimed = re.sub(r"<time.*?</time>", "", answer.text)  # which may have any number
        assert "49" not in re.findall(r"\{\{.*?\}\}|alert\(1\).*?(49)", untimed)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown[LETTER].text
    assert "secret" in shown[f"{LETTER}?payload"].text
    assert "halted" in shown["/consumers/halts"].text
    assert "paused" in shown["/"].text


@pytest.mark.usefixtures("scene")
def test_older_letters_are_found_though_the_last_one_shown_was_dropped(
    see_as: As, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LETTERS", 1)
    client = see_as(*RIGHTS)
    connection.execute(
        """
        INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at,
                                           reason, attempts, failed_at)
        SELECT consumer, channel, shard, 2, record_id, key, action, object, data, staged_at, reason, attempts, failed_at - interval '1 h'
        FROM penstock.dead_letters
        """
    )
    [older] = re.findall(r'href="(/dead-letters\?after=[^"]+)"', client.get("/dead-letters").text)
    connection.execute('DELETE FROM penstock.dead_letters WHERE "offset" = 1')

    answer = client.get(older)

    assert answer.status_code == 200
    assert "things/0 offset 2" in answer.text
    assert client.get("/dead-letters?after=yesterday").status_code == 400


@pytest.mark.usefixtures("scene")
def test_many_viewers_of_the_doctor_are_one_examination(see_as: As, monkeypatch: pytest.MonkeyPatch) -> None:
    client, calls = see_as(*RIGHTS), count()

    def counted(*args: Any, **options: Any) -> list[CheckResult]:
        next(calls)
        return diagnose(*args, **options)

    monkeypatch.setattr(pages, "diagnose", counted)

    assert {client.get(path).status_code for path in ("/doctor", "/doctor.json", "/doctor")} == {200}
    assert next(calls) == 1


@pytest.mark.usefixtures("scene")
def test_a_visitor_without_the_right_sees_no_key_no_reason_and_no_payload_anywhere(
    see_as: As, connection: Connection
) -> None:
    client = see_as("see")
    pause(connection, "consumer", "search", reason="said of nobody", by="ann")

    for path in PATHS:
        if "nobody" in path:
            continue
        bare, _, query = path.partition("?")
        json_path = ("/index" if bare == "/" else bare) + ".json" + (f"?{query}" if query else "")
        for address in (path, json_path):
            answer = client.get(address)
            assert answer.status_code == 200, address
            for secret in ("alert", "said of", "secret"):
                assert secret not in answer.text, address
    assert HIDDEN in client.get(LETTER).text
    assert "ValueError" in client.get(LETTER).text
    assert client.get("/find?q=some-key").status_code == 400
    see_as("see", "keys")
    assert "said of" in client.get(LETTER).text
    assert "secret" not in client.get(f"{LETTER}?payload").text


@pytest.mark.usefixtures("scene")
def test_a_login_that_reads_no_payloads_is_enough_for_every_page(
    flow: Pipeline, database_url_for: UrlFor, redis_url: str
) -> None:
    visitors = Visitors()
    visitors.visitor = Visitor("ann", RIGHTS)
    made = make_console(flow, database_url_for("a_monitor"), redis_url, access=visitors)
    client = TestClient(made)

    shown = {path: client.get(path) for path in PATHS}
    made.close()

    refused = shown.pop(f"{LETTER}?payload")
    assert {path: answer.status_code for path, answer in shown.items()} == dict.fromkeys(shown, 200)
    assert refused.status_code == 400
    assert "secret" not in refused.text


def test_whoever_may_not_see_sees_nothing(see_as: As) -> None:
    for client in (see_as(), see_as("keys", "payloads")):
        for path in PATHS:
            assert client.get(path).status_code in {401, 403}, path
            assert client.get("/index.json").status_code in {401, 403}


@pytest.mark.usefixtures("scene")
def test_the_json_beside_a_page_is_what_the_command_prints(see_as: As) -> None:
    client = see_as(*RIGHTS)

    overview = json.loads(client.get("/index.json").text)
    letters = json.loads(client.get("/dead-letters.json?consumer=refuses").text)

    assert {each["consumer"] for each in overview["consumers"]} == {"applies", "halts", "refuses", "search", "work"}
    assert [(each["consumer"], each["shard"], each["offset"]) for each in letters["letters"]] == [("refuses", 0, 1)]
    assert [(each["error"], each["letters"]) for each in letters["groups"]] == [("ValueError", 1)]


@pytest.mark.usefixtures("scene")
def test_a_page_that_has_not_changed_is_not_sent_again(see_as: As) -> None:
    client = see_as(*RIGHTS)
    first = client.get("/consumers/applies")

    again = client.get("/consumers/applies", headers={"If-None-Match": first.headers["etag"]})

    assert (again.status_code, again.content) == (304, b"")


def test_an_empty_pipeline_says_what_to_do_next(see_as: As) -> None:
    client = see_as(*RIGHTS)

    texts = {
        path: client.get(path).text for path in PATHS if "{" not in path and path.count("/") == 1 and "?" not in path
    }

    assert "penstock run" in texts["/"]
    assert "penstock reconcile" in texts["/reconciliations"]
    assert "Nothing was done here yet" in texts["/actions"]
    assert "There is none" in texts["/dead-letters"]
    assert client.get("/consumers/nobody").status_code == 404
    assert client.get("/channels/nothing.json").json()["error"].startswith("no channel")


def test_a_server_that_is_away_is_named_and_the_page_goes_on_asking(
    flow: Pipeline, redis_url: str, database_url: str
) -> None:
    away = "redis://127.0.0.1:1/0"
    visitors = Visitors()
    visitors.visitor = Visitor("ann", RIGHTS)

    without_redis = make_console(flow, database_url, away, access=visitors)
    without_postgres = make_console(flow, "postgresql://nobody@127.0.0.1:1/none", redis_url, access=visitors)
    shown = TestClient(without_redis).get("/")
    missing = TestClient(without_postgres).get("/")
    without_redis.close()
    without_postgres.close()

    assert shown.status_code == 200
    assert "records wait in Postgres" in shown.text
    assert missing.status_code == 503
    assert "data-live" in missing.text
    assert "Postgres" in missing.text


def test_a_consumers_page_gives_the_advice_of_the_overview(see_as: As, connection: Connection, scene: int) -> None:
    client = see_as(*RIGHTS)
    connection.execute(
        'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, '
        "reason, attempts) VALUES ('halts', 'things', 1, 1, %s, 'k', 'a', 'o', '1', now(), 'ValueError', 1)",
        (scene,),
    )
    connection.execute(
        "INSERT INTO penstock.checkpoints (consumer, channel, shard, \"offset\", epoch) VALUES ('halts', 'things', 1, 1, 1) "
        "ON CONFLICT DO NOTHING"
    )
    advice = "penstock dead-letters retry halts --all, and penstock reset checkpoint halts --resume --apply"

    assert advice in client.get("/").text
    assert advice in client.get("/consumers/halts").text
    assert is_about("a", "consumer a is paused")
    assert not is_about("a", "consumer b-a, a_b and aa are paused")


def test_the_reader_survives_any_error(
    flow: Pipeline, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([RuntimeError("once")])

    def fail_once(*arguments: Any) -> Any:
        for error in failures:
            raise error
        return status(*arguments)

    monkeypatch.setattr("penstock.operating.status.gathering.status", fail_once)
    sampler = StatusSampler(flow, database_url, redis_url)

    assert sampler.look().status is None
    eventually(lambda: sampler.look().status is not None, "the next sample")
    sampler.close()


def test_viewers_share_one_reader(flow: Pipeline, database_url: str, redis_url: str) -> None:
    sampler = StatusSampler(flow, database_url, redis_url)

    found = [sampler.look() for _ in range(50)]
    sampler.close()

    assert found[0].status is not None
    assert sampler.samples <= 2
    assert len({id(each) for each in found}) <= 2


def test_a_rate_is_of_the_last_minute(
    flow: Pipeline, database_url: str, redis_url: str, connection: Connection, streamer: object
) -> None:
    sampler = StatusSampler(flow, database_url, redis_url)
    first = sampler.look()
    eventually(lambda: len(sampler.look().recent) >= 2, "the second sample")
    sampler.close()

    assert first.rate("sequenced", "things") is None
    assert sampler.look().rate("sequenced", "things") == 0.0
    sampler.close()


def test_every_template_is_used_and_nothing_is_loaded_from_elsewhere() -> None:
    home = files("penstock.console")
    used = {page.template for page in PAGES.values()} | {"plan.html", "enter.html", "error.html"}
    for template in (home / "templates").iterdir():
        text = template.read_text()
        used |= set(re.findall(r'{% (?:include|extends|import) "([^"]+)"', text))
        assert not re.search(r"https?:|//", text.replace("//}", "")), template
    assert {each.name for each in (home / "templates").iterdir()} == used
    script = (home / "static" / "console.js").read_text()
    assert "innerHTML" not in script
    assert LETTERS <= 200
