"""Puts a mutant into the running process: swaps the code of functions, and replaces constants, statements and scripts."""

import ast
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from mutants.mutations import ROOT, Mutant
from mutants.queries import split_statements
from penstock.channels import scripts
from penstock.database import statements as loader

UNFREEZE = gc.unfreeze  # tests/conftest.py replaces it
_load, _read = loader.statements, scripts._read
_replaced: dict[str, str] = {}  # statements, and scripts or fragments, by block


class CannotSwap(Exception):
    """The mistake is in what has run when a module was imported, such as the fields of a class."""


def record_blocks(note: Callable[[str], None]) -> None:
    """Calls ``note`` with each statement that is looked up and each script that is called.

    Must run before a module imports ``statements``.
    """

    class Statements(dict[str, bytes]):
        schema = ""

        def __getitem__(self, name: str) -> bytes:
            note(f"sql:{name}")
            text = _replaced.get(f"sql:{name}")
            quoted = loader.quote(self.schema)
            return super().__getitem__(name) if text is None else text.replace("{schema}", quoted).encode()

    @cache
    def statements(schema: str) -> dict[str, bytes]:
        made = Statements(_load(schema))
        made.schema = schema
        return made

    def recording(call: Any) -> Any:
        def recorded(script: scripts.Script, calls: Any) -> Any:
            note(f"lua:{script.name}")
            return call(script, calls)

        return recorded

    assert "penstock.database.store" not in sys.modules
    loader.statements = statements
    scripts._read = lambda name: _replaced.get(f"lua:{name}") or _read(name)
    scripts.Script.packed = recording(scripts.Script.packed)  # type: ignore[method-assign]
    scripts.Script.steps = recording(scripts.Script.steps)  # type: ignore[method-assign]


@contextmanager
def mistake(mutant: Mutant, after: str) -> Iterator[None]:
    """Makes the mistake for the duration of the block.  Raises ``CannotSwap``."""
    if mutant.block is None:
        with _swapped(mutant.path, after):
            yield
        return
    _replaced[mutant.block] = split_statements(after)[mutant.block] if mutant.path.endswith(".sql") else after
    _forget_scripts()
    try:
        yield
    finally:
        del _replaced[mutant.block]
        _forget_scripts()


def _forget_scripts() -> None:
    scripts.script.cache_clear()
    scripts.with_fragments.cache_clear()


@contextmanager
def _swapped(path: str, text: str) -> Iterator[None]:
    before, after = (_list_codes(each, str(ROOT / path)) for each in ((ROOT / path).read_text(), text))
    keys = {(code.co_qualname, code.co_firstlineno): key for key, code in before.items()}
    functions, caches = _list_functions(len(sys.modules))
    live = [(function, function.__code__) for function in functions[str(ROOT / path)]]
    constants = list(_replace_constants(path, text))
    is_changed = bool(constants)
    try:
        for function, code in live:
            key = keys.get((code.co_qualname, code.co_firstlineno), ("", 0))
            new = after.get(key)
            if new is not None and _contents(new) != _contents(before[key]):
                if len(new.co_freevars) != len(code.co_freevars):
                    raise CannotSwap
                function.__code__ = new
                is_changed = True
        if not is_changed:
            raise CannotSwap
        for cached in caches[str(ROOT / path)]:
            cached.cache_clear()
        yield
    finally:
        for function, code in live:
            function.__code__ = code
        for names, name, value in constants:
            names[name] = value
        for cached in caches[str(ROOT / path)]:
            cached.cache_clear()


def _list_codes(text: str, file: str) -> dict[tuple[str, int], CodeType]:
    """The code objects of a file by qualified name, and number among those of this name."""
    codes: dict[tuple[str, int], CodeType] = {}
    numbers = Counter[str]()

    def add(code: CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                numbers[constant.co_qualname] += 1
                codes[constant.co_qualname, numbers[constant.co_qualname]] = constant
                add(constant)

    add(compile(text, file, "exec", dont_inherit=True))
    return codes


def _contents(code: CodeType) -> tuple[Any, ...]:
    """A code object without its line numbers."""
    constants = (_contents(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts)
    return (code.co_code, code.co_names, code.co_varnames, *constants)


@lru_cache(1)
def _list_functions(_modules: int) -> tuple[dict[str, list[FunctionType]], dict[str, list[Any]]]:
    """The package's functions by file, and its caches, of a number of modules that are imported."""
    functions, caches = defaultdict[str, list[FunctionType]](list), defaultdict[str, list[Any]](list)
    UNFREEZE()
    for thing in gc.get_objects():
        function = getattr(thing, "__wrapped__", None) if type(thing).__name__ == "_lru_cache_wrapper" else thing
        if type(function) is FunctionType and "/penstock/" in function.__code__.co_filename:
            functions[function.__code__.co_filename].append(function)
            if thing is not function:
                caches[function.__code__.co_filename].append(thing)
    gc.freeze()
    return functions, caches


def module_name(path: str) -> str:
    """The module of a file."""
    return ".".join(Path(path).with_suffix("").parts[1:]).removesuffix(".__init__")


def _replace_constants(path: str, text: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Executes the module's assignments that differ, and those that use them; yields what is to be put back."""
    module = import_module(module_name(path))
    changed: set[str] = set()
    namespace = dict(vars(module))
    for old, new in zip(ast.parse((ROOT / path).read_text()).body, ast.parse(text).body, strict=False):
        if not isinstance(new, ast.Assign | ast.AnnAssign):
            continue
        used = {node.id for node in ast.walk(new) if isinstance(node, ast.Name)}
        if ast.dump(old) == ast.dump(new) and used.isdisjoint(changed):
            continue
        exec(compile(ast.Module([new], []), path, "exec"), namespace)
        targets = new.targets if isinstance(new, ast.Assign) else [new.target]
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            changed.add(name)
            value = vars(module)[name]
            for importer in [each for key, each in sys.modules.items() if key.startswith("penstock.")]:
                if vars(importer).get(name) is value:
                    yield vars(importer), name, value
                    vars(importer)[name] = namespace[name]
