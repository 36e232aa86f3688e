"""An action shows its plan first, is done by those with the right if that is still the plan, and is in the log."""

import re
import shlex
from html import unescape
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from starlette.testclient import TestClient

from console.conftest import HOSTILE, As, Visitors
from fixtures.constants import SetConstants
from penstock import Pipeline
from penstock.console import Visitor, make_console
from penstock.console.access import RIGHTS, Right
from penstock.console.actions import ACTIONS
from penstock.console.reading import HIDDEN
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.declaring.outcomes import RESERVED
from penstock.operating.jobs.changes import cancel_jobs
from penstock.operating.pausing import list_actions, pause

LETTER = {"consumer": "refuses", "channel": "things", "shard": "0", "offset": "1"}
GIVEN: dict[str, dict[str, str]] = {
    "pause": {"kind": "consumer", "name": "applies", "reason": "a deploy"},
    "resume": {"kind": "channel", "name": "jobs"},
    "run": {"name": "sweep"},
    "go-on": {"name": "halts"},
    "retry": LETTER,
    "retry-all": {"consumer": "refuses", "error": "ValueError"},
    "drop": {**LETTER, "confirm": "refuses"},
    "drop-all": {"consumer": "refuses", "confirm": "refuses"},
    "cancel": {"channel": "jobs", "tenant": "k", "confirm": "jobs"},
    "retry-jobs": {"channel": "jobs", "tenant": "later"},
    "move-due": {"channel": "jobs", "tenant": "k", "due": "2h"},
    "limit": {"channel": "jobs", "key": "k", "in_flight": "2", "rate": "0.5", "is_paused": "on", "weight": ""},
}

STAGE_JOB = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT channel, shard, key, action, object, data, headers FROM penstock.staged_records WHERE channel = 'jobs'
"""

pytestmark = pytest.mark.usefixtures("scene")

STAGE_LATER = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
VALUES ('jobs', 0, 'later', 'message', 'thing', '1', jsonb_build_object(%s::text, '{"delay_ms": 3600000}'::jsonb))
"""


def prepare(connection: Connection) -> None:
    """Something to resume, and a job to retry."""
    pause(Store(connection), "channel", "jobs", reason="before", by="bob")
    connection.execute(STAGE_LATER.encode(), (RESERVED,))


def plan(client: TestClient, action: str, given: dict[str, str]) -> dict[str, str]:
    """The fields of the plan's form."""
    answer = client.get(f"/act/{action}", params=given)
    assert answer.status_code == 200, answer.text
    [address] = re.findall(r'<form class="wide" method="post" action="\?([^"]*)">', answer.text)
    [digest] = re.findall(r'<input type="hidden" name="digest" value="([^"]*)">', answer.text)
    return dict(parse_qsl(unescape(address), keep_blank_values=True)) | {"digest": digest}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_is_done_once_it_was_planned_and_confirmed(see_as: As, connection: Connection, action: str) -> None:
    client, given = see_as(*RIGHTS), GIVEN[action]
    prepare(connection)

    without_plan = client.post(f"/act/{action}", data=given)
    fields = plan(client, action, given)
    before = done(connection)
    answer = client.post(f"/act/{action}", data=given | fields)

    assert without_plan.status_code == 409
    assert answer.status_code == 303, answer.text
    assert client.get(answer.headers["location"]).status_code == 200
    assert before != done(connection)
    [noted] = list_actions(Store(connection))
    assert (noted.done_by, noted.command.split()[0]) == ("ann", "penstock")
    assert noted.title in client.get("/actions").text
    assert action != "cancel" or noted.title == "Cancel the jobs of a tenant in jobs"  # which one needs a right


def done(connection: Connection) -> list[tuple[object, ...]]:
    """What the actions change."""
    return connection.execute(
        """
        SELECT (SELECT array_agg(kind || name ORDER BY 1) FROM penstock.pauses),
               (SELECT count(halted) FROM penstock.checkpoints),
               (SELECT count(*) FROM penstock.dead_letters),
               (SELECT count(retry_requested_at) FROM penstock.dead_letters),
               (SELECT count(*) FROM penstock.cancellations),
               (SELECT array_agg(headers::text ORDER BY id) FROM penstock.staged_records),
               (SELECT array_agg(name || limits ORDER BY 1) FROM penstock.queue_limits),
               (SELECT array_agg(name || next_at ORDER BY 1) FROM penstock.schedules)
        """
    ).fetchall()


