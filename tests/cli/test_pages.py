"""Generated pages match the code; every error has a section in the docs and an exit code."""

import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import penstock
from penstock.errors import PenstockError

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ERRORS = (REFERENCE / "errors.md").read_text()
GENERATED = runpy.run_path(str(REFERENCE / "command_line.py"))
TREE = re.findall(r"^( *)(\w+) (\d)$", ERRORS, re.MULTILINE)
SECTIONS = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", ERRORS, re.MULTILINE | re.DOTALL))


def all_errors() -> list[type[PenstockError]]:
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not module.name.endswith("__main__") and not module.name.startswith("penstock.django."):  # without a project
            importlib.import_module(module.name)
    found, waiting = [], [PenstockError]
    while waiting:
        error = waiting.pop()
        found.append(error)
        waiting.extend(error.__subclasses__())
    return sorted({e for e in found if e.__module__.startswith("penstock.")}, key=lambda e: e.__name__)


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.__name__)
def test_an_error_has_a_section_and_an_exit_code(error: type[PenstockError]) -> None:
    assert error.page == f"errors#{error.__name__.lower()}"
    assert error.__name__ in SECTIONS
    assert error.exit_code in dict(GENERATED["EXIT_CODES"])
    assert error.__doc__


def test_the_tree_shows_the_base_class_and_the_exit_code_of_every_error() -> None:
    shown: dict[str, tuple[str | None, int]] = {}
    path: list[str] = []
    for indent, name, code in TREE:
        del path[len(indent) // 4 :]
        shown[name] = (path[-1] if path else None, int(code))
        path.append(name)

    assert shown == {
        error.__name__: (None if error is PenstockError else _find_base(error), error.exit_code)
        for error in all_errors()
    }


def _find_base(error: type[PenstockError]) -> str:
    return next(base.__name__ for base in error.__bases__ if issubclass(base, PenstockError))


def test_every_section_belongs_to_an_existing_error() -> None:
    assert set(SECTIONS) == {error.__name__ for error in all_errors()} | {"UnstagedChanges"}


def test_every_page_named_in_an_error_text_exists() -> None:
    source = Path(penstock.__file__).parent
    named = {anchor for path in source.rglob("*.py") for anchor in re.findall(r"errors#([a-z]+)", path.read_text())}

    assert named <= {name.lower() for name in SECTIONS}


@pytest.mark.parametrize("name", sorted(GENERATED["pages"]()))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    """If this fails, run ``python docs/reference/command_line.py``."""
    assert (REFERENCE / name).read_text() == GENERATED["pages"]()[name]
