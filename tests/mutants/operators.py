"""Small defects, injected by text in Python, SQL and Lua: one change at one place that is neither comment nor docstring."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Rule = tuple[str, str]
"""A regular expression, and what takes the place of its match."""

_SHARED: list[Rule] = [
    (r"(?<![<>=!~-])>=", ">"),
    (r"(?<![<>=!~-])<=(?!>)", "<"),
    (r"(?<=\s)>(?=\s)", ">="),
    (r"(?<=\s)<(?=\s)", "<="),
    (r"\+ 1\b", "+ 0"),
    (r"- 1\b", "- 0"),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
]
_WORDS: list[Rule] = [(r"\band\b", "or"), (r"\bor\b", "and"), (r"(?<!is )\bnot (?!in\b)", "")]
_RULES: dict[str, list[Rule]] = {
    ".py": [
        *_SHARED,
        *_WORDS,
        (r"==", "!="),
        (r"!=", "=="),
        (r"\bis not None\b", "is None"),
        (r"\bis None\b", "is not None"),
        (r"(?<!strict=)\bTrue\b", "False"),  # what zip checks never happens
        (r"\bFalse\b", "True"),
        (r"\bnot in\b", "in"),
        (r"\bcontinue\b", "break"),
    ],
    ".lua": [*_SHARED, *_WORDS, (r"==", "~="), (r"~=", "=="), (r"^\s*redis\.call\(.*\)$", "")],
    ".sql": [
        *_SHARED,
        (r"\bNOT EXISTS\b", "EXISTS"),
        (r"\bIS NOT NULL\b", "IS NULL"),
        (r"\bIS NULL\b", "IS NOT NULL"),
        (r"^\s+AND\b.*[^;]$", ""),
        (r"\bOR\b", "AND"),
        (r"\bDESC\b", ""),
        (r"\bSKIP LOCKED\b", ""),
        (r"\bFOR UPDATE\b.*(?=;)", ""),
        (r"\bUNION ALL\b", "UNION"),
        (r"\bcoalesce\(", "nullif("),
    ],
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file with one defect.

    Attributes:
        path: The file.
        line: Where the defect is, from 1.
        before: The line as it was.
        after: The line as it is.
        text: The whole file with the defect.
    """

    path: Path
    line: int
    before: str
    after: str
    text: str


def find_mutants(path: Path) -> Iterator[Mutant]:
    """All defects that can be injected in a file, in the order of its lines."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    for number, column, end, replacement in _find_places(path.suffix, text, lines):
        before = lines[number]
        after = before[:column] + replacement + before[end:]
        mutated = "".join([*lines[:number], after, *lines[number + 1 :]])
        if path.suffix != ".py" or _compiles(mutated):
            yield Mutant(path, number + 1, before.strip(), after.strip(), mutated)


def _find_places(suffix: str, text: str, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """Line, columns of beginning and end, and the replacement."""
    passive = _passive_python(text) if suffix == ".py" else _passive_by_dashes(lines)
    for number, line in enumerate(lines):
        for pattern, replacement in _RULES[suffix]:
            for found in re.finditer(pattern, line.rstrip("\n")):
                if not any(a <= (number, found.start()) < b for a, b in passive.get(number, ())):
                    yield number, found.start(), found.end(), replacement
    if suffix == ".py":
        yield from _find_calls(text)


Span = tuple[tuple[int, int], tuple[int, int]]


def _passive_by_dashes(lines: list[str]) -> dict[int, list[Span]]:
    """Comments of SQL and Lua, by line."""
    return {
        number: [((number, line.index("--")), (number, len(line)))]
        for number, line in enumerate(lines)
        if "--" in line
    }


def _passive_python(text: str) -> dict[int, list[Span]]:
    """Comments, strings, annotations, imports and decorators of classes, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kinds = {tokenize.COMMENT, tokenize.STRING}
    spans = [_span(each.start, each.end) for each in tokens if each.type in kinds]
    spans += [
        _span((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset or 0))
        for node in _passive_nodes(ast.parse(text))
        if node.end_lineno is not None
    ]
    found: dict[int, list[Span]] = {}
    for begin, end in spans:
        for number in range(begin[0], end[0] + 1):
            found.setdefault(number, []).append((begin, end))
    return found


def _passive_nodes(tree: ast.Module) -> Iterable[ast.expr | ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from node.decorator_list


def _span(begin: tuple[int, int], end: tuple[int, int]) -> Span:
    return (begin[0] - 1, begin[1]), (end[0] - 1, end[1])


def _find_calls(text: str) -> Iterator[tuple[int, int, int, str]]:
    """Statements on one line that are nothing but a call: what they do is left undone."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and node.lineno == node.end_lineno
            and not _only_speaks(node.value)
        ):
            yield node.lineno - 1, node.col_offset, node.end_col_offset or 0, "pass"


def _only_speaks(call: ast.Call) -> bool:
    """Whether the call logs or marks a crash point: no test has to notice that it is gone."""
    return re.match(r"(log\.|crashpoint)", ast.unparse(call.func)) is not None


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True
