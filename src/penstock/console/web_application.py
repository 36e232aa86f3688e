"""Routes requests to the pages, and checks each of them.

A request that changes something has to come from a page of ours: browsers say so in
``Sec-Fetch-Site``, older ones in ``Origin``.  A name in ``Host`` that nobody has allowed is
refused, so that a page of another site cannot have its own name point here.  Every answer forbids
scripts, styles, frames and requests that are not ours.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import structlog
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.console.access import SESSION_S, Access, Entrance, Right, Visitor, cookie_name
from penstock.console.actions import ACTIONS, Acting, ChangedPlan
from penstock.console.pages import PAGES
from penstock.console.reading import ConnectionPool, Page, Reading
from penstock.console.rendering import render, respond, respond_json, respond_table
from penstock.console.status_sampler import StatusSampler
from penstock.errors import (
    InvalidSetting,
    PenstockError,
    PrivilegeMissing,
    ServerUnavailable,
    Unknown,
)
from penstock.pipeline import Pipeline

log = structlog.get_logger("penstock.console")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # with none at all, browsers send a form as if it came from elsewhere
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}

HEALTH = "/healthz"
"""Answers every probe as long as this process does, under any host name, and asks no server."""

TRACE_URL = r"https?://[A-Za-z0-9.:\[\]-]+/[!-;=?-z~]*\{trace_id\}[!-;=?-z~]*"
"""Pattern of the address of a trace: its host is fixed, and ``{trace_id}`` comes once."""

PROMETHEUS_URL = r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?"
"""Pattern of the address of Prometheus, maybe below a path."""

MAX_FORM = 10_000
"""Limit of a form, in bytes."""

FORM_S = 10.0
"""Seconds in which a form has to come."""

LOG_INS = 2
"""Passwords that are compared at the same time: each takes 16 MiB and a core for a while."""

MAX_LOG_INS = 10
"""Log-ins that may wait for a comparison; a further one gets 429."""


class Console:
    """The ASGI application: refuses requests of other sites, and adds headers to all answers."""

    def __init__(self, app: ASGIApp, sampler: StatusSampler, hosts: frozenset[str] | None) -> None:
        self._app, self._sampler, self._hosts = app, sampler, hosts

    def close(self) -> None:
        """Closes what reads the servers; another request starts it again."""
        self._sampler.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        # The lifespan is that of the server, or of the application around.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_answered, scope = False, _add_root(scope)

        async def send_with_headers(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                headers = [
                    (name.lower().encode(), value.encode()) for name, value in HEADERS.items()
                ]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        refusal = self._refuse(Request(scope))
        try:
            await (refusal or self._app)(scope, receive, send_with_headers)
        except Exception as error:
            # Starlette raises it again for the server's log, which would have its text.
            if not is_answered:
                raise
            log.error("page failed", path=scope["path"], error=type(error).__name__)  # noqa: TRY400  without its text

    def _refuse(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        is_probe = request.url.path.removeprefix(_root(request)) == HEALTH
        if self._hosts is not None and _parse_host(host) not in self._hosts and not is_probe:
            return PlainTextResponse("421: this console does not answer under that name\n", 421)
        if "\x00" in unquote(f"{request.url.path}?{request.url.query}"):
            return PlainTextResponse("400: no name, key or place has a character NUL\n", 400)
        if request.method in {"GET", "HEAD"}:
            return None
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site is None and origin is not None and urlsplit(origin).netloc == host:
            site = "same-origin"
        if site == "same-origin":
            return None
        return PlainTextResponse("403: this comes from another site\n", 403)


def _parse_host(host: str) -> str:
    """Returns the name in ``Host``; empty if there is none, or more than a port beside it."""
    with suppress(ValueError):
        parts = urlsplit(f"//{host}")
        if parts.netloc == host and "@" not in host:
            return parts.hostname or ""
    return ""


def make_console(  # noqa: PLR0913  the choices of a console
    pipeline: Pipeline | None,
    database_url: str,
    redis_url: str,
    *,
    access: Access,
    acting_database_url: str | None = None,
    hosts: Collection[str] | None = None,
    trace_url: str | None = None,
    prometheus_url: str | None = None,
) -> Console:
    """Returns the console as an ASGI application, to be mounted in another one or run by itself.

    Args:
        pipeline: What the application declares; None shows what is registered.
        database_url: Postgres, for reading: best the login of a member of ``penstock_monitor``,
            which cannot read payloads.
        redis_url: Redis.
        access: Who asks, and what he may; asked with each request.
        acting_database_url: Postgres, for acting; None shows the commands instead.
        hosts: The names in ``Host`` that are answered; None leaves that to the application around
            it.
        trace_url: Page of a trace in a tracing system, with ``{trace_id}`` in it; records with a
            trace link to it.
        prometheus_url: Prometheus, which scrapes ``penstock metrics``: charts are made from it.

    Raises:
        InvalidSetting: ``trace_url`` or ``prometheus_url`` is no such address.
    """
    if trace_url is not None and not re.fullmatch(TRACE_URL, trace_url):
        raise InvalidSetting(
            f"--trace-url {trace_url!r}: give an address of https or http, such as "
            "https://traces.example/trace/{trace_id}"
        )
    if prometheus_url is not None and not re.fullmatch(PROMETHEUS_URL, prometheus_url):
        raise InvalidSetting(
            "--prometheus-url: give an address of http or https without a user, such as "
            "http://prometheus:9090"
        )
    sampler = StatusSampler(pipeline, database_url, redis_url)
    reading = Reading(pipeline, database_url, redis_url, sampler, prometheus_url)
    pool = None if acting_database_url is None else ConnectionPool(acting_database_url)
    acting = Acting(pipeline, pool, redis_url)
    entrance = access if isinstance(access, Entrance) and access.proxy_header is None else None
    desk = _Desk(reading, acting, access, entrance, trace_url)

    routes = [Route(HEALTH, lambda _: PlainTextResponse("ok\n"))]
    routes += [
        Route(f"/static/{name}", _static(name, kind), name=name) for name, kind in STATIC.items()
    ]
    if entrance is not None:
        # In threads of their own: pages and static files do not wait for them.
        enter = partial(_enter, entrance, CapacityLimiter(LOG_INS))
        routes.append(Route("/enter", enter, methods=["GET", "POST"]))
        routes.append(Route("/leave", partial(_leave, entrance), methods=["POST"]))
    for path, page in PAGES.items():
        stem = "/index" if path == "/" else path
        routes += [
            Route(f"{stem}.{kind}", partial(desk.export, page, kind))
            for kind in ("json", "csv", "ndjson")
        ]
        routes.append(Route(path, partial(desk.html, page)))
    routes += [
        Route(f"/act/{name}", partial(desk.act, name), methods=["GET", "POST"]) for name in ACTIONS
    ]
    answers = dict.fromkeys((HTTPException, PenstockError, Exception), desk.show_error)
    app = Starlette(routes=routes, exception_handlers=answers)
    # It would be to a whole address, of which a proxy has changed scheme and name.
    app.router.redirect_slashes = False
    names = None if hosts is None else frozenset(map(str.lower, hosts))
    return Console(app, reading.sampler, names)


@dataclass(frozen=True)
class _Desk:
    """Answers requests for visitors who may make them.

    ``entrance`` is where they log in, if they do it here.
    """

    reading: Reading
    acting: Acting
    access: Access
    entrance: Entrance | None
    trace_url: str | None

    def html(self, page: Page, request: Request) -> Response:
        visitor = self._admit(request, page)
        if visitor is None:
            return RedirectResponse(f"{_root(request)}/enter", 303)
        content = page.read(self.reading, visitor, request)
        stale = content.sample if content.sample is not None and content.sample.is_stale else None
        values = self._around(request, visitor) | dict(content.values)
        is_live = page.is_live or content.is_partial or stale is not None
        values |= {"page": page, "live": is_live, "stale": stale}
        values["has_rows"] = isinstance(content.json, list | tuple | dict)
        status = 503 if stale is not None and stale.error else 200
        return respond(request, render(page.template, values), "text/html", status)

    def export(self, page: Page, kind: str, request: Request) -> Response:
        visitor = self._admit(request, page)
        if visitor is None:
            raise HTTPException(401, "log in first")
        content = page.read(self.reading, visitor, request)
        # A program would take it for the status of now.
        if content.sample is not None and content.sample.error is not None:
            raise ServerUnavailable(content.sample.error)
        return (
            respond_json(request, content.json)
            if kind == "json"
            else respond_table(request, content.json, kind)
        )

    async def act(self, name: str, request: Request) -> Response:
        form = join_fields(request.query_params.multi_items())
        if request.method == "POST":
            form |= await _read_form(request)
        return await run_in_threadpool(self._act, name, request, form)

    def _act(self, name: str, request: Request, form: dict[str, str]) -> Response:
        action = ACTIONS[name]
        visitor = self.access(request)
        if visitor is None:
            raise HTTPException(401, "log in first")
        _check_right(visitor, action.right)
        if form.keys() & {"tenant", "key", "unique"}:
            _check_right(visitor, "keys")
        error = None
        if request.method == "POST":
            try:
                target = self.acting.carry_out(action, visitor, form)
            except ChangedPlan as changed:
                error = str(changed)
            else:
                self.reading.sampler.forget()
                return RedirectResponse(f"{_root(request)}{target}", 303)
        plan = self.acting.plan(action, form)
        values = {"plan": plan, "form": form, "error": error, "live": False}
        body = render("plan.html", self._around(request, visitor) | values)
        return respond(request, body, "text/html", 200 if error is None else 409)

    def _admit(self, request: Request, page: Page) -> Visitor | None:
        visitor = self.access(request)
        if visitor is None:
            if self.entrance is not None:
                return None
            raise HTTPException(401, "nobody who may see this")
        _check_right(visitor, page.right)
        return visitor

    def _around(self, request: Request, visitor: Visitor) -> dict[str, Any]:
        """Returns the values for the layout of every page."""
        return {
            "root": _root(request),
            "path": request.url.path.removeprefix(_root(request)),
            "query": request.url.query,
            "visitor": visitor,
            "menu": [page for page in PAGES.values() if page.menu and visitor.may(page.right)],
            "can_act": self.acting.pool is not None,
            "can_leave": self.entrance is not None,
            "schema": self.reading.scope.schema,
            "trace_url": self.trace_url,
            "stale": None,
        }

    def show_error(self, request: Request, error: Exception) -> Response:
        match error:
            case HTTPException():
                return self._respond_error(request, error.status_code, str(error.detail), "")
            case PenstockError():
                is_away = isinstance(error, ServerUnavailable) and not isinstance(
                    error, PrivilegeMissing
                )
                status = 404 if isinstance(error, Unknown) else 503 if is_away else 400
                return self._respond_error(request, status, str(error), error.page)
            case _:  # not its text, which may quote a record
                return self._respond_error(
                    request, 500, f"{type(error).__name__}, which Penstock did not expect", ""
                )

    def _respond_error(self, request: Request, status: int, text: str, page: str) -> Response:
        if request.url.path.endswith((".json", ".csv", ".ndjson")):
            return respond_json(request, {"error": text, "page": page}, status)
        visitor = None
        with suppress(Exception):  # it may be the error
            visitor = self.access(request)
        values = {"root": _root(request), "visitor": None, "live": False, "stale": None}
        if visitor is not None and visitor.may("see"):
            values = self._around(request, visitor) | {"live": status >= 500}  # noqa: PLR2004
        body = render("error.html", {**values, "status": status, "text": text})
        return respond(request, body, "text/html", status)


def _check_right(visitor: Visitor, right: Right) -> None:
    if not visitor.may(right):
        raise HTTPException(
            403, f"this needs the right {right!r}, which {visitor.name} does not have"
        )


def _add_root(scope: Scope) -> Scope:
    """Returns the scope as Starlette's ``mount`` makes it.

    What mounts the console may have cut its own path off, as Litestar does.
    """
    full_path = unquote(scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1")).rstrip("/")
    inner_path = scope["path"].rstrip("/")
    if scope.get("root_path") or full_path == inner_path or not full_path.endswith(inner_path):
        return scope
    root = full_path.removesuffix(inner_path)
    return {**scope, "root_path": root, "path": f"{root}{inner_path or '/'}"}


def _root(request: Request) -> str:
    """Returns the path at which the console is mounted."""
    return str(request.scope.get("root_path", ""))


def _static(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    body = (files("penstock.console") / "static" / name).read_text(encoding="utf-8")

    async def answer(request: Request) -> Response:  # without a thread, which pages may all have
        return respond(request, body, kind, cache="no-cache")

    return answer


async def _enter(entrance: Entrance, limiter: CapacityLimiter, request: Request) -> Response:
    """Logs in by the link, or by name and password."""
    root = _root(request)
    cookie, refused = None, ""
    if request.method == "POST":
        form = await _read_form(request)
        host, name = request.client.host if request.client else "", form.get("name", "")
        if limiter.statistics().tasks_waiting >= MAX_LOG_INS:
            raise HTTPException(429, "too many log-ins at once; try again in a second")
        cookie = await to_thread.run_sync(
            entrance.log_in, name, form.get("password", ""), host, limiter=limiter
        )
        # Not a name that nobody has: it may be a password, typed into the wrong field.
        log.info(
            "log-in",
            visitor=name if name in entrance.users else "unknown",
            host=host,
            refused=cookie is None,
        )
        refused = (
            "The name or the password is wrong, or there were too many attempts in the last minute."
        )
    elif token := request.query_params.get("token"):
        cookie = entrance.redeem(token)
        refused = (
            "This link was used already, or is not this console's. penstock console prints a new "
            "one when it starts."
        )
    if cookie is None:
        values = {"root": root, "visitor": None, "live": False, "stale": None}
        values |= {"refused": refused, "has_users": bool(entrance.users)}
        body = render("enter.html", values)
        return respond(request, body, "text/html", 403 if refused else 200)
    response = RedirectResponse(f"{root}/", 303)
    response.set_cookie(
        cookie_name(request),
        cookie,
        max_age=int(SESSION_S),
        path=f"{root}/",
        httponly=True,
        samesite="strict",
        secure=_is_secure(request),
    )
    return response


def _is_secure(request: Request) -> bool:
    """Returns whether the browser speaks TLS, also to a proxy.

    It says so itself with a form, and the proxy with a link.
    """
    origin = request.headers.get("origin", "")
    proxied = request.headers.get("x-forwarded-proto", "")
    return "https" in {request.url.scheme, urlsplit(origin).scheme, proxied.lower()}


def _leave(entrance: Entrance, request: Request) -> Response:
    entrance.sessions.end(request)
    return RedirectResponse(f"{_root(request)}/enter", 303)


def join_fields(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns fields by name, and the values of a repeated ``id`` with commas between.

    Jobs that were chosen come as such ids.
    """
    joined: dict[str, str] = {}
    for name, text in fields:
        joined[name] = f"{joined[name]},{text}" if name == "id" and name in joined else text
    return joined


async def _read_form(request: Request) -> dict[str, str]:
    """Returns the fields of a small form."""
    body = b""
    try:
        async with asyncio.timeout(FORM_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM:
                    raise HTTPException(413, "the form is too large")
    except TimeoutError:
        raise HTTPException(408, "the form did not arrive") from None
    if (
        request.headers.get("content-type", "").partition(";")[0].strip()
        != "application/x-www-form-urlencoded"
    ):
        raise HTTPException(415, "send a form")
    try:
        form = join_fields(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=80))
    except ValueError:
        raise HTTPException(400, "the form cannot be read") from None
    if any("\x00" in text for field in form.items() for text in field):
        raise HTTPException(400, "no name, key or reason has a character NUL")
    return form
