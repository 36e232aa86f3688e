"""``penstock queues``: lists and sets the limits of a queue's tenants and keys."""

from typing import Annotated, Any

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, subcommand, whoami
from penstock.cli.commands.jobs import QueueArgument
from penstock.cli.connecting import open_connections
from penstock.cli.render import say, show, show_found
from penstock.errors import InvalidSetting
from penstock.operating.jobs.queue_limits import LimitChange, list_limits
from penstock.operating.pausing import note_action
from penstock.settings import Settings

queues = typer.Typer(no_args_is_help=True, help="List or set limits of the tenants and keys of a queue.")


@subcommand(queues, "limits")
def limits_(settings: Settings, queue: QueueArgument, json: Json = False) -> None:
    """List the limits that hold: those that were set, and those that are declared beside them; no name is all others."""
    with open_connections(settings, "queues") as servers:
        found, _ = list_limits(servers.connection, queue, scope=servers.scope)
    show_found(found, "kind, name, limits, set at", json=json)


@subcommand(queues, "limit")
def limit_(  # noqa: PLR0917  options
    settings: Settings,
    queue: QueueArgument,
    tenant: Annotated[
        str | None, typer.Option(help="Of this tenant; empty for all without limits of their own.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Of this key, likewise.")] = None,
    in_flight: Annotated[int | None, typer.Option(help="Maximum number in flight.")] = None,
    rate: Annotated[float | None, typer.Option(help="Maximum number a second.")] = None,
    burst: Annotated[int | None, typer.Option(help="With a rate: maximum number at once after a pause.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share of a tenant beside others that wait.")] = None,
    elastic: Annotated[
        int | None, typer.Option(help="Number in flight above which a tenant goes only when no other is ready.")
    ] = None,
    bytes_: Annotated[
        int | None, typer.Option("--bytes", help="Maximum bytes of a tenant's payloads in Redis.")
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Hand nothing of it over.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take back what was set; what is declared holds.")] = False,
    apply: Apply = False,
) -> None:
    """Set all limits of a tenant or a key, in place of those it has; they are kept in Postgres."""
    of_tenant = {"weight": weight, "elastic": elastic, "bytes": bytes_}
    given: dict[str, Any] = {"in_flight": in_flight, "rate": rate, "burst": burst, **of_tenant}
    given = {name: value for name, value in given.items() if value is not None} | ({"is_paused": True} if pause else {})
    if bool(given) is remove:
        raise InvalidSetting(
            "which limits? Give --in-flight, --rate, --weight, --elastic, --bytes or --pause; or --remove alone"
        )
    if (tenant is None) is (key is None) or (key is not None and given.keys() & of_tenant.keys()):
        raise InvalidSetting(
            "of what? Give --tenant or --key, one of them; a key has no --weight, --elastic or --bytes"
        )
    change = LimitChange(queue, *(("tenant", tenant) if tenant is not None else ("key", str(key))), given)
    with open_connections(settings, "queues") as servers:
        show(change.describe(change.find(servers.connection, servers.scope)))
        if not apply:
            say(NOTHING_CHANGED)
            return
        note_action(servers.connection, whoami(), change.title, change.command, scope=servers.scope)
        change.apply(servers.connection, servers.scope)
    show("holds within a second or two, once the streamer has read it")
