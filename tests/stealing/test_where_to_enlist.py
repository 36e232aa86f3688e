"""An application enlists once for a request, a commit or a cache hit, when that is over, and loses nothing by it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from fixtures.postgres import engine_url
from penstock.engines.stealing import ASGIEnlister, Recruiter, WSGIEnlister, enlist_after_commit, enlist_on_hit
from penstock.errors import DeclarationError


class Noting(Recruiter):
    """Notes when it is asked, among what else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def enlist(self) -> bool:
        self.events.append("enlist")
        return super().enlist()

    @property
    def enlisted(self) -> int:
        return self.events.count("enlist")


@pytest.fixture
def noting() -> Noting:
    return Noting()


def converse(app: Callable[..., Any], noting: Noting, scope: dict[str, Any], *messages: dict[str, Any]) -> None:
    """One connection of an ASGI server, which notes what is sent."""
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        more = "…" if message.get("more_body") else ""
        noting.events.append(message["type"] + more)

    asyncio.run(app(scope, receive, send))


def http(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "path": path,
        "method": "GET",
        "headers": [],
        "query_string": b"",
        "asgi": {"spec_version": "2.4"},
    }


def make_starlette(noting: Noting) -> ASGIEnlister:
    async def plain(_: Request) -> PlainTextResponse:
        task = BackgroundTask(lambda: noting.events.append("background task"))
        return PlainTextResponse("plain", background=task)

    async def stream(_: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            for piece in "ab":
                yield piece

        return StreamingResponse(pieces())

    async def fail(_: Request) -> PlainTextResponse:
        raise ValueError

    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    routes = [Route("/", plain), Route("/stream", stream), Route("/fail", fail)]
    return ASGIEnlister(Starlette(routes=[*routes, WebSocketRoute("/talk", talk)]), noting)


def test_asgi_enlists_after_the_response_and_its_background_tasks(noting: Noting) -> None:
    converse(make_starlette(noting), noting, http("/"), {"type": "http.request"})

    assert noting.events == ["http.response.start", "http.response.body", "background task", "enlist"]


def test_asgi_enlists_after_the_last_piece_of_a_stream(noting: Noting) -> None:
    converse(make_starlette(noting), noting, http("/stream"))

    assert noting.events[1:] == ["http.response.body…"] * 2 + ["http.response.body", "enlist"]


def test_asgi_enlists_after_a_websocket(noting: Noting) -> None:
    scope = {**http("/talk"), "type": "websocket"}

    converse(make_starlette(noting), noting, scope, {"type": "websocket.connect"})

    assert noting.events == ["websocket.accept", "websocket.send", "websocket.close", "enlist"]


def test_asgi_enlists_for_no_failure_and_not_for_the_lifespan(noting: Noting) -> None:
    app = make_starlette(noting)

    with pytest.raises(ValueError, match=r"^$"):
        converse(app, noting, http("/fail"))
    converse(app, noting, {"type": "lifespan"}, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})

    assert noting.enlisted == 0
    assert "lifespan.shutdown.complete" in noting.events


class Pieces:
    """A response that notes what a server does with it."""

    def __init__(self, noting: Noting, *, fails: bool = False) -> None:
        self._noting, self._fails = noting, fails

    def __iter__(self) -> Iterator[bytes]:
        for piece in (b"a", b"b"):
            self._noting.events.append("piece")
            yield piece
        if self._fails:
            raise ValueError

    def close(self) -> None:
        self._noting.events.append("close")


def serve(app: Callable[..., Iterable[bytes]], **environ: object) -> bytes:
    """One request of a WSGI server."""
    request: dict[str, Any] = {**environ}
    setup_testing_defaults(request)
    response = app(request, lambda *_: None)
    try:
        return b"".join(response)
    finally:
        getattr(response, "close", lambda: None)()


def test_wsgi_enlists_after_the_response_was_closed(noting: Noting) -> None:
    app = WSGIEnlister(lambda *_: Pieces(noting), noting)

    assert serve(app) == b"ab"

    assert noting.events == ["piece", "piece", "close", "enlist"]


