"""What one text takes from another place is compared with that place: figures with the bench, a map with the directory."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from fixtures.documents import DOCS, ROOT
from penstock.cli.app import load_commands

README = " ".join((ROOT / "README.md").read_text().split())
BENCH = (DOCS / "reference" / "bench.md").read_text()

FIGURES = [
    ("drain-200b-1", "Penstock", 1, r"\| ([\d,]+) records/s \| [\d.]+ times a script"),
    ("drain-200b-1", "`xadd`", 2, r"([\d.]+) times a script that only calls `XADD`"),
    ("drain-200b-1", "`debezium`", 2, r"([\d.]+) times Debezium's engine"),
    ("cost-cpu-publish", "Penstock", 1, r"([\d.]+) µs a record"),
    ("cost-cpu-publish", "`skip-locked-pipelined`", 1, r"pipelined: ([\d.]+) µs"),
    ("consume-bulk", "Penstock, record by record", 1, r"one consumer \| ([\d,]+) records/s"),
    ("consume-bulk", "`article-consumer`", 2, r"([\d.]+) times a consumer that trusts"),
    ("case", "`latency-1000`", 1, r"1,000 records/s \| ([\d.]+) ms, p99"),
]
"""Of each of README's figures: the table, the row and the column in the bench, and where README has it."""


@pytest.mark.parametrize(("table", "row", "column", "shown"), FIGURES)
def test_a_figure_of_readme_is_the_benchs(table: str, row: str, column: int, shown: str) -> None:
    match = re.search(shown, README)
    assert match, shown
    rows = [
        cells
        for lines in re.findall(rf"^\| `?{table}`? \|.*\n\|[- |]+\n((?:\|.*\n)+)", BENCH, re.MULTILINE)
        for line in lines.splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0] == row
    ]

    [cells] = rows
    assert match[1] == re.split(r"[ (]|, ", cells[column])[0]


def test_the_readme_has_no_other_figure_of_speed() -> None:
    [section] = re.findall(r"^## How fast it is\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    known = {match[1] for *_, shown in FIGURES if (match := re.search(shown, README))}

    date_and_load = {"2026", "11", "27", "200", "1,000"}
    others = {"7.8", "0.12"}  # the 99th percentile, and a commit
    assert set(re.findall(r"\b\d[\d.,]*\b", section)) == known | date_and_load | others


def test_the_map_of_the_package_has_every_part_once() -> None:
    package = Path(penstock.__file__).parent
    parts = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - {
        "__init__",
        "__main__",
    }
    lines = re.findall(r"^    (\S.*)$", penstock.__doc__ or "", re.MULTILINE)
    first = [name for line in lines for name in re.split(r" {2,}", line)[0].split(", ")]
    further = [name for line in lines for group in re.findall(r"; ([a-z_, ]+): ", line) for name in group.split(", ")]

    assert sorted(first + further) == sorted(parts)


def test_no_help_has_brackets_which_rich_takes_for_markup() -> None:
    """``--listen`` once named the extra of ``penstock-outbox[prometheus]`` as ``penstock-outbox``."""
    texts = [text for command in load_commands().values() for text in _find_help(command)]

    assert [text for text in texts if "[" in text] == []
    assert len(texts) > 100


def _find_help(command: Any) -> Iterator[str]:
    yield command.help or ""
    yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
    for part in getattr(command, "commands", {}).values():
        yield from _find_help(part)
