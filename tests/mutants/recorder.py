"""A plugin of pytest: which tests execute which lines, statements and scripts, and how long each takes.

Lines are coverage.py's; a statement is executed by the test that looks it up, and a script by the test that calls it.  What a test's
other processes execute is not seen.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import coverage
import pytest

from penstock.channels import scripts
from penstock.database import statements as loader

PLACE = Path(os.environ.get("PENSTOCK_MUTANTS", ".mutants"))
NAME = f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}"

_test = ""
_blocks: dict[str, set[str]] = defaultdict(set)
_durations: dict[str, float] = defaultdict(float)
_coverage = coverage.Coverage(
    data_file=str(PLACE / f"coverage.{NAME}"), source=["src/penstock"], config_file=False, messages=False
)
_coverage.set_option("run:relative_files", True)  # so that another checkout can read it


class _Statements(dict[str, bytes]):
    def __getitem__(self, name: str) -> bytes:
        _blocks[f"sql:{name}"].add(_test)
        return super().__getitem__(name)


def checksums() -> dict[str, int]:
    """One for each file of the package: the lines of a file with another one have moved."""
    return {str(file): crc32(file.read_bytes()) for file in sorted(Path("src/penstock").rglob("*.py"))}


def _record() -> None:
    load, packed, steps = loader.statements, scripts.Script.packed, scripts.Script.steps

    def statements(schema: str) -> dict[str, bytes]:
        return _Statements(load(schema))

    def recording(call: Any) -> Any:
        def recorded(script: scripts.Script, calls: Sequence[Any]) -> Any:
            _blocks[f"lua:{script.name}"].add(_test)
            return call(script, calls)

        return recorded

    loader.statements = statements  # type: ignore[assignment]
    scripts.Script.packed = recording(packed)  # type: ignore[method-assign]
    scripts.Script.steps = recording(steps)  # type: ignore[method-assign]


if os.environ.get("PENSTOCK_MUTANTS"):
    PLACE.mkdir(exist_ok=True)
    _coverage.start()
    _record()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _test  # noqa: PLW0603
    _test = item.nodeid.partition("@")[0]
    _coverage.switch_context(_test)
    try:
        return (yield)
    finally:
        _test = ""
        _coverage.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations[report.nodeid.partition("@")[0]] += report.duration


def pytest_sessionfinish() -> None:
    _coverage.stop()
    _coverage.save()
    blocks = {name: sorted(tests - {""}) for name, tests in _blocks.items()}
    recorded = {"durations": _durations, "blocks": blocks, "sums": checksums()}
    (PLACE / f"recorded.{NAME}.json").write_text(json.dumps(recorded))
