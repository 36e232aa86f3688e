"""Places at which an application enlists: after a response, after a commit, after a cache hit.

    ASGIEnlister          around an ASGI application, such as one of FastAPI, Starlette or Django
    WSGIEnlister          around a WSGI application, such as one of Flask or Django
    enlist_after_commit   sessions of SQLAlchemy
    enlist_on_hit         a function that looks something up

Anywhere else, the application calls ``Recruiter.enlist`` itself.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import event
from sqlalchemy.orm import Session

from penstock.engines.stealing.recruiter import Recruiter
from penstock.engines.stealing.sampler import Outcome
from penstock.errors import ServerUnavailable
from penstock.staging.rules import Target, resolve_target

P = ParamSpec("P")
R = TypeVar("R")
ASGIApplication = Callable[[Any, Any, Any], Awaitable[None]]
WSGIApplication = Callable[[Any, Any], Iterable[bytes]]

CONVERSATIONS = ("http", "websocket")
"""The types of an ASGI scope that end with something sent to a client; ``lifespan`` is none."""


class ASGIEnlister:
    """ASGI middleware: enlists after each response and websocket, once the application returns.

    Streaming responses have then been sent, and background tasks have run.  A request that raises
    enlists nobody.
    """

    def __init__(self, app: ASGIApplication, recruiter: Recruiter) -> None:
        """Wraps an application; the outermost middleware enlists last, which is best.

        Args:
            app: The application.
            recruiter: Has the jobs.
        """
        self._app, self._recruiter = app, recruiter

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Serves a request, then enlists."""
        await self._app(scope, receive, send)
        if scope["type"] in CONVERSATIONS:
            self._recruiter.enlist()


class WSGIEnlister:
    """WSGI middleware: enlists after each response, when the server has closed it.

    A file that the server sends by itself (``wsgi.file_wrapper``) is left to it, and enlists
    nobody.
    """

    def __init__(self, app: WSGIApplication, recruiter: Recruiter) -> None:
        """Wraps an application.

        Args:
            app: The application.
            recruiter: Has the jobs.
        """
        self._app, self._recruiter = app, recruiter

    def __call__(
        self, environ: MutableMapping[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Serves a request; the response enlists when it is closed."""
        response = self._app(environ, start_response)
        wrapper = environ.get("wsgi.file_wrapper")
        if isinstance(wrapper, type) and isinstance(response, wrapper):
            return response
        return _Response(response, self._recruiter)


class _Response:
    """The response of a WSGI application, with a ``close`` that enlists."""

    def __init__(self, response: Iterable[bytes], recruiter: Recruiter) -> None:
        self._response, self._recruiter = response, recruiter

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._response)

    def close(self) -> None:
        """Closes the response and enlists; called by the server at the end of the request."""
        close = getattr(self._response, "close", None)
        if close is not None:
            close()
        self._recruiter.enlist()


def enlist_after_commit(recruiter: Recruiter, target: object) -> None:
    """Enlists after each commit of a session, but not after the release of a savepoint.

    Args:
        recruiter: Has the jobs.
        target: A ``Session``, a subclass of it, a ``sessionmaker``, a ``scoped_session``, or an
            async equivalent.

    Raises:
        DeclarationError: ``target`` is of another type.
    """

    def after_commit(session: Session) -> None:
        if not session.in_nested_transaction():
            recruiter.enlist()

    resolved = resolve_target(target)
    attached = _attached.setdefault(resolved, WeakSet())
    if recruiter not in attached:
        attached.add(recruiter)
        event.listen(resolved, "after_commit", after_commit)


_attached: WeakKeyDictionary[Target, WeakSet[Recruiter]] = WeakKeyDictionary()
"""Recruiters that listen to a session: attaching twice has no further effect."""


def enlist_on_hit(
    recruiter: Recruiter, is_hit: Callable[[Any], bool] = lambda result: result is not None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a cache look-up: a hit was little work, so it enlists.

    Args:
        recruiter: Has the jobs.
        is_hit: Whether what the function returned, or what its coroutine did, is a hit; by default
            all but None.
    """

    def note(result: Any) -> Any:
        if is_hit(result):
            recruiter.enlist()
        return result

    def decorate(look_up: Callable[P, R]) -> Callable[P, R]:
        @wraps(look_up)
        def plain(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, note(look_up(*args, **kwargs)))

        @wraps(look_up)
        async def asynchronous(*args: P.args, **kwargs: P.kwargs) -> Any:
            return note(await cast(Awaitable[Any], look_up(*args, **kwargs)))

        return cast(Callable[P, R], asynchronous if inspect.iscoroutinefunction(look_up) else plain)

    return decorate


def make_slice(work: Callable[[], object]) -> Callable[[], Outcome]:
    """Makes a job that does a slice of a structure's work: ``make_slice(sessions.gc)``.

    It gives up if Redis does not answer or another process was faster, and counts a slice that
    found nothing as such.

    Args:
        work: ``VolatileHash.gc``, ``PinnedKeys.reap``, ``QueueTracker.sync``, or any function that
            returns something true if there was work.
    """

    def slice_() -> Outcome:
        try:
            result = work()
        except ServerUnavailable:
            return Outcome.GAVE_UP
        if getattr(result, "gave_up", False):
            return Outcome.GAVE_UP
        return Outcome.FINISHED if result else Outcome.NOTHING_TO_DO

    return slice_
