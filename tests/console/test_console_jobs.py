"""The pages of jobs: filtered, in pages, chosen and changed by one plan, and without what a visitor may not see; and what is exported."""

import csv
import json
import re
from html import unescape
from io import StringIO
from urllib.parse import parse_qsl, urlsplit

import pytest

from console.conftest import As
from console.test_console_actions import plan
from fixtures.constants import SetConstants
from penstock.console.access import RIGHTS
from penstock.console.reading import HIDDEN
from penstock.database.connections import Connection, connect_postgres

pytestmark = pytest.mark.usefixtures("scene")

STAGE_JOBS = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers, created_at)
SELECT 'jobs', 0, CASE WHEN n % 10 = 0 THEN 'few' ELSE 'many' END, 'message', 'thing', '{"secret": "payload"}',
       CASE WHEN n % 1000 = 0 THEN '{"penstock": {"delay_ms": 7200000}}'::jsonb END,
       clock_timestamp() - (n + CASE WHEN n > 2600 THEN 1100 ELSE 0 END) * interval '1 s'
FROM generate_series(1, 10000) AS n
"""
"""None becomes an hour old while a test runs."""

STAGE_ONE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at)
VALUES ('jobs', 0, 'few', 'message', 'thing', '1', now() - interval '2 h')
"""


def cancelled(connection: Connection) -> int:
    return connection.execute("SELECT FROM penstock.cancellations").rowcount


@pytest.mark.slow
def test_ten_thousand_jobs_are_filtered_paged_and_cancelled_by_one_plan(see_as: As, connection: Connection) -> None:
    connection.execute(STAGE_JOBS.encode())
    client = see_as(*RIGHTS)
    ids, cancel = list[str](), ""
    address = "/jobs?queue=jobs&tenant=few&before=1h"
    while address:
        page = client.get(address)
        assert page.status_code == 200
        assert len(page.content) < 100_000
        ids += re.findall(r'name="id" value="(\d+)"', page.text)
        [cancel] = re.findall(r'href="([^"]*)">Cancel all that match', page.text)
        [address] = map(unescape, re.findall(r'<a href="([^"]*)">Next page|$', page.text)[:1])
    expected = connection.execute(
        "SELECT id FROM penstock.staged_records WHERE key = 'few' AND created_at < now() - interval '1 h' ORDER BY id"
    ).fetchall()
    assert len(ids) > 600
    assert ids == [str(id_) for (id_,) in expected]

    given = dict(parse_qsl(urlsplit(unescape(cancel)).query))
    shown = client.get("/act/cancel", params=given).text
    assert f"{len(ids)} jobs now." in shown
    assert "Jobs staged after this plan stay as they are." in shown
    fields = plan(client, "cancel", given)
    connection.execute(STAGE_ONE.encode())
    answer = client.post("/act/cancel", data=fields | {"confirm": "jobs"})

    assert answer.status_code == 303, answer.text
    assert cancelled(connection) == len(ids)
    assert "penstock jobs cancel jobs --tenant few --before" in client.get("/actions").text


def test_chosen_jobs_are_one_plan(see_as: As, connection: Connection) -> None:
    connection.execute(STAGE_JOBS.replace("10000", "20").encode())
    client = see_as(*RIGHTS)
    listed = client.get("/jobs").text
    ids = re.findall(r'name="id" value="(\d+)"', listed)[3:6]
    fields = [("channel", "jobs"), *(("id", id_) for id_ in ids)]
    page = client.get("/act/cancel", params=fields).text
    [digest] = re.findall(r'name="digest" value="([^"]*)"', page)
    [address] = re.findall(r'method="post" action="([^"]*)"', page)

    assert "more in Postgres alone" in listed
    assert ">3 jobs now." in page
    answer = client.post(f"/act/cancel{unescape(address)}", data={"digest": digest, "confirm": "jobs"})
    assert answer.status_code == 303, answer.text
    rows = connection.execute("SELECT record_id FROM penstock.cancellations ORDER BY 1").fetchall()
    assert [str(id_) for (id_,) in rows] == ids


