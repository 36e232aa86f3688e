"""What the console's lists hold and its plans say, of a pipeline that has one of everybody."""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from html import unescape
from typing import Any
from unittest.mock import patch

import pytest
from starlette.testclient import TestClient

from fixtures.constants import SetConstants
from fixtures.crowd import pipeline
from penstock.console import Visitor, make_console
from penstock.console.access import RIGHTS
from penstock.console.pages import MAX_ROWS
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.store import Store
from penstock.operating.pausing import pause
from penstock.operating.tracing.causes import search_key

LETTERS = """
UPDATE penstock.dead_letters SET later_shard = 0, later_offset = 5 WHERE consumer = 'late' AND channel = 'orders' AND "offset" = 2;
UPDATE penstock.dead_letters SET parked = true, retry_requested_at = now() WHERE consumer = 'late' AND channel = 'old' AND "offset" = 3;
UPDATE penstock.dead_letters SET reason = 'KeyError: no' WHERE consumer = 'late' AND channel = 'old' AND "offset" = 1
"""


@pytest.fixture
def client(crowd: None, connection: Connection, database_url: str, redis_url: str) -> Iterator[TestClient]:
    del crowd
    for statement in LETTERS.split(";\n"):
        connection.execute(statement.encode())
    console = make_console(
        pipeline, database_url, redis_url, access=lambda _: Visitor("ann", RIGHTS), acting_database_url=database_url
    )
    yield TestClient(console, base_url="http://console")
    console.close()


def at(consumer: str, channel: str, shard: int, *offsets: int) -> list[str]:
    return [f"{consumer} {channel}/{shard} {offset}" for offset in offsets]


LATE = [*at("late", "old", 0, 3, 2, 1), *at("late", "orders", 1, 1), *at("late", "orders", 0, 2, 1)]
ALL = [
    *at("search", "index", 1, 1),
    *at("reader", "rides@eu", 0, 1),
    *at("halted", "orders", 0, 5, 4, 3, 2, 1),
    *at("gone", "orders", 0, 4, 3, 2, 1),
    *LATE[:3],
    *at("done", "orders", 2, 1),
    *LATE[3:],
]

LISTS: dict[str, Any] = {
    "/channels/orders/contents": [
        *(f"orders/2 offset {offset} orders2-{offset} insert thing" for offset in (3, 2, 1)),
        *(f"orders/1 offset {offset} orders1-{offset} insert thing" for offset in (7, 6, 5, 4, 3, 2, 1)),
        *(f"orders/0 offset {offset} orders0-{offset} insert thing" for offset in (10, 9, 8, 7, 6, 5)),
    ],
    "/channels/jobs/contents": [
        *(f"jobs/0 {job}  a leased {job}" for job in (29, 30)),
        *(f"jobs/0 {job}  a waiting {job}" for job in (31, 32, 33, 34, 35)),
    ],
    "/channels/index/contents": [
        "index/0 index0-1 held",
        "index/0 index0-2 held",
        "index/0 index0-3 dirty",
        "index/1 index1-1 reserved",
        "index/1 index1-2 dirty",
    ],
    "/channels/calm/contents": [],
    "/channels/jobs/tenants": ["a 5 2 ready"],
    "/channels/orders/tenants": "orders is not a queue, and only queues have tenants",
    "/channels/nobody": "no channel 'nobody' is registered",
    "/consumers/nobody": "no consumer 'nobody' is registered",
    "/dead-letters": ALL,
    "/dead-letters?consumer=late": LATE,
    "/dead-letters?consumer=late&channel=orders": LATE[3:],
    "/dead-letters?consumer=late&error=KeyError": LATE[2:3],
    "/dead-letters?key=k&channel=index": ALL[:1],
    "/dead-letters?key=other": [],
    "/dead-letters?error=Value": [],
    "/find?q=%20orders/1+offset+4%20": ["orders/1 offset 4"],
    "/find?q=14": ["orders/1 offset 4"],
    "/find?q=14&key": [],
    "/find?q=orders1-4": ["orders/1 offset 4"],
    "/find?q=k": [f"grown/3 offset {offset}" for offset in (1, 2, 3, 4)],
}


