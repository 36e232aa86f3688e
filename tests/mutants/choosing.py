"""Which tests could notice a defect: those that reach its function, SQL statement or script, by a measurement kept in a file."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants.operators import Mutant

SOURCE, LUA = Path("src/penstock"), Path("lua")
_INCLUDES = re.compile(r"^-- includes: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Test:
    """A test: its id, its duration when it was measured, in seconds, and the places that it reached."""

    name: str
    seconds: float
    reached: frozenset[str]


def read_tests(directory: Path) -> list[Test]:
    """The tests that were measured, the shortest first."""
    lines = (line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines())
    rows = map(json.loads, lines)
    found = [Test(row["test"], row["seconds"], frozenset(row["reached"])) for row in rows]
    return sorted(found, key=lambda test: test.seconds)


def choose_tests(tests: list[Test], mutant: Mutant, root: Path) -> list[Test]:
    """Those that reach the mutant's place, in their order; a line outside of all functions is reached by who reaches the file."""
    path = mutant.path.relative_to(root)
    if path.suffix == ".lua":
        places = {f"lua:{name}" for name in _scripts_with(root / LUA, mutant.path)}
    elif path.suffix == ".sql":
        places = {_statement(path, mutant)}
    else:
        places = set(_functions(path, mutant))
    chosen = [test for test in tests if test.reached & places]
    if chosen or path.suffix != ".py":
        return chosen
    prefix = f"{path.relative_to(SOURCE)}:"
    return [test for test in tests if any(place.startswith(prefix) for place in test.reached)]


def _scripts_with(lua: Path, path: Path) -> Iterator[str]:
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


def _functions(path: Path, mutant: Mutant) -> Iterator[str]:
    """The innermost function that has the line, as the measurement names it: by its first line, decorators included."""
    first = 0
    for node in ast.walk(ast.parse(mutant.path.read_text())):
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef
        ) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            first = max(first, min([node.lineno, *(each.lineno for each in node.decorator_list)]))
    if first:
        yield f"{path.relative_to(SOURCE)}:{first}"
