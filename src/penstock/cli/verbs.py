"""What all verbs share: options made from the settings, one way to fail, the application's pipeline.

    @verb("idle", "resend_chance")
    def stream(settings: Settings, drain: Drain = False) -> None: ...

``verb`` gives the function an option for each of the settings named, and for those that every verb has, and calls it
with the ``Settings``.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from penstock.cli.logs import configure_log
from penstock.cli.render import show_error
from penstock.errors import DeclarationError, InvalidSetting
from penstock.settings import Described, Secret, Settings, described, load_settings

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

COMMON = (
    "app",
    "database_url",
    "redis_url",
    "data_directory",
    "prepare",
    "log_format",
    "log_level",
)
"""Settings that every verb takes."""

OUR_OWN = "Settings (also PENSTOCK_… and pyproject.toml)"
"""Title of these options in the help."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[
    bool,
    typer.Option(
        "--yes", help="Carry the plan out; without it, the plan is shown and nothing changes."
    ),
]


def verb(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a verb of ``function(settings, …)``: with options for the settings ``names`` and for ``COMMON``."""
    taken = [described()[name] for name in (*names, *COMMON)]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            chosen = {setting.name: arguments.pop(setting.name) for setting in taken}
            debug = chosen["log_level"] == "debug"
            try:
                settings = load_settings(chosen)
                debug = settings.log_level == "debug"
                configure_log(settings)
                function(settings=settings, **arguments)
            except (typer.Exit, typer.Abort, KeyboardInterrupt):
                raise
            except BrokenPipeError:
                # Whoever read our output has had enough of it: `penstock tail … | head`.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None
            except Exception as error:
                raise typer.Exit(show_error(error, debug=debug)) from error

        own = [
            p
            for p in inspect.signature(function, eval_str=True).parameters.values()
            if p.name != "settings"
        ]
        options = [_option(setting) for setting in taken]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *options)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # its signature is not ours
        return run

    return decorate


@contextmanager
def from_extra(extra: str, what: str, instead: str = "") -> Iterator[None]:
    """Imports of packages that only some installations have.

    Args:
        extra: Which have: ``spark``.
        what: What needs them: ``reconciling``.
        instead: What else can be done: ``, or …``.

    Raises:
        InvalidSetting: They are not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidSetting(
            f"{what} needs {str(error.name).partition('.')[0]}: pip install 'penstock[{extra}]'{instead}"
        ) from error


def _option(setting: Described) -> inspect.Parameter:
    """An option that is None, or empty, if it was not given."""
    kind: Any = setting.type
    if kind is bool:
        names = [f"{setting.option}/--no-{setting.option.removeprefix('--')}"]
    else:
        names = [setting.option]
    if kind not in (bool, float, int, Path, list[str]):
        kind = str  # a URL, or one of some words: checked with the other settings, in one way
    default: list[str] | None = [] if kind == list[str] else None
    option = typer.Option(
        *names,
        help=f"{setting.sentence} Default: {setting.shown_default}.",
        metavar=_metavar(setting),
        show_default=False,
        rich_help_panel=OUR_OWN,
    )
    annotation = kind if kind == list[str] else kind | None
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[annotation, option],
    )


def _metavar(setting: Described) -> str | None:
    if setting.type is bool:
        return None
    if setting.name == "app":
        return "MODULE:ATTRIBUTE"
    if setting.type == list[str]:
        return "NAME=VALUE"
    if get_origin(setting.type) is Literal:
        return "|".join(get_args(setting.type))
    return {Secret: "URL", Path: "PATH", float: "NUMBER"}.get(setting.type, "TEXT")


def pipeline_of(settings: Settings) -> "Pipeline":
    """The pipeline that the application declares.

    Raises:
        DeclarationError: ``--app`` is missing, or names no pipeline.
    """
    from penstock.loading import load_pipeline  # noqa: PLC0415  not for `--help`

    if settings.app is None:
        raise DeclarationError(
            'which pipeline? Name it: --app module:attribute, PENSTOCK_APP=…, or app = "…" in [tool.penstock] of pyproject.toml'
        )
    return load_pipeline(settings.app)


def pipeline_if_named(settings: Settings) -> "Pipeline | None":
    """The pipeline if ``--app`` names one; commands that only look can do without.

    Raises:
        DeclarationError: ``--app`` names no pipeline.
    """
    return None if settings.app is None else pipeline_of(settings)
