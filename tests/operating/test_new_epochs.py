"""A new epoch is on disk before it is used, whatever the server's default is: Redis refuses older ones from then on."""

from collections.abc import Callable

import pytest
import redis

from penstock import Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.journal import check_lineage
from penstock.operating.reset import reset_epoch
from penstock.records import DEFAULT_SCOPE

Open = Callable[[Connection, redis.Redis, Pipeline], object]


def open_by_worker(connection: Connection, client: redis.Redis, flow: Pipeline) -> object:
    return check_lineage(connection, client, DEFAULT_SCOPE, declared=flow.shard_names)


def open_by_operator(connection: Connection, client: redis.Redis, flow: Pipeline) -> object:
    return reset_epoch(connection, client, flow, apply=True)


@pytest.mark.parametrize("open_epoch", [open_by_worker, open_by_operator])
def test_an_epoch_is_durable_before_anything_else_happens(
    connection: Connection,
    database_url: str,
    redis_client: redis.Redis,
    flow: Pipeline,
    open_epoch: Open,
) -> None:
    connection.execute("UPDATE penstock.epochs SET timeline = 77")
    connection.execute("CREATE TABLE public.seen (setting text)")
    connection.execute(
        "CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO public.seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$"
    )
    connection.execute(
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON penstock.epochs "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.see()"
    )
    with connect_postgres(database_url, application="lax") as lax:
        lax.execute("SET synchronous_commit = off")
        open_epoch(lax, redis_client, flow)

    assert connection.execute("SELECT setting FROM public.seen").fetchall() == [("on",)]


@pytest.mark.parametrize(
    ("change", "cluster"),
    [("timeline = 77", "the same"), ("system_identifier = '7'", "another")],
)
def test_the_reason_of_an_epoch_that_a_worker_opens_names_what_has_changed(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, change: str, cluster: str
) -> None:
    connection.execute(f"UPDATE penstock.epochs SET {change}".encode())
    open_by_worker(connection, redis_client, flow)
    rows = connection.execute("SELECT reason FROM penstock.epochs ORDER BY epoch").fetchall()

    assert [f"cluster {cluster};" in reason for (reason,) in rows] == [False, True]