def test_a_schedule_is_paused_resumed_and_run_on_its_page(see_as: As, connection: Connection) -> None:
    client, given = see_as(*RIGHTS), {"kind": "schedule", "name": "sweep"}
    offered = []
    for action, more in (("pause", {"reason": "a deploy"}), ("resume", {}), ("run", {})):
        offered.append(re.findall(r"/act/(\w+)\?(?:kind=schedule&amp;)?name=sweep", client.get("/schedules").text))
        answer = client.post(f"/act/{action}", data=given | more | plan(client, action, given | more))
        assert (answer.status_code, answer.headers.get("location")) == (303, "/schedules"), answer.text

    assert offered == [["pause", "run"], ["resume"], ["pause", "run"]]
    assert [action.command for action in list_actions(Store(connection))] == [
        "penstock schedules run sweep",
        "penstock schedules resume sweep",
        "penstock schedules pause sweep --reason 'a deploy'",
    ]
    assert "/act/" not in see_as("see", "drop").get("/schedules").text


ANOTHER_LETTER = """
INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts)
VALUES ('refuses', 'things', 0, 2, 7, 'k', 'insert', 'thing', '1', now(), 'ValueError: no', 1)
"""
CHANGED = {
    "resume": "UPDATE penstock.pauses SET reason = 'another one'",
    "go-on": 'UPDATE penstock.checkpoints SET "offset" = 7 WHERE halted IS NOT NULL',
    "retry": "UPDATE penstock.dead_letters SET retry_requested_at = now()",
    "retry-all": ANOTHER_LETTER,
    "drop": "UPDATE penstock.dead_letters SET record_id = record_id + 1",
    "limit": "INSERT INTO penstock.queue_limits (channel, kind, name, limits) VALUES ('jobs', 'key', 'k', '{\"rate\": 5}')",
}
"""What others do between the plan and the act; the plans of all other actions say the same in every state."""


@pytest.mark.parametrize("action", CHANGED)
def test_what_has_changed_since_its_plan_is_planned_again(see_as: As, connection: Connection, action: str) -> None:
    client, given = see_as(*RIGHTS), GIVEN[action]
    prepare(connection)
    fields = plan(client, action, given)
    connection.execute(CHANGED[action].encode())
    before = done(connection)
    answer = client.post(f"/act/{action}", data=given | fields)

    assert answer.status_code == 409
    assert "Here is the new one." in answer.text
    assert (done(connection), list_actions(Store(connection))) == (before, [])
    assert client.post(f"/act/{action}", data=given | plan(client, action, given)).status_code == 303


def test_a_cancellation_of_many_takes_no_more_than_its_plan_says(
    see_as: As, connection: Connection, set_constants: SetConstants
) -> None:
    """Over two pages of jobs; one that is done meanwhile, the newest, is no other plan."""
    set_constants("console.actions", MAX_CHOSEN=501)
    connection.execute(f"{STAGE_JOB} AND key = 'k' LIMIT 1".encode())
    for _ in range(9):
        connection.execute(f"{STAGE_JOB} AND key = 'k'".encode())
    client, given = see_as(*RIGHTS), GIVEN["cancel"]
    shown = client.get("/act/cancel", params=given).text
    assert "501 jobs now." in shown
    assert "A plan takes up to 501; make another plan for the others." in shown
    fields = plan(client, "cancel", given)
    newest = (
        "SELECT id FROM penstock.staged_records WHERE channel = 'jobs' AND key = 'k' ORDER BY id LIMIT 1 OFFSET 500"
    )
    connection.execute(f"DELETE FROM penstock.staged_records WHERE id = ({newest})".encode())
    assert client.post("/act/cancel", data=given | fields).status_code == 303

    assert connection.execute("SELECT count(*) FROM penstock.cancellations").fetchall() == [(500,)]


