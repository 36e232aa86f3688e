"""Dead letters in Django's admin: listed, shown, and retried by the consumers' workers.

Nothing else is done to them.  Who may what are permissions of Django's: ``penstock.view_letter``
sees the pages, ``penstock.retry_letter`` may ask for retries, ``penstock.view_payload`` sees keys,
reasons and payloads, all of which may quote a record.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from penstock.database.store import Store
from penstock.display import format_count
from penstock.django.apps import get_database_url, get_pipeline
from penstock.django.models import Letter
from penstock.errors import InvalidSetting, Unknown
from penstock.parsing import find_number

if TYPE_CHECKING:  # a web process that shows no dead letters does without the driver's part
    from penstock.consuming.letter_retry import DeadLetterRow
    from penstock.database.connections import Connection
    from penstock.operating.letters import LetterPosition
    from penstock.records import Scope

PAGE = 100
"""Dead letters of a page."""


@admin.register(Letter)
class LetterAdmin(admin.ModelAdmin):
    """The pages of dead letters."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Returns False: dead letters cannot be edited here."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Returns False: dead letters cannot be edited here."""
        del request, obj
        return False

    has_delete_permission = has_change_permission

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Shows the newest dead letters; a POST asks the workers to retry the chosen ones."""
        del extra_context
        self._check(request)
        if request.method == "POST":
            return self._retry(request)
        from penstock.operating.letters import LetterFilter, newest  # noqa: PLC0415  the driver's part

        position = _find_position(request.GET)
        letter_filter = LetterFilter(request.GET.get("of") or None)
        with _connected() as (connection, scope):
            letters = newest(Store(connection, scope), letter_filter, after=position, limit=PAGE)
        last = letters[-1] if len(letters) == PAGE else None
        named_letters = [(_name(letter), letter) for letter in letters]
        return self._show(
            request,
            "dead_letters",
            letters=named_letters,
            more=last,
            of=letter_filter.consumer,
            title="Dead letters",
        )

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Shows one dead letter."""
        del form_url, extra_context
        self._check(request)
        from penstock.operating.letters import read_record  # noqa: PLC0415  the driver's part

        with _connected() as (connection, scope):
            letter = next(iter(_find(Store(connection, scope), [object_id])), None)
            record = None if letter is None else read_record(Store(connection, scope), letter)
        if letter is None or record is None:
            raise Http404
        return self._show(request, "dead_letter", letter=letter, record=record, title=_name(letter))

    def _check(self, request: HttpRequest, permission: str = "view_letter") -> None:
        if not request.user.has_perm(f"penstock.{permission}"):
            raise PermissionDenied
        if any(
            "\0" in text
            for text in (request.path, *request.GET.values(), *request.POST.getlist("letter"))
        ):
            raise BadRequest("NUL is in no name")

    def _show(self, request: HttpRequest, name: str, **values: Any) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            **values,
            "opts": self.opts,
            "may_retry": request.user.has_perm("penstock.retry_letter"),
            "may_see": request.user.has_perm("penstock.view_payload"),
        }
        return TemplateResponse(request, f"admin/penstock/{name}.html", context)

    def _retry(self, request: HttpRequest) -> HttpResponse:
        self._check(request, "retry_letter")
        from penstock.operating.letters import request_retries  # noqa: PLC0415  the driver's part
        from penstock.operating.pausing import note_action  # noqa: PLC0415  the same

        requested = 0
        with _connected() as (connection, scope), connection.transaction():
            letters = _find(Store(connection, scope), request.POST.getlist("letter"))
            chosen = [letter for letter in letters if not letter.superseded_by]
            if chosen:
                requested = request_retries(Store(connection, scope), chosen)
                commands = "; ".join(
                    f"penstock dead-letters retry {letter.consumer} '{letter.place}'"
                    for letter in chosen
                )
                user = request.user.get_username()
                title = f"Retry {format_count(requested, 'dead letter')}"
                note_action(Store(connection, scope), user, title, commands)
        self.message_user(
            request,
            f"Workers retry {format_count(requested, 'dead letter')} within seconds, unless they "
            "are paused.",
        )
        if len(chosen) < len(letters):
            text = (
                "Letters whose key has a later applied record are not retried here: penstock "
                "dead-letters retry --superseded"
            )
            self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(request.get_full_path())


@contextmanager
def _connected() -> "Iterator[tuple[Connection, Scope]]":
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  the driver's part

    pipeline = get_pipeline()
    with connect_postgres(get_database_url(pipeline.using), application="admin") as connection:
        yield connection, pipeline.scope


def _find_position(query: Any) -> "LetterPosition | None":
    """Parses the position where the previous page ended; None if it is missing or invalid."""
    from penstock.operating.letters import LetterPosition  # noqa: PLC0415  the driver's part

    try:
        time = datetime.fromisoformat(query["failed_at"])
        shard, offset = find_number(query["shard"].encode()), find_number(query["offset"].encode())
        names = query["consumer"], query["channel"]
    except (KeyError, ValueError):
        return None
    return None if shard is None or offset is None else LetterPosition(time, *names, shard, offset)


def _name(letter: "DeadLetterRow") -> str:
    return f"{letter.consumer} {letter.place}"


def _find(store: Store["Connection"], names: Sequence[str]) -> "list[DeadLetterRow]":
    """Finds the dead letters by consumer and place; leaves out those that are gone."""
    from penstock.operating.letters import find  # noqa: PLC0415  the driver's part
    from penstock.records import parse_place  # noqa: PLC0415  the same

    letters = []
    for name in names:
        consumer, _, place = name.partition(" ")
        try:
            letters.append(find(store, consumer, parse_place(place)))
        except (Unknown, InvalidSetting):
            continue
    return letters
