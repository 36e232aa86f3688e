"""The console in a real browser: nothing is blocked or loaded from elsewhere, pages follow the pipeline, and the keyboard is enough."""

import base64
import json
import re
import socket
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from console.conftest import THINGS
from console.test_console_jobs import STAGE_JOBS
from console.test_console_matrix import EXAMPLES, LETTER
from console.test_console_matrix import PATHS as SHOWN
from fixtures.command_line import CommandLine
from fixtures.postgres import engine_url
from penstock import Pipeline, stage
from penstock.database.connections import Connection
from penstock.streaming import Streamer
from penstock.testing import eventually

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")

pytestmark = [
    pytest.mark.slow,  # minutes: a browser, axe on every page, and pages that ask every few seconds
    pytest.mark.xdist_group("browser"),
]

PATHS = tuple(
    dict.fromkeys(
        [
            *(paths[0] for paths in EXAMPLES.values()),
            *(path for path in SHOWN if path.endswith("payload") or path.startswith(("/channels/", "/find?"))),
            "/consumers/search",
            "/consumers/nobody",
            "/enter",
        ]
    )
)
"""A page of each route, plans included, all that shows something else, an error and the log-in."""


def requests(driver: Any) -> list[tuple[str, int]]:
    """The addresses that were asked since the last call, with the status of the answer."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.responseReceived":
            found.append((message["params"]["response"]["url"], message["params"]["response"]["status"]))
    return found


def read(driver: Any, selector: str) -> str:
    """The text of an element, in one step: pages replace theirs every few seconds."""
    return str(driver.execute_script("return document.querySelector(arguments[0]).innerText", selector)).strip()


def set_scheme(driver: Any, scheme: str) -> None:
    """Sets it without a transition."""
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def set_width(driver: Any, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


NARROW = 600
"""Width below which rows are cards."""

CUT = """
const outside = [...document.querySelectorAll("main td, main tbody th")].filter((cell) => {
  const box = cell.getBoundingClientRect();
  return box.width && (box.right > innerWidth || cell.scrollWidth > cell.clientWidth + 1);
});
const unnamed = [...document.querySelectorAll("main td")].filter((cell) => {
  return getComputedStyle(cell, "::before").content.length < 4 && cell.textContent.trim();
});
const covered = [...document.querySelectorAll("main td, main tbody th")].filter((cell) => {
  return parseFloat(getComputedStyle(cell, "::before").height) > cell.clientHeight;  // that of the next cell
});
return [...outside, ...unnamed, ...covered].map((cell) => cell.outerHTML.slice(0, 200));
"""
"""Cells that are cut off, do not say of which column they are, or say it over the next one."""


SEEN = """
window.reached = new Map();
document.addEventListener("focusin", ({target}) => reached.set(target, getComputedStyle(target).outlineStyle));
return document.querySelectorAll("a, button, input, [tabindex]").length;
"""
MISSED = """
const all = [...document.querySelectorAll("a, button, input, .scroll, code.command")].filter((e) => e.checkVisibility());
return [
  ...all.filter((e) => !reached.has(e)).map((e) => `not reached: ${e.outerHTML.slice(0, 120)}`),
  ...[...reached].filter(([, outline]) => outline === "none").map(([e]) => `focus not seen: ${e.outerHTML.slice(0, 120)}`),
];
"""


def reach_by_keyboard(driver: Any) -> list[str]:
    """What the Tab key does not reach, or does not show that it has reached."""
    count = driver.execute_script(SEEN)
    webdriver.ActionChains(driver).send_keys(webdriver.Keys.TAB * 2 * (count + 2)).perform()
    return [str(each) for each in driver.execute_script(MISSED)]


AXE = "axe.run(document).then(arguments[0])"


def find_barriers(driver: Any) -> list[str]:
    """What axe-core finds, by all its rules, and contrasts of our own, which it leaves out where colours are mixed."""
    results = driver.execute_async_script(AXE)
    assert results["passes"]
    violations = [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in results["violations"]]
    return violations + list(driver.execute_script((Path(__file__).parent / "accessibility.js").read_text()))


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_every_page_fits_asks_no_other_host_and_can_be_read_and_used_by_everybody(
    driver: Any, address: str, width: int
) -> None:
    """Also by the Tab key alone; in the dark scheme where it is narrow, since schemes differ in colours alone."""
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    set_width(driver, width)
    found: dict[str, list[str]] = {}
    for path in PATHS:
        set_scheme(driver, "dark" if width < NARROW else "light")
        driver.get_log("browser")
        driver.get(address + path)
        logged = [entry["message"] for entry in driver.get_log("browser")]
        wrong = [message for message in logged if "a status of 404" not in message]
        if (wide := driver.execute_script("return document.documentElement.scrollWidth")) > width:
            wrong.append(f"{wide} wide")
        high = driver.execute_script("return document.querySelector('header')?.offsetHeight ?? 0")
        if width == 1280 and high > 60:
            wrong.append(f"the head is {high} high: two rows")
        if width < NARROW:
            wrong += driver.execute_script(CUT)
        if width != 800:  # colours, names and order are those of the other widths
            driver.execute_script(axe)
            wrong += find_barriers(driver)
            wrong += reach_by_keyboard(driver)
        found[path] = wrong
    set_scheme(driver, "light")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    assert {path: wrong for path, wrong in found.items() if wrong} == {}
    assert {url.split("/", 3)[2] for url, _ in requests(driver)} == {address.removeprefix("http://")}


def test_an_open_page_follows_the_pipeline_and_asks_for_nothing_twice(
    driver: Any, address: str, connection: Connection, streamer: Streamer, database_url: str, flow: Pipeline
) -> None:
    driver.get(address + "/channels")  # a page without ages
    requests(driver)
    eventually(lambda: 304 in {status for _, status in requests(driver)}, "a page that has not changed", timeout_s=30)

    stage_thing(flow, database_url, streamer, "followed")

    row = "[...document.querySelectorAll('tr')].find((tr) => tr.querySelector('th a')?.textContent === 'things')"
    sequenced = f"return {row}.querySelectorAll('td')[3].textContent.trim()"
    eventually(lambda: driver.execute_script(sequenced) == "2", "the page shows the record", timeout_s=30)


def test_a_refresh_keeps_how_far_a_table_was_scrolled_and_where_the_focus_is(
    driver: Any, address: str, connection: Connection
) -> None:
    set_width(driver, 700)
    for selector in (".scroll", ".scroll a", ".troubles + p a"):
        driver.get(address + "/consumers/halts")
        driver.execute_script(
            "document.querySelector(arguments[0]).focus();"
            "document.querySelectorAll('.scroll').forEach((table) => { table.scrollLeft = 40; })",
            selector,
        )
        before = driver.execute_script(STATE)
        connection.execute("UPDATE penstock.checkpoints SET skipped = skipped + 1000 WHERE consumer = 'halts'")
        shown = "return document.querySelector('main').textContent.includes(arguments[0])"
        [(skipped,)] = connection.execute(
            "SELECT max(skipped) FROM penstock.checkpoints WHERE consumer = 'halts'"
        ).fetchall()
        eventually(lambda: driver.execute_script(shown, f"{skipped:,}"), "the page is new", timeout_s=60)  # noqa: B023

        assert driver.execute_script(STATE) == before
        assert before["scrolled"][-1] == 40
        assert before["focus"] not in {"BODY", "MAIN"}
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def stage_thing(flow: Pipeline, database_url: str, streamer: Streamer, key: str) -> None:
    engine = create_engine(engine_url(database_url))
    with Session(engine) as session, session.begin():
        flow.attach(session)
        stage(session, to=THINGS, key=key, action="insert", object="thing", data={})
    engine.dispose()
    streamer.drain()


def count_rounds(driver: Any) -> None:
    """Counts the page's rounds from now on, those without a request, too."""
    driver.execute_script(
        "window.rounds = 0; const real = setTimeout; window.setTimeout = (...a) => { rounds++; return real(...a); }"
    )


