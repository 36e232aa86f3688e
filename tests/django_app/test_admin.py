"""The admin's pages of dead letters: who sees what, and what a retry asks for; in this process, beside those of a project."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from fixtures.constants import SetConstants
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.django import DjangoPipeline
from penstock.operating.pausing import list_actions

LETTERS = """
UPDATE penstock.dead_letters SET later_shard = 0, later_offset = 5 WHERE consumer = 'late' AND channel = 'orders' AND "offset" = 2;
UPDATE penstock.dead_letters SET data = '{"secret": 1}', key = 'a key', reason = 'KeyError: of it'
"""

VIEW, RETRY, PAYLOAD = (f"penstock.{name}" for name in ("view_letter", "retry_letter", "view_payload"))

HALTED = [f"halted orders/0 offset {offset}" for offset in (5, 4, 3, 2, 1)]
GONE = [f"gone orders/0 offset {offset}" for offset in (4, 3, 2, 1)]


class User:
    """Somebody with permissions."""

    is_active = is_staff = is_authenticated = True

    def __init__(self, *permissions: str) -> None:
        self.permissions = permissions

    def has_perm(self, name: str) -> bool:
        return name in self.permissions

    def has_module_perms(self, _: str) -> bool:
        return True

    def has_usable_password(self) -> bool:
        return True

    def get_username(self) -> str:
        return "otto"


Ask = Callable[..., Any]


@pytest.fixture
def ask(crowd: None, connection: Connection, pipeline: DjangoPipeline) -> Ask:
    """Asks for a page: permissions, query, the letters of a form, the name of one letter; returns its answer, and what was said."""
    del crowd, pipeline
    from django.contrib import admin  # noqa: PLC0415  after the settings
    from django.contrib.messages.storage.cookie import CookieStorage  # noqa: PLC0415  the same
    from django.test import RequestFactory  # noqa: PLC0415  the same

    from penstock.django.admin import LetterAdmin  # noqa: PLC0415  the same
    from penstock.django.models import Letter  # noqa: PLC0415  the same

    for statement in LETTERS.split(";\n"):
        connection.execute(statement.encode())
    pages = LetterAdmin(Letter, admin.site)

    def call(*may: str, query: str = "", letters: list[str] | None = None, one: str | None = None) -> Any:
        path = f"/admin/penstock/letter/{'' if one is None else f'{quote(one)}/change/'}?{query}"
        request: Any = (
            RequestFactory().get(path) if letters is None else RequestFactory().post(path, {"letter": letters})
        )
        request.user, request._messages = User(*may), CookieStorage(RequestFactory().get("/"))
        answer = pages.changelist_view(request) if one is None else pages.change_view(request, one)
        said = [f"{each.level_tag}: {each}" for each in request._messages]
        if not hasattr(answer, "context_data"):
            return answer, said
        return answer.render(), answer.context_data

    return call


def names(found: dict[str, Any]) -> list[str]:
    return [name for name, _ in found["letters"]]


def test_the_newest_letters_are_listed_a_page_at_a_time(ask: Ask, set_constants: SetConstants) -> None:
    whole = names(ask(VIEW)[1])
    set_constants("django.admin", PAGE=4)
    pages, query = [], ""
    for _ in range(9):
        answer, found = ask(VIEW, query=query)
        pages.append(names(found))
        if found["more"] is None:
            assert "Older ones" not in answer.text
            break
        [query] = re.findall(r'href="\?([^"]*)">Older', answer.text.replace("&amp;", "&"))

    assert [name for page in pages for name in page] == whole
    assert [len(page) for page in pages] == [4, 4, 4, 4, 2]
    assert (whole[:7], whole[7:11]) == (["search index/1 offset 1", "reader rides@eu/0 offset 1", *HALTED], GONE)
    for page, has_more in ((len(whole), True), (len(whole) + 1, False)):
        set_constants("django.admin", PAGE=page)
        assert (ask(VIEW)[1]["more"] is not None) == has_more
    set_constants("django.admin", PAGE=4)
    assert names(ask(VIEW, query="of=gone")[1]) == GONE
    assert names(ask(VIEW, query="of=")[1]) == whole[:4]
    for wrong in ("failed_at=x", "failed_at=2026-11-27", "failed_at=2026-11-27&consumer=a&channel=b&shard=x&offset=1"):
        assert names(ask(VIEW, query=wrong)[1]) == whole[:4]


def test_permissions_decide_what_is_seen_and_done(
    ask: Ask, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.core.exceptions import BadRequest, PermissionDenied  # noqa: PLC0415  after the settings
    from django.http import Http404  # noqa: PLC0415  the same

    for refused in ({}, {"one": GONE[0]}, {"letters": GONE}):
        with pytest.raises(PermissionDenied):
            ask(RETRY, PAYLOAD, **refused)
    with pytest.raises(PermissionDenied):
        ask(VIEW, PAYLOAD, letters=GONE)
    for hostile in ({"query": "of=%00"}, {"letters": ["\0"]}, {"one": "\0"}):
        with pytest.raises(BadRequest):
            ask(VIEW, RETRY, **hostile)
    for missing in ("nobody orders/0 offset 1", "gone orders/0 offset 9", "gone", "gone x"):
        with pytest.raises(Http404):
            ask(VIEW, one=missing)

    def look(*may: str) -> list[tuple[bool, bool, bool, bool]]:
        texts = [ask(VIEW, *may, **which)[0].text for which in ({}, {"one": GONE[0]})]
        return [("a key" in t, "of it" in t, "secret" in t, 'name="letter"' in t) for t in texts]

    assert look() == [(False, False, False, False)] * 2
    assert look(PAYLOAD) == [(True, True, False, False), (True, True, True, False)]
    assert next(each[3] for each in look(RETRY))
    assert list_actions(Store(connection)) == []
    monkeypatch.setattr("penstock.operating.letters.read_record", lambda *_: None)  # a worker has just taken it
    with pytest.raises(Http404):
        ask(VIEW, one=GONE[0])


def test_a_retry_asks_for_those_chosen_that_are_there_and_not_superseded(ask: Ask, connection: Connection) -> None:
    chosen = ["nobody orders/0 offset 1", GONE[0], "gone orders/0 offset 9", "late orders/0 offset 2", "x", GONE[3]]

    answer, said = ask(VIEW, RETRY, query="of=gone", letters=chosen)
    again, nothing = ask(VIEW, RETRY, letters=["x"])
    superseded = ask(VIEW, RETRY, letters=["late orders/0 offset 2"])[1]

    assert (answer.status_code, answer.url, again.status_code) == (302, "/admin/penstock/letter/?of=gone", 302)
    warning = (
        "warning: Letters whose key has a later applied record are not retried here: "
        "penstock dead-letters retry --superseded"
    )
    assert said == ["info: Workers retry 2 dead letters within seconds, unless they are paused.", warning]
    assert nothing == ["info: Workers retry 0 dead letters within seconds, unless they are paused."]
    assert superseded == [*nothing, warning]
    requested = 'SELECT consumer, "offset" FROM penstock.dead_letters WHERE retry_requested_at IS NOT NULL ORDER BY 2'
    assert connection.execute(requested).fetchall() == [("gone", 1), ("gone", 4)]
    [noted] = list_actions(Store(connection))
    assert (noted.done_by, noted.title) == ("otto", "Retry 2 dead letters")
    assert noted.command == "; ".join(
        f"penstock dead-letters retry gone 'orders/0 offset {offset}'" for offset in (4, 1)
    )


def test_letters_are_neither_added_nor_changed_nor_deleted(ask: Ask) -> None:
    from django.contrib import admin  # noqa: PLC0415  after the settings

    from penstock.django.models import Letter  # noqa: PLC0415  the same

    pages: Any = admin.site._registry[Letter]
    assert not any(
        (pages.has_add_permission(None), pages.has_change_permission(None), pages.has_delete_permission(None))
    )
    assert ({each for each, _ in Letter._meta.permissions}, Letter._meta.default_permissions) == (
        {"retry_letter", "view_payload"},
        ("view",),
    )
    assert Letter._meta.managed is False
