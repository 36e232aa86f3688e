"""Every setting, defined once: its name, default, unit and description.

A setting is taken from the first of these that has it:

    1. the option of the command          --database-url …
    2. its environment variable           PENSTOCK_DATABASE_URL=…
    3. ``[tool.penstock]`` in the ``pyproject.toml`` of the working directory
    4. its default

An empty value is not a missing one but an error: a secret that is not set must not choose other servers.

The options, the environment variables and the documentation page are generated from the class below; pydantic-settings
reads and validates the values.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
)
from typing_extensions import override

from penstock.errors import InvalidSetting

TABLE = ("tool", "penstock")
"""The table of the settings in ``pyproject.toml``."""

PREFIX = "PENSTOCK_"
"""Prefix of their environment variables."""


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A text whose ``repr`` is masked: URLs contain passwords."""

    value: str

    def __repr__(self) -> str:
        return "Secret('**********')"


def _setting(sentence: str, *, unit: str = "", **limits: float) -> dict[str, Any]:
    return {"sentence": sentence, "unit": unit, "limits": limits}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a command."""

    app: str | None = field(
        default=None,
        metadata=_setting("The application's pipeline, as module:attribute; imported from the working directory, too."),
    )
    database_url: Secret | None = field(
        default=None,
        metadata=_setting(
            "The primary Postgres: postgresql://user:password@host/database. With neither this nor redis_url, "
            "a command at a terminal, or with data_directory, uses an embedded Postgres and Valkey."
        ),
    )
    redis_url: Secret | None = field(
        default=None,
        metadata=_setting(
            "The Redis or Valkey that holds the log: redis://, redis+cluster:// or redis+sentinel://, with TLS rediss…, or unix://."
        ),
    )
    sources: dict[str, Secret] = field(
        default_factory=dict,
        metadata=_setting(
            "For consumers that read a log from several sources: the Postgres of each, by the source's name. In the environment "
            "PENSTOCK_SOURCES__EU=postgresql://… sets that of one."
        ),
    )
    data_directory: Path | None = field(
        default=None,
        metadata=_setting(
            "Directory of the embedded servers, which are used if no URLs are given: without this setting .penstock, "
            "in which only a command at a terminal, or the demo, starts them."
        ),
    )
    engine: Literal["auto", "spark", "inline", "stealing"] = field(
        default="auto",
        metadata=_setting(
            "Execution engine: Spark, or a single Python process without a JVM; in the demo also stealing, where requests "
            "do the work. With auto, run takes Spark if it is "
            "installed; verify, reconcile and consume take it only for DataFrames, Parquet, or with --master or --conf."
        ),
    )
    idle: float = field(
        default=0.05, metadata=_setting("Longest pause after a round that found no records.", unit="s", gt=0, le=60)
    )
    prepare: bool = field(
        default=True, metadata=_setting("Whether to use prepared statements. Behind a pooler none are used.")
    )
    share: str | None = field(
        default=None,
        metadata=_setting(
            "The share of the shards that this streamer publishes beside others, such as 1/2 and 2/2; the first also sequences. "
            "By default it does everything."
        ),
    )
    concurrency: int | None = field(
        default=None,
        metadata=_setting(
            "Jobs that each worker of a queue does at the same time; by default as the worker declares it.",
            ge=1,
            le=1000,
        ),
    )
    master: str | None = field(
        default=None, metadata=_setting("Spark's master URL; by default local, with as many threads as needed.")
    )
    conf: list[str] = field(default_factory=list, metadata=_setting("Spark configuration, each as name=value."))
    epoch_seconds: float = field(
        default=60.0,
        metadata=_setting("How long a Spark task runs before it reports and is scheduled again.", unit="s", gt=0),
    )
    log_format: Literal["auto", "console", "json"] = field(
        default="auto",
        metadata=_setting("Format of the log on stderr; auto is console on a terminal, JSON lines otherwise."),
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata=_setting("Lowest level that is logged; with debug, an error shows its traceback.")
    )


@dataclass(frozen=True, slots=True)
class SettingDescription:
    """A setting, for options and documentation.

    Attributes:
        name: Its name in Python and in ``pyproject.toml``.
        option: Its name on the command line.
        variable: Its name in the environment.
        type: The type of its values, without None.
        optional: Whether it may be None.
        default: Its default.
        unit: The unit of a number; empty if there is none.
        sentence: What it is.
    """

    name: str
    option: str
    variable: str
    type: Any
    optional: bool
    default: object
    unit: str
    sentence: str

    @property
    def values(self) -> str:
        """The type of its values, in words."""
        if get_origin(self.type) is Literal:
            return ", ".join(str(value) for value in get_args(self.type))
        if self.type == dict[str, Secret]:
            return "a URL for each name; in the environment a JSON object"
        if self.type == list[str]:
            return "several texts; in the environment a JSON list"
        words = {Secret: "URL", Path: "path", bool: "true, false", float: "number", int: "number", str: "text"}
        return words[self.type]

    @property
    def shown_default(self) -> str:
        """The default, with its unit, in words."""
        if self.default is None or self.default in ([], {}):
            return "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default} {self.unit}".strip()


def describe_settings() -> dict[str, SettingDescription]:
    """All settings by name, in declaration order."""
    hints = get_type_hints(Settings)
    descriptions = {}
    for each in fields(Settings):
        hint = hints[each.name]
        # `X | None` is an optional X.
        optional = get_origin(hint) in (Union, types.UnionType)
        descriptions[each.name] = SettingDescription(
            each.name,
            "--" + each.name.replace("_", "-"),
            PREFIX + each.name.upper(),
            next(arm for arm in get_args(hint) if arm is not type(None)) if optional else hint,
            optional,
            each.default if each.default_factory is MISSING else each.default_factory(),
            each.metadata["unit"],
            each.metadata["sentence"],
        )
    return descriptions


def load_settings(chosen: Mapping[str, object], *, directory: Path | None = None) -> Settings:
    """Loads the settings from all four sources.

    Args:
        chosen: Options of the command; None if not given.
        directory: The directory of ``pyproject.toml``; None is the working directory.

    Raises:
        InvalidSetting: A value is invalid, or ``[tool.penstock]`` has an unknown name.
    """
    given = {name: _parse_option(name, value) for name, value in chosen.items() if value is not None and value != []}
    pyproject = (directory or Path()) / "pyproject.toml"
    try:
        loaded = _model(pyproject)(**given)
    except pydantic.ValidationError as error:
        # Without the values: they may be secrets.
        problems = [
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_input=False, include_url=False, include_context=False)
        ]
        raise InvalidSetting(
            "; ".join(problems) + f". Settings come from options, {PREFIX}… and [tool.penstock] of {pyproject}"
        ) from None
    except (ValueError, OSError) as error:  # pyproject.toml is not TOML, or a variable is not JSON
        raise InvalidSetting(
            f"the settings cannot be read: {type(error).__name__} in {pyproject} or in {PREFIX}…"
        ) from None
    return Settings(**{name: _convert(getattr(loaded, name)) for name in describe_settings()})


def _parse_option(name: str, value: object) -> object:
    """The value of an option: several NAME=URL become one mapping."""
    if describe_settings()[name].type == dict[str, Secret] and isinstance(value, list):
        return dict(pair.partition("=")[::2] for pair in value)
    return value


def _convert(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _convert(each) for name, each in value.items()}
    reveal = getattr(value, "get_secret_value", None)
    return Secret(reveal()) if reveal is not None else value


class _Environment(EnvSettingsSource):
    """The environment's variables; an empty one that should be JSON is kept, for the message of all empty values."""

    @override
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        return super().decode_complex_value(field_name, field, value) if value.strip() else value