def test_a_later_job_that_is_retried_or_moved_is_due_at_the_time_that_the_plan_says(
    see_as: As, connection: Connection
) -> None:
    connection.execute(STAGE_JOBS.replace("10000", "1000").encode())
    client = see_as(*RIGHTS)
    delayed = re.findall(r'name="id" value="(\d+)"', client.get("/jobs?state=delayed").text)
    assert len(delayed) == 1
    assert "1 delayed: it is due now" in client.get(f"/act/retry-jobs?channel=jobs&id={delayed[0]}").text
    given = {"channel": "jobs", "id": delayed[0], "due": "0s"}
    assert client.post("/act/move-due", data=plan(client, "move-due", given)).status_code == 303

    assert re.findall(r'name="id" value="(\d+)"', client.get("/jobs?state=delayed").text) == []


def test_a_state_is_looked_for_as_long_as_a_page_may_take(
    see_as: As, connection: Connection, set_constants: SetConstants
) -> None:
    connection.execute(STAGE_JOBS.replace("10000", "1200").encode())
    set_constants("console.job_pages", SEARCH_S=0.0)
    client, address, found = see_as("see"), "/jobs?queue=jobs&state=delayed", list[str]()
    for _ in range(5):
        page = client.get(address).text
        found += re.findall(r"/jobs/jobs/(\d+)", page)
        [address] = map(unescape, re.findall(r'<a href="([^"]*)">Next page|$', page)[:1])
        if not address:
            break
        assert "were looked at" in page

    assert len(found) == 1
    assert address == ""


def test_a_visitor_without_keys_sees_no_tenant_and_asks_for_none(see_as: As) -> None:
    hidden, shown = see_as("see").get("/jobs").text, see_as("see", "keys").get("/jobs").text

    assert HIDDEN in hidden
    assert HIDDEN not in shown
    assert see_as("see").get("/jobs?queue=jobs&tenant=k").status_code == 400
    assert see_as("see", "drop").get("/act/cancel?channel=jobs&unique=u").status_code == 403


@pytest.mark.parametrize("page", ["/jobs/jobs/3", "/dead-letters/refuses/things/0/1"])
def test_a_payload_is_shown_by_right_where_it_is_asked_for(see_as: As, page: str) -> None:
    texts = [see_as(*rights).get(f"{page}?payload").text for rights in (("see",), ("see", "payloads"))]

    assert ["secret" in text for text in texts] == [False, True]
    assert "secret" not in see_as("see", "payloads").get(page).text


def test_a_job_that_is_unknown_is_not_found(see_as: As) -> None:
    assert see_as("see").get("/jobs/jobs/99").status_code == 404


def test_rows_are_exported_as_csv_and_as_a_json_object_a_line(see_as: As, connection: Connection) -> None:
    """With the same rights as the page; what a spreadsheet would calculate is quoted."""
    connection.execute("UPDATE penstock.dead_letters SET key = '=1+1'")
    client = see_as("see", "keys")
    page, table, lines = (client.get(f"/dead-letters.{kind}?consumer=refuses") for kind in ("json", "csv", "ndjson"))

    [row] = csv.DictReader(StringIO(table.text))
    assert (row["consumer"], row["key"]) == ("refuses", "'=1+1")
    assert [json.loads(line) for line in lines.text.splitlines()] == page.json()["letters"]
    assert "/dead-letters.csv?consumer=refuses" in client.get("/dead-letters?consumer=refuses").text
    assert "1+1" not in see_as("see").get("/dead-letters.csv").text
    assert see_as().get("/dead-letters.csv").status_code == 401


def test_schedules_icks_and_workers_have_pages(
    see_as: As, connection: Connection, database_url: str, scene: int
) -> None:
    connection.execute(
        "INSERT INTO penstock.schedules (name, channel, every, timezone, next_at) VALUES "
        "('nightly', 'jobs', '21600s', 'UTC', now() + interval '5 days'), ('weekly', 'jobs', '604800s', 'UTC', NULL)"
    )
    client = see_as("see")
    with connect_postgres(database_url, application="consumer applies"):
        workers = client.get("/workers").text
    schedules, icks = client.get("/schedules").text, client.get("/icks").text

    assert "/consumers/applies" in workers
    assert "nightly skips times" in schedules
    assert "<td>6h</td>" in schedules
    assert "nightly skips times" in client.get("/").text
    assert re.search(r'/channels/index">index</a></th><td class="n">1</td>\s*<td class="n">1</td>', icks)
