"""The settings, what migrating does to tables and triggers, and the URL of a database."""

import io
import os
import sys
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

import penstock.django
from django_app.conftest import ACCOUNTS
from django_app.test_checks import find_model
from penstock import Pipeline
from penstock.database.connections import Connection
from penstock.django import DjangoPipeline
from penstock.errors import DeclarationError, TriggerMissing


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({}, "which pipeline"),
        ({"PIPELINE": "accounts_events:plain"}, "accounts_events:plain is a Pipeline: declare it as a"),
        ({"PIPELINE": "accounts_events:lite"}, "using='lite' is not a Postgres"),
        ({"PIPELINE": "accounts_events:nowhere"}, "using='nowhere' is not a Postgres"),
    ],
)
def test_a_setting_that_names_no_pipeline_of_django_is_an_error(
    setting: dict[str, str], message: str, pipeline: DjangoPipeline
) -> None:
    from django.test import override_settings  # noqa: PLC0415  after the settings

    from penstock.django.apps import check_pipeline, get_pipeline  # noqa: PLC0415  the same

    module: Any = sys.modules["accounts_events"]
    module.plain, module.lite, module.nowhere = (
        Pipeline(),
        DjangoPipeline(using="lite"),
        DjangoPipeline(using="nowhere"),
    )
    assert penstock.django.pipeline is get_pipeline() is pipeline
    assert not hasattr(penstock.django, "pipelines")
    with override_settings(PENSTOCK=setting):
        with pytest.raises(DeclarationError, match=message):
            get_pipeline()
        assert [each.id for each in check_pipeline()] == ["penstock.E001"]


