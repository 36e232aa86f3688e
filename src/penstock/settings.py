"""Every setting once: its name, default, unit and sentence.

A setting is taken from the first of these that has it:

    1. the option of the command          --database-url …
    2. its twin in the environment        PENSTOCK_DATABASE_URL=…
    3. ``[tool.penstock]`` in the ``pyproject.toml`` of the working directory
    4. its default

The options, the twins and the page of the documentation are made from the class below.  What reads and checks the
values, pydantic-settings, is imported when they are asked for, so that ``penstock --help`` is quick.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.errors import InvalidSetting

TABLE = ("tool", "penstock")
"""Where the settings stand in ``pyproject.toml``."""

PREFIX = "PENSTOCK_"
"""How their twins in the environment begin."""


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A text that is not shown: URLs hold passwords."""

    value: str

    def __repr__(self) -> str:
        return "Secret('**********')"


def _is(sentence: str, *, unit: str = "", **limits: float) -> dict[str, Any]:
    return {"sentence": sentence, "unit": unit, "limits": limits}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What commands are told."""

    app: str | None = field(
        default=None,
        metadata=_is(
            "The application's pipeline, as module:attribute; found from the working directory."
        ),
    )
    database_url: Secret | None = field(
        default=None,
        metadata=_is(
            "The primary Postgres: postgresql://user:password@host/database. With neither this nor redis_url, "
            "a Postgres and a Valkey of our own run in data_directory."
        ),
    )
    redis_url: Secret | None = field(
        default=None,
        metadata=_is(
            "The Redis or Valkey that holds the log: redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://."
        ),
    )
    data_directory: Path = field(
        default=Path(".penstock"),
        metadata=_is("Where the servers of our own keep their data, if no URLs are given."),
    )
    engine: Literal["spark", "inline"] = field(
        default="spark",
        metadata=_is("Who turns the wheel: Spark, or one Python process without a JVM."),
    )
    idle: float = field(
        default=0.05,
        metadata=_is("Longest pause between two looks that found nothing.", unit="s", gt=0, le=60),
    )
    prepare: bool = field(
        default=True,
        metadata=_is(
            "Whether statements are prepared; not so behind a pooler that cannot keep them."
        ),
    )
    resend_chance: float = field(
        default=0.0,
        metadata=_is(
            "How often, from 0 to 1, the streamer sends its last records once more, and consumers read theirs once more: to show that it is harmless.",
            ge=0,
            le=1,
        ),
    )
    master: str | None = field(
        default=None,
        metadata=_is(
            "Spark's master; by default this machine, with as many threads as are needed."
        ),
    )
    conf: list[str] = field(
        default_factory=list, metadata=_is("Spark's own settings, each as name=value.")
    )
    epoch_seconds: float = field(
        default=60.0,
        metadata=_is(
            "How long a task of Spark works before it reports and is placed anew.", unit="s", gt=0
        ),
    )
    log_format: Literal["auto", "console", "json"] = field(
        default="auto",
        metadata=_is(
            "How the log is written to stderr; auto is console on a terminal, and else JSON lines."
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info",
        metadata=_is("The least that is logged; with debug, an error shows where it came from."),
    )


@dataclass(frozen=True, slots=True)
class Described:
    """A setting, for options and for the documentation.

    Attributes:
        name: In Python and in ``pyproject.toml``.
        option: On the command line.
        variable: In the environment.
        type: What it takes, without None.
        optional: Whether it may be left without a value.
        default: Its default.
        unit: Of a number; empty if it has none.
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
        """What it takes, in words."""
        if get_origin(self.type) is Literal:
            return ", ".join(str(value) for value in get_args(self.type))
        if self.type == list[str]:
            return "texts; in the environment a JSON list"
        words = {
            Secret: "URL",
            Path: "path",
            bool: "true, false",
            float: "number",
            int: "number",
            str: "text",
        }
        return words[self.type]

    @property
    def shown_default(self) -> str:
        """The default, with its unit, in words."""
        if self.default is None or self.default == []:
            return "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default} {self.unit}".strip()


def described() -> dict[str, Described]:
    """All settings by name, in the order of their declaration."""
    hints = get_type_hints(Settings)
    found = {}
    for each in fields(Settings):
        hint = hints[each.name]
        # `X | None` is an optional X.
        optional = get_origin(hint) in (Union, types.UnionType)
        found[each.name] = Described(
            each.name,
            "--" + each.name.replace("_", "-"),
            PREFIX + each.name.upper(),
            next(arm for arm in get_args(hint) if arm is not type(None)) if optional else hint,
            optional,
            each.default if each.default_factory is MISSING else each.default_factory(),
            each.metadata["unit"],
            each.metadata["sentence"],
        )
    return found


def load_settings(chosen: Mapping[str, object], *, directory: Path | None = None) -> Settings:
    """The settings, from all four places.

    Args:
        chosen: Options of the command; None is what was not given.
        directory: Where ``pyproject.toml`` is looked for; None is the working directory.

    Raises:
        InvalidSetting: A value is not acceptable, or ``[tool.penstock]`` has a name that is no setting.
    """
    import pydantic  # noqa: PLC0415  not for `--help`

    given = {name: value for name, value in chosen.items() if value is not None and value != []}
    pyproject = (directory or Path()) / "pyproject.toml"
    try:
        loaded = _model(pyproject)(**given)
    except pydantic.ValidationError as error:
        # The values are left out: they may be secrets.
        problems = [
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(
                include_input=False, include_url=False, include_context=False
            )
        ]
        raise InvalidSetting(
            "; ".join(problems)
            + f". Settings come from options, {PREFIX}… and [tool.penstock] of {pyproject}"
        ) from None
    except ValueError as error:  # pyproject.toml is no TOML, or a variable is no JSON
        raise InvalidSetting(
            f"the settings cannot be read: {type(error).__name__} in {pyproject} or in {PREFIX}…"
        ) from None
    return Settings(**{name: _revealed(getattr(loaded, name)) for name in described()})


def _revealed(value: Any) -> Any:
    reveal = getattr(value, "get_secret_value", None)
    return Secret(reveal()) if reveal is not None else value


def _model(pyproject: Path) -> Any:
    """The class above as pydantic-settings knows it, with the order of its sources."""
    from pydantic import Field, SecretStr, create_model  # noqa: PLC0415  the same
    from pydantic_settings import (  # noqa: PLC0415  the same
        BaseSettings,
        PydanticBaseSettingsSource,
        PyprojectTomlConfigSettingsSource,
        SettingsConfigDict,
    )

    class Sources(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=PREFIX,
            env_ignore_empty=True,
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
            del dotenv_settings, file_secret_settings
            file = PyprojectTomlConfigSettingsSource(settings_cls, pyproject)
            return init_settings, env_settings, file

    parts: dict[str, Any] = {}
    limits = {each.name: each.metadata["limits"] for each in fields(Settings)}
    for name, setting in described().items():
        kind = SecretStr if setting.type is Secret else setting.type
        parts[name] = (
            kind | None if setting.optional else kind,
            Field(setting.default, **limits[name]),
        )
    return create_model("PenstockSettings", __base__=Sources, **parts)
