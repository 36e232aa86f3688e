"""What single pages show, and how they are read: beside ``test_console_matrix``, which has them all."""

import json
import re
from html import unescape
from importlib.resources import files
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from starlette.testclient import TestClient

from console.conftest import As, Visitors
from console.test_console_matrix import LETTER, PATHS
from fixtures.constants import SetConstants
from fixtures.roles import UrlFor
from penstock import Pipeline
from penstock.console import make_console, reading
from penstock.console.access import COOKIE, RIGHTS, Visitor, cookie_name
from penstock.console.pages import LETTERS, PAGES, is_about
from penstock.console.reading import HIDDEN, Reading
from penstock.console.status_sampler import Sample
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.gathering import status
from penstock.streaming import Streamer


@pytest.mark.usefixtures("scene")
def test_older_letters_are_found_though_the_last_one_shown_was_dropped(
    see_as: As, connection: Connection, set_constants: SetConstants
) -> None:
    set_constants("console.pages", LETTERS=1)
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
def test_dead_letters_are_searched_by_key_by_who_may_see_keys(
    see_as: As, connection: Connection, set_constants: SetConstants
) -> None:
    """Others see them all, and of their errors the class; a page that has all of them leads to no other."""
    set_constants("console.pages", LETTERS=1)

    whole, concealed, other, later = (
        see_as(*rights).get(f"/dead-letters.json?{query}").json()
        for rights, query in (
            (RIGHTS, ""),
            (("see",), "key=other"),
            (RIGHTS, "key=other"),
            (RIGHTS, "after=2026-01-01T00:00:00%20refuses%20things/0%20offset%209"),
        )
    )

    assert [group["error"] for group in whole["groups"]] == ["ValueError"]
    assert [(each["key"], each["reason"]) for each in concealed["letters"]] == [(HIDDEN, "ValueError")]
    assert [group["error"] for group in concealed["groups"]] == ["ValueError"]
    assert (other["letters"], other["groups"]) == ([], [])
    assert later["groups"] == []
    assert "after=" not in see_as(*RIGHTS).get("/dead-letters").text
    connection.execute("UPDATE penstock.dead_letters SET reason = 'said of k, without a class'")
    groups = [see_as(*rights).get("/dead-letters.json").json()["groups"] for rights in (RIGHTS, ("see",))]
    assert [each["error"] for [each] in groups] == ["said of k, without a class", HIDDEN]


@pytest.mark.usefixtures("scene")
def test_what_a_visitor_may_not_see_is_left_out_of_each_sample_anew(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline
) -> None:
    """Kept for all visitors of one sample, and no longer."""
    first = Sample(status(Store(connection), redis_client, flow), None)
    connection.execute("UPDATE penstock.checkpoints SET waiting = 'said of a record'")
    second = Sample(status(Store(connection), redis_client, flow), None)
    samples = [first, first, second, second]
    made = Reading(flow, "", "", SimpleNamespace(look=lambda: samples.pop(0)))  # type: ignore[arg-type]

    shown = [made.status(Visitor("ann", frozenset({"see"})))[1] for _ in range(4)]

    assert [len(each.waiting) > 0 for each in shown] == [False, False, True, True]
    assert {reason for each in shown for _, _, reason in each.waiting} == {HIDDEN}
    assert (shown[0] is shown[1], shown[2] is shown[3]) == (True, True)


@pytest.mark.usefixtures("scene")
def test_the_attempts_at_a_job_are_shown(see_as: As, connection: Connection) -> None:
    [(job,)] = connection.execute("SELECT min(record_ids[1]) FROM penstock.journal WHERE channel = 'jobs'").fetchall()
    times = {"began_at": "2026-01-01T00:00:00+00:00", "ended_at": "2026-01-01T00:00:01+00:00"}
    failed = json.dumps([{"attempt": 1, "worker": "<host>:7", "error": "ValueError", **times}])
    connection.execute("INSERT INTO penstock.job_notes VALUES (%s, 'jobs', %s, 0.4)", [job, failed])

    shown = see_as(*RIGHTS).get(f"/find?q={job}").text

    assert re.search(r"attempt 1</b>.*by &lt;host&gt;:7 .*ValueError", shown)
    assert "progress</b> 40 %" in shown


@pytest.mark.usefixtures("scene")
def test_the_group_of_a_job_is_shown_to_who_may_see_keys(see_as: As, connection: Connection) -> None:
    group = "INSERT INTO penstock.job_groups (name, channel, members, waits_for) VALUES (%s, %s, %s, 1)"
    for name, channel, members in (
        ("elsewhere", "others", [3]),
        ("import-17", "jobs", [2, 3]),
        ("others", "jobs", [2]),
    ):
        connection.execute(group, [name, channel, members])

    shown, concealed = (see_as(*rights).get("/jobs/jobs/3").text for rights in (RIGHTS, ("see",)))

    assert re.search(r"<dt>Group</dt><dd[^>]*>import-17</dd>", shown)
    assert "import-17" not in concealed


