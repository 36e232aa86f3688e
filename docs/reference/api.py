"""Generates the API reference from the docstrings of the public names; ``make site`` puts it in place of ``api/README.md``.

python docs/reference/api.py DIRECTORY    writes the pages
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]

PAGES: dict[str, tuple[str, ...]] = {
    "penstock": (
        "penstock.declaring.declarations.ConsumerSpec",
        "penstock.declaring.declarations.WorkerSpec",
        "penstock.declaring.declarations.StagingRule",
        "penstock.declaring.declarations.ReconciliationSpec",
        "penstock.staging.job_calls.DeclaredWorker",
    ),
    "penstock.clients": (),
    "penstock.engines.stealing": (),
    "penstock.journal.journal_records": (),
    "penstock.schema.migrations": (),
    "penstock.testing": (),
    "penstock.django": (),
    "penstock.spark": (),
    "penstock.errors": (),
    "penstock.observer": (),
}
"""The packages; for each, names beside those of its ``__all__``."""

MAX_LINE = 92
"""Longest signature on one line, in characters."""

_STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
_NAMED_FOLLOW = {griffe.ParameterKind.var_positional, griffe.ParameterKind.keyword_only}

_FACES = {"Operations", "Blocking", "BlockingClient", "Asynchronous", "AsyncClient", "Queued"}
"""Bases that give operations their faces."""

_UNLISTED = {*_FACES, "LogChannel"}
"""Bases that are on no page: their members are described at the classes that have them."""

_STEPS = re.compile(r"\bSteps\[(.*)\]")
"""What an operation returns once it is run."""

_INHERITED_RAISES = re.compile(r"^Raises:\n +As (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([A-Za-z_.]+)`")
_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)


class Reference:
    """The pages, from the source: nothing is imported.

    Attributes:
        names: Each page's names, with their objects.
    """

    def __init__(self) -> None:
        package = griffe.load("penstock", search_paths=[ROOT / "src"], docstring_parser="google", resolve_aliases=True)
        self._objects: Any = package.modules_collection
        self.names = {module: dict(self._named(module, more)) for module, more in PAGES.items()}

    def pages(self) -> dict[str, str]:
        """The text of each page by its file name."""
        made = {f"{_page(module)}.md": self._module(module) for module in PAGES}
        return {"README.md": self._index(), **made}

    def _named(self, module: str, more: Iterable[str]) -> Iterator[tuple[str, Any]]:
        found = self._objects[module]
        exports = found.exports or (() if more else _defined_classes(found))
        for name in (*exports, *more):
            path = found.imports.get(name, name if "." in name else f"{module}.{name}")
            target = self._objects[path]
            yield name.rpartition(".")[2], target.final_target if target.is_alias else target

    def _index(self) -> str:
        lines = ["# API reference", "", "Which names may an application import?"]
        lines += ["", "| module | names |", "| --- | --- |"]
        for module, names in self.names.items():
            links = (f"[`{n}`]({_page(module)}.md#{_anchor(n, o)})" for n, o in names.items())
            lines.append(f"| [`{module}`]({_page(module)}.md) | {', '.join(links)} |")
        return "\n".join([*lines, ""])

    def _module(self, module: str) -> str:
        blocks = [f"# {module}", *self._docstring(self._objects[module], module)]
        for name, each in self.names[module].items():
            blocks += [f"## {_title(name, each)}", *self._object(each, module)]
        return "\n\n".join(block for block in blocks if block) + "\n"

    def _object(self, each: Any, module: str) -> Iterator[str]:
        if each.is_attribute:
            yield _python(f"{each.name} = {each.value}")
            yield from self._docstring(each, module)
        elif each.is_function:
            yield _python(self._signature(each))
            yield from self._docstring(each, module)
        else:
            yield from self._class(each, module)

    def _class(self, cls: Any, module: str) -> Iterator[str]:
        constructor = next((c.members["__init__"] for c in (cls, *cls.mro()) if "__init__" in c.members), None)
        if cls.signature():
            yield _python(self._signature(cls))
        elif constructor is not None and constructor.is_function:
            made = self._signature(constructor).replace("__init__(", f"{cls.name}(").removesuffix(" -> None")
            yield _python(_with_types(cls, made))
        if bases := _public_bases(cls):
            yield self._linked(f"Base: {', '.join(f'`{base}`' for base in bases)}.", module)
        if module == "penstock.errors":
            yield f"[What to do](../errors.md#{cls.name.lower()})."
        yield from self._docstring(cls, module)
        if constructor is not None and constructor.docstring:
            yield from self._docstring(constructor, module)
        yield from self._members(cls, module)

    def _members(self, cls: Any, module: str) -> Iterator[str]:
        members = list(_public_members(cls))
        attributes = [m for m in members if _is_attribute(m) and m.docstring]
        if attributes:
            items = (f"- `{a.name}`: {' '.join(self._docstring(a, module))}" for a in attributes)
            yield "\n".join(["Properties:", "", *items])
        for each in members:
            if each.is_function and not _is_attribute(each):
                yield f"### {cls.name}.{each.name}"
                yield _python(_with_types(cls, self._signature(each)))
                yield from self._docstring(each, module)

    def _signature(self, each: Any) -> str:
        """The signature, with constants for their names; one parameter a line if it is long."""
        for parameter in each.parameters:
            constant = self._constant(parameter.default)
            if constant is not None:
                parameter.default = constant
        whole = _STEPS.sub(r"\1", str(each.signature()))
        if len(whole) <= MAX_LINE:
            return whole
        lines = "".join(f"    {parameter},\n" for parameter in _parameters(each))
        returns = "" if each.is_class else _STEPS.sub(r"\1", f" -> {each.returns}")
        return f"{each.name}(\n{lines}){returns}"

    def _constant(self, default: Any) -> str | None:
        """The value of a module's constant."""
        if not isinstance(default, griffe.ExprName) or not default.name.isupper():
            return None
        return str(self._objects[default.canonical_path].value)

    def _docstring(self, each: Any, module: str) -> Iterator[str]:
        if each.docstring is None:
            return
        each.docstring.value = _INHERITED_RAISES.sub(r"Raises as \1", each.docstring.value)
        for section in each.docstring.parse("google", warn_unknown_params=False):
            yield self._section(section, module)

    def _section(self, section: Any, module: str) -> str:
        match section.kind.value:
            case "text":
                return self._linked(_reflowed(_LITERAL.sub(r"`\1`", section.value)), module)
            case "returns":
                described = " ".join(item.description for item in section.value)
                return f"Returns: {self._linked(_text(described), module)}"
            case "raises":
                raised = ((str(item.annotation), item.description) for item in section.value)
                items = [(self._linked(f"`{name}`", module), what) for name, what in raised]
                return self._listed("Raises:", items, module)
            case kind:
                title = {"parameters": "Arguments:", "attributes": "Attributes:"}[kind]
                items = [(f"`{item.name}`", item.description) for item in section.value]
                return self._listed(title, items, module)

    def _listed(self, title: str, items: Iterable[tuple[str, str]], module: str) -> str:
        lines = (f"- {name}: {self._linked(_text(what), module)}" for name, what in items)
        return "\n".join([title, "", *lines])

    def _linked(self, text: str, module: str) -> str:
        """Names in code become links to where they are described."""

        def link(match: re.Match[str]) -> str:
            path = self._path(match[1], module)
            return match[0] if path is None else f"[`{match[1]}`]({path})"

        paragraphs = text.split("\n\n")
        return "\n\n".join(p if p.startswith("    ") else _CODE.sub(link, p) for p in paragraphs)

    def _path(self, name: str, module: str) -> str | None:
        """Where a name is described: on this page, or elsewhere if it cannot be mistaken for a common word."""
        if name in self.names["penstock.errors"]:
            return f"../errors.md#{name.lower()}"
        owner, _, member = name.partition(".")
        for where in (module, *self.names) if owner[0].isupper() else (module,):
            each = self.names[where].get(owner)
            if each is not None and (not member or member in each.members):
                page = "" if where == module else f"{_page(where)}.md"
                anchor = f"{owner}{member}".lower() if member else _anchor(owner, each)
                return f"{page}#{anchor}"
        return None


