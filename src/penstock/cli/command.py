"""Common parts of all commands: options for settings, error handling, the application's pipeline.

    @command("idle", "share")
    def stream(settings: Settings, drain: Drain = False) -> None: ...

``command`` adds an option for each named setting and for those that every command takes, and calls
the function with the ``Settings``.  A parameter may be a filter, and stand for an option of each
field that its annotation names, with the word that the help has for the value, if it is a special
one:

    JobOptions = Annotated[JobFilter, {"tenant": None, "unique": "NAME"}]

The help of an option is in its annotation, in ``Args`` of the function's docstring, or in
``Attributes`` of the filter's.
"""

import gc
import getpass
import inspect
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, get_args, get_origin

import typer

from penstock import logs
from penstock.cli.render import prepare_output, show_error
from penstock.errors import DeclarationError, InvalidSetting
from penstock.parsing import MAX_NUMBER, find_number
from penstock.pipeline import Pipeline, load_pipeline
from penstock.records import (
    Moment,
    Offset,
    Place,
    RecordId,
    is_place,
    parse_moment,
    parse_offset,
    parse_place,
)
from penstock.settings import Settings, make_parameters, read_helps

COMMON = (
    "app",
    "database_url",
    "redis_url",
    "data_directory",
    "prepare",
    "log_format",
    "log_level",
)
"""Settings that every command takes."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Python's stand-in for a byte that is not UTF-8."""

NOTHING_CHANGED = "Nothing was changed. To carry it out: --apply"
"""The last line of a plan."""