def list_shown(found: Any) -> list[str]:
    """A line for each item of a page's JSON."""
    if isinstance(found, dict) and "letters" in found:
        return [f"{each['consumer']} {each['channel']}/{each['shard']} {each['offset']}" for each in found["letters"]]
    if isinstance(found, dict):
        return [f"{each['channel']}/{each['shard']} offset {each['offset']}" for each in found["stories"]]
    names = ("place", "key", "tenant", "what", "waiting", "in_flight", "state", "job")
    return [" ".join(str(each[name]) for name in names if each.get(name) is not None) for each in found]


@pytest.mark.slow
def test_a_list_has_what_it_is_asked_for_in_its_order(client: TestClient) -> None:
    shown = {}
    for address in LISTS:
        path, _, query = address.partition("?")
        found = json.loads(client.get(f"{path}.json?{query}").text)
        shown[address] = found["error"] if isinstance(found, dict) and "error" in found else list_shown(found)
    assert shown == LISTS

    groups = json.loads(client.get("/dead-letters.json?consumer=late").text)["groups"]
    assert [(each["channel"], each["error"], each["letters"]) for each in groups] == [
        ("orders", "ValueError", 3),
        ("old", "ValueError", 2),
        ("old", "KeyError", 1),
    ]
    grades = [each["grade"] for each in json.loads(client.get("/doctor.json").text)]
    assert grades == sorted(grades, key=["error", "warning", "ok"].index)
    assert {*grades} == {"error", "warning", "ok"}


def test_the_overview_shows_so_many_and_says_how_many_more(
    connection: Connection, database_url: str, redis_url: str
) -> None:
    connection.execute(
        "INSERT INTO penstock.channels (channel, kind, shards, keep) SELECT 'c' || n, 'log', 1, '1 h' FROM generate_series(1, %s) n",
        [MAX_ROWS + 9],
    )
    connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch) '
        "SELECT 'r' || n, 'c1', 0, 0, 1 FROM generate_series(1, %s) n",
        [MAX_ROWS + 5],
    )
    console = make_console(None, database_url, redis_url, access=lambda _: Visitor("ann"))
    try:
        overview = TestClient(console, base_url="http://console").get("/").text
    finally:
        console.close()

    rows = [len(re.findall(f'<th scope="row"><a href="/{kind}/', overview)) for kind in ("channels", "consumers")]
    assert rows == [MAX_ROWS, MAX_ROWS]
    assert "14 more are not shown here" in overview


LETTER = "channel=orders&shard=0&offset="


def list_places(client: TestClient, address: str) -> list[str]:
    """The places that a page of contents shows."""
    return [each["place"] for each in client.get(address).json()]


def test_the_newest_records_are_those_of_the_shards_that_were_written_last(
    client: TestClient, set_constants: SetConstants
) -> None:
    """Not those of the first shards, which are an older generation's."""
    set_constants("channels.log.streams", MAX_READ=1)
    assert list_places(client, "/channels/orders/contents.json") == [f"orders/2 offset {n}" for n in (3, 2, 1)]
    assert "1 of 3 shards were read" in client.get("/channels/orders/contents").text
    assert list_places(client, "/channels/orders/contents.json?shard=0")[0] == "orders/0 offset 10"
    assert "has no shard &#39;9&#39;; it has 3" in client.get("/channels/orders/contents?shard=9").text


CUTS = {
    "/": ("more are not shown here: ", "penstock status<"),
    "/channels": ("more channels: ", "penstock channels list<"),
    "/channels/orders": ("2 more shards: ", "penstock status --by-shard<", "more readers: "),
    "/channels/orders/contents": ("1 are shown. More: ", "penstock tail orders --count 1000<"),
    "/channels/orders/contents?shard=1": ("penstock tail orders --shard 1 --count 1000<",),
    "/consumers": ("more consumers: ", "penstock consumers list<"),
    "/consumers/late": ("more shards: ", "penstock status --by-shard<"),
    "/consumers/done": ('<th scope="row">orders/2<',),  # the only one that is not at rest
    "/dead-letters?consumer=late": ("2 more reasons: ", "penstock dead-letters list --by-reason<", "Older ones"),
    "/doctor": ("more results: ", "penstock doctor<"),
    "/act/retry-all?consumer=late": ("and others, of 2 further errors",),
}