@pytest.mark.parametrize("action", ["resume", "run"])
def test_an_action_that_fails_is_not_noted(see_as: As, connection: Connection, action: str) -> None:
    client, given = see_as(*RIGHTS), GIVEN[action]
    prepare(connection)
    fields = plan(client, action, given)
    connection.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$")
    for table in ("pauses", "schedules"):
        connection.execute(f"CREATE TRIGGER no BEFORE DELETE OR UPDATE ON penstock.{table} EXECUTE FUNCTION refuse()")
    before = done(connection)

    assert client.post(f"/act/{action}", data=given | fields).status_code >= 500
    assert (done(connection), list_actions(Store(connection))) == (before, [])


def test_jobs_are_chosen_by_what_redis_knows_and_moved_into_the_future(see_as: As, connection: Connection) -> None:
    client, given = see_as(*RIGHTS), GIVEN["move-due"] | {"state": "waiting"}
    assert "1 job now." in client.get("/act/cancel", params=GIVEN["cancel"] | {"state": "waiting"}).text
    assert client.get("/act/run", params={"name": "nope"}).status_code == 404
    assert client.post("/act/move-due", data=given | plan(client, "move-due", given)).status_code == 303

    due = "SELECT (headers -> %s ->> 'due')::bigint / 1000 - extract(epoch FROM now()) FROM penstock.staged_records"
    [(after_s,)] = connection.execute(f"{due} WHERE channel = 'jobs' AND key = 'k'".encode(), (RESERVED,)).fetchall()
    assert 7100 < after_s <= 7200


MANY_LETTERS = """
INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts,
                                   later_shard, later_offset)
SELECT 'refuses', 'things', n % 2, 100 + n, n, 'k' || n, 'insert', 'thing', '1', now(), 'ValueError: no', 1,
       CASE WHEN n <= 7 THEN 0 END, CASE WHEN n <= 7 THEN 9000 ELSE 0 END
FROM generate_series(1, 2500) AS n
"""


def test_a_retry_of_all_takes_all_that_its_plan_counts_in_batches(see_as: As, connection: Connection) -> None:
    connection.execute(MANY_LETTERS.encode())
    client, given = see_as(*RIGHTS), GIVEN["retry-all"]
    fields = plan(client, "retry-all", given)
    answer = client.post("/act/retry-all", data=given | fields)

    assert answer.status_code == 303, answer.text
    requested = (
        "SELECT count(*), count(DISTINCT retry_requested_at) > 2, "
        "array_agg(DISTINCT shard ORDER BY shard) FROM penstock.dead_letters WHERE retry_requested_at IS NOT NULL"
    )
    assert connection.execute(requested.encode()).fetchall() == [(2494, True, [0, 1])]
    assert [each.title for each in list_actions(Store(connection))] == ["Retry 2,494 dead letters of refuses"]
    left_alone = (
        "SELECT count(*) FROM penstock.dead_letters WHERE retry_requested_at IS NULL AND later_shard IS NOT NULL"
    )
    assert connection.execute(left_alone.encode()).fetchall() == [(7,)]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_plan_is_carried_out_once(see_as: As, connection: Connection, action: str) -> None:
    """Sent again, by a reload or by the button back, it is another plan: what it did may have been undone on purpose."""
    prepare(connection)
    client, given = see_as(*RIGHTS), GIVEN[action]
    fields = given | plan(client, action, given)
    assert client.post(f"/act/{action}", data=fields).status_code == 303
    for statement in UNDONE:
        connection.execute(statement.encode())
    state = done(connection)

    answer = client.post(f"/act/{action}", data=fields)

    assert answer.status_code in {404, 409}, answer.text
    assert done(connection) == state
    assert len(list_actions(Store(connection))) == 1


UNDONE = (
    "DELETE FROM penstock.pauses WHERE kind = 'consumer'",
    "UPDATE penstock.dead_letters SET retry_requested_at = NULL",
    "DELETE FROM penstock.cancellations",
    "DELETE FROM penstock.queue_limits",
    "UPDATE penstock.checkpoints SET halted = 'LookupError' WHERE consumer = 'halts' AND shard = 0",
)
"""What others do after an action, so that its plan would be the same again."""


