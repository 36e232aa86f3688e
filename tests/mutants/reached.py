"""A pytest plugin: which functions, SQL statements and Lua scripts a test reaches, and a choice of tests in a given order.

With ``MUTANTS_MEASURE=directory`` it writes one line of JSON for each test that passes; with ``MUTANTS_CHOSEN=file`` it runs the tests named in
that file and no others, in its order.  What a test's subprocesses reach is not seen.
"""

import json
import os
import sys
import threading
from collections.abc import Generator
from functools import cache
from pathlib import Path
from time import monotonic
from types import FrameType

import pytest

import penstock.database.statements as loader
from penstock.channels import scripts

SOURCE = str(Path(loader.__file__).parents[1]) + os.sep
_CALLS = {scripts.Script._queued.__code__, scripts.Script.packed.__code__}
_reached: set[str] = set()
_failed: set[str] = set()


class _Noted(dict[str, bytes]):
    """The statements of a package; notes which are taken."""

    package = ""

    def __getitem__(self, name: str) -> bytes:
        _reached.add(f"{self.package}:{name}")
        return super().__getitem__(name)


def _note(frame: FrameType, _event: str, _argument: object) -> None:
    """Notes each function that is called; for a call of a script, its name as well."""
    code = frame.f_code
    if code.co_filename.startswith(SOURCE):
        _reached.add(f"{code.co_filename.removeprefix(SOURCE)}:{code.co_qualname}")
        if code in _CALLS:
            _reached.add(f"lua:{frame.f_locals['self'].name}")


def _note_statements() -> None:
    """Must run before other modules import the loader's function."""
    load = loader.statements

    @cache
    def noted(package: str, schema: str) -> dict[str, bytes]:
        found = _Noted(load(package, schema))
        found.package = package
        return found

    loader.statements = noted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _reached.clear()
    began = monotonic()
    result = yield
    path = os.environ.get("MUTANTS_MEASURE")
    if path and item.nodeid not in _failed:
        found = {"test": item.nodeid, "seconds": monotonic() - began, "reached": sorted(_reached)}
        with Path(path, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := os.environ.get("MUTANTS_CHOSEN"):
        order = {test: place for place, test in enumerate(json.loads(Path(path).read_text()))}
        items[:] = sorted(
            (each for each in items if each.nodeid in order), key=lambda each: order[each.nodeid]
        )


if os.environ.get("MUTANTS_MEASURE"):
    _note_statements()
    threading.settrace(_note)  # it returns None: lines are not traced
    sys.settrace(_note)