def _text(text: str) -> str:
    return " ".join(_LITERAL.sub(r"`\1`", text).split())


def _reflowed(text: str) -> str:
    """Each paragraph on a line; what is indented stays as it is."""
    paragraphs = (p.rstrip() for p in text.split("\n\n"))
    return "\n\n".join(p if p.startswith("    ") else " ".join(p.split()) for p in paragraphs)


def _python(code: str) -> str:
    """Fenced as ``py``: the tests compile what is fenced as ``python``."""
    return f"```py\n{code}\n```"


def _page(module: str) -> str:
    return module.rpartition(".")[2]


def _title(name: str, each: Any) -> str:
    return f"class {name}" if each.is_class else name


def _anchor(name: str, each: Any) -> str:
    return _title(name, each).lower().replace(" ", "-")


def _parameters(each: Any) -> Iterator[str]:
    """The parameters as they are declared, without ``self``."""
    named = False
    for parameter in each.parameters:
        if parameter.name in {"self", "cls"}:
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not named:
            yield "*"
        named = named or kind in _NAMED_FOLLOW
        annotation = f": {parameter.annotation}" if parameter.annotation else ""
        default = "" if kind in _STARS or parameter.default is None else f" = {parameter.default}"
        yield f"{_STARS.get(kind, '')}{parameter.name}{annotation}{default}"