def test_wsgi_closes_a_response_that_fails(noting: Noting) -> None:
    app = WSGIEnlister(lambda *_: Pieces(noting, fails=True), noting)

    with pytest.raises(ValueError, match=r"^$"):
        serve(app)

    assert noting.events == ["piece", "piece", "close", "enlist"]


def test_wsgi_takes_a_response_without_close(noting: Noting) -> None:
    assert serve(WSGIEnlister(lambda *_: [b"a", b"b"], noting)) == b"ab"

    assert noting.enlisted == 1


def test_wsgi_leaves_a_file_to_the_server(noting: Noting, tmp_path: Any) -> None:
    """A server sends its own wrapper without reading the file, and would read one inside another response."""
    file = tmp_path / "file"
    file.write_bytes(b"content")
    wrapped = FileWrapper(file.open("rb"))
    app = WSGIEnlister(lambda *_: wrapped, noting)

    environ: dict[str, Any] = {"wsgi.file_wrapper": FileWrapper}
    setup_testing_defaults(environ)

    assert app(environ, lambda *_: None) is wrapped
    assert noting.enlisted == 0
    wrapped.close()


def test_a_commit_enlists_and_neither_a_rollback_nor_a_savepoint_does(noting: Noting, engine: Engine) -> None:
    sessions = sessionmaker(engine)
    enlist_after_commit(noting, sessions)
    enlist_after_commit(noting, sessions)

    with sessions() as session:
        session.execute(text("SELECT 1"))
        with session.begin_nested():
            session.execute(text("SELECT 1"))
        session.rollback()
        assert noting.enlisted == 0
        session.execute(text("SELECT 1"))
        session.commit()

    assert noting.enlisted == 1


def test_other_sessions_do_not_enlist(noting: Noting, engine: Engine) -> None:
    enlist_after_commit(noting, sessionmaker(engine))

    with sessionmaker(engine).begin() as session:
        session.execute(text("SELECT 1"))

    assert noting.enlisted == 0


def test_every_kind_of_session_enlists(noting: Noting, engine: Engine) -> None:
    class Own(Session):
        pass

    scoped = scoped_session(sessionmaker(engine))
    single = Session(engine)
    for target in (Own, scoped, single):
        enlist_after_commit(noting, target)

    for session in (Own(engine), scoped, single):
        with session.begin():
            session.execute(text("SELECT 1"))
        session.close()

    assert noting.enlisted == 3


def test_a_commit_of_an_asynchronous_session_enlists(noting: Noting, database_url: str) -> None:
    async def commit() -> None:
        engine = create_async_engine(engine_url(database_url))
        sessions = async_sessionmaker(engine)
        enlist_after_commit(noting, sessions)
        async with sessions.begin() as session:
            assert isinstance(session, AsyncSession)
            await session.execute(text("SELECT 1"))
        await engine.dispose()

    asyncio.run(commit())

    assert noting.enlisted == 1


def test_what_is_no_session_is_refused(noting: Noting) -> None:
    engine = create_engine("postgresql+psycopg://")

    with pytest.raises(DeclarationError, match="Engine"):
        enlist_after_commit(noting, engine)


def test_a_cache_hit_enlists_and_a_miss_does_not(noting: Noting) -> None:
    cache = {"ann": 0}

    @enlist_on_hit(noting)
    def find(name: str) -> int | None:
        """Finds."""
        return cache.get(name)

    assert (find("ann"), find(name="bob")) == (0, None)

    assert noting.enlisted == 1
    assert (find.__name__, find.__doc__) == ("find", "Finds.")


def test_an_application_says_what_a_hit_is(noting: Noting) -> None:
    @enlist_on_hit(noting, is_hit=lambda found: found["hit"])
    async def find(*, hit: bool) -> dict[str, bool]:
        await asyncio.sleep(0)
        return {"hit": hit}

    assert asyncio.run(find(hit=True)) == {"hit": True}
    assert asyncio.run(find(hit=False)) == {"hit": False}

    assert noting.enlisted == 1


def test_a_look_up_that_fails_enlists_nobody(noting: Noting) -> None:
    @enlist_on_hit(noting)
    def find() -> int:
        raise KeyError

    with pytest.raises(KeyError):
        find()

    assert noting.enlisted == 0
