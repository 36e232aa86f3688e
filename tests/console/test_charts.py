"""Charts of an hour and a day: from a Prometheus that has kept them, or from what this process remembers."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from starlette.testclient import TestClient

from console.conftest import As
from fixtures.constants import SetConstants
from penstock import Pipeline
from penstock.console import Visitor, make_console
from penstock.console.history import Moment, recall
from penstock.console.status_sampler import Point, Sample
from penstock.embedded.processes import free_port
from penstock.testing import eventually

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

DAY_S, HOUR_S = 86_400, 3600

GAP = range(6 * HOUR_S, 10 * HOUR_S)
"""Seconds ago in which nothing was scraped of what is published."""


DWELLS = {("quiet", 50): 1, ("quiet", 99): 8, ("noisy", 50): 2, ("noisy", 99): 4}
"""Seconds that jobs have waited, by tenants and percentile."""

LATENCIES = {"0.1": 50, "1.0": 95, "10.0": 100, "+Inf": 100}
"""Records a second whose latency was within a bound: half within 0.1 s, 95 in 100 within a second."""


def write_scrapes(path: Path, now: int) -> None:
    """Writes a day and an hour of scrapes of two exporters, and of another pipeline that counts for nothing here."""
    counters = {
        ("sequenced", 'channel="things"'): 2,
        ("published", 'channel="things"'): 2,
        ("consumer_applied", 'consumer="a",channel="things"'): 1,
        ("consumer_applied", 'consumer="b",channel="things"'): 2,
    }
    lines, start = [], now - DAY_S - HOUR_S
    times = range(start, now + 1, 60)
    for name in ("sequenced", "published", "consumer_applied"):
        lines.append(f"# TYPE penstock_{name}_records counter")
        for (counter, labels), rate in counters.items():
            for schema, instance, at in product(("penstock", "other"), "12", times):
                if counter == name and not (name == "published" and now - at in GAP):
                    sample = f'{{schema="{schema}",instance="{instance}",{labels}}} {rate * (at - start)} {at}'
                    lines.append(f"penstock_{name}_records_total{sample}")
    lines.append("# TYPE penstock_consumer_lag_records gauge")
    for (consumer, lag), schema, instance, at in product((("a", 5), ("b", 7)), ("penstock", "other"), "12", times):
        labels = f'schema="{schema}",instance="{instance}",consumer="{consumer}",channel="things"'
        lines.append(f"penstock_consumer_lag_records{{{labels}}} {lag} {at}")
    lines.append("# TYPE penstock_queue_dwell_seconds gauge")
    for (tenants, percentile), seconds in DWELLS.items():
        for schema, at in product(("penstock", "other"), times):
            labels = f'schema="{schema}",channel="jobs",tenants="{tenants}",percentile="{percentile}"'
            lines.append(f"penstock_queue_dwell_seconds{{{labels}}} {seconds if schema == 'penstock' else 99} {at}")
    lines.append("# TYPE penstock_stage_to_commit_seconds histogram")
    for schema, process, (bound, rate), at in product(("penstock", "other"), "12", LATENCIES.items(), times):
        labels = f'schema="{schema}",instance="{process}",consumer="a",channel="things",le="{bound}"'
        count = (rate if schema == "penstock" else 100) * (at - start)
        lines.append(f"penstock_stage_to_commit_seconds_bucket{{{labels}}} {count} {at}")
    path.write_text("\n".join([*lines, "# EOF\n"]))


@pytest.fixture(scope="module")
def prometheus_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that has scraped for a day."""
    if not (PROMETHEUS and PROMTOOL):
        pytest.skip("apt-get install prometheus")
    home, port = tmp_path_factory.mktemp("prometheus"), free_port()
    write_scrapes(home / "scrapes", int(datetime.now(UTC).timestamp()))
    blocks = [PROMTOOL, "tsdb", "create-blocks-from", "openmetrics", str(home / "scrapes"), str(home / "data")]
    subprocess.run(blocks, check=True, capture_output=True)
    (home / "empty.yml").touch()
    options = (f"--config.file={home}/empty.yml", f"--storage.tsdb.path={home}/data", "--log.level=error")
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([PROMETHEUS, *options, f"--web.listen-address=127.0.0.1:{port}"])

    def is_ready() -> bool:
        try:
            with urlopen(f"{url}/-/ready") as answer:
                return bool(answer.status == 200)
        except URLError:
            return False

    try:
        eventually(is_ready, "Prometheus is ready", timeout_s=60)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def see_with(flow: Pipeline, database_url: str, redis_url: str) -> Iterator[Any]:
    """Consoles with a Prometheus, each as after a restart."""
    consoles = []

    def begin(url: str) -> TestClient:
        consoles.append(
            make_console(flow, database_url, redis_url, access=lambda _: Visitor("ann"), prometheus_url=url)
        )
        return TestClient(consoles[-1], base_url="http://console")

    yield begin
    for console in consoles:
        console.close()


