"""A proxy that delays every piece of a conversation with Postgres or Redis."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

DELAY_S = 0.05
PIECE = 64 * 1024


def delay(pipe: Pipe, upstreams: Sequence[Path], directory: Path) -> None:
    """Serves a socket of the same name in ``directory`` for each of the servers' sockets."""
    asyncio.run(_serve(pipe, upstreams, directory))


async def _serve(pipe: Pipe, upstreams: Sequence[Path], directory: Path) -> None:
    for upstream in upstreams:
        await asyncio.start_unix_server(_connect_to(upstream), directory / upstream.name)
    pipe.send("ready")
    with suppress(EOFError, OSError):
        await asyncio.to_thread(pipe.recv)


def _connect_to(upstream: Path):  # type: ignore[no-untyped-def]  # asyncio's own callback
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(upstream)
        await asyncio.gather(_pass_on(reader, to_server), _pass_on(from_server, writer))

    return connect


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            await asyncio.sleep(DELAY_S)
            writer.write(piece)
            await writer.drain()
    writer.close()