DIFFERENCES = 4
"""Exit code for differences that were not repaired, breaking changes, and lost, doubled or
misplaced records."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
IsKey = Annotated[
    bool, typer.Option("--key", help="Take the argument as a key, even if it is a number.")
]
OfChannel = Annotated[str | None, typer.Option("--channel", help="Only records of this channel.")]
OnlyShard = Annotated[int | None, typer.Option("--shard", min=0, help="Only this shard.")]
RecordArgument = Annotated[
    str,
    typer.Argument(
        metavar="KEY|ID|PLACE", help="A key, a record's number, or a place: 'rides/2 offset 4118'."
    ),
]
Apply = Annotated[
    bool, typer.Option("--apply", help="Carry out the plan; without it, the plan is only shown.")
]


def configure_log(settings: Settings) -> None:
    """Sets up the log of this process, before it imports the application."""
    console = settings.log_format == "console" or (
        settings.log_format == "auto" and sys.stderr.isatty()
    )
    logs.configure(console=console, level=settings.log_level)


def command(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of ``function(settings, …)``.

    It has options for the settings ``names`` and ``COMMON``.
    """
    setting_names = (*names, *COMMON)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        sentence, helps = read_helps(function)
        declared = [
            p
            for p in inspect.signature(function, eval_str=True).parameters.values()
            if p.name != "settings"
        ]
        groups = {
            "settings": (Settings, setting_names),
            **{p.name: get_args(p.annotation) for p in declared if _is_filter(p)},
        }
        flat = [option for p in declared for option in (_list_options(p) if _is_filter(p) else [p])]
        described = [_describe(p, helps[p.name]) if p.name in helps else p for p in flat]

        def run(**options: Any) -> None:
            arguments = options.copy()
            for name, (kind, fields) in groups.items():
                arguments[name] = kind(**{field: arguments.pop(field) for field in fields})
            _run(function, arguments, options)

        parameters = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in (*described, *make_parameters(setting_names))
        ]
        run.__name__, run.__doc__ = function.__name__, sentence
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by Typer
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def subcommand(
    group: typer.Typer, title: str, *names: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a group: see ``command``."""
    return lambda function: group.command(title)(command(*names)(function))


def _is_filter(parameter: inspect.Parameter) -> bool:
    return get_origin(parameter.annotation) is Annotated and isinstance(
        get_args(parameter.annotation)[1], Mapping
    )


def _list_options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yields the parameters that a filter stands for."""
    kind, metavars = get_args(parameter.annotation)
    fields, (_, helps) = inspect.signature(kind).parameters, read_helps(kind)
    for name, metavar in metavars.items():
        parser = parse_past if fields[name].annotation == datetime | None else None
        option = typer.Option(metavar=metavar, parser=parser, help=helps[name])
        yield fields[name].replace(annotation=Annotated[fields[name].annotation, option])


def _describe(parameter: inspect.Parameter, text: str) -> inspect.Parameter:
    """Returns the parameter with its help.

    Without a default it is an argument, unless its annotation makes it an option.
    """
    kind = parameter.annotation
    plain = typer.Argument if parameter.default is parameter.empty else typer.Option
    kind, shared = get_args(kind) if get_origin(kind) is Annotated else (kind, plain())
    option = copy(shared)
    option.help = text
    return parameter.replace(annotation=Annotated[kind, option])


def _run(
    function: Callable[..., None], arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Runs the command, unless an option is refused.

    An error becomes a line on stderr and an exit code.
    """
    settings: Settings = arguments["settings"]
    prepare_output()
    try:
        _check(options)
        configure_log(settings)
        function(**arguments)
    except (typer.Exit, typer.Abort, KeyboardInterrupt):
        raise
    except BrokenPipeError:
        # The reader of our output has closed it: `penstock tail … | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except Exception as error:
        raise typer.Exit(show_error(error, debug=settings.log_level == "debug")) from error


def _check(arguments: Mapping[str, Any]) -> None:
    """Refuses values that no server takes.

    These are text that is not UTF-8, and numbers that Postgres does not have.
    """
    for name, argument in arguments.items():
        for value in argument if isinstance(argument, list) else [argument]:
            if isinstance(value, str) and _SURROGATE.search(value):
                raise InvalidSetting(f"{name} is not in UTF-8: {value!a}")
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                raise InvalidSetting(f"{name} is {value}; the largest number is {MAX_NUMBER}")


@contextmanager
def require_extra(extra: str, feature: str, instead: str = "") -> Iterator[None]:
    """Guards imports of packages that come with an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidSetting(
            f"{feature} needs {str(error.name).partition('.')[0]}: pip install "
            f"'penstock-outbox[{extra}]'{instead}"
        ) from error


def parse_position(text: str) -> Offset | Place:
    """Returns an offset, or a place such as ``rides/2 offset 4118``."""
    return parse_offset(text) if text.isascii() and text.isdigit() else parse_place(text)


def means_position(text: str) -> bool:
    """Returns whether a text is an offset or a place, where a time may be given, too."""
    return text.isdigit() or " offset " in text


def parse_point(text: str) -> Offset | Place | Moment:
    """Returns an offset, a place, or a time."""
    return parse_position(text) if means_position(text) else parse_moment(text)


def parse_past(text: str) -> datetime:
    """Returns a time, which may be given as an age."""
    moment = parse_moment(text)
    try:
        return datetime.now(UTC) - moment if isinstance(moment, timedelta) else moment
    except OverflowError:
        raise InvalidSetting(
            f"{text!r} is before the year 1: write a later time, such as 2h for two hours ago"
        ) from None


def parse_record(text: str, *, is_key: bool) -> RecordId | Place | str:
    """Returns a record's number, a place, or a key; with ``is_key`` always a key."""
    if is_key:
        return text
    if text.isascii() and text.isdigit():
        number = find_number(text.encode())
        if number is None:
            raise InvalidSetting(f"{text} is not the number of a record; if it is a key, add --key")
        return RecordId(number)
    return parse_place(text) if is_place(text) else text


def whoami() -> str:
    """Returns the user and the machine, for notes of who did it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def require_pipeline(settings: Settings) -> Pipeline:
    """Returns the pipeline that the application declares."""
    if settings.app is None:
        raise DeclarationError(
            "which pipeline? Name it: --app module:attribute, PENSTOCK_APP=…, "
            'or app = "…" in [tool.penstock] of pyproject.toml'
        )
    with _kept_from_the_application():
        return load_pipeline(settings.app)


@contextmanager
def _kept_from_the_application() -> Iterator[None]:
    """Restores what importing an application's module may have set for the whole process.

    Its handlers of signals would leave a worker that cannot be stopped, and ``dictConfig`` disables
    the loggers there are.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "penstock" and isinstance(logger, logging.Logger):
            logger.disabled = False


def find_pipeline(settings: Settings) -> Pipeline | None:
    """Returns the pipeline of ``--app``; None without it, for commands that do not need one."""
    return None if settings.app is None else require_pipeline(settings)


@contextmanager
def spared_from_garbage_collection() -> Iterator[None]:
    """Takes the objects loaded so far out of the search for cycles.

    Records come by the thousand, and so many new objects make Python look through all it has
    several times a second: a fifth of a consumer's time, and pauses of 50 ms.  What comes later is
    looked through as ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