def test_the_tail_of_a_log_shows_records_as_they_come_and_is_paused_by_a_key(
    driver: Any, address: str, flow: Pipeline, database_url: str, streamer: Streamer
) -> None:
    def shows(key: str) -> bool:
        return key in read(driver, "main")

    driver.get(address + "/channels/things/contents")
    stage_thing(flow, database_url, streamer, "first-to-come")
    eventually(lambda: shows("first-to-come"), "the new record", timeout_s=30)

    webdriver.ActionChains(driver).send_keys("p").perform()
    eventually(lambda: read(driver, "#live") == "paused by p", "the page says so")
    stage_thing(flow, database_url, streamer, "second-to-come")
    count_rounds(driver)
    eventually(lambda: driver.execute_script("return window.rounds") >= 1, "no request is under way", timeout_s=30)
    requests(driver)
    eventually(lambda: driver.execute_script("return window.rounds") >= 3, "rounds without a request", timeout_s=30)
    assert not shows("second-to-come")
    assert requests(driver) == []

    webdriver.ActionChains(driver).send_keys("p").perform()
    eventually(lambda: shows("second-to-come"), "it goes on", timeout_s=30)
    assert read(driver, "#live") == "live"


STATE = """
return {
  focus: document.activeElement.tagName + " " + document.activeElement.className + " " + document.activeElement.href,
  scrolled: [...document.querySelectorAll(".scroll")].map((table) => table.scrollLeft),
};
"""


