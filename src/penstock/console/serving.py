"""Serves the console in this process until SIGINT or SIGTERM, or in a thread."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from penstock.console.web_application import Console
from penstock.errors import InvalidSetting

GRACE_S = 2
"""Seconds in which open requests may end."""

HEAD_S = 10.0
"""Seconds in which a client has to send the head of a request, from its first byte or from the
connection on."""

MAX_HEADS = 100
"""Limit of the connections whose next head is not complete, below that of all connections.  Of
more, the oldest is closed."""


def _make_protocol() -> type[H11Protocol]:
    """Returns the protocol of one server, with a deadline for heads.

    uvicorn has none: half a head would keep its connection for ever.
    """
    incomplete: dict[H11Protocol, asyncio.TimerHandle] = {}

    class Protocol(H11Protocol):
        @override
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
            super().connection_made(transport)
            self._expect_head()

        @override
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_head()

        @override
        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            cycle: RequestResponseCycle | None = self.cycle  # None before the first request
            if cycle is not None and not cycle.response_complete:
                self._forget()
            elif self not in incomplete:
                incomplete[self] = self.loop.call_later(HEAD_S, self.transport.close)
                if len(incomplete) > MAX_HEADS:
                    oldest = next(iter(incomplete))
                    incomplete.pop(oldest).cancel()
                    oldest.transport.close()

        def _forget(self) -> None:
            if (timer := incomplete.pop(self, None)) is not None:
                timer.cancel()

    return Protocol


class _Server(uvicorn.Server):
    """A server that reports when it answers."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def _make_server(console: Console, on_ready: Callable[[], None], root_path: str = "") -> _Server:
    # No log: it would have the one-time token, keys in addresses, and the text of errors.
    config = uvicorn.Config(
        console,
        http=_make_protocol(),  # whatever else is installed has other limits
        ws="none",
        root_path=root_path,  # which the proxy before it has taken off
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=16_384,
        limit_concurrency=200,
    )
    return _Server(config, on_ready)


@contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            raise InvalidSetting(f"{host}:{port} cannot be listened to: {error.strerror}") from None
        yield bound


def serve(
    console: Console, host: str, port: int, on_ready: Callable[[int], None], root_path: str = ""
) -> None:
    """Serves until a signal; reports the port once it answers, a free one for port 0."""
    with _bind(host, port) as bound:
        try:
            _make_server(console, lambda: on_ready(bound.getsockname()[1]), root_path).run([bound])
        finally:
            console.close()


@contextmanager
def served(
    console: Console, host: str = "127.0.0.1", port: int = 0, root_path: str = ""
) -> Iterator[int]:
    """Serves in a thread while the block runs; yields the port."""
    with _bind(host, port) as bound:
        ready = threading.Event()
        server = _make_server(console, ready.set, root_path)
        thread = threading.Thread(
            target=server.run, args=([bound],), name="penstock console server", daemon=True
        )
        thread.start()
        try:
            ready.wait()
            yield int(bound.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
            console.close()
