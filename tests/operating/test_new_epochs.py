"""A new epoch is on disk before it is used, whatever the server's default is: Redis refuses older ones from then on."""

from collections.abc import Callable

import pytest
import redis

from fixtures.flow import stage_rows
from fixtures.roles import UrlFor
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection, connect_postgres
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.errors import HistoryDiverged, SchemaMissing
from penstock.journal.lineage import check_lineage
from penstock.operating.reset.epoch import reset_epoch
from penstock.schema.role_plan import make_roles
from penstock.streaming import tick

Open = Callable[[Connection, redis.Redis, Pipeline], object]


def open_by_worker(connection: Connection, client: redis.Redis, flow: Pipeline) -> object:
    return check_lineage(Store(connection), client, declared=flow.shard_names)


def open_by_operator(connection: Connection, client: redis.Redis, flow: Pipeline) -> object:
    return reset_epoch(connection, client, flow, apply=True)


@pytest.mark.parametrize("open_epoch", [open_by_worker, open_by_operator])
def test_an_epoch_is_durable_before_anything_else_happens(
    connection: Connection, database_url: str, redis_client: redis.Redis, flow: Pipeline, open_epoch: Open
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


@pytest.mark.parametrize(("change", "cluster"), [("timeline = 77", "the same"), ("system_identifier = '7'", "another")])
def test_an_epoch_that_a_worker_opens_names_what_has_changed_and_has_the_next_tick(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, change: str, cluster: str
) -> None:
    connection.execute(f"UPDATE penstock.epochs SET {change}".encode())
    assert open_by_worker(connection, redis_client, flow) == 2
    rows = connection.execute("SELECT reason FROM penstock.epochs ORDER BY epoch").fetchall()

    assert tick(Store(connection)).epoch == 2
    assert [f"cluster {cluster};" in reason for (reason,) in rows] == [False, True]


@pytest.mark.parametrize("table", ["epochs", "ticks"])
def test_a_schema_without_an_epoch_or_a_tick_names_init(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, table: str
) -> None:
    connection.execute(f"TRUNCATE penstock.{table} CASCADE".encode())

    with pytest.raises(SchemaMissing, match=r"has no epoch or no tick.*penstock init"):
        open_by_worker(connection, redis_client, flow)


def test_one_shard_that_was_written_in_a_later_epoch_is_enough(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, things: Log
) -> None:
    """Postgres has lost the epoch: a streamer that went on would fence itself off, shard by shard."""
    for shard, epoch in zip(things.shard_names, (1, 5), strict=True):
        redis_client.set(log_keys("penstock", shard).epoch, epoch)

    with pytest.raises(HistoryDiverged, match="epoch 5"):
        open_by_worker(connection, redis_client, flow)
    register_channel(Store(connection), things)
    assert reset_epoch(connection, redis_client, flow).new_epoch == 6


def test_a_record_of_the_very_next_transaction_is_another_clusters(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, things: Log
) -> None:
    """This cluster will give that id out, and would sequence the record then, perhaps twice."""
    stage_rows(connection, things, 1)
    connection.execute("UPDATE penstock.epochs SET system_identifier = '7'")
    connection.execute("UPDATE penstock.staged_records SET xid = (pg_current_xact_id()::text::bigint + 1)::text::xid8")

    with pytest.raises(HistoryDiverged, match="another cluster"):
        open_by_worker(connection, redis_client, flow)


SET_LAST_TICK = """
UPDATE penstock.ticks
SET snapshot = format('%%1$s:%%1$s:', pg_current_xact_id()::text::bigint + %s)::pg_snapshot
"""


def test_transaction_ids_went_back_only_if_the_next_is_lower_than_that_of_the_last_tick(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline
) -> None:
    connection.execute(SET_LAST_TICK, [1])
    open_by_worker(connection, redis_client, flow)

    connection.execute(SET_LAST_TICK, [2])
    with pytest.raises(HistoryDiverged, match="another cluster"):
        open_by_worker(connection, redis_client, flow)


def test_a_copy_without_its_sequences_is_refused_until_a_reset(
    connection: Connection, redis_client: redis.Redis, flow: Pipeline, things: Log
) -> None:
    """As logical replication makes it: an id would name two records."""
    stage_rows(connection, things, 3)
    connection.execute("UPDATE penstock.epochs SET system_identifier = '7'")
    connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN id RESTART WITH 1")

    with pytest.raises(HistoryDiverged, match="without its sequences"):
        open_by_worker(connection, redis_client, flow)

    open_by_operator(connection, redis_client, flow)
    open_by_worker(connection, redis_client, flow)
    stage_rows(connection, things, 3)


def test_another_cluster_whose_sequences_a_role_may_not_see_is_not_taken_for_proved(
    redis_client: redis.Redis, flow: Pipeline, connection: Connection, database_url_for: UrlFor
) -> None:
    """The roles of ``penstock init --roles`` see them, and go on as after ``pg_upgrade``; others get the grant."""
    sequence = "SELECT ON SEQUENCE penstock.staged_records_id_seq"
    url = database_url_for("a_streamer")
    connection.execute("UPDATE penstock.epochs SET system_identifier = '7'")
    connection.execute(f"REVOKE {sequence} FROM penstock_streamer".encode())

    with connect_postgres(url, application="test") as streamer:
        with pytest.raises(HistoryDiverged, match=f"cannot see.*GRANT {sequence}"):
            open_by_worker(streamer, redis_client, flow)
        make_roles(connection, "penstock", "penstock")
        assert open_by_worker(streamer, redis_client, flow) == 2
