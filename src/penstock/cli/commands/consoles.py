"""``penstock console``: the web page."""

import getpass
import re
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import command, find_pipeline, require_extra
from penstock.cli.connecting import servers
from penstock.cli.render import show
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.errors import InvalidSetting
from penstock.pipeline import get_scope
from penstock.schema.revisions import check_revision
from penstock.settings import Settings

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@command()
def console(
    settings: Settings,
    address: Annotated[str, typer.Option("--listen", metavar="HOST:PORT")] = "127.0.0.1:8787",
    host: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    users: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    proxy: Annotated[str | None, typer.Option(metavar="HEADER@ADDRESS")] = None,
    acting_database_url: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="PENSTOCK_ACTING_DATABASE_URL", show_envvar=False),
    ] = None,
    root_path: Annotated[str, typer.Option("--root-path", metavar="PATH")] = "",
    trace_url: Annotated[str | None, typer.Option("--trace-url", metavar="URL")] = None,
    prometheus_url: Annotated[str | None, typer.Option("--prometheus-url", metavar="URL")] = None,
    hash_password: Annotated[bool, typer.Option("--hash-password")] = False,
) -> None:
    """Show the pipeline in a browser. Without --users, only the printed link opens the console, and
    only on this machine.

    Args:
        address: Address to listen on.
        host: Additional host name of the console.
        users: TOML file. A table for each user has the user's rights and the hash of the
            password.
        proxy: Header in which a proxy at this address names the user, one of --users.
        acting_database_url: Postgres for actions, such as pausing or retrying. Without this option,
            the console only reads.
        root_path: Path prefix that a proxy removes, such as /penstock.
        trace_url: Page of a trace in your tracing system, such as
            https://traces.example/trace/{trace_id}.
        prometheus_url: Prometheus that scrapes penstock metrics. It provides charts over a day and
            across restarts.
        hash_password: Ask for a password, print its hash for --users, and exit.
    """
    with require_extra("console", "penstock console"):
        from penstock.console import access  # noqa: PLC0415  an extra
        from penstock.console.serving import serve  # noqa: PLC0415  the same
        from penstock.console.web_application import make_console  # noqa: PLC0415  the same
    if hash_password:
        show(
            access.hash_password(
                getpass.getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
            )
        )
        return
    name, _, port = address.rpartition(":")
    if not name or not port.isdecimal():
        raise InvalidSetting(f"--listen {address!r}: give HOST:PORT, such as 127.0.0.1:8787")
    if users is None and (name.strip("[]") not in LOOPBACK or proxy is not None):
        raise InvalidSetting(
            "without users, anybody with the link could open it from another machine: name users "
            "with --users FILE"
        )
    if root_path and not re.fullmatch("(/[A-Za-z0-9._~-]+)+", root_path):
        raise InvalidSetting(
            f"--root-path {root_path!r}: give a path such as /penstock, without a slash at its end"
        )
    header, _, proxy_address = (proxy or "").partition("@")
    if proxy is not None and not (header and proxy_address):
        raise InvalidSetting(
            f"--proxy {proxy!r}: give HEADER@ADDRESS, such as X-Remote-User@10.0.0.7"
        )
    accounts = {} if users is None else access.read_users(users)
    if users is not None and not accounts:
        raise InvalidSetting(f"{users} has no user: nobody could log in")
    token = secrets.token_urlsafe(24) if users is None else None
    pipeline = find_pipeline(settings)
    entrance = access.Entrance(accounts, token, header or None, proxy_address)
    with servers(settings, schema=get_scope(pipeline).schema, start=False) as urls:
        with connect_postgres(
            urls.database_url, application="console", prepare=settings.prepare
        ) as connection:
            check_revision(Store(connection, get_scope(pipeline)))
        application = make_console(
            pipeline,
            urls.database_url,
            urls.redis_url,
            access=entrance,
            acting_database_url=acting_database_url,
            hosts={*LOOPBACK, name.strip("[]"), *(host or ())},
            trace_url=trace_url,
            prometheus_url=prometheus_url,
        )
        path = f"enter?token={token}" if token else ""
        serve(
            application,
            name.strip("[]"),
            int(port),
            lambda port: show(f"The console: http://{name}:{port}{root_path}/{path}"),
            root_path,
        )
