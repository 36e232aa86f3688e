"""What must not slow the pipeline down: a large backlog, records that are kept, a transaction that stays open."""

from contextlib import closing
from datetime import timedelta
from functools import partial
from time import perf_counter

from benchmarks.application import BULK, CHANNEL
from benchmarks.backlogs import Backlog, Scale, fill
from benchmarks.cases.consuming import measure_consumer
from benchmarks.cases.draining import measure_drain
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.servers import BenchServers
from penstock import Log, Pipeline
from penstock.channels.log.streams import extents
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.streaming import Streamer, tick
from penstock.streaming.retention import retain
from penstock.streaming.sequencer import JOURNAL_CHUNK

KEPT = (10_000, 100_000, 1_000_000, 10_000_000)
SLOW = 1_000_000
"""Number of records, kept or in a backlog, from which ``--quick`` leaves a case out."""

BACKLOGS = (10_000, 100_000, 1_000_000, 10_000_000)
HUGE = 10_000_000
"""Number of records in a backlog from which a case is measured only on request."""

CHURN = 20_000
"""Transactions that commit while one stays open: an hour's worth at five per second."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Large backlogs; drains with kept records, with removal, and with an open transaction."""
    alone = {"nothing else": lambda: _drain_alone(servers, Backlog(scale.records))}
    return [
        *(case for waiting in BACKLOGS for case in _make_large_cases(servers, scale, Backlog(waiting))),
        *(
            Case(
                name=f"drain-kept-{kept}",
                unit="records/s",
                sentence=f"the streamer empties a backlog on top of {kept:,} records that are kept",
                ours=partial(_drain_on_top, servers, Backlog(scale.records), kept),
                limits=alone,
                slow=kept >= SLOW,
            )
            for kept in KEPT
        ),
        Case(
            name="drain-removed",
            unit="records/s",
            sentence="the same, and then everything is removed again from Postgres, the journal and the log",
            ours=lambda: _drain_and_remove(servers, Backlog(scale.records)),
            limits=alone,
        ),
        Case(
            name="drain-held",
            unit="records/s",
            sentence=f"the same while a transaction has been open for {CHURN:,} others",
            ours=lambda: _drain_while_open(servers, Backlog(scale.records)),
            limits=alone,
            slow=True,
        ),
    ]


def _make_large_cases(servers: BenchServers, scale: Scale, backlog: Backlog) -> list[Case]:
    """The streamer, and a consumer, with a backlog of this size."""
    found = []
    for who, sentence, run in (
        ("streamer", "the streamer empties", lambda: _drain_alone(servers, backlog)),
        ("consumer", "a consumer applies, in bulk,", lambda: measure_consumer(servers, backlog, BULK)),
    ):
        found.append(
            Case(
                name=f"backlog-{who}-{backlog.records}",
                unit="records/s",
                sentence=f"{sentence} a backlog of {backlog.records:,}",
                ours=run,
                slow=backlog.records >= SLOW,
                on_request=backlog.records >= HUGE,
                rounds=scale.few_rounds,
            )
        )
    return found


def _drain_alone(servers: BenchServers, backlog: Backlog) -> Figures:
    return measure_drain(servers, backlog, servers.stage(backlog))


def _drain_on_top(servers: BenchServers, backlog: Backlog, kept: int) -> Figures:
    """The kept records are in Postgres and its journal; Redis has evicted them."""

    def fill_kept(connection: Connection) -> None:
        fill(connection, Backlog(kept, backlog.payload_bytes, backlog.shards))
        tick(Store(connection))

    url = servers.database(f"kept_{kept}", fill_kept)
    servers.empty_redis()
    with servers.postgres(url) as connection:
        _evict(servers, url)
        fill(connection, backlog)
    return measure_drain(servers, backlog, url)


def _evict(servers: BenchServers, database_url: str) -> None:
    """Puts into Redis what eviction leaves of a log: its last offset."""
    with servers.postgres(database_url) as connection, servers.redis() as client:
        for shard in Backlog(0).shard_names:
            tail = connection.execute(
                "SELECT max(last_offset) FROM penstock.journal WHERE channel = %s AND shard = %s",
                (shard.channel, shard.shard),
            ).fetchone()
            if tail and tail[0]:
                stream = log_keys("penstock", shard).stream
                client.xadd(stream, {"evicted": ""}, id=f"{tail[0]}-0")
                client.xtrim(stream, maxlen=0, approximate=False)


def _drain_and_remove(servers: BenchServers, backlog: Backlog) -> Figures:
    """There is no consumer, and nothing is kept.

    Raises:
        NotMeasured: More records are left than the newest journal row of each shard covers.
    """
    channel = Log(CHANNEL, shards=backlog.shards, keep=timedelta(0))
    with (
        servers.copy(backlog) as url,
        closing(Streamer(Pipeline([channel]), url, servers.redis_url)) as streamer,
        servers.postgres(url) as connection,
        servers.redis() as client,
    ):
        streamer.open()
        began = perf_counter()
        streamer.drain()
        found = extents(client, "penstock", channel.shard_names)
        retain(Store(connection), client, channel, {shard: each.tail for shard, each in found.items()})
        took = perf_counter() - began
        [(left,)] = connection.execute("SELECT count(*) FROM penstock.staged_records")
    if left > JOURNAL_CHUNK * backlog.shards:
        raise NotMeasured(f"{left} of {backlog.records} records are still there")
    return {"": backlog.records / took}


def _drain_while_open(servers: BenchServers, backlog: Backlog) -> Figures:
    url = servers.stage(backlog)
    with servers.postgres(url) as holding, servers.postgres(url) as busy:
        holding.execute("BEGIN")
        holding.execute("SELECT pg_current_xact_id()")
        busy.execute("SET synchronous_commit = off")
        for _ in range(CHURN):
            busy.execute("SELECT pg_current_xact_id()")
        return measure_drain(servers, backlog, url)
