"""Every setting, defined once: its type, its default, and the option that describes it.

A setting is taken from the first of these that has it:

    1. the option of the command          --database-url …
    2. its environment variable           PENSTOCK_DATABASE_URL=…
    3. ``[tool.penstock]`` in the ``pyproject.toml`` of the working directory
    4. its default

``read_defaults`` reads 2 and 3; Typer parses and checks the value that was taken.  An empty value
is not a missing one but an error: a secret that is not set must not choose other servers.
"""

import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from penstock.errors import InvalidSetting
from penstock.parsing import parse_duration

PREFIX = "PENSTOCK_"
"""Prefix of the environment variables."""

SETTINGS_PANEL = f"Settings (also {PREFIX}… and pyproject.toml)"
"""Heading of these options in the help."""

_EMPTY = (
    "the value is empty, as that of an unset secret; "
    "give one, or remove the option or its variable PENSTOCK_…"
)


def _parse_text(value: object) -> str:
    if not str(value).strip():
        raise typer.BadParameter(_EMPTY)
    return str(value)


def duration(*, max_s: float = float("inf"), zero: bool = False) -> Callable[[Any], float]:
    """Returns a parser of durations.

    Its errors do not quote the value, which may be a misplaced secret.
    """

    def parse(text: Any) -> float:
        _parse_text(text)
        try:
            seconds = parse_duration(text)
        except ValueError:
            raise typer.BadParameter(
                "give seconds, or a duration such as 20ms, 90s, 10m, 2h"
            ) from None
        if seconds > max_s or not (seconds or zero):
            raise typer.BadParameter(
                "it has to be more than 0 s" + (f", and at most {max_s:g} s" if seconds else "")
            )
        return seconds

    return parse


def _parse_pair(text: str) -> str:
    if not all(part.strip() for part in text.partition("=")):
        raise typer.BadParameter(f"give NAME=URL; {_EMPTY}")
    return text


def _join_sources(context: typer.Context, pairs: list[str]) -> list[str]:
    """Joins the sources of options to those of environment and file, and replaces equal names."""
    return [*(context.default_map or {}).get("sources", ()), *pairs]


def _setting(metavar: str | None = None, **more: Any) -> Any:
    """Returns an option; a text has a ``metavar`` and must not be empty."""
    parser = {} if metavar is None else {"parser": _parse_text}
    return typer.Option(metavar=metavar, rich_help_panel=SETTINGS_PANEL, **(parser | more))


_DESCRIBED = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def read_helps(documented: object) -> tuple[str, dict[str, str]]:
    """Returns the summary of a docstring, and the help of its ``Args`` or ``Attributes``."""
    sentence, _, described = (inspect.getdoc(documented) or "").partition("\n\nA")
    helps = {name: " ".join(text.split()) for name, text in _DESCRIBED.findall(described)}
    return " ".join(sentence.split()), helps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a command.

    Attributes:
        app: The application's pipeline, as module:attribute. Python also searches the working
            directory.
        database_url: The primary Postgres: postgresql://user:password@host/database. If neither
            this nor redis_url is set, commands use an embedded Postgres and Valkey, but only at a
            terminal or with data_directory.
        redis_url: The log's Redis or Valkey: redis://, redis+cluster://, redis+sentinel:// (rediss…
            for TLS) or unix://.
        sources: For a consumer of several sources: the Postgres of each source, by its name. In the
            environment a JSON object, or PENSTOCK_SOURCES__EU=postgresql://… for one source; in
            pyproject.toml a table.
        data_directory: Directory of the embedded servers (default at a terminal and in the demo:
            .penstock).
        engine: Execution engine: spark, inline (one Python process) or, only in the demo, stealing
            (requests do the work). With auto, penstock run uses Spark if it is installed. Other
            commands use Spark only for DataFrames, Parquet, --master or --conf.
        idle: Maximum pause after a round without records.
        prepare: Use prepared statements, unless Penstock detects a pooler.
        share: Share of the shards that this streamer publishes, by default all. 1/2 is the first of
            two shares; the streamer of the first share also sequences.
        listen: HTTP address of /livez, /readyz and, with the extra prometheus, /metrics of this
            process (penstock metrics: of the whole pipeline). A port alone means only this machine.
        concurrency: Jobs that each worker of a queue does at the same time; by default, the
            worker's declared number.
        master: Spark's master URL; by default local, with as many threads as needed.
        conf: Options of Spark, each as name=value; in the environment a JSON list.
        epoch_length: Time that a Spark task runs before Spark schedules it again.
        log_format: Format of the log on stderr. auto means console on a terminal, otherwise JSON
            lines.
        log_level: Lowest level that is logged. With debug, a failed command shows its traceback.
    """

    app: Annotated[str | None, _setting("MODULE:ATTRIBUTE")] = None
    database_url: Annotated[str | None, _setting("URL")] = field(default=None, repr=False)
    redis_url: Annotated[str | None, _setting("URL")] = field(default=None, repr=False)
    sources: Annotated[
        list[str], _setting("NAME=URL", parser=_parse_pair, callback=_join_sources)
    ] = field(default_factory=list, repr=False)
    data_directory: Annotated[str | None, _setting("PATH")] = None
    engine: Annotated[Literal["auto", "spark", "inline", "stealing"], _setting()] = "auto"
    idle: Annotated[float, _setting("DURATION", parser=duration(max_s=60))] = 0.05
    prepare: Annotated[bool, _setting()] = True
    share: Annotated[str | None, _setting("SHARE")] = None
    listen: Annotated[str | None, _setting("HOST:PORT")] = None
    concurrency: Annotated[int | None, _setting(min=1, max=1000)] = None
    master: Annotated[str | None, _setting("URL")] = None
    conf: Annotated[list[str], _setting("NAME=VALUE")] = field(default_factory=list)
    epoch_length: Annotated[float, _setting("DURATION", parser=duration())] = 60.0
    log_format: Annotated[Literal["auto", "console", "json"], _setting()] = "auto"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _setting()] = "info"

    @property
    def source_urls(self) -> dict[str, str]:
        """URL of each source, by the source's name."""
        return _split(self.sources)

    @property
    def spark_conf(self) -> dict[str, str]:
        """Spark configuration by name."""
        return _split(self.conf)


