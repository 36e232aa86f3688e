"""The page of log events has each that the code writes, with its level and its fields, and no other."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "logs.md"
SECTION = re.compile(r"^## `(penstock[\w.]*)`$")
ROW = re.compile(r"^\| (?:`(penstock[\w.]*)` \| )?`([^`]+)` \| ([\w, ]+) \| ([^|]*)\| ?[^|]*\|$")
"""A row of a logger's table; in the last table, the logger is the first column."""

EVENT = re.compile(r"[a-z][a-z -]+[a-z]")
LOGS = re.compile(r"(?:\blog|_log|get_logger\(.*\))\.(debug|info|warning|error|exception|critical|log|msg)$")

Event = tuple[str, str]
"""The names of logger and event."""

SECRET = {"data", "headers", "payload", "password", "url"}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Logger, level and call of each line that the code may log, and those with ``%s`` in the text."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = _find_logger(path, text)
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "_log_aside":  # in a thread of its own
                yield name, "error", node
            elif (found := LOGS.search(called)) is not None:
                yield name, found[1], node


def _find_logger(path: Path, text: str) -> str:
    """The name of a module's logger, which may be another module's."""
    if named := re.search(r'get_?[lL]ogger\("(penstock[\w.]*)"\)', text):
        return named[1]
    if shared := re.search(r"^from (penstock[\w.]+) import .*\blog\b", text, re.MULTILINE):
        path = ROOT / "src" / f"{shared[1].replace('.', '/')}.py"
        return _find_logger(path, path.read_text(encoding="utf-8"))
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)


@cache
def written() -> dict[Event, tuple[set[str], set[str], bool]]:
    """Levels and fields of each event; True if a call has fields that only the running code knows."""
    found: dict[Event, tuple[set[str], set[str], bool]] = defaultdict(lambda: (set(), set(), False))
    for logger, level, call in calls():
        text = call.args[0]
        assert isinstance(text, ast.Constant), f"{logger}: {ast.unparse(call)}: the event is a constant"
        levels, fields, is_open = found[logger, str(text.value)]
        named = {each.arg for each in call.keywords if each.arg is not None}
        is_open |= any(each.arg is None for each in call.keywords)
        found[logger, str(text.value)] = levels | {level}, fields | named, is_open
    return found


def documented() -> dict[Event, tuple[set[str], set[str]]]:
    found, logger = {}, ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if section := SECTION.match(line):
            logger = section[1]
        elif row := ROW.match(line):
            found[row[1] or logger, row[2]] = set(row[3].split(", ")), set(re.findall(r"`(\w+)`", row[4]))
    return found


def test_the_page_has_every_event_and_no_other() -> None:
    assert documented().keys() == written().keys()


def test_the_page_has_the_level_and_the_fields_of_each_event() -> None:
    page = documented()
    for event, (levels, fields, is_open) in written().items():
        assert page[event][0] == levels, event
        assert page[event][1] >= fields if is_open else page[event][1] == fields, event


def test_an_event_is_a_name_and_its_values_are_fields() -> None:
    """But for modules that run in the application's processes with the standard library's logging: a field would be lost there."""
    for (logger, event), (_, fields, _) in written().items():
        assert EVENT.fullmatch(event) or ("%" in event and not fields), (logger, event)


def test_no_field_has_a_payload_or_a_secret_or_a_traceback_with_values() -> None:
    assert not [event for event, (_, fields, _) in written().items() if fields & (SECRET | {"exc_info", "stack_info"})]


def test_a_method_of_a_log_is_called_where_it_is_named() -> None:
    """Or the walk above would miss what it logs."""
    named = re.compile(r"\blog\.(?:debug|info|warning|error|exception|critical)\b(?!\()")
    found = [
        path.stem for path in sorted((ROOT / "src").rglob("*.py")) if named.search(path.read_text(encoding="utf-8"))
    ]

    assert found == ["job_threads"], "_log_aside, which the walk knows"
