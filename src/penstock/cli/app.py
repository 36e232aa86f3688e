"""The program ``penstock``: its commands, in the order in which ``--help`` shows them.

The module of a command is imported only when that command is run or asked for its help, so that
``penstock --help`` is fast.  A test compares the sentences below with those of the commands.
"""

import gc
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.display import mask
from penstock.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command whose module in ``penstock.cli.commands`` is not imported yet.

    ``panel`` is the panel of ``--help`` that shows it.
    """

    name: str
    module: str
    panel: str
    help: str

    def load(self) -> Any:
        """Imports its module and builds the command.

        What is imported is no garbage: to look for some was an eighth of a start.
        """
        gc.disable()
        try:
            module = import_module(f"penstock.cli.commands.{self.module}")
        finally:
            gc.enable()
        target = getattr(module, self.name.replace("-", "_"))
        if isinstance(target, typer.Typer):
            return typer.main.get_group(target)
        single = typer.Typer(add_completion=False)
        single.command(self.name)(target)
        return typer.main.get_command(single)


_COMMANDS = """\
Run     rocket_rides   demo          Run a sample pipeline under crashes, repeated sends and a kill. Exits with 4 if anything is lost or doubled.
Run     installation   init          Create or upgrade Penstock's tables and the declared triggers. With --roles, show or create Penstock's roles.
Run     services       run           Run the whole pipeline: the streamer and all consumers.
Run     services       stream        Sequence and publish staged records. Several streamers may run at once.
Run     services       consume       Apply records with one consumer. Several processes divide its shards among themselves.
Run     services       work          Do the jobs of queues. Several processes share the jobs. SIGTERM and Ctrl-C give unstarted jobs back at once; a second Ctrl-C also gives running jobs back.
Inspect health         status        Show how many records are staged, sequenced, published and applied. Exits with 1 if a shard makes no progress.
Inspect registrations  asyncapi      Print channels and payloads as AsyncAPI 3. With --check, exits with 4 if a change breaks old or new readers.
Inspect consoles       console       Show the pipeline in a browser. Without --users, only the printed link opens the console, and only on this machine.
Inspect health         metrics       Print or serve the pipeline's state as Prometheus metrics. One exporter is enough for a pipeline.
Inspect lookups        tail          Print the records of a log with their payloads, the oldest members of an Ick, or the unfinished messages of a queue.
Inspect lookups        trace         Show the path of a record: when it was staged, sequenced, published, and applied by each consumer.
Inspect lookups        explain       Explain why a record is not applied yet, and what to do. Exits with 0 if all its consumers have applied it, else with 1.
Inspect health         doctor        Check for anything that endangers records. Exits with 1 if it finds an error, and with 3 if a server does not answer.
Inspect probe          probe         Ask a process that was started with --listen whether it is alive (/livez) or ready (/readyz). If it is not, prints why, and exits with 1.
Inspect comparisons    verify        Prove that no record is missing, doubled, changed or out of order, while everything runs. Exits with 4 if it finds such a record.
Repair  comparisons    reconcile     Compare the state of running consumers with the canonical tables. Exits with 4 if differences remain.
Repair  resets         replay        Copy records of a log, by range or key, into another channel, as new records. Continues an interrupted replay.
Repair  redelivery     dead-letters  Inspect, retry or drop dead letters.
Repair  jobs           jobs          List, show, cancel, retry or move the jobs of a queue.
Repair  jobs           queues        List or set limits of the tenants and keys of a queue.
Repair  registrations  consumers     List, pause, rename or retire registered consumers.
Repair  registrations  channels      List channels, or change a channel while it is in use.
Repair  registrations  schedules     Pause a schedule, resume it, or run it now.
Repair  resets         reset         Move a checkpoint, open a new epoch, or repair an Ick.
"""  # noqa: E501  a table, a line for each command

COMMANDS = tuple(
    CommandEntry(name, module, panel, sentence)
    for panel, module, name, sentence in (line.split(maxsplit=3) for line in _COMMANDS.splitlines())
)


class _LazyCommand(TyperCommand):
    """Stands for a command in ``penstock --help``; parsing its arguments imports the real one."""

    def __init__(self, entry: CommandEntry) -> None:
        super().__init__(entry.name, help=entry.help, rich_help_panel=entry.panel)
        self._entry = entry

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Returns the context of the real command or group: invoking it invokes that command."""
        words = arguments[1] if len(arguments) > 1 else options.get("args", ())
        command = self._entry.load()
        defaults = _read_defaults(is_help=bool({"--help", "-h"} & set(words)))
        defaults |= {name: defaults.copy() for name in getattr(command, "commands", ())}
        return command.make_context(*arguments, default_map=defaults, **options)


def _read_defaults(*, is_help: bool) -> dict[str, Any]:
    from penstock.settings import read_defaults  # noqa: PLC0415  not for --help

    try:
        return read_defaults()
    except InvalidSetting:
        if is_help:
            return {}
        raise


_UsageError: Any = typer.BadParameter.__base__
"""Base of Typer's errors of usage, wherever its release keeps it."""


class LazyGroup(TyperGroup):
    """Lists all commands without importing them."""

    def __init__(self, **attributes: Any) -> None:
        """Adds an entry for each of ``COMMANDS``."""
        super().__init__(**attributes)
        for entry in COMMANDS:
            self.add_command(_LazyCommand(entry))

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; a wrong value or argument may be a URL that was meant for a setting."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message = mask(error.message)
            raise
        except InvalidSetting as error:  # before the command runs
            from penstock.cli.render import show_error  # noqa: PLC0415  not for a probe, every few seconds

            raise typer.Exit(show_error(error, debug=False)) from error


app = typer.Typer(
    name="penstock",
    cls=LazyGroup,
    help="Records staged with the change, streamed to Redis, applied exactly once.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def load_commands() -> dict[str, Any]:
    """Returns all commands by name, imported: for the reference page, and for tests."""
    return {entry.name: entry.load() for entry in COMMANDS}


def _show_version(is_requested: bool) -> None:
    if is_requested:
        try:
            print(f"penstock {version('penstock-outbox')}")
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


WITHOUT_GIL = (
    "penstock: this Python runs without its GIL, where the drivers of Postgres and Redis are not "
    "tested: "
    "take Python's ordinary build, or set PYTHON_GIL=1"
)


def main() -> None:
    """Runs the command given on the command line, and exits; refuses a Python without its GIL."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        print(WITHOUT_GIL, file=sys.stderr)
        sys.exit(2)
    app()
