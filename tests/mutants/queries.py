"""Mutants of SQL and of Lua: what is easily left out, or swapped."""

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache, partial

from mutants.mutations import ROOT, Mutant, splice

_STATEMENT = re.compile(r"^-- :name (\w+)\n", re.MULTILINE)
_TOKEN = re.compile(
    r"--[^\n]*|'(?:[^']|'')*'|\"[^\"]*\"|\$\w*\$|%\(\w+\)s|[A-Za-z_]\w*|<=|>=|<>|!=|::|\d+|\S", re.DOTALL
)
_ENDS = {"AND", "OR", "WHERE", "GROUP", "ORDER", "HAVING", "LIMIT", "FOR", "RETURNING", "UNION", "ON", "WHEN", "THEN", "ELSE", "END",
         "LEFT", "JOIN", "CROSS", "INNER", "FROM", "SET", "WINDOW", "OFFSET", "FETCH", "EXCEPT", "INTERSECT", "VALUES", "SELECT", ";"}  # fmt: skip
_SIMPLE = [
    (r"\bFOR (?:NO KEY )?(?:UPDATE|SHARE)(?: OF \w+)?(?: SKIP LOCKED| NOWAIT)?", "", "drop a lock"),
    (r" SKIP LOCKED", "", "drop SKIP LOCKED"),
    (r"\bIS NOT DISTINCT FROM\b", "=", "IS NOT DISTINCT FROM to ="),
    (r"\bIS DISTINCT FROM\b", "<>", "IS DISTINCT FROM to <>"),
    (r"(?<![<>=!-])<(?![<>=@-])", "<=", "< to <="),
    (r"(?<![<>=!-])<=(?![<>=@])", "<", "<= to <"),
    (r"(?<![<>=!-])>(?![<>=@])", ">=", "> to >="),
    (r"(?<![<>=!-])>=(?![<>=@])", ">", ">= to >"),
    (r"\bLEFT JOIN\b", "JOIN", "LEFT JOIN to JOIN"),
    (r"\bNOT EXISTS\b", "EXISTS", "NOT EXISTS to EXISTS"),
    (r"\bUNION ALL\b", "UNION", "UNION ALL to UNION"),
    (r"\bDISTINCT\b(?! FROM)", "", "drop DISTINCT"),
    (r"\bDESC\b", "ASC", "DESC to ASC"),
    (r"\bmin\(", "max(", "min to max"),
    (r"\bmax\(", "min(", "max to min"),
    (r"\bleast\(", "greatest(", "least to greatest"),
    (r"\bgreatest\(", "least(", "greatest to least"),
    (r" \+ 1\b", "", "drop + 1"),
    (r" - 1\b", "", "drop - 1"),
]


def sql_mutants(path: str) -> Iterator[Mutant]:
    """The mutants of the named statements of a file."""
    text = (ROOT / path).read_text()
    for start, end, replacement, operator in _sql_changes(text):
        if block := find_block(path, start):
            line = text.count("\n", 0, start) + 1
            yield Mutant(path, line, operator, partial(splice, start, end, replacement), block=block)


def find_block(path: str, place: int) -> str | None:
    """The statement or script in which a place of a file is; None where coverage sees lines."""
    if path.endswith(".lua"):
        return f"lua:{path.removeprefix('lua/').removesuffix('.lua')}"
    if not path.endswith(".sql"):
        return None
    names = _statements(path)
    at = bisect_right([start for start, _ in names], place) - 1
    return f"sql:{names[at][1]}" if at >= 0 else None


@cache
def _statements(path: str) -> list[tuple[int, str]]:
    return [(match.end(), match[1]) for match in _STATEMENT.finditer((ROOT / path).read_text())]


