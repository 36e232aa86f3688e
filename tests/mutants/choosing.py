"""Which tests could notice a defect: those that reach its function, SQL statement or script, by a measurement that is kept."""

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mutants.operators import Mutant

SOURCE, LUA = Path("src/penstock"), Path("lua")
_INCLUDES = re.compile(r"^-- includes: (.+)$", re.MULTILINE)

Measure = Callable[[Path, Sequence[str]], None]
"""Runs files of tests; for each test that passes, it writes a line of JSON into a directory: see ``reached``."""


@dataclass(frozen=True, slots=True)
class MeasuredTest:
    """A test: its id, its duration when it was measured, in seconds, and the places that it reached."""

    name: str
    seconds: float
    reached: frozenset[str]


def measure_tests(
    kept: Path, root: Path, files: Sequence[str], measure: Measure
) -> list[MeasuredTest]:
    """All tests of the files, the shortest first; only files that are new or have changed are measured.

    Args:
        kept: The file with the measurements.
        root: The checkout.
        files: Files of tests, below the checkout.
        measure: Measures some of them.
    """
    hashes = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in files}
    rows = [
        row
        for row in (_read_lines(kept) if kept.exists() else [])
        if hashes.get(_get_file(row)) == row["hash"]
    ]
    if changed := sorted(hashes.keys() - {_get_file(row) for row in rows}):
        with TemporaryDirectory() as directory:
            measure(Path(directory), changed)
            found = [row for path in Path(directory).iterdir() for row in _read_lines(path)]
        rows += [row | {"hash": hashes[_get_file(row)]} for row in found]
        kept.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tests = (MeasuredTest(row["test"], row["seconds"], frozenset(row["reached"])) for row in rows)
    return sorted(tests, key=lambda test: test.seconds)


def choose_tests(tests: Sequence[MeasuredTest], mutant: Mutant, root: Path) -> list[MeasuredTest]:
    """Those that reach the mutant's place, in their order; a line outside of all functions is reached by who reaches the file."""
    path = mutant.path.relative_to(root)
    if path.suffix == ".lua":
        places = {f"lua:{name}" for name in _scripts_with(root / LUA, mutant.path)}
    elif path.suffix == ".sql":
        places = {_statement(path, mutant)}
    else:
        function = _find_function(ast.parse(mutant.path.read_text()), mutant.line)
        places = {f"{path.relative_to(SOURCE)}:{function}"}
        if not function:
            prefix = f"{path.relative_to(SOURCE)}:"
            return [t for t in tests if any(place.startswith(prefix) for place in t.reached)]
    return [test for test in tests if test.reached & places]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _get_file(row: dict[str, Any]) -> str:
    name: str = row["test"]
    return name.partition("::")[0]


def _scripts_with(lua: Path, path: Path) -> Iterator[str]:
    """The script, or those that include the fragment."""
    name = str(path.relative_to(lua).with_suffix(""))
    yield name
    for script in lua.rglob("*.lua"):
        included = _INCLUDES.search(script.read_text())
        if included and name in included[1].split(", "):
            yield str(script.relative_to(lua).with_suffix(""))


def _statement(path: Path, mutant: Mutant) -> str:
    before = mutant.path.read_text().splitlines()[: mutant.line]
    headings = [line.split()[2] for line in before if line.startswith("-- :name ")]
    package = ".".join(("penstock", *path.relative_to(SOURCE).parts[:-1]))
    return f"{package}:{headings[-1]}"


def _find_function(node: ast.AST, line: int, within: str = "") -> str:
    """The qualified name of the innermost function that has the line; "" if there is none."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt) or not child.lineno <= line <= (child.end_lineno or 0):
            continue
        if isinstance(child, ast.ClassDef):
            return _find_function(child, line, f"{within}{child.name}.")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{within}{child.name}"
            return _find_function(child, line, f"{name}.<locals>.") or name
        return _find_function(child, line, within)
    return ""
