"""Every guarantee that the page numbers has a test that names it, and no test names one that the page lacks."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "guarantees.md"
NAMED = re.compile(r"Guarantees? (\d+(?:(?:, | and )\d+)*)")


def test_every_guarantee_has_a_test_and_every_test_its_guarantee() -> None:
    promised = {int(number) for number in re.findall(r"^- \*\*(\d+)\*\* ", PAGE.read_text(), re.MULTILINE)}
    proved = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for names in NAMED.findall(path.read_text())
        for number in re.findall(r"\d+", names)
    }

    assert {"without a test": promised - proved, "not on the page": proved - promised} == {
        "without a test": set(),
        "not on the page": set(),
    }


def test_every_guarantee_has_a_mistake_that_breaks_it() -> None:
    promised = {int(number) for number in re.findall(r"^- \*\*(\d+)\*\* ", PAGE.read_text(), re.MULTILINE)}
    mistakes = tomllib.loads((ROOT / "tests" / "mutants" / "guarantees.toml").read_text())["defect"]

    assert {mistake["guarantee"] for mistake in mistakes} == promised
    for mistake in mistakes:
        path, _, test = mistake["test"].partition("::")
        assert (ROOT / mistake["path"]).read_text().count(mistake["before"]) == 1, mistake
        assert f"def {test}(" in (ROOT / path).read_text(), mistake
