"""A link between pages leads somewhere."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "lua" / "README.md"])
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings; a repeated one gets a number."""
    found: set[str] = set()
    times: Counter[str] = Counter()
    for heading in HEADING.findall(FENCED.sub("", page.read_text())):
        text = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{anchor}-{times[anchor]}" if times[anchor] else anchor)
        times[anchor] += 1
    return found


def broken(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    assert list(broken(page)) == []


def test_the_map_of_the_documentation_has_every_page() -> None:
    """Those of the API, the decisions and the upgrades have maps of their own."""
    docs = ROOT / "docs"
    led_to = {(docs / link.partition("#")[0]).resolve() for link in LINK.findall((docs / "README.md").read_text())}
    pages = {page for page in docs.rglob("*.md") if page.parent.name not in {"api", "decisions", "upgrades"}}

    assert pages - led_to == {docs / "README.md"}
    assert docs / "upgrades" / "README.md" in led_to