def _defined_classes(module: Any) -> list[str]:
    return [
        name
        for name, each in module.members.items()
        if not each.is_alias and each.is_class and not name.startswith("_")
    ]


def _public_bases(cls: Any) -> list[str]:
    names = [str(base).partition("[")[0] for base in cls.bases]
    return [n for n in names if not n.startswith("_") and n not in {"Generic", "ABC", "Exception", *_FACES}]


def _with_types(cls: Any, signature: str) -> str:
    """A signature with what the class gives for the type variables of its private base."""
    for base in cls.bases:
        if str(base).startswith("_") and isinstance(base, griffe.ExprSubscript):
            names = [str(each) for each in _arguments(base.canonical_path, cls)]
            given = [str(each) for each in _elements(base.slice)]
            for name, text in zip(names, given, strict=True):
                signature = re.sub(rf"\b{name}\b(?=[\],)= |]|$)", text.strip("'\""), signature)
    return signature


def _arguments(path: str, cls: Any) -> list[Any]:
    """The type variables of a class."""
    [found] = (base for base in cls.mro() if base.canonical_path == path)
    return _elements(
        max((b.slice for b in found.bases if isinstance(b, griffe.ExprSubscript)), key=lambda b: len(str(b)))
    )


def _elements(of: Any) -> list[Any]:
    return list(of.elements) if isinstance(of, griffe.ExprTuple) else [of]


def _public_members(cls: Any) -> Iterator[Any]:
    """Its own, and those of its private bases; what all faces have is described once, at the class for threads."""
    is_other = any(base.name in {"Asynchronous", "Queued"} for base in cls.mro())
    private = [base for base in cls.mro() if base.name.startswith("_") or base.name in _UNLISTED]
    members = {n: m for c in (*(() if is_other else reversed(private)), cls) for n, m in c.members.items()}
    for name, each in members.items():
        if not name.startswith("_") and not each.is_alias:
            yield each


def _is_attribute(each: Any) -> bool:
    return each.is_attribute or any("OnFirstUse" in d.callable_path for d in each.decorators)


def write_pages(directory: Path) -> None:
    """Writes a page for each package, and their index."""
    for name, text in Reference().pages().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
