"""What must not make the pipeline slower: a large backlog, records that are kept, a transaction that stays open."""

from contextlib import closing
from datetime import timedelta
from time import perf_counter

from penstock import Log, Pipeline
from penstock.bench.application import BULK, CHANNEL
from penstock.bench.cases.consuming import consumed
from penstock.bench.cases.draining import drained
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.plant import Backlog, Plant, Scale, fill
from penstock.channels.log import extents
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.streaming import Streamer, tick
from penstock.streaming.retention import retain
from penstock.streaming.sequencer import JOURNAL_CHUNK

KEPT = (10_000, 100_000, 1_000_000, 10_000_000)
SLOW = 1_000_000
"""Records kept from which a case is left out by ``--quick``."""

BACKLOGS = (10_000, 100_000, 1_000_000, 10_000_000)
HUGE = 10_000_000
"""Records that wait from which a case is left out unless it is asked for."""

CHURN = 20_000
"""Transactions that commit while the open one stays open: an hour's worth, at five a second."""


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """Each beside a drain of as many records where nothing else is."""
    alone = {"nothing else": lambda: _fresh(plant, Backlog(scale.records))}
    return [
        *(case for waiting in BACKLOGS for case in _large(plant, scale, Backlog(waiting))),
        *(
            Case(
                name=f"drain-kept-{kept}",
                unit="records/s",
                sentence=f"the streamer empties a backlog on top of {kept:,} records that are kept",
                ours=lambda kept=kept: _on_top(plant, Backlog(scale.records), kept),  # type: ignore[misc]  # bound now
                limits=alone,
                slow=kept >= SLOW,
            )
            for kept in KEPT
        ),
        Case(
            name="drain-removed",
            unit="records/s",
            sentence="the same, and then all is removed again: from Postgres, the journal and the log",
            ours=lambda: _removed(plant, Backlog(scale.records)),
            limits=alone,
        ),
        Case(
            name="drain-held",
            unit="records/s",
            sentence=f"the same while a transaction has been open for {CHURN:,} others",
            ours=lambda: _while_open(plant, Backlog(scale.records)),
            limits=alone,
            slow=True,
        ),
    ]


def _large(plant: Plant, scale: Scale, backlog: Backlog) -> list[Case]:
    """The streamer and a consumer with as much to do."""
    found = []
    for who, sentence, run in (
        ("streamer", "the streamer empties", lambda: _fresh(plant, backlog)),
        ("consumer", "a consumer applies, in bulk,", lambda: consumed(plant, backlog, BULK)),
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


def _fresh(plant: Plant, backlog: Backlog) -> Sample:
    return drained(plant, backlog, plant.staged(backlog))


def _on_top(plant: Plant, backlog: Backlog, kept: int) -> Sample:
    """The kept ones are in Postgres and its journal; Redis has evicted them."""

    def fill_kept(connection: Connection) -> None:
        fill(connection, Backlog(kept, backlog.payload_bytes, backlog.shards))
        tick(connection)

    url = plant.database(f"kept_{kept}", fill_kept)
    plant.empty_redis()
    with plant.postgres(url) as connection:
        _evict(plant, url)
        fill(connection, backlog)
    return drained(plant, backlog, url)


def _evict(plant: Plant, database_url: str) -> None:
    """Leaves in Redis what eviction leaves of a log: its last offset."""
    with plant.postgres(database_url) as connection, plant.redis() as client:
        for shard in Backlog(0).shard_names:
            tail = connection.execute(
                "SELECT max(last_offset) FROM penstock.journal WHERE channel = %s AND shard = %s",
                (shard.channel, shard.shard),
            ).fetchone()
            if tail and tail[0]:
                stream = log_keys("penstock", shard).stream
                client.xadd(stream, {"evicted": ""}, id=f"{tail[0]}-0")
                client.xtrim(stream, maxlen=0, approximate=False)


def _removed(plant: Plant, backlog: Backlog) -> Sample:
    """Nobody reads it, and nothing is kept.

    Raises:
        NotMeasured: More is left than the newest journal row of each shard names.
    """
    channel = Log(CHANNEL, shards=backlog.shards, keep=timedelta(0))
    with (
        plant.copied(backlog) as url,
        closing(Streamer(Pipeline([channel]), url, plant.redis_url)) as streamer,
        plant.postgres(url) as connection,
        plant.redis() as client,
    ):
        streamer.open()
        began = perf_counter()
        streamer.drain()
        found = extents(client, "penstock", channel.shard_names)
        retain(connection, client, channel, {shard: each.tail for shard, each in found.items()})
        took = perf_counter() - began
        [(left,)] = connection.execute("SELECT count(*) FROM penstock.staged_records")
    if left > JOURNAL_CHUNK * backlog.shards:
        raise NotMeasured(f"{left} of {backlog.records} records are still there")
    return {"": backlog.records / took}


def _while_open(plant: Plant, backlog: Backlog) -> Sample:
    url = plant.staged(backlog)
    with plant.postgres(url) as holding, plant.postgres(url) as busy:
        holding.execute("BEGIN")
        holding.execute("SELECT pg_current_xact_id()")
        busy.execute("SET synchronous_commit = off")
        for _ in range(CHURN):
            busy.execute("SELECT pg_current_xact_id()")
        return drained(plant, backlog, url)