LOGIN = {"USER": "a@b:c", "PASSWORD": "p/w%", "HOST": "/tmp/x y", "PORT": "7"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LOGIN, {"user": "a@b:c", "password": "p/w%", "host": "/tmp/x y", "port": "7", "dbname": "d?b"}),
        ({**LOGIN, "PASSWORD": ""}, {"user": "a@b:c", "host": "/tmp/x y", "port": "7", "dbname": "d?b"}),
        ({**LOGIN, "USER": ""}, {"password": "p/w%", "host": "/tmp/x y", "port": "7", "dbname": "d?b"}),
        (dict.fromkeys(LOGIN, ""), {"dbname": "d?b"}),
        (
            {
                **dict.fromkeys(LOGIN, ""),
                "OPTIONS": {"sslmode": "require", "isolation_level": 2, "application_name": "a&b"},
            },
            {"dbname": "d?b", "sslmode": "require", "application_name": "a&b"},
        ),
    ],
)
def test_the_url_of_a_database_has_what_django_connects_with(
    settings: dict[str, Any], expected: dict[str, str], db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.django.apps import get_database_url  # noqa: PLC0415  after the settings

    for name, value in {"NAME": "d?b", "OPTIONS": {}, **settings}.items():
        monkeypatch.setitem(db.connections["default"].settings_dict, name, value)

    url = get_database_url("default")

    assert psycopg.conninfo.conninfo_to_dict(url) == expected
    assert not url.endswith("?")


def migrate(using: str = "default", *, plan: Any = (), verbosity: int = 1) -> str:
    """What is printed when migrations have been run."""
    from penstock.django.apps import upgrade_after_migrate  # noqa: PLC0415  after the settings

    out = io.StringIO()
    upgrade_after_migrate(using=using, verbosity=verbosity, plan=plan, stdout=out)
    return out.getvalue()


def plan(label: str, *, backwards: bool) -> list[tuple[Any, bool]]:
    return [(SimpleNamespace(app_label=label), backwards)]


def test_triggers_are_installed_when_their_tables_are_there(
    db: Any, pipeline: DjangoPipeline, connection: Connection
) -> None:
    """Guarantee 7."""
    triggers = "SELECT tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1"
    pipeline.stages(find_model("Tag"), to=ACCOUNTS, key="id")
    with db.connection.schema_editor() as editor:
        editor.create_model(find_model("Tag"))
    quiet = [migrate(plan=None), migrate(plan=plan("penstock", backwards=True)), migrate("second"), migrate("lite")]
    assert quiet == [""] * 4
    assert connection.execute(triggers).fetchall() == []

    assert migrate(plan=plan("accounts", backwards=True)) == "  Penstock's trigger: accounts_tag"
    assert {table for (table,) in connection.execute(triggers)} == {"accounts_tag"}
    assert migrate(plan=plan("penstock", backwards=False)) == "", "it is there already"

    pipeline.stages(find_model("Membership"), to=ACCOUNTS, key="id")
    missing = migrate()
    assert "accounts_membership" in missing
    assert migrate(verbosity=0) == ""
    connection.execute("CREATE TABLE accounts_membership (id int)")
    with pytest.raises(TriggerMissing, match="accounts_membership"):
        migrate()


def test_tables_are_made_and_dropped_in_the_pipelines_database_alone(
    db: Any, pipeline: DjangoPipeline, connection: Connection
) -> None:
    from penstock.django.apps import create_tables, drop_tables  # noqa: PLC0415  after the settings

    def count() -> tuple[bool, int]:
        [(table,)] = connection.execute("SELECT to_regclass('penstock.staged_records')::text").fetchall()
        functions = "SELECT FROM pg_proc WHERE proname LIKE '%accounts_tag%' OR prosrc LIKE '%accounts_tag%'"
        return table is not None, connection.execute(functions).rowcount

    pipeline.stages(find_model("Tag"), to=ACCOUNTS, key="id")
    with db.connection.schema_editor() as editor:
        editor.create_model(find_model("Tag"))
    migrate()
    with_trigger = count()
    drop_tables("second")
    assert count() == with_trigger
    assert with_trigger[1] > 0
    find_model("Tag").objects.create()
    with pytest.raises(Exception, match="still hold records"):
        drop_tables("default")
    assert count() == with_trigger
    connection.execute("DELETE FROM penstock.staged_records")
    drop_tables("default")
    assert count() == (False, 0)
    create_tables("second")
    assert count() == (False, 0)
    create_tables("default")
    assert count() == (True, 0)


@pytest.mark.usefixtures("db")
def test_the_app_takes_part_in_checks_connections_and_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.apps import apps  # noqa: PLC0415  after the settings
    from django.core.checks.registry import registry  # noqa: PLC0415  the same
    from django.db.backends.signals import connection_created  # noqa: PLC0415  the same
    from django.db.models.signals import post_migrate  # noqa: PLC0415  the same

    from penstock.django.apps import allow_flush, check_pipeline, upgrade_after_migrate  # noqa: PLC0415  the same

    monkeypatch.setattr(registry, "registered_checks", set())
    for signal in (connection_created, post_migrate):
        monkeypatch.setattr(signal, "receivers", [])
    apps.get_app_config("penstock").ready()

    assert registry.registered_checks == {check_pipeline}
    listening = [signal.receivers[0][1]() for signal in (connection_created, post_migrate)]
    assert listening == [allow_flush, upgrade_after_migrate]


def test_flush_empties_tables_that_are_captured_by_trigger(db: Any, pipeline: DjangoPipeline) -> None:
    """As every TransactionTestCase ends."""
    from penstock.django.apps import allow_flush  # noqa: PLC0415  after the settings

    pipeline.stages(find_model("Tag"), to=ACCOUNTS, key="id")
    with db.connection.schema_editor() as editor:
        editor.create_model(find_model("Tag"))
    migrate()
    tags = find_model("Tag").objects
    tags.create()
    with pytest.raises(db.DatabaseError), db.connection.cursor() as cursor:
        cursor.execute("TRUNCATE accounts_tag")
    for _ in range(2):  # each connection that Django opens
        allow_flush(db.connection)
        allow_flush(db.connections["lite"])
    db.connection.ops.execute_sql_flush(["TRUNCATE accounts_tag"])

    assert tags.count() == 0
    assert "execute_sql_flush" not in vars(db.connections["lite"].ops)


def test_the_migration_makes_the_tables_and_takes_them_back(
    db: Any, pipeline: DjangoPipeline, connection: Connection
) -> None:
    from django.db.migrations.executor import MigrationExecutor  # noqa: PLC0415  after the settings

    def has_tables() -> bool:
        [(table,)] = connection.execute("SELECT to_regclass('penstock.staged_records')").fetchall()
        return table is not None

    shown = [has_tables()]
    for target in ("0001_initial", None, "0001_initial"):
        MigrationExecutor(db.connection).migrate([("penstock", target)])
        shown.append(has_tables())
    assert shown == [True, True, False, True]


@pytest.mark.parametrize(
    ("arguments", "variables", "shown"),
    [
        (["status"], {}, {"APP": "penstock.django:pipeline", "DATABASE_URL": "ours", "REDIS_URL": "redis://project"}),
        (["status"], {"REDIS_URL": "redis://own"}, {"APP": "penstock.django:pipeline", "DATABASE_URL": "ours", "REDIS_URL": "redis://own"}),
        (["status", "--help"], {}, {}),
    ],
)  # fmt: skip
def test_a_command_has_the_settings_of_the_project_while_it_runs(
    arguments: list[str],
    variables: dict[str, str],
    shown: dict[str, str],
    pipeline: DjangoPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from django.conf import settings  # noqa: PLC0415  after the settings

    from penstock.django.apps import get_database_url  # noqa: PLC0415  the same
    from penstock.django.management.commands.penstock import Command  # noqa: PLC0415  the same

    assert pipeline.using == "default"
    settings.PENSTOCK["REDIS_URL"] = "redis://project"
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    calls: list[Any] = []

    def app(words: list[str], prog_name: str) -> None:
        calls.append((words, prog_name, {n: v for n, v in os.environ.items() if n.startswith("PENSTOCK_")}))

    monkeypatch.setattr("penstock.cli.app.app", app)
    expected = {name: get_database_url("default") if value == "ours" else value for name, value in shown.items()}
    before = dict(os.environ)

    Command().run_from_argv(["manage.py", "penstock", *arguments])
    Command().handle(arguments=arguments)

    assert calls == [(arguments, "manage.py penstock", {f"PENSTOCK_{n}": v for n, v in expected.items()})] * 2
    assert os.environ == before
    Command().print_help("manage.py", "penstock")
    assert calls[-1][0] == ["--help"]


@pytest.mark.parametrize(("ended", "code"), [(0, None), (None, None), (3, 3), ("it failed", 1)])
def test_a_command_that_fails_is_an_error_with_its_exit_code(
    ended: object, code: int | None, pipeline: DjangoPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.core.management import CommandError  # noqa: PLC0415  after the settings

    from penstock.django.management.commands.penstock import Command  # noqa: PLC0415  the same

    def app(*_: object, **__: object) -> None:
        raise SystemExit(ended)

    assert pipeline.using == "default"
    monkeypatch.setattr("penstock.cli.app.app", app)
    if code is None:
        Command().handle(arguments=["status"])
        return
    with pytest.raises(CommandError, match="penstock status failed") as failed:
        Command().handle(arguments=["status", "--json"])
    assert failed.value.returncode == code


def test_without_a_pipeline_no_command_is_run(
    pipeline: DjangoPipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from django.test import override_settings  # noqa: PLC0415  after the settings

    from penstock.django.management.commands.penstock import Command  # noqa: PLC0415  the same

    assert pipeline.using == "default"
    monkeypatch.setattr("penstock.cli.app.app", None)
    with override_settings(PENSTOCK={}), pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "penstock", "status"])
    assert ended.value.code == DeclarationError.exit_code
    assert capsys.readouterr().err.splitlines()[1:] == ["docs: errors#declarationerror"]
