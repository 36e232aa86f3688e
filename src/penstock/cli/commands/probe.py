"""``penstock probe``: asks a worker's probe, for images without curl.

It imports the standard library and Typer alone.
"""

from http.client import HTTPConnection, HTTPException
from typing import Annotated
from urllib.parse import urlsplit

import typer

from penstock.errors import InvalidSetting

TIMEOUT_S = 3.0
"""Longest wait for the connection, and for the next bytes of the answer."""

MAX_BYTES = 10_000
"""Limit of the answer that is read and printed."""

HEALTHY = 200


def probe(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="Address to ask, such as http://127.0.0.1:9310/livez."),
    ],
) -> None:
    """Ask a process that was started with --listen whether it is alive (/livez) or ready (/readyz).
    If it is not, prints why, and exits with 1.
    """
    host, port, path = _parse(url)
    try:
        status, text = _ask(host, port, path)
    except (OSError, HTTPException) as error:
        typer.echo(f"{host}:{port} does not answer: {type(error).__name__}", err=True)
        raise typer.Exit(1) from None
    typer.echo(_printable(text.strip()), err=status != HEALTHY)
    raise typer.Exit(0 if status == HEALTHY else 1)


def _parse(url: str) -> tuple[str, int, str]:
    """Returns host, port and path."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname is not None:
            return parts.hostname, parts.port or 80, parts.path or "/livez"
    except ValueError:  # of the port
        pass
    from penstock.cli.render import show_error  # noqa: PLC0415  not for a probe

    error = InvalidSetting("give a URL such as http://127.0.0.1:9310/livez; HTTPS is not supported")
    raise typer.Exit(show_error(error, debug=False))


def _ask(host: str, port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(MAX_BYTES).decode(errors="replace")
    finally:
        connection.close()


def _printable(text: str) -> str:
    """Returns the text without characters that would change the terminal."""
    return "".join(
        character if character.isprintable() or character == "\n" else "?" for character in text
    )
