"""Runs a streamer or a consumer as commands do: until a stop signal, or until nothing is left."""

from typing import Any

import typer

from penstock.cli.connections import open_connections
from penstock.cli.progress import ProgressLine
from penstock.cli.signals import Stop
from penstock.consuming import Consumed
from penstock.consuming.brake import how_to_resume
from penstock.consuming.worker import Worker
from penstock.errors import Halted
from penstock.operating.status import status
from penstock.pipeline import Pipeline
from penstock.settings import Settings
from penstock.streaming import RoundResult, Streamer


def run_loop(loop: Streamer | Worker[Any], stop: Stop, progress: ProgressLine, *, drain: bool) -> None:
    """Runs rounds until a stop signal, and closes the connections.

    Args:
        loop: The streamer, or a consumer's worker.
        stop: Called between rounds.
        progress: Counts what they do.
        drain: Return when nothing is left.

    Raises:
        typer.Exit: A stop signal has ended the draining.
    """

    def report(done: RoundResult | Consumed) -> None:
        progress.add(done)
        if drain and stop():
            raise typer.Exit(0)

    if not drain:
        loop.run(stop, report)
        return
    try:
        loop.drain(report)
    finally:
        loop.close()


def raise_if_halted(settings: Settings, pipeline: Pipeline, name: str) -> None:
    """Raises ``Halted``: a drain that leaves halted shards behind is not a success."""
    with open_connections(settings, f"consumer {name}") as servers:
        found = status(servers.connection, servers.client, pipeline)
    halted = {shard: reason for consumer, shard, reason in found.halted if consumer == name}
    if halted:
        has_letters = found.has_letters(name)
        ways = dict.fromkeys(how_to_resume(name, *each, has_letters) for each in halted.items())
        # Without the reason: it may quote a payload, which belongs on stdout, in the status.
        raise Halted(
            f"{name} is halted in {', '.join(map(str, halted))}; penstock status shows why. Fix the cause, "
            f"{'; '.join(ways)}"
        )