def test_a_consumer_is_paused_with_the_keyboard_alone(driver: Any, address: str, connection: Connection) -> None:
    keys = webdriver.Keys
    driver.get(address + "/consumers/applies")

    def press(*pressed: str) -> None:
        webdriver.ActionChains(driver).send_keys(*pressed).perform()

    for _ in range(60):
        press(keys.TAB)
        if driver.switch_to.active_element.text == "Pause":
            break
    press(keys.ENTER)
    eventually(lambda: "/act/pause" in driver.current_url, "the plan")
    press("its table is being moved", keys.ENTER)
    eventually(lambda: driver.current_url == f"{address}/consumers/applies", "the consumer's page")

    [(name, reason, by)] = connection.execute("SELECT name, reason, paused_by FROM penstock.pauses").fetchall()
    assert (name, reason, by) == ("applies", "its table is being moved", "local")
    assert "paused" in read(driver, "main")


def test_keys_open_help_and_rows_and_copy_a_command_and_the_scheme_can_be_changed(driver: Any, address: str) -> None:
    set_scheme(driver, "light")
    driver.get(address + "/channels")
    body = driver.find_element("css selector", "body")
    body.send_keys("?")
    assert driver.execute_script("return document.getElementById('keys').open")
    driver.find_element("css selector", "#keys button").click()
    names = []
    driver.execute_script("document.querySelector('main tbody th a').focus()")
    for key in ("\ue015", "\ue013"):  # down, up
        driver.switch_to.active_element.send_keys(key)
        names.append(driver.execute_script("return document.activeElement.textContent"))
    assert names[0] != names[1]
    driver.switch_to.active_element.send_keys("/")
    assert driver.execute_script("return document.activeElement.name") == "q"

    driver.get(address + LETTER)
    driver.execute_script("document.querySelector('code.command').focus()")
    driver.switch_to.active_element.send_keys(webdriver.Keys.ENTER)
    selected = driver.execute_script("return String(getSelection())")
    assert selected == read(driver, "code.command") != ""

    grounds = []
    for _ in range(3):
        grounds.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
        driver.find_element("id", "theme").click()
    assert grounds[0] == grounds[1] != grounds[2], "system and light are light, dark is dark"


def test_a_letter_is_retried_by_its_plan_and_not_by_one_that_has_changed(
    driver: Any, address: str, connection: Connection
) -> None:
    requested = "SELECT retry_requested_at IS NOT NULL FROM penstock.dead_letters WHERE consumer = 'refuses'"
    driver.get(address + "/dead-letters/refuses/things/0/1")
    driver.find_element("link text", "Retry").click()
    eventually(lambda: "/act/retry" in driver.current_url, "the plan")
    connection.execute("UPDATE penstock.dead_letters SET parked = true WHERE consumer = 'refuses'")

    driver.find_element("css selector", "main form button").click()
    eventually(lambda: "has changed since" in read(driver, "main"), "the new plan")
    before = connection.execute(requested).fetchall()
    driver.find_element("css selector", "main form button").click()
    eventually(lambda: driver.current_url == f"{address}/dead-letters?consumer=refuses", "the list")

    assert (before, connection.execute(requested).fetchall()) == ([(False,)], [(True,)])
    assert "retry requested" in read(driver, "main")


def test_of_ten_thousand_jobs_those_of_a_tenant_are_chosen_and_cancelled_by_their_plan(
    driver: Any, address: str, connection: Connection
) -> None:
    connection.execute(STAGE_JOBS.encode())
    driver.get(address + "/jobs?queue=jobs")
    driver.find_element("name", "tenant").send_keys("few", webdriver.Keys.ENTER)
    eventually(lambda: "tenant=few" in driver.current_url, "the jobs of the tenant")
    boxes = driver.find_elements("css selector", "td input[name=id]")
    chosen = [box.get_attribute("value") for box in boxes[1:3]]
    for box in boxes[1:3]:
        box.click()
    driver.find_element("css selector", "button.danger").click()
    eventually(lambda: "/act/cancel" in driver.current_url, "the plan")
    assert len(boxes) == 50
    assert "2 jobs now." in read(driver, "main")
    driver.find_element("name", "confirm").send_keys("jobs", webdriver.Keys.ENTER)
    eventually(lambda: driver.current_url == f"{address}/jobs?queue=jobs", "the list")

    cancelled = connection.execute("SELECT record_id::text FROM penstock.cancellations ORDER BY record_id").fetchall()
    assert cancelled == [(id_,) for id_ in chosen]


