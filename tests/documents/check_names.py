"""Arguments and variables have the noun of what they hold: a word that only fills a sentence names nothing."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src/penstock"

FILLERS = frozenset(
    re.findall(
        r"\w+",
        "own found known each left made given some there here more said what which who whose where rest "
        "wanted asked taken shown held kept done standing whole was named seen noted began begins ends ended "
        "after before at by of so such it they them this that those these both every moved",
    )
)
WRITTEN_BY_USERS = {"each", "every", "of"}
"""Arguments of ``Pipeline``'s methods: ``consumer(each=True)``, ``worker(every="10m")``, ``reconciliation(of=…)``."""

MAX_SHARE = 1.0
"""Per cent of the names in a package that may be fillers: there are words that are the noun."""


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_names_say_what_they_hold() -> None:
    names, fillers = Counter[str](), Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = WRITTEN_BY_USERS if package == "pipeline" else set()
        package = package if (PACKAGE / package).is_dir() else "the modules at the top"
        for name in _names(path):
            names[package] += name not in {"self", "cls"}
            fillers[package] += name in FILLERS - allowed

    shares = {package: 100 * fillers[package] / names[package] for package in names}
    too_many = {p: round(s, 2) for p, s in shares.items() if s > MAX_SHARE + 0.05}
    assert too_many == {}
