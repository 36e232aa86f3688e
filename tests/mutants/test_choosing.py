"""The tests of a defect are those that reach its function, statement or script; changed files are measured again."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mutants.__main__ import AREAS, find_all, read_equivalent
from mutants.choosing import MeasuredTest, choose_tests, measure_tests
from mutants.operators import Mutant
from mutants.running import ROOT

CODE = """
LIMIT = 1

class Outer:
    @property
    def one(self) -> int:
        def inner() -> int:
            return 2
        return inner()
"""
SQL = "-- :name first\nSELECT 1;\n\n-- :name second\nSELECT 2;\n"


@pytest.mark.parametrize(
    ("name", "line", "chosen"),
    [
        ("src/penstock/a/b.py", 8, ["inner"]),
        ("src/penstock/a/b.py", 9, ["outer"]),
        ("src/penstock/a/b.py", 2, ["inner", "outer"]),
        ("src/penstock/a/statements.sql", 2, ["first"]),
        ("src/penstock/a/statements.sql", 5, ["second"]),
        ("lua/ick/_part.lua", 1, ["whole"]),
        ("lua/ick/whole.lua", 2, ["whole"]),
    ],
)
def test_tests_are_chosen_by_what_they_reach(
    tmp_path: Path, name: str, line: int, chosen: list[str]
) -> None:
    for path, text in {
        "src/penstock/a/b.py": CODE,
        "src/penstock/a/statements.sql": SQL,
        "lua/ick/_part.lua": "-- part\n",
        "lua/ick/whole.lua": "-- whole\n-- includes: ick/_part\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    tests = [
        MeasuredTest(name, 0.1, frozenset([place]))
        for name, place in {
            "inner": "a/b.py:Outer.one.<locals>.inner",
            "outer": "a/b.py:Outer.one",
            "first": "penstock.a:first",
            "second": "penstock.a:second",
            "whole": "lua:ick/whole",
        }.items()
    ]
    found = choose_tests(tests, Mutant(tmp_path / name, line, "", "", ""), tmp_path)

    assert [test.name for test in found] == chosen


def test_only_new_and_changed_files_are_measured(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def measure(directory: Path, files: Sequence[str]) -> None:
        asked.append(list(files))
        rows = [{"test": f"{file}::test", "seconds": 1.0, "reached": [file]} for file in files]
        (directory / "1.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def names() -> list[str]:
        tests = measure_tests(tmp_path / "kept", tmp_path, ["a", "b"], measure)
        return sorted(test.name for test in tests)

    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    assert names() == names() == ["a::test", "b::test"]
    (tmp_path / "b").write_text("2")
    assert names() == ["a::test", "b::test"]
    assert asked == [["a", "b"], ["b"]]


def test_the_equivalent_changes_are_still_those_of_lines_that_are_there() -> None:
    possible = {
        (str(mutant.path.relative_to(ROOT)), mutant.before, mutant.after)
        for area in AREAS
        for mutant in find_all(area)
    }

    assert read_equivalent().keys() - possible == set()
