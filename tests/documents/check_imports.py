"""The import-linter judges which way imports point; here it is made sure that it sees all of them, and that they make no circle."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

BY_STRING = {"__import__", "import_module", "load_module", "module_from_spec", "resolve_name", "run_module", "run_path"}
"""What imports a module that a string names."""

LOADERS = {
    "penstock": "a public name, at its first use; what it imports for type checkers says which",
    "penstock.cli.app": "the module of a command, when it is run",
    "penstock.demo.supervision": "the program of a process, as python -m does",
    "penstock.pipeline": "the application's module",
}
"""The modules that may, and what they import so."""


@cache
def _nodes() -> dict[str, list[ast.AST]]:
    """The syntax of each module of the package, by its name."""
    files = ((".".join(path.relative_to(SRC).with_suffix("").parts), path) for path in SRC.glob("penstock/**/*.py"))
    return {name.removesuffix(".__init__"): [*ast.walk(ast.parse(path.read_text()))] for name, path in files}


def _imported(module: str) -> Iterator[str]:
    """What a module imports, in functions and for type checkers, too: paths, of names or of modules."""
    for node in _nodes()[module]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    if module == "penstock.cli.app":
        yield from (name for name in _nodes() if name.startswith("penstock.cli.commands."))


def _arrows(module: str) -> set[str]:
    """The modules that a module imports, and the packages that Python imports before them, but for those that it is in."""
    arrows = set()
    for path in _imported(module):
        *packages, target = [
            prefix for prefix in accumulate(path.split("."), "{}.{}".format) if prefix in _nodes()
        ] or [""]
        arrows |= {target, *(package for package in packages if not module.startswith(f"{package}."))}
    return arrows - {module, ""}


def test_no_module_is_imported_by_a_string() -> None:
    named = {
        name
        for name, nodes in _nodes().items()
        if any(getattr(node, field, None) in BY_STRING for node in nodes for field in ("id", "attr", "name"))
    }
    assert named == LOADERS.keys()


def test_no_imports_make_a_circle() -> None:
    arrows = {name: _arrows(name) for name in _nodes()}

    assert sum(map(len, arrows.values())) > 2000
    TopologicalSorter(arrows).prepare()  # raises CycleError, which shows the circle