def test_the_log_has_the_reason_of_a_pause_for_those_who_may_see_reasons(see_as: As, connection: Connection) -> None:
    client, given = see_as(*RIGHTS), GIVEN["pause"] | {"reason": "it's a $(deploy)"}
    client.post("/act/pause", data=given | plan(client, "pause", given))
    again = given | {"reason": "and another"}
    shown = client.get("/act/pause", params=again).text
    client.post("/act/pause", data=again | plan(client, "pause", again))

    commands = [shlex.split(each.command) for each in list_actions(Store(connection))]
    assert commands == [
        ["penstock", "consumers", "pause", "applies", "--reason", reason]
        for reason in ("and another", "it's a $(deploy)")
    ]
    assert "It is paused already, and only the reason changes" in shown
    assert re.search('name="reason" required .* value="and another"', shown)
    assert "deploy" in client.get("/actions").text
    assert "deploy" not in see_as("see").get("/actions").text


@pytest.mark.slow
def test_without_its_right_an_action_is_neither_planned_nor_done(see_as: As, connection: Connection) -> None:
    prepare(connection)
    before = done(connection)

    for action, given in GIVEN.items():
        fields = plan(see_as(*RIGHTS), action, given)
        rights: set[Right] = {*RIGHTS} - {ACTIONS[action].right}
        for client in (see_as(*rights), see_as(ACTIONS[action].right), see_as()):
            assert client.get(f"/act/{action}", params=given).status_code in {401, 403}
            assert client.post(f"/act/{action}", data=given | fields).status_code in {401, 403}

    for action in ("cancel", "limit"):  # they name a tenant, a key
        assert see_as("see", ACTIONS[action].right).get(f"/act/{action}", params=GIVEN[action]).status_code == 403
    assert {*GIVEN} == {*ACTIONS}
    assert done(connection) == before
    assert list_actions(Store(connection)) == []


def test_a_halt_that_names_another_way_does_not_simply_go_on(see_as: As, connection: Connection) -> None:
    """The effects are in the database, and would be doubled."""
    connection.execute(
        "UPDATE penstock.checkpoints SET halted = 'it committed, then: penstock reset checkpoint halts --to 1 --resume' "
        "WHERE consumer = 'halts' AND halted IS NOT NULL"
    )

    answer = see_as(*RIGHTS).get("/act/go-on", params={"name": "halts"})

    assert answer.status_code == 400
    assert "needs another command" in answer.text


def test_the_command_of_a_plan_means_the_same_in_a_shell(see_as: As, connection: Connection) -> None:
    given = {"consumer": "refuses", "error": "not $(one) word"}
    connection.execute("UPDATE penstock.dead_letters SET reason = 'not $(one) word: no' WHERE consumer = 'refuses'")
    client = see_as(*RIGHTS)

    answer = client.post("/act/retry-all", data=given | plan(client, "retry-all", given))

    assert answer.status_code == 303, answer.text
    [noted] = list_actions(Store(connection))
    assert shlex.split(noted.command)[-2:] == ["--error", "not $(one) word"]
    assert "$(" not in noted.command.replace("'not $(one) word'", "")