@pytest.mark.usefixtures("scene")
def test_the_trace_of_a_job_a_letter_and_a_record_is_a_link_where_the_record_has_one(
    flow: Pipeline, visitors: Visitors, database_url: str, redis_url: str, connection: Connection, scene: int
) -> None:
    visitors.visitor, template = Visitor("ann"), "https://traces.example/trace/{trace_id}?from=penstock"
    console = make_console(flow, database_url, redis_url, access=visitors, trace_url=template)
    client = TestClient(console, base_url="http://console")
    paths = ("/jobs/jobs/3", "/dead-letters/refuses/things/0/1", f"/find?q={scene}")
    link = f'<a href="{template.format(trace_id="a" * 32)}" rel="noreferrer">{"a" * 32}</a>'
    without = [client.get(path).text for path in paths]
    headers = f"coalesce(headers, '{{}}') || '{{\"traceparent\": \"00-{'a' * 32}-{'b' * 16}-01\"}}'"
    connection.execute(f"UPDATE penstock.staged_records SET headers = {headers}".encode())
    linked = [client.get(path).text for path in paths]
    console.close()

    assert ["traces.example" in text for text in without] == [False] * 3
    assert [link in text for text in linked] == [True] * 3


@pytest.fixture
def records(flow: Pipeline, connection: Connection, streamer: Streamer) -> list[str]:
    """Three states of a key, with another key's records between them; the places of all."""
    states = [("k", '{"fare": 1.10, "city": "Rome"}'), ("k", '{"fare": 2.20, "city": "Rome"}'), ("o", '"other"')]
    for key, payload in [*states, ("k", '{"fare": 2.20, "city": "Oslo"}'), ("k", '{"fare": 2.20, "city": "Oslo"}')]:
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 0, %s, 'update', 'ride', %s)",
            (key, payload),
        )
    streamer.drain()
    return [f"things/0 offset {offset}" for offset in range(1, 6)]


def test_the_payload_of_a_record_is_compared_with_the_one_before_it_of_its_key(
    see_as: As, records: list[str], set_constants: SetConstants, redis_client: redis.Redis
) -> None:
    def read(place: str) -> Any:
        return client.get("/find.json", params={"q": place, "payload": ""}).json()["payload"]

    client = see_as("see", "payloads")
    first, second, _, fourth, fifth = map(read, records)
    page = client.get("/find", params={"q": records[3], "payload": ""}).text
    set_constants("console.record_pages", SEARCH_S=0.0)
    late = read(records[3])
    set_constants("console.record_pages", SEARCH_S=3600.0, MAX_LINES=2)
    cut = read(records[3])
    redis_client.xtrim("penstock:{things/0}:log", maxlen=0)
    evicted = read(records[1])
    hidden = see_as("see", "keys").get("/find.json", params={"q": records[3], "payload": ""}).json()["payload"]

    assert (first["previous"], first["changes"]) == (None, [])
    assert second["previous"] == records[0]
    assert second["changes"][1:] == [" {", '   "city": "Rome",', '-  "fare": 1.10', '+  "fare": 2.20', " }"]
    assert [line for line in fourth["changes"] if line[0] in "+-"] == ['-  "city": "Rome",', '+  "city": "Oslo",']
    assert "<pre>{\n  &#34;city&#34;: &#34;Oslo&#34;,\n" in page
    assert "<del>-  &#34;city&#34;: &#34;Rome&#34;,</del>\n<ins>+  &#34;city&#34;: &#34;Oslo&#34;,</ins>\n" in page
    assert (fifth["previous"], fifth["changes"]) == (records[3], [])
    assert (late["previous"], "time was up" in late["note"]) == (None, True)
    assert (cut["payload"].count("\n"), "characters of it are neither shown nor compared" in cut["note"]) == (1, True)
    assert (evicted["payload"], evicted["previous"]) == ('{\n  "city": "Rome",', records[0])
    assert hidden is None


def test_many_viewers_of_the_doctor_are_one_examination(see_as: As, monkeypatch: pytest.MonkeyPatch) -> None:
    client, calls = see_as(*RIGHTS), count()

    def counted(*args: Any, **options: Any) -> list[CheckResult]:
        next(calls)
        return diagnose(*args, **options)

    monkeypatch.setattr(reading, "diagnose", counted)

    assert {client.get(path).status_code for path in ("/doctor", "/doctor.json", "/doctor")} == {200}
    assert next(calls) == 1


@pytest.mark.slow
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
    assert shown.pop("/jobs/jobs/3?payload").status_code == 400
    assert {path: answer.status_code for path, answer in shown.items()} == dict.fromkeys(shown, 200)
    assert refused.status_code == 400
    assert "secret" not in refused.text


@pytest.mark.usefixtures("scene")
def test_the_json_beside_a_page_is_what_the_command_prints(see_as: As) -> None:
    client = see_as(*RIGHTS)

    overview = json.loads(client.get("/index.json").text)
    letters = json.loads(client.get("/dead-letters.json?consumer=refuses").text)

    assert {each["consumer"] for each in overview["consumers"]} == {"applies", "halts", "refuses", "search", "work"}
    assert [(each["consumer"], each["shard"], each["offset"]) for each in letters["letters"]] == [("refuses", 0, 1)]
    assert [(each["error"], each["letters"]) for each in letters["groups"]] == [("ValueError", 1)]


