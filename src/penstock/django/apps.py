"""The app ``penstock.django``.

What ``manage.py migrate`` and ``check`` do, and the setting that names the pipeline.

    PENSTOCK = {"PIPELINE": "shop.events:pipeline", "REDIS_URL": "redis://localhost"}

Migrating brings Penstock's tables to this release's revision, and installs the triggers of the
rules when all models have their tables: at the end, whichever migrations there were, so that
squashed migrations and databases of tests have them too.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.db import connections, router
from django.db.backends.signals import connection_created
from django.db.models import ManyToManyRel
from django.db.models.signals import post_migrate

from penstock.django.django_pipeline import DjangoPipeline
from penstock.errors import DeclarationError, PenstockError, TriggerMissing
from penstock.pipeline import load_pipeline
from penstock.staging.triggers import ALLOW_TRUNCATE


class PenstockConfig(AppConfig):
    """Penstock in a Django project."""

    name = "penstock.django"
    label = "penstock"
    verbose_name = "Penstock"

    def ready(self) -> None:
        """Connects the signals."""
        checks.register(check_pipeline)
        connection_created.connect(allow_flush, dispatch_uid="penstock.flush")
        post_migrate.connect(upgrade_after_migrate, sender=self)


def get_pipeline() -> DjangoPipeline:
    """Returns the pipeline that the setting ``PENSTOCK`` names.

    Raises:
        DeclarationError: The setting names none, or its database is not Postgres.
    """
    path = get_setting("PIPELINE")
    if not path:
        raise DeclarationError(
            'which pipeline? Name it in the settings: PENSTOCK = {"PIPELINE": '
            '"shop.events:pipeline"}'
        )
    pipeline = load_pipeline(path)
    if not isinstance(pipeline, DjangoPipeline):
        raise DeclarationError(
            f"{path} is a {type(pipeline).__name__}: declare it as a penstock.django.DjangoPipeline"
        )
    if pipeline.using not in connections or connections[pipeline.using].vendor != "postgresql":
        raise DeclarationError(f"{path}: using={pipeline.using!r} is not a Postgres in DATABASES")
    return pipeline


def get_setting(name: str) -> Any:
    """Returns a value of the setting ``PENSTOCK``; None without it."""
    return getattr(settings, "PENSTOCK", {}).get(name)


def get_database_url(using: str) -> str:
    """Returns the URL of a database in ``DATABASES`` for Penstock's own connections.

    In tests, of the test database.
    """
    from psycopg.pq import Conninfo  # noqa: PLC0415  the driver is not needed to declare

    options = {option.keyword.decode() for option in Conninfo.get_defaults()} - {"client_encoding"}
    parameters = {
        name: value
        for name, value in connections[using].get_connection_params().items()
        if name in options
    }
    user, password, path = (
        quote(str(parameters.pop(name, "")), safe="") for name in ("user", "password", "dbname")
    )
    login = f"{user}:{password}@" if password else f"{user}@" if user else ""
    return f"postgresql://{login}/{path}?{urlencode(parameters, quote_via=quote)}".rstrip("?")


def check_pipeline(**_: object) -> list[checks.CheckMessage]:
    """Checks for ``manage.py check`` that the pipeline imports, and its rules see their changes."""
    try:
        pipeline = get_pipeline()
    except PenstockError as error:
        return [checks.Error(str(error), id="penstock.E001")]
    return [*_find_elsewhere(pipeline), *_find_unstaged(pipeline)]


def _find_elsewhere(pipeline: DjangoPipeline) -> Iterator[checks.CheckMessage]:
    """Finds models that are written to another database.

    A trigger and Penstock's tables are in one.
    """
    for model in pipeline.models:
        alias = router.db_for_write(model)
        if alias != pipeline.using:
            yield checks.Error(
                f"{model.__name__} is written to the database {alias!r}, and its staging rule is "
                f"of a pipeline with using={pipeline.using!r}: nothing would be staged",
                hint=f"Declare the rule in a DjangoPipeline(…, using={alias!r}).",
                obj=model,
                id="penstock.E002",
            )


def _find_unstaged(pipeline: DjangoPipeline) -> Iterator[checks.CheckMessage]:
    """Finds many-to-many fields of models with rules: their rows are in another table."""
    staged = {model._meta.db_table for model in pipeline.models}  # noqa: SLF001  public by its documentation
    fields: dict[str, tuple[type[Any], str]] = {}
    for model in pipeline.models:
        for field in model._meta.get_fields():  # noqa: SLF001  the same
            if field.many_to_many:
                forward: Any = field.field if isinstance(field, ManyToManyRel) else field
                table = forward.remote_field.through._meta.db_table  # noqa: SLF001  the same
                fields.setdefault(f"{forward.model.__name__}.{forward.name}", (model, table))
    for name, (model, table) in fields.items():
        if table not in staged:
            yield checks.Warning(
                f"{name} is kept in the table {table}: adding to it or removing from it changes "
                f"no row of {model.__name__}, and nothing is staged",
                hint=f"Declare a rule for {name}.through; or add penstock.W001 to "
                "SILENCED_SYSTEM_CHECKS.",
                obj=model,
                id="penstock.W001",
            )


def create_tables(using: str) -> None:
    """Creates or upgrades Penstock's tables, if this is the pipeline's database."""
    from penstock.schema.initialise import initialise  # noqa: PLC0415  alembic

    pipeline = get_pipeline()
    if using == pipeline.using:
        initialise(get_database_url(using), pipeline.scope.schema)


def drop_tables(using: str) -> None:
    """Drops the rules' triggers and Penstock's tables; refused while these hold records."""
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  the driver
    from penstock.schema.capture import make_triggers  # noqa: PLC0415  the same
    from penstock.schema.initialise import initialise  # noqa: PLC0415  alembic

    pipeline = get_pipeline()
    if using != pipeline.using:
        return
    url = get_database_url(using)
    initialise(url, pipeline.scope.schema, revision="base")
    with connect_postgres(url, application="init") as connection, connection.transaction():
        for trigger in make_triggers(pipeline):
            connection.execute(f"DROP FUNCTION IF EXISTS {trigger.function}() CASCADE".encode())


def upgrade_after_migrate(
    using: str, verbosity: int, plan: Any = None, stdout: Any = None, **_: object
) -> None:
    """Brings tables and triggers up to date, unless Penstock's were just removed.

    ``flush`` has no plan.
    """
    if plan is None or any(
        backwards for migration, backwards in plan if migration.app_label == "penstock"
    ):
        return
    from penstock.schema.capture import install_triggers, make_triggers  # noqa: PLC0415  the driver

    pipeline = get_pipeline()
    if using != pipeline.using:
        return
    create_tables(using)
    with connections[
        using
    ].cursor() as cursor:  # with a schema a tenant, that which is being migrated
        cursor.execute("SHOW search_path")
        [search_path] = cursor.fetchone()
    try:
        installed = install_triggers(get_database_url(using), pipeline, search_path)
    except TriggerMissing as error:
        tables = connections[using].introspection.table_names()
        if all(trigger.table in tables for trigger in make_triggers(pipeline)):
            raise
        # Some apps are not migrated yet.  No worker starts without its triggers.
        installed = [str(error)]
    for line in installed if stdout is not None and verbosity else ():
        stdout.write(f"  Penstock's trigger: {line}")


def allow_flush(connection: Any, **_: object) -> None:
    """Has ``flush``, the end of every TransactionTestCase, empty tables captured by trigger."""
    if connection.vendor != "postgresql" or "execute_sql_flush" in vars(connection.ops):
        return
    flush = connection.ops.execute_sql_flush
    connection.ops.execute_sql_flush = lambda statements: flush([ALLOW_TRUNCATE, *statements])