def test_whatever_is_cut_says_by_how_much_and_where_the_rest_is(
    client: TestClient, set_constants: SetConstants
) -> None:
    set_constants("console.pages", MAX_ROWS=1, MAX_SHARDS=1, MAX_GROUPS=1, CONTENTS=1, LETTERS=1)
    set_constants("console.actions", MAX_KINDS=1)
    missing = {path: [word for word in words if word not in client.get(path).text] for path, words in CUTS.items()}
    assert {path: words for path, words in missing.items() if words} == {}


def test_nothing_is_said_of_more_where_all_is_shown(client: TestClient) -> None:
    pages = {path: client.get(path).text for path in (*CUTS, "/schedules", "/workers", "/actions")}
    found = {path: re.findall(r"[\d,]+ more \w+: |Older ones: ", page) for path, page in pages.items()}
    assert {path: words for path, words in found.items() if words} == {}


def test_a_consumer_is_in_the_first_state_that_holds_it(client: TestClient, connection: Connection) -> None:
    pause(Store(connection), "consumer", "done", reason="a deploy", by="ann")
    rows = client.get("/consumers").text.split("<tr>")
    states = {
        name: state
        for row in rows
        for name, state in re.findall(r'consumers/(\w+)">.*<span class="state [\w-]+">([\w ]+)<', row, re.DOTALL)
    }
    expected = {"done": "paused", "halted": "halted", "grower": "waiting", "late": "behind"}
    assert {name: states[name] for name in expected} == expected


def test_what_is_furthest_behind_is_shown_first(client: TestClient) -> None:
    """Of a shard's checkpoints, of which four are shown, and of the queues: one is idle."""
    page = client.get("/channels/orders").text
    shown = [
        [int(offset) for offset in re.findall(r'<meter min="0" max="\d+" value="(\d+)"', cell)]
        for cell in re.findall(r"<td>(<span class=\"checkpoint\">.*?)</td>", page)
    ]
    assert [len(offsets) for offsets in shown] == [4, 4, 4]
    checkpoints = {"0": list[int](), "1": [], "2": []}
    for consumer in client.get("/consumers.json").json():
        for shard in consumer["shards"]:
            if consumer["channel"] == "orders":
                checkpoints[str(shard["shard"])].append(shard["checkpoint"])
    assert shown == [sorted(offsets)[:4] for offsets in checkpoints.values()]

    queued = [shard for channel in client.get("/channels.json").json() for shard in channel["shards"]]
    behind = sum(max(0, shard["sequenced"] - shard["published"]) for shard in queued if shard["published"] is not None)
    assert f"in all, {behind} not published" in client.get("/").text
    assert re.findall(r'"/consumers/([^"]+)"', client.get("/icks").text) == ["search"]

    assert ">idle</a>" in (jobs := client.get("/jobs").text)
    assert "data-live" not in jobs, "it does not follow the queue while nothing of it is missing"
    assert re.search(r'<small>of <a href="[^"]*">jobs</a>', jobs)


def test_a_search_for_a_key_says_how_far_back_it_came_and_goes_on_from_there(
    client: TestClient, connection: Connection, set_constants: SetConstants
) -> None:
    """Steps of one record, of which the first takes as long as it may."""
    set_constants("operating.tracing.causes", FIRST_IDS=1)
    set_constants("console.record_pages", SEARCH_S=0.0)
    [(newest,)] = connection.execute("SELECT max(id) FROM penstock.staged_records").fetchall()
    [(record, staged_at)] = connection.execute(
        "SELECT id, created_at FROM penstock.staged_records WHERE key = 'orders1-4'"
    ).fetchall()
    address, searched = "/find?q=orders1-4", []
    while "orders/1 offset 4" not in (page := client.get(address).text):
        searched.append(client.get(address.replace("/find?", "/find.json?")).json()["since"])
        assert f"searched back to number {searched[-1]}, staged <time" in page
        assert "<b>" not in page  # a cause would be that of a key that nobody has staged
        [following] = re.findall(r'<a href="(.*)">Search on from there</a>', page)
        address = following.replace("&amp;", "&")
    last = client.get(address.replace("/find?", "/find.json?")).json()
    set_constants("console.record_pages", SEARCH_S=3600.0)
    whole = client.get("/find?q=orders1-4").text

    assert searched == [*range(newest, record, -1)]
    assert last["since"] == record
    assert datetime.fromisoformat(last["since_at"]) == staged_at
    assert "orders/1 offset 4" in whole
    assert "No index has keys" not in whole