def test_an_unexpected_error_is_named_without_its_text(see_as: As, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may quote a record.  The page tries again."""
    monkeypatch.setattr(Reading, "postgres", lambda _: 1 / 0)
    answer = see_as("see").get("/actions")

    assert (answer.status_code, "division by zero" in answer.text) == (500, False)
    assert "ZeroDivisionError, which Penstock did not expect" in answer.text
    assert "This page retries by itself" in answer.text


@pytest.mark.usefixtures("scene")
def test_whoever_follows_a_log_takes_no_connection_to_postgres(see_as: As, set_constants: SetConstants) -> None:
    client = see_as("see", "keys")
    paths = [f"/channels/{name}/contents" for name in ("things", "index", "jobs")]
    assert client.get(paths[0]).status_code == 200, "the status that all viewers share"
    set_constants("console.status_sampler", WAIT_S=0.0)
    set_constants("console.reading", CONNECTIONS=0)
    answers = [client.get(path) for path in (*paths, "/actions")]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 503]
    assert [" data-live" in answer.text for answer in answers[:3]] == [True] * 3
    assert "things/0 offset 1" in answers[0].text


@pytest.mark.usefixtures("scene")
@pytest.mark.parametrize("name", ["things", "index", "jobs"])
def test_contents_show_keys_and_tenants_to_whom_may_see_them(see_as: As, name: str) -> None:
    shown, hidden = (
        see_as(*rights).get(f"/channels/{name}/contents.json").json() for rights in (("see", "keys"), ("see",))
    )
    named = ("key", "tenant") if name == "jobs" else ("key",)

    assert shown
    assert len(hidden) == len(shown)
    assert all(HIDDEN not in {each[field] for field in named} for each in shown)
    assert all({each[field] for field in named} == {HIDDEN} for each in hidden)


@pytest.mark.usefixtures("scene")
def test_a_page_that_has_not_changed_is_not_sent_again(see_as: As) -> None:
    client = see_as(*RIGHTS)
    first = client.get("/consumers/applies")

    again = client.get("/consumers/applies", headers={"If-None-Match": first.headers["etag"]})

    assert (again.status_code, again.content) == (304, b"")


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


WAY = "penstock reset checkpoint halts --to 'things/0 offset 7' --resume --apply"


@pytest.mark.parametrize(
    ("reason", "shown", "advice"),
    [
        ("it said secret", HIDDEN, "penstock reset checkpoint halts --resume --apply"),
        (f"secret failed, then: {WAY}", f"{HIDDEN}: {WAY}", "then type the command that penstock status shows"),
        (f"secret: {WAY.replace('halts', 'other')}", HIDDEN, "penstock reset checkpoint halts --resume --apply"),
        (f"{WAY.replace('7', 'secret')}", HIDDEN, "penstock reset checkpoint halts --resume --apply"),
    ],
)
@pytest.mark.usefixtures("scene")
def test_who_may_not_see_reasons_is_given_the_command_that_one_names(
    reason: str, shown: str, advice: str, see_as: As, connection: Connection
) -> None:
    """Another command would apply again what is in the database already."""
    update = "UPDATE penstock.checkpoints SET halted = %s WHERE consumer = 'halts' AND shard = 0"
    connection.execute(update, (reason,))
    client = see_as("see")
    for path in ("/", "/consumers/halts"):
        page = unescape(client.get(path).text)
        assert advice in page
        assert "secret" not in page
    assert {each["halted"] for each in client.get("/consumers/halts.json").json()[0]["shards"]} >= {shown}


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


@pytest.mark.usefixtures("scene")
def test_a_dead_letter_is_shown_though_nothing_else_is_left_of_its_record(
    see_as: As, connection: Connection, redis_client: redis.Redis
) -> None:
    path = "/dead-letters/refuses/things/0/1"
    assert "things/0 offset 1" in see_as(*RIGHTS).get(path).text
    for table in ("staged_records", "journal"):
        connection.execute(f"DELETE FROM penstock.{table} WHERE channel = 'things'".encode())
    redis_client.flushall()

    answer = see_as(*RIGHTS).get(path)

    assert answer.status_code == 200
    assert "ValueError" in answer.text


@pytest.mark.usefixtures("scene")
def test_pages_read_how_long_records_took_from_staging_to_effect(see_as: As) -> None:
    [applies] = see_as(*RIGHTS).get("/consumers/applies.json").json()

    assert 0 < applies["shards"][0]["latency_s"] < 60


@pytest.mark.parametrize(
    ("host", "name"),
    [("console:8000", f"{COOKIE}_8000"), ("console", COOKIE), ("", COOKIE), ("console:\u0661\u0662", COOKIE)],
)
def test_consoles_at_ports_of_one_host_have_cookies_of_their_own(host: str, name: str) -> None:
    """A name of a cookie is ASCII, whatever digits a request comes with."""
    request: Any = SimpleNamespace(headers={"host": host})

    assert cookie_name(request) == name