def _refuse_empty(value: Any) -> Any:
    parts = value.values() if isinstance(value, dict) else value
    for text in parts if isinstance(value, dict | list) else [value]:
        if isinstance(text, str) and not text.strip():
            raise PydanticCustomError("empty", "the value is empty, as that of an unset secret; give one, or remove it")
    return value


def _model(pyproject: Path) -> Any:
    """``Settings`` as a pydantic-settings model, with the order of its sources."""

    class Sources(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=PREFIX,
            env_nested_delimiter="__",
            pyproject_toml_table_header=TABLE,
            extra="forbid",
            hide_input_in_errors=True,
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del env_settings, dotenv_settings, file_secret_settings
            file = PyprojectTomlConfigSettingsSource(settings_cls, pyproject)
            return init_settings, _Environment(settings_cls), file

        _filled = pydantic.field_validator("*", mode="before")(_refuse_empty)

    parts: dict[str, Any] = {}
    limits = {each.name: each.metadata["limits"] for each in fields(Settings)}
    for name, setting in describe_settings().items():
        kinds = {Secret: pydantic.SecretStr, dict[str, Secret]: dict[str, pydantic.SecretStr]}
        kind = kinds.get(setting.type, setting.type)
        parts[name] = (kind | None if setting.optional else kind, pydantic.Field(setting.default, **limits[name]))
    return pydantic.create_model("PenstockSettings", __base__=Sources, **parts)
