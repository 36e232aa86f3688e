"""``penstock init``: creates or upgrades the tables and the roles, or prints the SQL for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from penstock.channels.acl import SAVE, acl_lines, save_users
from penstock.channels.server import connect_redis
from penstock.cli.command import NOTHING_CHANGED, Apply, command, find_pipeline
from penstock.cli.connecting import servers
from penstock.cli.render import say, show_text
from penstock.database.connections import connect_postgres
from penstock.errors import InvalidSetting
from penstock.pipeline import Pipeline, get_scope
from penstock.records import Scope
from penstock.schema.capture import install_triggers, make_triggers
from penstock.schema.initialise import initialise, migration_sql, reporting_waits
from penstock.schema.revisions import newest_shipped
from penstock.schema.role_plan import make_roles, plan_roles, roles_sql
from penstock.settings import Settings


@command()
def init(
    settings: Settings,
    sql: Annotated[bool, typer.Option("--sql")] = False,
    schema: str | None = None,
    roles: Annotated[bool, typer.Option("--roles")] = False,
    acl: Literal["setuser", "file", "save"] | None = None,
    role_prefix: str | None = None,
    apply: Apply = False,
) -> None:
    """Create or upgrade Penstock's tables and the declared triggers. With --roles, show or create
    Penstock's roles.

    Args:
        sql: Only print the SQL.
        schema: Schema of the tables; by default the schema of the pipeline, or penstock.
        roles: Show the missing roles in Postgres (owner, producer, streamer, consumer, viewer,
            monitor) instead of creating tables.
        acl: With --roles. setuser: print redis-cli commands that create the users of Redis. file:
            print lines of an ACL file. save: make the server keep its users over a restart.
        role_prefix: Prefix of the roles' names; by default the schema's name.
        apply: With --roles: create the roles.
    """
    if not roles and (acl is not None or role_prefix is not None or apply):
        raise InvalidSetting(
            "--acl, --role-prefix and --apply belong to --roles: penstock init --roles"
        )
    if acl is not None and (sql or apply):
        raise InvalidSetting(
            "--acl is about the users of Redis and nothing else; leave out --sql and --apply"
        )
    if acl == "save":
        _save_users(settings)
        return
    pipeline = find_pipeline(settings)
    scope = get_scope(pipeline)
    scope = scope if schema is None else Scope(schema, scope.namespace)
    if acl is not None:
        show_text("\n".join(acl_lines(scope.namespace, role_prefix or scope.schema, acl)))
        if acl == "setuser":
            say(
                "Redis keeps these users in memory. Set passwords, log in as the administrator, "
                "then: "
                f"{SAVE}"
            )
    elif not roles:
        _init_tables(settings, scope.schema, pipeline, sql=sql)
    elif sql:
        show_text(roles_sql(scope.schema, role_prefix or scope.schema))
    else:
        _init_roles(settings, scope.schema, role_prefix or scope.schema, apply=apply)


def _init_tables(settings: Settings, schema: str, pipeline: Pipeline | None, *, sql: bool) -> None:
    if pipeline is not None and pipeline.scope.schema != schema:
        say(f"triggers are left out: the pipeline's are for schema {pipeline.scope.schema}")
        pipeline = None
    if sql:
        show_text(migration_sql(schema))
        _show_triggers(pipeline)
        return
    with _find_postgres(settings, schema) as url:
        old, new = initialise(url, schema), newest_shipped()
        if old == new:
            say(f"schema {schema} is at {new} already")
        else:
            say(f"schema {schema}: {old or 'new'} → {new}")
        for table in install_triggers(url, pipeline) if pipeline is not None else ():
            say(f"table {table}: trigger installed")


@contextmanager
def _find_postgres(settings: Settings, schema: str) -> Iterator[str]:
    """Yields the URL of the only server that is needed, or of an embedded one."""
    if settings.database_url is None:
        with servers(settings, schema=schema) as urls:
            yield urls.database_url
    else:
        with reporting_waits(settings.database_url, say):
            yield settings.database_url


def _show_triggers(pipeline: Pipeline | None) -> None:
    for trigger in make_triggers(pipeline) if pipeline is not None else ():
        show_text(f"-- Captures changes of {trigger.rule.model.__name__}\n\nBEGIN;\n")
        for statement in trigger.statements:
            show_text(f"{statement};\n")
        show_text("COMMIT;\n")


def _save_users(settings: Settings) -> None:
    if settings.redis_url is None:
        raise InvalidSetting(
            "--acl save needs the Redis whose users are to be saved: --redis-url, with a user that "
            "may administer it"
        )
    with connect_redis(settings.redis_url) as client:
        for path in save_users(client):
            say(f"the users of Redis are in {path}")


def _init_roles(settings: Settings, schema: str, prefix: str, *, apply: bool) -> None:
    carry_out = make_roles if apply else plan_roles
    with (
        _find_postgres(settings, schema) as url,
        connect_postgres(url, application="init") as connection,
    ):
        plan = carry_out(connection, schema, prefix)
    for statement in plan.statements:
        show_text(f"{statement};")
    for note in plan.notes:
        say(note)
    if not plan.statements:
        say(f"the roles {prefix}_… of schema {schema} have what they need, and no more")
    elif apply:
        say(f"Done. Next, let your logins in: GRANT {prefix}_streamer TO …")
    else:
        say(NOTHING_CHANGED)