def test_a_key_with_many_records_leads_to_the_older_ones(
    client: TestClient, connection: Connection, set_constants: SetConstants
) -> None:
    """A page has the newest, whatever of the table was looked at."""
    set_constants("operating.tracing.causes", MAX_OF_KEY=2)
    ids = [
        row[0]
        for _ in range(5)
        for row in connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "VALUES ('orders', 0, 'often', 'a', 'o', '{}') RETURNING id"
        )
    ]
    address, shown = "/find?q=often&key", list[list[int]]()
    while address:
        page = client.get(address).text
        shown.append([int(number) for number in re.findall(r"<h2>Record (\d+)", page)])
        following = re.search(r'<a href="(.*)">Search on from there</a>', page)
        address = following[1].replace("&amp;", "&") if following else ""

    assert shown == [ids[3:], ids[1:3], ids[:1]]


def test_a_search_that_postgres_gives_up_shows_what_it_has_found(
    connection: Connection, set_constants: SetConstants
) -> None:
    """Older rows may be slow to read: the way on begins where the last step ended."""
    set_constants("operating.tracing.causes", FIRST_IDS=1)
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'orders', 0, 'k' || i, 'a', 'o', '{}' FROM generate_series(1, 5) i"
    )
    store = Store(connection)
    [(newest,)] = connection.execute("SELECT max(id) FROM penstock.staged_records").fetchall()
    steps, read = 0, store.rows  # of this object: the class's is replaced

    def give_up(name: str, *values: Any, **options: Any) -> list[Any]:
        nonlocal steps
        steps += name == "ids_of_key_between"
        if steps == 3:
            with postgres_errors("looking for a key"):
                connection.execute("SET LOCAL statement_timeout = 1; SELECT pg_sleep(60)")
        return read(name, *values, **options)

    with patch.object(Store, "rows", side_effect=give_up):
        search = search_key(store, "k1", 3600)

    assert (search.ids, search.since) == ((), newest - 2)
    assert str(search) == f"the key 'k1' among those from {newest - 2} on"