def split_statements(text: str) -> dict[str, str]:
    """The statements of a file, by block."""
    parts = _STATEMENT.split(text)[1:]
    return {f"sql:{name}": body.strip().rstrip(";") for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _sql_changes(text: str) -> Iterator[tuple[int, int, str, str]]:
    hidden = _blank(text, r"--[^\n]*|'(?:[^']|'')*'")
    for pattern, replacement, operator in _SIMPLE:
        for match in re.finditer(pattern, hidden):
            yield match.start(), match.end(), replacement, operator
    for match in re.finditer(r"\bORDER BY\b", hidden):
        yield match.start(), _end_of_condition(hidden, match.end(), commas=True), "", "drop an order"
    for match in re.finditer(r"\bWHERE\b", hidden):
        end = _end_of_condition(hidden, match.end())
        if hidden[end : end + 3] == "AND":
            yield match.end(), end + 3, " ", "drop a condition"
        elif hidden[end : end + 2] != "OR":
            yield match.start(), end, "", "drop the filter"
    for match in re.finditer(r"\bAND\b", hidden):
        if not _is_between(hidden, match.start()):
            yield match.start(), _end_of_condition(hidden, match.end()), "", "drop a condition"


def _blank(text: str, pattern: str) -> str:
    """A text with what matches replaced by spaces, so that places stay."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)


def _end_of_condition(text: str, start: int, *, commas: bool = False) -> int:
    """The place after a condition: the next one, clause, or closing parenthesis at its level."""
    depth, between = 0, False
    for token in _TOKEN.finditer(text, start):
        word = token[0].upper()
        if token[0] in ("(", "["):
            depth += 1
        elif token[0] in (")", "]"):
            if depth == 0:
                return token.start()
            depth -= 1
        elif depth == 0:
            if word == "BETWEEN":
                between = True
            elif word == "AND" and between:
                between = False
            elif (
                word in _ENDS and not (word == "FROM" and text[: token.start()].rstrip().upper().endswith("DISTINCT"))
            ) or (word == "," and not commas):
                return token.start()
    return len(text)


def _is_between(text: str, place: int) -> bool:
    return (
        re.search(r"\bBETWEEN\s+[^()]*(?:\([^()]*\))?[^()]*$", text[max(0, place - 200) : place], re.IGNORECASE)
        is not None
    )


_NO_STEP = r"(?<!\bat = at)(?<!\bhead = head)(?<!\blooks = looks)(?<!\bplace = place)"
"""Not the step of a loop: a script without an end blocks the server for all other tests."""

_LUA = [
    (r"(?<![<>=~])<(?![<>=])", "<=", "< to <="),
    (r"<=", "<", "<= to <"),
    (r"(?<![<>=~])>(?![<>=])", ">=", "> to >="),
    (r">=", ">", ">= to >"),
    (r"==", "~=", "== to ~="),
    (r"~=", "==", "~= to =="),
    (r"\bmath\.max\b", "math.min", "max to min"),
    (r"\bmath\.min\b", "math.max", "min to max"),
    (rf"{_NO_STEP} \+ 1\b", "", "drop + 1"),
    (rf"{_NO_STEP} - 1\b", "", "drop - 1"),
    (r"\bnot (?=\w)", "", "drop not"),
    (r"(?<=\n)(?: *)redis\.call\([^\n]*\)(?=\n)", "", "drop a command"),
    (r"\bif [^\n]*? then\b", "if false then", "drop a branch"),
    (r" and [^\n()]+?(?= then\b| or | and )", "", "drop a condition"),
    (r" or [^\n()]+?(?= then\b| or | and )", "", "drop an alternative"),
]


def lua_mutants(path: str) -> Iterator[Mutant]:
    """The mutants of a script or a fragment."""
    text = (ROOT / path).read_text()
    hidden = _blank(text, r"--[^\n]*|\"[^\"\n]*\"")
    block = find_block(path, 0)
    for pattern, replacement, operator in _LUA:
        for match in re.finditer(pattern, text if "call" in pattern else hidden):
            line = text.count("\n", 0, match.start()) + 1
            make = partial(splice, match.start(), match.end(), replacement)
            yield Mutant(path, line, operator, make, block)