@pytest.mark.slow  # 5 s: a Prometheus with a day of scrapes
@pytest.mark.usefixtures("scene")
def test_charts_of_a_day_and_an_hour_are_those_that_prometheus_has_kept(see_with: Any, prometheus_url: str) -> None:
    """Whatever the console has seen itself; one of two exporters counts, and no other pipeline."""
    moments = {
        period: see_with(prometheus_url).get(f"/charts.json?period={period}").json() for period in ("hour", "day")
    }
    page = see_with(prometheus_url).get("/charts?period=day").text

    spans = {
        period: datetime.fromisoformat(rows[-1]["at"]) - datetime.fromisoformat(rows[0]["at"])
        for period, rows in moments.items()
    }
    assert {period: span.total_seconds() for period, span in spans.items()} == {
        "hour": HOUR_S * 59 / 60,
        "day": DAY_S * 59 / 60,
    }
    for rows in moments.values():
        assert {round(row["sequenced"], 3) for row in rows} == {2.0}
        assert {round(row["applied"], 3) for row in rows} == {3.0}
        assert {row["lag"] for row in rows} == {12}
        assert {tuple(round(row[f"latency_p{n}"], 3) for n in (50, 95, 99)) for row in rows} == {(0.1, 1.0, 8.2)}
        assert {(row["dwell_p50"], row["dwell_p99"]) for row in rows} == {(2, 8)}
    assert {round(row["published"] or 0, 3) for row in moments["hour"]} == {2.0}
    unknown = [row["published"] is None for row in moments["day"]]
    assert (unknown[0], unknown[-1], sum(unknown) > 5) == (False, False, True)
    lines = re.findall(r'aria-label="([\w ]+) over the last day">(.*?)</svg>', page)
    assert {name: line.count("<polyline") for name, line in lines} == {
        "Sequenced": 1,
        "Published": 2,
        "Applied": 1,
        "Lag": 1,
        "Latency": 3,
        "Queue dwell": 2,
    }
    assert re.findall(r"(p\d+) peak (.*?)</span>", page) == [
        ("p50", "0.1 s"),
        ("p95", "1 s"),
        ("p99", "8.2 s"),
        ("p50", "2 s"),
        ("p99", "8 s"),
    ]
    assert page.count("<tr>") == 61


class Answers(BaseHTTPRequestHandler):
    """Answers whatever it is asked with what a test has written."""

    body, asked, last_path = b"", 0, ""

    def do_GET(self) -> None:
        type(self).asked += 1
        type(self).last_path = self.path
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def answers() -> Iterator[tuple[type[Answers], str]]:
    handler = type("Handler", (Answers,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}/below/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "body",
    [
        "<script>alert(1)</script>",
        "[]",
        '{"data": {"result": [{"metric": {}, "values": []}]}}',
        '{"data": {"result": [{"metric": {"chart": "lag"}, "values": [[1, "<script>"]]}]}}',
        '{"data": {"result": [{"metric": {"chart": "lag"}, "values": [[1, {}]]}]}}',
        '{"data": {"result": [{"metric": {"chart": "lag"}, "values": [[Infinity, "2"]]}]}}',
        "[" * 100_000,
        '{"data": {"result": [{"metric": {"chart": []}, "values": [[1, "2"]]}]}}',
    ],
)
def test_what_is_no_answer_of_prometheus_is_told_once_for_all_viewers(
    see_with: Any, answers: tuple[type[Answers], str], body: str, set_constants: SetConstants
) -> None:
    """The page shows what the process remembers."""
    set_constants("console.reading", REMEMBERED_S=3600.0)
    handler, url = answers
    handler.body = body.encode()
    client = see_with(url)
    pages = [client.get("/charts?period=day") for _ in range(3)]

    assert [page.status_code for page in pages] == [200] * 3
    assert all("Prometheus does not answer: " in page.text for page in pages)
    assert all("of the last hour" in page.text and "<script>" not in page.text for page in pages)
    assert handler.asked == 1


