"""The command ``penstock``: which verbs there are, and in which order they are shown.

Modules that take long to import are imported by the verbs that need them.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from penstock.cli.commands.consume import consume
from penstock.cli.commands.consumers import consumers
from penstock.cli.commands.dead_letters import dead_letters
from penstock.cli.commands.demo import demo
from penstock.cli.commands.doctor import doctor
from penstock.cli.commands.init import init
from penstock.cli.commands.reconcile import reconcile
from penstock.cli.commands.reset import reset
from penstock.cli.commands.run import run
from penstock.cli.commands.status import status
from penstock.cli.commands.stream import stream
from penstock.cli.commands.tail import tail
from penstock.cli.commands.verify import verify

RUN, LOOK, MEND = "Run it", "Look at it", "Mend it"

app = typer.Typer(
    name="penstock",
    help="Records staged with the change, streamed to Redis, applied exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("demo", rich_help_panel=RUN)(demo)
app.command("init", rich_help_panel=RUN)(init)
app.command("run", rich_help_panel=RUN)(run)
app.command("stream", rich_help_panel=RUN)(stream)
app.command("consume", rich_help_panel=RUN)(consume)
app.command("status", rich_help_panel=LOOK)(status)
app.command("tail", rich_help_panel=LOOK)(tail)
app.command("doctor", rich_help_panel=LOOK)(doctor)
app.command("verify", rich_help_panel=LOOK)(verify)
app.command("reconcile", rich_help_panel=MEND)(reconcile)
app.add_typer(
    dead_letters,
    name="dead-letters",
    help="Records that consumers have set aside.",
    rich_help_panel=MEND,
)
app.add_typer(
    consumers,
    name="consumers",
    help="Registered consumers: retention waits for them.",
    rich_help_panel=MEND,
)
app.add_typer(
    reset,
    name="reset",
    help="Move a checkpoint, or open a new epoch: a plan first.",
    rich_help_panel=MEND,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"penstock {version('penstock')}")
        except PackageNotFoundError:
            print("penstock, not installed")
        raise typer.Exit


@app.callback()
def _penstock(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del show_version


def main() -> None:
    """Runs the command of the command line; ends the process."""
    app()