RELEASES = """
return [...document.querySelectorAll("table:first-of-type tbody tr")].map((row) => [...row.cells].map((cell) => cell.innerText))
  .filter((cells) => cells[0] === "reader").map((cells) => [cells[1], cells[2].split(" ")[0]]).sort();
"""


def test_a_rolling_deploy_shows_both_releases_until_the_old_one_has_stopped(
    driver: Any, address: str, penstock: CommandLine, connection: Connection
) -> None:
    """Two processes of one host, each with the release of its own installation."""
    connection.execute("CREATE TABLE public.effects (id bigint)")
    running = []

    def start(release: str) -> tuple[str, str]:
        installed = penstock.directory / release / f"penstock_outbox-{release}.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text(f"Name: penstock-outbox\nVersion: {release}\n")
        penstock.environment["PYTHONPATH"] = str(installed.parent)
        running.append(penstock.start_installed("consume", "reader"))
        return release, f"{socket.gethostname().partition('.')[0]}:{running[-1].pid}"

    def shown() -> list[tuple[str, str]]:
        return [tuple(row) for row in driver.execute_script(RELEASES)]

    driver.get(address + "/workers")
    try:
        old = start("7.0.0")
        eventually(lambda: shown() == [old], "the old release", timeout_s=60)
        new = start("7.1.0")
        eventually(lambda: shown() == [old, new], "both", timeout_s=60)
        assert re.search(r"Several releases run: .*7\.0\.0 \(\d+ connections?\).*7\.1\.0", read(driver, ".note"))
        running[0].terminate()
        assert running[0].wait(60) == 0
        eventually(lambda: shown() == [new], "only the new one", timeout_s=60)
        assert "7.0.0" not in read(driver, "main")
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_a_hidden_page_asks_for_nothing(driver: Any, address: str) -> None:
    driver.get(address + "/")
    driver.execute_script("Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'})")
    eventually(lambda: read(driver, "#live") == "paused", "the page says so", timeout_s=30)
    requests(driver)
    count_rounds(driver)
    eventually(
        lambda: driver.execute_script("return window.rounds") >= 2, "two rounds that could have asked", timeout_s=30
    )

    assert requests(driver) == []


DIFFERENCE = """
const [pictures, done] = arguments;
const loaded = pictures.map((picture) => new Promise((resolve, reject) => {
  const image = new Image();
  image.onload = () => resolve(image);
  image.onerror = reject;
  image.src = "data:image/png;base64," + picture;
}));
Promise.all(loaded).then((images) => {
  const [one, other] = images.map((image) => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [89, 5];
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, 890, 50, 0, 0, 89, 5);
    return context.getImageData(0, 0, 89, 5).data;
  });
  done(one.reduce((sum, value, i) => sum + Math.abs(value - other[i]), 0) / one.length);
});
"""


def test_the_picture_in_the_readme_still_shows_the_console(driver: Any, address: str) -> None:
    """By the menu, ten pixels at a time, for what is below is another pipeline's.  ``make picture`` takes it anew."""
    font = subprocess.run(["fc-match", "system-ui"], capture_output=True, text=True, check=True).stdout
    if "DejaVu Sans" not in font:
        pytest.skip("the picture is written in DejaVu Sans, which is not the font of this system")
    picture = base64.b64encode((Path(__file__).parents[2] / "docs/pictures/console.png").read_bytes()).decode()
    set_width(driver, 1280)
    differences = {}
    for scheme in ("dark", "light"):
        set_scheme(driver, scheme)
        driver.get(address + "/")
        shown = driver.get_screenshot_as_base64()
        driver.get("about:blank")  # the console's policy forbids a picture in its address
        differences[scheme] = driver.execute_async_script(DIFFERENCE, [picture, shown])
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    assert differences["light"] < 1  # of 255; one word of the menu changed: 1.4
    assert differences["dark"] > 40
