"""A small HTTP server in a thread: answers GET of a few fixed paths, and nothing else.

A client that is slow, or sends nothing, cannot keep others out: of more than ``MAX_CONNECTIONS``
whose request has not come yet the oldest makes room.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any, Self

from typing_extensions import override

from penstock.errors import InvalidSetting

MAX_CONNECTIONS = 4
MAX_ANSWERS = 32
"""Limit of the answers that are made at the same time; a further client gets 503."""

TIMEOUT_S = 5.0
"""Seconds that a client may take to send the next bytes of its request, or to take the answer's."""

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request."""

    status: int  # of HTTP
    body: str  # the text
    content_type: str = TEXT


Routes = Mapping[str, Callable[[str], Answer]]
"""What answers each path; it is given the request's header ``Accept``."""


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S
    server: "_Server"

    def do_GET(self) -> None:
        with self.server.admitted(self.connection) as may_answer:
            answer = (
                self._make_answer() if may_answer else Answer(503, "too many requests at once\n")
            )
        body = answer.body.encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  the same

    def _make_answer(self) -> Answer:
        make = self.server.routes.get(self.path.partition("?")[0])
        if make is None:
            return Answer(404, f"{' '.join(self.server.routes)}\n")
        return make(self.headers.get("Accept", ""))

    @override
    def version_string(self) -> str:
        return "penstock"

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: probes come every few seconds."""


class _Server(TCPServer):
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        self.routes = routes
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: dict[socket.socket, None] = {}
        self._answers = threading.BoundedSemaphore(MAX_ANSWERS)
        super().__init__((host, port), _Handler)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections[request] = None
        for oldest in list(self._connections)[:-MAX_CONNECTIONS]:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()

    @contextmanager
    def admitted(self, request: socket.socket) -> Iterator[bool]:
        """Notes that a request has arrived, so that its client is kept.

        Yields whether to answer it now.
        """
        self._connections.pop(request, None)
        may_answer = self._answers.acquire(blocking=False)
        try:
            yield may_answer
        finally:
            if may_answer:
                self._answers.release()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            with suppress(OSError):  # the client has gone, or was too slow
                self.finish_request(request, client_address)
        finally:
            self._connections.pop(request, None)
            self.shutdown_request(request)


class Listener:
    """Serves routes while a ``with`` block runs.

    Attributes:
        port: The port; a free one for port 0.
    """

    def __init__(self, address: str, routes: Routes) -> None:
        """Listens; ``address`` is ``host:port``, or a port of this machine alone."""
        host, _, number = address.rpartition(":")
        if not (number.isascii() and number.isdigit() and int(number) < 2**16):
            raise InvalidSetting(
                f"--listen {address}: give a port, or HOST:PORT, such as 0.0.0.0:9310"
            )
        try:
            self._server = _Server(host.strip("[]") or "127.0.0.1", int(number), routes)
        except OSError as error:
            raise InvalidSetting(
                f"--listen {address}: this address cannot be listened to: {error.strerror}. Use "
                "a free port"
            ) from None
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Self:
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="penstock-listener", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
