"""A plugin of pytest: runs the tests that execute a mutant, for each mutant, until one fails."""

import gc
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutants.mutations import ROOT, Mutant
from mutants.recording import Recorded
from mutants.swapping import CannotSwap, mistake, module_name, record_blocks
from penstock.channels.scripts import with_fragments

LIMIT_S = 120
BUDGET_S = 60
"""Seconds of tests of a mutant that survives."""

FULL = "too many clients"
"""What Postgres says when earlier mutants have left connections open: that test has caught nothing."""

SPOILED = 8
"""Tests that may fail after a mutant, before there is something wrong with the process."""


@dataclass
class Outcome:
    """What became of a mutant: caught, survived, undecided (after the budget, or not to be swapped), not executed."""

    mutant: Mutant
    result: str
    details: str = ""


class Lane:
    """Tries mutants one after the other; what has become of them is in ``outcomes``."""

    def __init__(self, mutants: Iterable[Mutant], recorded: Recorded) -> None:
        self._mutants, self.outcomes = mutants, list[Outcome]()
        self._recorded = recorded
        self._items: dict[str, pytest.Item] = {}
        record_blocks(lambda _block: None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs nothing else."""

        def show(line: str) -> None:
            session.config.get_terminal_writer().line(line, flush=True)

        signal.signal(signal.SIGALRM, _stop)
        self._items = {item.nodeid: item for item in session.items}
        failed_after = 0
        for mutant in self._mutants:
            outcome, test = self._try(mutant)
            while test is not None and self._run(test) and (failure := self._run(test, is_fresh=True)):
                show(f"{test.nodeid} fails without the mutant, too, and is left out from now on: {failure}")
                self._items.pop(test.nodeid, None)
                failed_after += 1
                if failed_after >= SPOILED:
                    break
                outcome, test = self._try(mutant)  # either the mutant has left something behind, or the test has
                outcome.result = "caught" if test is not None else "undecided"
            self.outcomes.append(outcome)
            show(f"{outcome.result}: {mutant.path}:{mutant.line} {mutant.change} {outcome.details}")
            if failed_after >= SPOILED:
                break
        session._setupstate.teardown_exact(None)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Closes what a failed test has left open: pytest keeps its frames, and fixtures wait for its connections."""
        if getattr(sys, "last_traceback", None) is not None:
            sys.last_value = sys.last_traceback = None
            vars(sys).pop("last_exc", None)
            gc.collect()

    @staticmethod
    def _run(item: pytest.Item, limit_s: float = LIMIT_S, *, is_fresh: bool = False) -> str:
        """Runs a test; returns its failure.  Fixtures of its module stay for the next one, unless that is to be ``is_fresh``."""
        signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
        try:
            item.session._setupstate.teardown_exact(item.session if is_fresh else item.parent)  # type: ignore[arg-type]  # a collector will do
            reports = runtestprotocol(item, log=False, nextitem=item.parent)  # type: ignore[arg-type]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        failures = [str(report.longrepr).strip().rpartition("\n")[2] for report in reports if report.failed]
        return "; ".join(failures)

    def _try(self, mutant: Mutant) -> tuple[Outcome, pytest.Item | None]:
        """The outcome, and the test that has failed."""
        tests = self._find_tests(mutant)
        if not tests:
            return Outcome(mutant, "not executed"), None
        if mutant.path.endswith(".py") and module_name(mutant.path) not in sys.modules:
            self._run(tests[0])  # imports it, perhaps after settings that it needs
        began, passed = monotonic(), 0
        with suppress(CannotSwap), mistake(mutant, mutant.make((ROOT / mutant.path).read_text()) or ""):
            for test in tests:
                known_s = self._recorded.durations.get(test.nodeid)
                if failure := self._run(test, LIMIT_S if known_s is None else max(20, 6 * known_s)):
                    if FULL in failure:
                        return Outcome(mutant, "undecided", failure), test
                    return Outcome(mutant, "caught", f"<- {test.nodeid}"), test
                passed += 1
                if monotonic() - began > BUDGET_S:
                    break
        result = "survived" if passed == len(tests) else "undecided"
        return Outcome(mutant, result, f"({passed} of {len(tests)} tests)"), None

    def _find_tests(self, mutant: Mutant) -> list[pytest.Item]:
        """The tests that execute a mutant, those of its folder and quick ones first, but some of each file."""
        if mutant.test:
            return [item for name, item in self._items.items() if name.partition("[")[0] == mutant.test]
        durations = self._recorded.durations
        if mutant.block is None:
            lines = self._recorded.lines.contexts_by_lineno(str(ROOT / mutant.path))
            names = {*lines.get(mutant.line, ())}
        else:
            blocks = self._recorded.blocks
            names = {name for block in blocks if _uses(block, mutant.block) for name in blocks[block]}
        words = {part for part in Path(mutant.path).with_suffix("").parts[1:] if part != "penstock"}
        words |= {word for part in words for word in part.split("_")}
        near = {name: sum(word in name for word in words) for name in names & self._items.keys() & durations.keys()}
        before, turns = Counter[Any](), {}
        for name in sorted(near, key=lambda name: (-near[name], durations[name])):
            turns[name] = before[self._items[name].path] // (1 + 4 * near[name])
            before[self._items[name].path] += 1
        return [self._items[name] for name in sorted(turns, key=lambda name: (turns[name], durations[name]))]


def _uses(block: str, part: str) -> bool:
    """True if a statement or script is, or includes, a part."""
    return block == part or (block.startswith("lua:") and part.removeprefix("lua:") in with_fragments(block[4:]))


def _stop(*_: object) -> None:
    pytest.fail("takes much longer than without the mutant")