def test_a_job_is_cancelled_from_the_page_of_its_queue(
    see_as: As, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noted first: many jobs are cancelled in several transactions."""
    noted: list[Any] = []

    def cancel(*arguments: Any) -> Any:
        noted.extend(connection.execute("SELECT title FROM penstock.actions"))
        return cancel_jobs(*arguments)

    monkeypatch.setattr("penstock.console.actions.cancel_jobs", cancel)
    [(job,)] = connection.execute("SELECT id FROM penstock.staged_records WHERE channel = 'jobs'").fetchall()
    client = see_as(*RIGHTS)
    [given] = re.findall(r"/act/cancel\?channel=(jobs)&amp;id=(\d+)", client.get("/channels/jobs/contents").text)
    assert given == ("jobs", str(job))
    fields = {"channel": "jobs", "id": str(job)}

    answer = client.post("/act/cancel", data=fields | plan(client, "cancel", fields) | {"confirm": "jobs"})

    assert answer.headers["location"] == "/jobs?queue=jobs"
    assert noted == [(f"Cancel job {job} of jobs",)]
    assert connection.execute("SELECT record_id FROM penstock.cancellations").fetchall() == [(job,)]
    assert "penstock jobs cancel jobs" in client.get("/actions").text
    assert "penstock jobs cancel jobs" not in see_as("see").get("/actions").text


def test_limits_that_were_set_are_taken_back_from_the_page_that_lists_them(see_as: As, connection: Connection) -> None:
    client, given = see_as(*RIGHTS), {"channel": "jobs", "key": HOSTILE, "rate": "0.5", "is_paused": "on", "bytes": "9"}
    assert client.post("/act/limit", data=given | plan(client, "limit", given)).status_code == 303
    assert connection.execute("SELECT kind, name, limits FROM penstock.queue_limits").fetchall() == [
        ("key", HOSTILE, {"rate": 0.5, "is_paused": True})
    ]
    [noted] = list_actions(Store(connection))
    assert shlex.split(noted.command)[4:] == ["--key", HOSTILE, "--rate", "0.5", "--pause", "--apply"]
    [link] = re.findall(r'href="(/act/limit[^"]+)"', client.get("/channels/jobs/limits").text)

    answer = client.post("/act/limit", data=plan(client, "limit", dict(parse_qsl(urlsplit(unescape(link)).query))))

    assert answer.headers["location"] == "/channels/jobs/limits"
    assert connection.execute("SELECT FROM penstock.queue_limits").fetchall() == []
    assert see_as("see").get("/actions").text.count(HIDDEN) == 2


def test_what_destroys_asks_for_its_name(see_as: As, connection: Connection) -> None:
    client = see_as(*RIGHTS)
    fields = plan(client, "drop", LETTER)

    answer = client.post("/act/drop", data=LETTER | fields | {"confirm": "yes"})

    assert answer.status_code == 409
    assert "type refuses to confirm" in answer.text
    assert connection.execute("SELECT count(*) FROM penstock.dead_letters").fetchall() == [(1,)]


def test_a_reason_that_is_refused_is_told_and_nothing_is_noted(see_as: As, connection: Connection) -> None:
    client = see_as(*RIGHTS)
    given = GIVEN["pause"] | {"reason": " "}

    answer = client.post("/act/pause", data=given | plan(client, "pause", given))

    assert answer.status_code == 400
    assert "a reason of 1 to 500 characters" in answer.text
    assert list_actions(Store(connection)) == []


NOTHING: list[tuple[str, dict[str, str], int]] = [
    ("pause", {}, 400),
    ("pause", {"kind": "shard", "name": "x"}, 400),
    ("pause", {"kind": "consumer", "name": "x; curl evil"}, 404),
    ("resume", {"kind": "consumer", "name": "applies"}, 404),
    ("go-on", {"name": "applies"}, 404),
    ("go-on", {"name": "nobody"}, 404),
    ("drop", {**LETTER, "offset": "2"}, 404),
    ("drop", {**LETTER, "offset": "-1"}, 400),
    ("drop", {**LETTER, "shard": "x"}, 400),
    ("limit", {"channel": "jobs", "rate": "1"}, 400),
    ("limit", {"channel": "jobs", "key": "", "rate": "nan"}, 400),
    ("limit", {"channel": "jobs", "key": "", "burst": "1.5"}, 400),
    ("limit", {"channel": "jobs", "key": "k", "bytes": "9"}, 404),
    ("limit", {"channel": "things", "key": "k", "rate": "1"}, 404),
]


def test_an_action_on_nothing_is_told(see_as: As) -> None:
    client = see_as(*RIGHTS)
    answered = [(action, given, client.get(f"/act/{action}", params=given).status_code) for action, given, _ in NOTHING]

    assert answered == NOTHING


def test_without_a_login_for_acting_no_button_is_shown_and_nothing_is_done(
    flow: Pipeline, database_url: str, redis_url: str, connection: Connection
) -> None:
    visitors = Visitors()
    visitors.visitor = Visitor("ann", RIGHTS)
    made = make_console(flow, database_url, redis_url, access=visitors)
    client = TestClient(made, headers={"Sec-Fetch-Site": "same-origin"})

    shown = client.get("/consumers/applies").text
    answer = client.post("/act/pause", data=GIVEN["pause"])
    made.close()

    assert "/act/" not in shown
    assert answer.status_code == 400
    assert "--acting-database-url" in answer.text
    assert connection.execute("SELECT FROM penstock.pauses").fetchall() == []
