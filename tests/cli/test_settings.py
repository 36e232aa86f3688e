"""A setting takes its value from the first source that has one, and secrets are not shown."""

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fixtures.command_line import CommandLine, load_settings
from penstock.cli.app import COMMANDS, app, load_commands
from penstock.errors import InvalidSetting
from penstock.settings import NAMES, PREFIX, make_parameters

FILE = '[tool.penstock]\napp = "from.file:pipeline"\nidle = 0.3\nconf = ["a=1", "b=2"]\n'


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(FILE)
    return tmp_path


def test_the_option_wins_over_the_environment_the_file_and_the_default(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_IDLE", "0.2")
    monkeypatch.setenv("PENSTOCK_APP", "from.environment:pipeline")

    settings = load_settings("--app", "from.option:pipeline", directory=place)

    assert settings.app == "from.option:pipeline"
    assert settings.idle == 0.2
    assert settings.conf == ["a=1", "b=2"]
    assert settings.engine == "auto"


def test_a_missing_file_is_not_an_error(tmp_path: Path) -> None:
    assert load_settings(directory=tmp_path).app is None


def test_an_empty_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset secret is one: taken as unset, it would start embedded servers, or read another schema."""
    for name in (*NAMES, "sources__eu"):
        for value in ("", " "):
            with monkeypatch.context() as patch:
                patch.setenv(f"PENSTOCK_{name.upper()}", value)

                with pytest.raises((InvalidSetting, typer.BadParameter), match="empty") as refused:
                    load_settings(directory=tmp_path)
                assert getattr(refused.value, "exit_code", None) == 2
                of = getattr(refused.value, "param", None)
                assert name.partition("__")[0] in (of.name if of else str(refused.value))


def test_an_empty_value_is_refused_wherever_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.penstock]\nredis_url = ""\nconf = [""]\n')

    for given in ((), ("--redis-url", "redis://h", "--sources", "eu="), ("--redis-url", "")):
        with pytest.raises(typer.BadParameter) as refused:
            load_settings(*given, directory=tmp_path)
        assert "empty" in refused.value.message

    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "")  # a source that is not asked
    options = ("--redis-url", "redis://h", "--database-url", "postgresql://h/d", "--conf", "a=1")
    assert load_settings(*options, directory=tmp_path).redis_url is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [("idle", "soon"), ("idle", "0"), ("idle", "2m"), ("engine", "steam"), ("concurrency", "0"), ("log_level", "loud")],
)
def test_an_invalid_value_is_refused_with_the_settings_name(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        load_settings(f"--{name.replace('_', '-')}", value, directory=tmp_path)
    assert refused.value.param is not None
    assert refused.value.param.name == name


def test_a_misspelt_setting_in_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.penstock]\nidel = 3\n")

    with pytest.raises(InvalidSetting, match="idel"):
        load_settings(directory=tmp_path)


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.penstock")

    with pytest.raises(InvalidSetting, match="pyproject"):
        load_settings(directory=tmp_path)


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.penstock]\ndatabase_url = "postgresql://u:hunter2@h/d"\nredis_url = ["hunter2"]\n'
    )
    with pytest.raises(InvalidSetting) as refused:
        load_settings(directory=tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.penstock]\ndatabase_url = "postgresql://u:hunter2@h/d"\n')
    settings = load_settings("--redis-url", "redis://:hunter2@h", directory=tmp_path)

    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(settings)
    assert settings.redis_url == "redis://:hunter2@h"


def test_every_setting_is_described() -> None:
    sentences = {p.name: p.annotation.__metadata__[0].help for p in make_parameters(NAMES)}
    assert [name for name, sentence in sentences.items() if not sentence.endswith(".")] == []


def test_every_option_and_argument_of_a_command_is_described() -> None:
    """Its help may be in ``Args`` of a docstring, where nothing else notices a name that no parameter has."""
    commands = load_commands().values()
    leaves = [leaf for each in commands for leaf in getattr(each, "commands", {"": each}).values()]
    assert [f"{leaf.name} {p.name}" for leaf in leaves for p in leaf.params if not getattr(p, "help", None)] == []


def test_a_command_whose_extra_is_missing_says_what_to_install(penstock: CommandLine) -> None:
    """Those that need Spark do so in ``test_without_spark.py``.  Nothing may be imported: a program of its own."""
    (penstock.directory / "sitecustomize.py").write_text("import sys\nsys.modules['httpx'] = None")
    paths = [str(penstock.directory), penstock.environment.get("PYTHONPATH", "")]
    penstock.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = penstock.start_installed("demo")
    _, stderr = process.communicate(timeout=250)

    assert process.returncode == 2, stderr
    assert "needs httpx: pip install 'penstock-outbox[demo]'" in stderr


def test_help_shows_no_value_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee 33: neither does an argument in a wrong place appear in the error."""
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:hunter2@h")
    monkeypatch.setenv("PENSTOCK_SOURCES__EU", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("PENSTOCK_CONF", '["spark.secret=hunter2"]')
    monkeypatch.setenv("PENSTOCK_MASTER", "spark://hunter2")
    for entry in COMMANDS:
        shown = CliRunner().invoke(app, [entry.name, "--help"])
        assert (shown.exit_code, "hunter2" in shown.output) == (0, False), entry.name
    for words in (["status", "postgresql://u:hunter2@h/d"], ["postgresql://u:hunter2@h/d"]):
        refused = CliRunner().invoke(app, words)
        assert (refused.exit_code, "hunter2" in refused.output) == (2, False)


def test_help_is_there_although_a_setting_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENGINE", "")

    assert CliRunner().invoke(app, ["status", "--help"]).exit_code == 0
    assert CliRunner().invoke(app, ["status"]).exit_code == 2


def test_sources_of_options_join_those_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_SOURCES", '{"eu": "postgresql://eu", "us": "postgresql://old"}')
    settings = load_settings("--sources", "us=postgresql://us", directory=tmp_path)

    assert settings.source_urls == {"eu": "postgresql://eu", "us": "postgresql://us"}


def test_a_source_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_SOURCES", '{"eu": null}')
    with pytest.raises(InvalidSetting):
        load_settings(directory=tmp_path)
