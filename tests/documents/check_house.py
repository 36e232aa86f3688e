"""The house keeps its measures."""

import ast
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for top in ("src/penstock", "benchmarks") for p in (ROOT / top).rglob("*.py"))
TEXTS = [
    *SOURCES,
    *(ROOT / "lua").rglob("*"),
    *(ROOT / "migrations").rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*.md"),
    *ROOT.glob("*.lock"),
    *ROOT.glob("*.toml"),
]


def test_files_can_be_read_in_a_sitting() -> None:
    assert [p for p in SOURCES if len(p.read_text().splitlines()) > 600] == []


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Where a function's work begins: after its parameters and its docstring."""
    documented = ast.get_docstring(node) is not None and len(node.body) > 1
    return node.body[1 if documented else 0].lineno


def _lengths() -> dict[str, int]:
    """Lines of each function, without its parameters and its docstring."""
    return {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or 0) - _first_line(node) + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_functions_do_one_thing() -> None:
    lengths = _lengths()

    assert [name for name, lines in lengths.items() if lines > 60] == []
    assert median(lengths.values()) <= 9


def test_there_is_no_drawer() -> None:
    names = re.compile(r"^(utils?|helpers?|common|misc|base)$")
    assert [p for p in SOURCES if names.match(p.stem)] == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("pattern", [r"https?://[^ )\"]*/simple\b", r"index-url", r"(^|[\s\"'=])/(work|root|home)/"])
def test_no_file_names_a_registry_or_somebodys_machine(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:80]}"
        for path in TEXTS
        if path.is_file()
        for line in path.read_text().splitlines()
        if re.search(pattern, line)
    ]
    assert found == []