NAMES = tuple(setting.name for setting in fields(Settings))


def _split(pairs: Iterable[str]) -> dict[str, str]:
    return dict(pair.partition("=")[::2] for pair in pairs)


def make_parameters(names: Sequence[str]) -> list[inspect.Parameter]:
    """Returns the parameters of a function that takes these settings as options."""
    hints = get_type_hints(Settings, include_extras=True)
    defaults = {
        setting.name: [] if setting.default is MISSING else setting.default
        for setting in fields(Settings)
    }
    kind, (_, helps) = inspect.Parameter.KEYWORD_ONLY, read_helps(Settings)
    # the default, not what the environment has in its place: that may be a secret
    for name in names:
        hints[name].__metadata__[0].help = helps.get(name)
        hints[name].__metadata__[0].show_default = (
            False if defaults[name] in (None, []) else str(defaults[name])
        )
    return [
        inspect.Parameter(name, kind, default=defaults[name], annotation=hints[name])
        for name in names
    ]


def read_defaults(directory: Path = Path()) -> dict[str, Any]:
    """Reads the defaults of options from the environment and ``pyproject.toml``.

    Raises ``InvalidSetting``, also if ``[tool.penstock]`` has an unknown name.
    """
    file = directory / "pyproject.toml"
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        configured: dict[str, Any] = tomllib.loads(text).get("tool", {}).get("penstock", {})
        values = configured | _read_environment()
        values["sources"] = [f"{name}={url}" for name, url in _read_sources(configured).items()]
    # no TOML or JSON, or another type
    except (ValueError, OSError, AttributeError, TypeError) as error:
        raise InvalidSetting(
            f"the settings cannot be read: {type(error).__name__} in {file} or in {PREFIX}…"
        ) from None
    options = {
        parameter.name: parameter.annotation.__metadata__[0] for parameter in make_parameters(NAMES)
    }
    for name, value in values.items():
        if name not in options:
            raise InvalidSetting(f"{name}: [tool.penstock] of {file} has no such setting")
        # an empty text would be false
        if isinstance(value, str) and not (value.strip() or options[name].metavar):
            raise InvalidSetting(f"{name}: {_EMPTY}")
        if isinstance(value, dict) or isinstance(value, list) != (name in {"conf", "sources"}):
            raise InvalidSetting(
                f"{name}: the value has another type than the setting, in {file} or in {PREFIX}…"
            )
    return values


def _read_environment() -> dict[str, Any]:
    """Reads the settings from the environment.

    Keeps an empty one, which is an error if it is used.
    """
    values: dict[str, Any] = {
        name: os.environ.get(PREFIX + name.upper()) for name in NAMES if name != "sources"
    }
    if values["conf"] is not None:
        values["conf"] = json.loads(values["conf"]) if values["conf"].strip() else [""]
    return {name: value for name, value in values.items() if value is not None}


def _read_sources(configured: dict[str, Any]) -> dict[str, str]:
    """Reads the sources from environment and file; the environment wins."""
    text, prefix = os.environ.get(f"{PREFIX}SOURCES", "{}"), f"{PREFIX}SOURCES__"
    several = json.loads(text) if text.strip() else {"": ""}
    if isinstance(several, dict) and not all(
        isinstance(url, str)
        for url in (*several.values(), *dict(configured.get("sources", {})).values())
    ):
        raise TypeError
    single = {
        name.removeprefix(prefix).lower(): url
        for name, url in os.environ.items()
        if name.startswith(prefix)
    }
    return dict(configured.get("sources", {})) | several | single
