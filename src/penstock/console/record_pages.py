"""Finds a record, and shows its payload beside that of the record before it of the same key.

Redis, or the journal, is read from the record back, for at most ``SEARCH_S``.  Long payloads are
cut before they are compared.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import unified_diff
from time import monotonic
from typing import Any

from msgspec.json import format as format_json
from starlette.requests import Request

from penstock.channels.commands import RedisClient
from penstock.console.access import Visitor
from penstock.console.job_pages import conceal_story
from penstock.console.reading import HIDDEN, Page, PageContent, Reading
from penstock.database.store import Store
from penstock.display import format_count
from penstock.errors import InvalidName, PenstockError, Unknown
from penstock.journal.journal_records import read_log
from penstock.operating.tracing.causes import Wanted, explain, search_key, trace
from penstock.operating.tracing.story import Story
from penstock.parsing import find_number
from penstock.records import Offset, OffsetRange, Place, Record, RecordId, is_place, parse_place

SEARCH_S = 2.0
"""Seconds for which records of a key are searched, from the newest back: no index has keys."""

BATCH = 100
"""Records that are read at once in search of the one before."""

MAX_CHARACTERS, MAX_LINES = 20_000, 500
"""Limits of a payload that is shown and compared."""


@dataclass(frozen=True, slots=True)
class ShownPayload:
    """The payload of a record, and what has changed since the record before it of its key."""

    payload: str | None  # None if it is not there
    note: str  # what is not shown, and why; empty if all is
    previous: str | None = None  # the place of the record before; None if none was found
    changes: Sequence[str] = ()  # lines of both payloads, as ``diff -u`` marks them


def _read_find(reading: Reading, visitor: Visitor, request: Request) -> PageContent:
    text = request.query_params.get("q", "").strip()
    values: dict[str, Any] = {"text": text, "stories": ()}
    values |= dict.fromkeys(("diagnosis", "since", "since_at", "payload"))
    if text:
        target: Wanted = _parse_target(text, is_key="key" in request.query_params)
        if isinstance(target, str) and not visitor.may("keys"):
            raise InvalidName(
                "give a record's number, or its place such as 'rides/2 offset 4118': this visitor "
                "may not see keys"
            )
        with reading.redis() as client, reading.postgres() as store:
            if isinstance(target, str):
                before = find_number(request.query_params.get("before", "").encode())
                target = search_key(store, target, SEARCH_S, before)
                if target.since > 1:
                    values |= {"since": target.since, "since_at": target.since_at}
            with suppress(Unknown):  # the diagnosis says why
                values["stories"] = trace(store, client, target)
            if values["stories"] or not values["since"]:  # else it may be further back
                values["diagnosis"] = explain(store, client, target)
            if visitor.may("payloads") and "payload" in request.query_params:
                values["payload"] = _show_payload(store, client, values["stories"])
        values["stories"] = [conceal_story(story, visitor) for story in values["stories"]]
        if not visitor.may("keys"):
            values["diagnosis"] = replace(values["diagnosis"], text=HIDDEN, story=None, writers=())
    names = ("stories", "diagnosis", "since", "since_at", "payload")
    is_partial = any(story.redis for story in values["stories"])
    return PageContent(values, {name: values[name] for name in names}, is_partial=is_partial)


def _parse_target(text: str, *, is_key: bool) -> RecordId | Place | str:
    if is_key:
        return text
    if text.isascii() and text.isdigit() and (number := find_number(text.encode())) is not None:
        return RecordId(number)
    return parse_place(text) if is_place(text) else text


def _show_payload(
    store: Store, client: RedisClient, stories: Sequence[Story]
) -> ShownPayload | None:
    """Returns the payload of the only record of a log; None if there is none, or are several."""
    if len(stories) != 1 or stories[0].kind != "log" or stories[0].offset is None:
        return None
    place = parse_place(stories[0].place)
    try:
        return find_payload(store, client, place)
    except PenstockError as error:
        return ShownPayload(None, str(error))


def find_payload(store: Store, client: RedisClient, place: Place) -> ShownPayload:
    """Returns the payload of a record of a log, compared with the one before it of its key."""
    offsets = OffsetRange(place.shard, Offset(1), place.offset)
    records = read_log(store, client, offsets, BATCH, backwards=True)
    record = next(records, None)
    if record is None or record.offset != place.offset:
        return ShownPayload(None, "It is not published yet, or Redis and the journal lost it.")
    end, last = monotonic() + SEARCH_S, record
    for last in records:
        if last.key == record.key:
            return _compare(record, last)
        if monotonic() > end:
            note = (
                f"No earlier record of its key was found back to offset {last.offset}: time was up."
            )
            return replace(_compare(record, None), note=note)
    return _compare(record, None)


def _compare(record: Record, previous: Record | None) -> ShownPayload:
    text, note = _format(record)
    if previous is None:
        return ShownPayload(text, note or "No record of its key is before it in this shard.")
    previous_text, _ = _format(previous)
    lines = unified_diff(previous_text.splitlines(), text.splitlines(), lineterm="", n=2)
    return ShownPayload(text, note, str(previous.place), list(lines)[2:])


def _format(record: Record) -> tuple[str, str]:
    """Returns a payload with a line for each value, and what is cut from it."""
    text = record.data_json
    formatted = format_json(text, indent=2)
    excerpt = "\n".join(formatted[:MAX_CHARACTERS].splitlines()[:MAX_LINES])
    cut = len(formatted) - len(excerpt)
    note = f"The last {format_count(cut, 'character')} of it are neither shown nor compared."
    return excerpt, note if cut > 0 else ""


PAGES: tuple[Page, ...] = (Page("find.html", _read_find, "/find", "Find", is_live=False),)
