"""The house keeps its measures."""

import ast
import re
from collections.abc import Iterable
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
    """700 lines of 100 columns."""
    assert [p for p in SOURCES if len(p.read_text().splitlines()) > 700] == []


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


PACKAGE = ROOT / "src/penstock"
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMED_BY_WHAT_THEY_SERVE = {"__init__", "statements"}
"""File names that say no more than their folder: of each package, and of its SQL."""


def _twice(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, path in names:
        found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_class_name_has_one_meaning() -> None:
    classes = (
        (node.name, path)
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert _twice(classes) == {}


def test_a_file_name_has_one_meaning() -> None:
    """A module of ``cli/commands`` has the name of its command; SQL that of the module that runs it."""
    files = {
        path.with_suffix("")
        for path in PACKAGE.rglob("*.*")
        if path.suffix in {".py", ".sql"}
        and path.stem not in NAMED_BY_WHAT_THEY_SERVE
        and path.parent.name != "commands"
    }
    assert _twice((path.name, path) for path in sorted(files)) == {}


def test_no_file_is_a_scrap() -> None:
    short = {str(p.relative_to(PACKAGE)): n for p in MODULES if (n := len(p.read_text().splitlines())) < 60}
    named_by_others = ("__init__.py", "__main__.py", "django/models.py", "django/migrations/0001_initial.py")
    assert {name for name in short if not name.endswith(named_by_others)} == set()


def test_the_maps_of_the_packages_name_what_is_there() -> None:
    """The lines of a docstring that begin with names and a gap: modules, or what the package exports."""
    lost = []
    for path in PACKAGE.rglob("__init__.py"):
        text = path.read_text()
        there = {p.stem for p in path.parent.iterdir()} | set(re.findall(r'"(\w+)"', text))
        maps = re.findall(r"^ *([a-z_]+(?:, [a-z_]+)*) {2,}\S", ast.get_docstring(ast.parse(text)) or "", re.MULTILINE)
        lost += [f"{path.parent.name}: {name}" for names in maps for name in names.split(", ") if name not in there]
    assert lost == []


def test_the_map_shows_every_room() -> None:
    """The docstring of the package, where a newcomer begins."""
    drawn = set(re.findall(r"\w+", ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or ""))
    rooms = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert rooms - drawn - {"__init__", "__main__"} == set()


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_sql_that_names_a_table_of_ours_is_in_a_file_of_its_own() -> None:
    """The demo is an application, and staging works on an application's session."""
    migrations = "".join(path.read_text() for path in (ROOT / "migrations").rglob("*.py"))
    tables = re.findall(r"CREATE TABLE \{schema\}\.(\w+)", migrations)
    named = re.compile(rf"\b(FROM|JOIN|INTO)\s+(\S+\.)?({'|'.join(tables)})\b")

    assert len(tables) > 20
    found = {p.relative_to(PACKAGE): match[0] for p in MODULES if (match := named.search(p.read_text()))}
    assert {path: text for path, text in found.items() if path.parts[0] not in {"demo", "staging"}} == {}


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
