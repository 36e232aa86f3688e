"""Mutants of Python: cosmic-ray's replacements of operators, and omissions of our own.

cosmic-ray and not mutmut: its operators are a library, which mutates a text; mutmut runs the suite itself, by function, and could
mutate neither SQL nor Lua beside it.
"""

import ast
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parents[2]

COMPARISONS = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
_ENDS = COMPARISONS[:4]
OPERATORS = (
    *(f"core/ReplaceComparisonOperator_{name}" for name in COMPARISONS),
    *(f"core/ReplaceBinaryOperator_{name}" for name in ("Add_Sub", "Sub_Add", "Mul_Div", "BitOr_BitAnd", "Sub_Mul")),
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/NumberReplacer",
)


@dataclass(frozen=True)
class Mutant:
    """One mistake: where it is, what it is called, and the text of the file with it."""

    path: str  # from the checkout's root
    line: int
    operator: str
    make: Callable[[str], str | None]
    block: str | None = None  # the statement or script in which it is, where coverage sees no lines
    test: str | None = None  # the test that must catch it, instead of those that execute it

    @property
    def key(self) -> str:
        """What names it in a list: its place moves with the lines above it."""
        return f"{self.path} | {self.change}"

    @property
    def change(self) -> str:
        """The operator, and the first line that differs, before and after."""
        before = (ROOT / self.path).read_text()
        after = self.make(before) or before
        changed = next(
            (pair for pair in zip(before.split("\n"), after.split("\n"), strict=False) if pair[0] != pair[1]), ("", "")
        )
        return f"{self.operator} | {changed[0].strip()} -> {changed[1].strip()}"


def splice(start: int, end: int, replacement: str, text: str) -> str:
    """A text with another one at a place."""
    return text[:start] + replacement + text[end:]


def python_mutants(path: str) -> Iterator[Mutant]:
    """All mutants of a Python file, but for those that only change types, texts for people, or how long something takes."""
    text = (ROOT / path).read_text()
    lines, skipped = text.splitlines(), _lines_without_effect(ast.parse(text))
    for mutant in (*_replacements(path, text), *_omissions(path, text)):
        is_of_time = mutant.operator.endswith(_ENDS) and "monotonic()" in lines[mutant.line - 1]
        if mutant.line not in skipped and not is_of_time:
            yield mutant


def _replacements(path: str, text: str) -> Iterator[Mutant]:
    nodes, lines = [*ast_nodes(get_ast(text))], text.splitlines()
    for name in OPERATORS:
        operator, occurrence = _operator(name), 0
        for node in nodes:
            for (line, column), _ in operator.mutation_positions(node):
                if not lines[line - 1][:column].endswith("strict="):  # an assertion, which holds
                    yield Mutant(path, line, name.partition("/")[2], partial(_replace, name, occurrence))
                occurrence += 1


@cache
def _operator(name: str):  # type: ignore[no-untyped-def]
    return get_operator(name)()


def _replace(name: str, occurrence: int, text: str) -> str | None:
    mutated: str | None = mutate_code(text, _operator(name), occurrence)
    return mutated


def _lines_without_effect(tree: ast.Module) -> set[int]:
    """Lines of signatures, types, endless loops, log calls, and of constants: their values are chosen, not right."""
    lines: set[int] = set()

    def skip(first: int, last: int | None) -> None:
        lines.update(range(first, (last or first) + 1))

    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                skip(node.lineno, max(node.lineno, node.body[0].lineno - 1))
            case ast.ClassDef(decorator_list=[first, *_]):  # frozen=True, slots=True
                skip(first.lineno, node.lineno)
            case ast.While(test=ast.Constant()):  # would only time out
                skip(node.lineno, node.lineno)
            case ast.AnnAssign(value=None):
                skip(node.lineno, node.end_lineno)
            case ast.Expr(value=ast.Call(func=function)) if _is_log(function):
                skip(node.lineno, node.end_lineno)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                skip(node.lineno, node.end_lineno)
            case _:
                pass
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            skip(node.lineno, node.end_lineno)
    return lines


def _is_log(function: ast.expr) -> bool:
    """True for a log call, and a crash point, at which slow tests end a process."""
    match function:
        case ast.Attribute(value=ast.Name(id="log")) | ast.Name(id="crashpoint"):
            return True
        case _:
            return False


def _omissions(path: str, text: str) -> Iterator[Mutant]:
    """What a person forgets: a condition, a call, a reset, a guard, an order, a part of a key."""
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line.encode()))
    data = text.encode()

    def place(node: ast.AST) -> tuple[int, int]:
        start = offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return len(data[:start].decode()), len(data[:end].decode())

    def mutant(node: ast.AST, operator: str, replacement: str) -> Mutant:
        start, end = place(node)
        return Mutant(path, node.lineno, operator, partial(splice, start, end, replacement))  # type: ignore[attr-defined]

    def source(node: ast.AST) -> str:
        start, end = place(node)
        return text[start:end]

    tree = ast.parse(text)
    in_init = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__")
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        match node:
            case ast.BoolOp(values=values):
                joint = " and " if isinstance(node.op, ast.And) else " or "
                for left in values:
                    kept = joint.join(f"({source(value)})" for value in values if value is not left)
                    yield mutant(node, "drop a condition", f"({kept})")
            case ast.Expr(value=ast.Call(func=function)) if not _is_log(function):
                yield mutant(node, "drop a call", "pass")
            case ast.Delete(targets=[ast.Name(), *_]):  # of what a function is given and does not use
                continue
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
                if id(node) in in_init:  # anything would fail without it
                    continue
                yield mutant(node, "drop an assignment", "pass")
            case ast.If(test=test, body=[ast.Return() | ast.Continue() | ast.Raise() | ast.Break()]):
                yield mutant(test, "drop a guard", "False")
            case ast.Call(func=ast.Name(id="sorted"), args=[first, *_]):
                yield mutant(node, "drop an order", f"list({source(first)})")
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield mutant(node.func, "swap min and max", "max" if name == "min" else "min")
            case ast.Subscript(value=ast.Attribute(), slice=ast.Tuple(elts=[_, _, *_] as parts)):
                yield mutant(node.slice, "drop a part of a key", ", ".join(source(part) for part in parts[:-1]) + ",")
            case ast.comprehension(ifs=[test, *_]):
                yield mutant(test, "drop a filter", "True")
            case _:
                pass


def shuffled(mutants: Iterable[Mutant], seed: str) -> list[Mutant]:
    """The mutants in an order that is the same for a seed, whatever else there is."""
    return sorted(
        mutants, key=lambda mutant: random.Random(f"{seed} {mutant.path} {mutant.line} {mutant.operator}").random()
    )