def test_a_prometheus_that_is_away_or_knows_nothing_leaves_a_page(
    see_with: Any, answers: tuple[type[Answers], str]
) -> None:
    handler, url = answers
    handler.body = b'{"data": {"result": [{"metric": {"chart": "lag"}, "values": [[1, "NaN"]]}]}}'
    empty = see_with(url)
    away = see_with(f"http://127.0.0.1:{free_port()}").get("/charts").text

    assert "Prometheus does not answer: URLError" in away
    rows = empty.get("/charts.json").json()
    assert {(row["sequenced"], row["lag"]) for row in rows} == {(None, None)}
    assert empty.get("/charts").text.count("Not known yet") == 6
    assert empty.get("/charts?period=week").status_code == 400


def test_charts_of_prometheus_are_shown_while_postgres_is_away(
    redis_url: str, answers: tuple[type[Answers], str]
) -> None:
    """Rates are over several scrapes.  Without a pipeline, nothing is known of a channel."""
    handler, url = answers
    now = int(datetime.now(UTC).timestamp()) // 60 * 60 - 600
    handler.body = f'{{"data": {{"result": [{{"metric": {{"chart": "lag"}}, "values": [[{now}, "7"]]}}]}}}}'.encode()
    away = "postgresql://nobody@127.0.0.1:1/none"
    console = make_console(None, away, redis_url, access=lambda _: Visitor("ann"), prometheus_url=url)
    client = TestClient(console, base_url="http://console")
    page, twin, contents = map(client.get, ("/charts", "/charts.json", "/channels/things/contents"))
    console.close()

    assert (page.status_code, twin.status_code, contents.status_code) == (200, 200, 503)
    assert "%5B300s%5D" in handler.last_path
    assert "peak 7 records" in page.text
    assert {row["lag"] for row in twin.json()} == {None, 7}


@pytest.mark.usefixtures("scene")
def test_without_prometheus_a_page_says_how_a_day_is_had(see_as: As) -> None:
    page = see_as("see").get("/charts?period=day").text

    assert "over restarts: --prometheus-url" in page
    assert "of the last hour" in page
    assert "Not known yet: nothing was applied within a minute" in page


def make_sample_point(time_s: float, count: int, published: int | None, lag: int) -> Point:
    lags = {("c", "a"): lag, ("d", "a"): 1}
    return Point(time_s, {"a": count, "b": 0}, {"a": published}, {("c", "a"): count}, lags, (time_s, None), (1, time_s))


def test_what_is_remembered_is_a_moment_a_minute_with_rates_between_the_last_points_of_two() -> None:
    """A count that has gone back, as after a reset, is none below 0."""
    read_at = datetime(2026, 11, 30, 12, tzinfo=UTC)
    points = [
        make_sample_point(*each)
        for each in (
            (0, 0, 0, 9),
            (50, 99, 0, 9),
            (60, 100, 0, 9),
            (110, 160, 30, 4),
            (170, 280, None, 0),
            (230, 100, 30, 0),
        )
    ]
    moments = recall(Sample(None, None, points[-2:], points[:-2], read_at))

    assert [(read_at - moment.at).total_seconds() for moment in moments] == [120, 60, 0]
    assert [(moment.sequenced, moment.applied) for moment in moments] == [(61 / 60, 61 / 60), (2.0, 2.0), (0.0, 0.0)]
    assert [moment.published for moment in moments] == [0.5, None, None]
    assert [moment.lag for moment in moments] == [5, 1, 1]
    assert [(moment.dwell_p50, moment.dwell_p99) for moment in moments] == [(110, None), (170, None), (230, None)]
    assert [(moment.latency_p50, moment.latency_p95, moment.latency_p99) for moment in moments] == [
        (1, None, 110),
        (1, None, 170),
        (1, None, 230),
    ]
    assert recall(Sample(None, "away")) == list[Moment]()