PLANS: dict[str, tuple[str, ...]] = {
    "pause?kind=channel&name=orders": (
        "Pause channel orders",
        "Work in progress is finished, and no process starts anything new.",
        "Applications continue to stage, and the streamer to publish. Retention waits.",
        "penstock channels pause orders --reason …",
        "/channels/orders",
    ),
    "resume?kind=consumer&name=paused": (
        "Resume consumer paused",
        "consumer paused is paused since 2026-01-01 00:00:00 UTC by ann: a deploy",
        "It continues within a second, where it was paused.",
        "penstock consumers resume paused",
        "/consumers/paused",
    ),
    "resume?kind=channel&name=paused": ("channel paused is not paused",),
    "go-on?name=halted": (
        "Resume the halted shards of halted",
        "Fix the cause first: otherwise they halt again.",
        "orders/1 continues after offset 3",
        "orders/2 continues after offset 4",
        "halted has dead letters: to keep the order of their keys, first: penstock dead-letters retry halted --all",
        "penstock reset checkpoint halted --resume --apply",
        "/consumers/halted",
    ),
    "go-on?name=paused": (
        "Resume the halted shards of paused",
        "Fix the cause first: otherwise they halt again.",
        "orders/0 continues after offset 6",
        "penstock reset checkpoint paused --resume --apply",
        "/consumers/paused",
    ),
    "go-on?name=late": ("no shard of late is halted",),
    f"retry?consumer=late&{LETTER}1": (
        "Retry the dead letter of late at orders/0 offset 1",
        "A worker of late calls its handler with it, within seconds, unless it is paused.",
        "penstock dead-letters retry late 'orders/0 offset 1'",
        "/dead-letters?consumer=late",
    ),
    f"retry?consumer=late&{LETTER}2": (
        "a later record of its key was applied since, at orders/0 offset 5: a retry would bring back the older state. To retry it anyway: penstock dead-letters retry late 'orders/0 offset 2' --superseded",
    ),
    "retry?consumer=late&channel=old&shard=0&offset=3": (
        "Retry the dead letter of late at old/0 offset 3",
        "A worker of late calls its handler with it, within seconds, unless it is paused.",
        "It is parked, and stays until earlier dead letters of its key are gone.",
        "A retry has already been requested, and no worker has taken it yet: is one running?",
        "penstock dead-letters retry late 'old/0 offset 3' --parked",
        "/dead-letters?consumer=late",
    ),
    "retry-all?consumer=late": (
        "Retry 5 dead letters of late",
        "2 of old, ValueError",
        "2 of orders, ValueError",
        "1 of old, KeyError",
        "Workers of late call its handler with them, in order, unless it is paused.",
        "Letters stay if a later record of their key was applied.",
        "penstock dead-letters retry late --all",
        "/dead-letters?consumer=late",
    ),
    "retry-all?consumer=late&channel=old&error=KeyError": (
        "Retry 1 dead letter of late",
        "1 of old, KeyError",
        "Workers of late call its handler with them, in order, unless it is paused.",
        "Letters stay if a later record of their key was applied.",
        "penstock dead-letters retry late --all --channel old --error KeyError",
        "/dead-letters?consumer=late",
    ),
    "retry-all?consumer=waits": ("waits has no such dead letter that could be retried",),
    f"drop?consumer=gone&{LETTER}2": (
        "Drop the dead letter of gone at orders/0 offset 2",
        "Record 2 will never take effect in gone.",
        "penstock dead-letters drop gone 'orders/0 offset 2' --apply",
        "gone",
        "/dead-letters?consumer=gone",
    ),
    "cancel?channel=jobs&tenant=a": (
        "Cancel the jobs of a tenant in jobs",
        "They will never take effect.",
        "A worker that has begun to write for one is asked to roll back: it does, unless it commits at this moment.",
        "Jobs staged after this plan stay as they are.",
        "penstock jobs cancel jobs --tenant a --apply",
        "jobs",
        "/jobs?queue=jobs&tenant=a",
    ),
    "cancel?channel=jobs&all=on": (
        "Cancel jobs of jobs",
        "They will never take effect.",
        "A worker that has begun to write for one is asked to roll back: it does, unless it commits at this moment.",
        "Jobs staged after this plan stay as they are.",
        "penstock jobs cancel jobs --all --apply",
        "jobs",
        "/jobs?queue=jobs",
    ),
    "cancel?channel=jobs&id=33": (
        "Cancel job 33 of jobs",
        "It will never take effect.",
        "A worker that has begun to write for one is asked to roll back: it does, unless it commits at this moment.",
        "Jobs staged after this plan stay as they are.",
        "penstock jobs cancel jobs 33 --apply",
        "jobs",
        "/jobs?queue=jobs",
    ),
    "cancel?channel=jobs&tenant=nobody": ("jobs has no such job that is not done",),
    "cancel?channel=jobs&id=x": ("id: give the numbers of jobs, comma-separated",),
    "cancel?channel=jobs": ("which jobs? Give id, tenant, key, unique, state or before; or all=on",),
    "limit?channel=jobs&key=x&in_flight=3": (
        "Limit a key of jobs",
        "key 'x' of jobs: no limits of its own → in_flight 3",
        "The streamer copies them to Redis within two seconds, for waiting jobs, too.",
        "penstock queues limit jobs --key x --in-flight 3 --apply",
        "/channels/jobs/limits",
    ),
    "limit?channel=jobs&in_flight=3": ("tenant or key is missing",),
    "limit?channel=jobs&key=x&rate=fast": ("rate 'fast': give a number",),
}


def test_a_plan_says_what_would_be_done_and_the_command_that_does_it(client: TestClient) -> None:
    shown: dict[str, tuple[str, ...]] = {}
    for address in PLANS:
        text = unescape(client.get(f"/act/{address}").text)
        title = re.findall(r"<h1>(.*?)</h1>", text)
        parts = re.findall(r'<li>(.*?)</li>|<code(?: class="command")?>(.*?)</code>|<a href="([^"]*)">Do nothing', text)
        error = re.findall(r'<p class="note error">(.*?)</p>', text)
        shown[address] = (*error,) if error else (*title, *("".join(each) for each in parts))
    assert shown == PLANS
