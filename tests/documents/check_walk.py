"""The walk of one record in CONTRIBUTING.md, and the questions before it, name files that exist, each once, in the order of the data's flow."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^\d+\. `([\w/]+\.(?:py|lua))`: \S", re.MULTILINE)
FLOW = ["staging", "streaming", "channels", "lua", "channels", "consuming"]


def steps() -> list[str]:
    return STEP.findall((ROOT / "CONTRIBUTING.md").read_text())


def test_the_walk_names_files_that_exist_each_once() -> None:
    places = [ROOT / "src" / "penstock", ROOT]

    assert [s for s in steps() if not any((place / s).exists() for place in places)] == []
    assert len(set(steps())) == len(steps()) > 10


def test_the_questions_are_answered_by_files_that_exist() -> None:
    answers = re.findall(r"^\| [^|]+\? \| `([\w/]+\.py)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)

    assert len(answers) == 15
    assert [answer for answer in answers if not (ROOT / "src" / "penstock" / answer).exists()] == []


def test_the_walk_never_returns_to_a_part_that_it_has_left() -> None:
    parts = [step.partition("/")[0] for step in steps()]

    assert [part for part, before in zip(parts, ["", *parts], strict=False) if part != before] == FLOW
