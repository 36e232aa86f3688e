"""Both servers restart under open pages: none is left in a failed state for a reason that has passed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from console.test_console_matrix import LETTER
from fixtures.constants import SetConstants
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis
from penstock.schema.initialise import initialise
from penstock.testing import eventually

pytestmark = [
    pytest.mark.slow,  # a minute: servers of its own, a browser with a window for each page
    pytest.mark.xdist_group("browser"),
]

PATHS = (
    "/",
    "/consumers/halts",
    "/channels/jobs/tenants",
    "/channels/things/contents",
    "/jobs",
    "/jobs/jobs/3",
    LETTER,
    "/find?q=1",
    "/workers",
    "/doctor",
    "/act/pause?kind=consumer&name=search",
)
"""A page of each kind: live or not, with what Postgres, Redis or both of them know, and a plan."""

FAILED = re.compile(r"does not answer|no answer|Old:|unknown is what|\A\d\d\d$", re.MULTILINE | re.IGNORECASE)


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    made = EmbeddedPostgres(tmp_path / "postgres")
    made.start()
    initialise(made.url)
    yield made
    made.remove()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    made = EmbeddedRedis(tmp_path / "redis")
    made.start()
    yield made
    made.remove()


@pytest.fixture
def database_url(own_postgres: EmbeddedPostgres) -> str:
    return own_postgres.url


@pytest.fixture
def redis_url(own_redis: EmbeddedRedis) -> str:
    return own_redis.url


def read_pages(driver: Any, windows: dict[str, str]) -> dict[str, str]:
    texts = {}
    for path, window in windows.items():
        driver.switch_to.window(window)
        texts[path] = str(driver.execute_script("return document.querySelector('main').innerText"))
    return texts


def find_failed(driver: Any, windows: dict[str, str]) -> set[str]:
    return {path for path, text in read_pages(driver, windows).items() if FAILED.search(text)}


def test_pages_that_were_open_or_asked_for_while_servers_restarted_are_whole_again(
    driver: Any, address: str, own_postgres: EmbeddedPostgres, own_redis: EmbeddedRedis, set_constants: SetConstants
) -> None:
    set_constants("console.reading", REMEMBERED_S=0.0)  # the doctor is asked anew by each request
    set_constants("console.status_sampler", BUSY_SHARE=0)  # a sample that has failed is followed by another at once
    windows = {}
    for path in PATHS:
        driver.switch_to.new_window("window")
        windows[path] = driver.current_window_handle
        driver.get(address + path)
    titles = {path: text.partition("\n")[0] for path, text in read_pages(driver, windows).items()}
    assert find_failed(driver, windows) == set()

    for servers in ([own_redis], [own_redis, own_postgres]):
        for server in servers:
            server.stop()
        eventually(lambda: "/" in find_failed(driver, windows), "an open page says so", timeout_s=60)
        for window in windows.values():
            driver.switch_to.window(window)
            driver.refresh()
        assert find_failed(driver, windows) > {"/", "/doctor", "/jobs", "/find?q=1", LETTER}
        for server in servers:
            server.start()
        eventually(lambda: find_failed(driver, windows) == set(), "all pages are whole again", timeout_s=60)
        assert {path: text.partition("\n")[0] for path, text in read_pages(driver, windows).items()} == titles
