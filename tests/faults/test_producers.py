"""Many producers at once, in every way that makes the order of ids differ from the order of commits."""

import random
import threading
from collections import Counter
from time import monotonic

import pytest

from fixtures.flow import Site
from penstock.database.connections import connect_postgres
from penstock.streaming import RoundResult

PRODUCERS = 16
INSERT = (
    "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
    "VALUES ('things', %(shard)s, %(key)s, 'update', 'thing', jsonb_build_object('version', %(version)s::int))"
)


def produce(url: str, number: int, until: float, committed: Counter[str]) -> None:
    """Changes random rows, under their locks; some of the transactions are rolled back."""
    dice = random.Random(number)
    with connect_postgres(url, application=f"producer {number}") as connection:
        while monotonic() < until:
            key = f"k{dice.randrange(50)}"
            with connection.transaction(force_rollback=dice.random() < 0.2) as outer:
                rows = connection.execute(
                    "UPDATE public.versions SET version = version + 1 WHERE key = %s RETURNING version", (key,)
                ).fetchall()
                staged = {"shard": int(key[1:]) % 2, "key": key, "version": rows[0][0]}
                connection.execute(INSERT, staged)
                with connection.transaction(force_rollback=True):
                    connection.execute(INSERT, staged | {"key": "savepoint, never committed"})
            if not outer.force_rollback:
                committed[key] += 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seconds", "held_s"),
    [pytest.param(5.0, 2.0, marks=pytest.mark.chaos), pytest.param(30.0, 10.0, marks=pytest.mark.storm)],
)
def test_everything_committed_is_in_the_log_once_in_order_while_a_transaction_is_held_open(
    site: Site, seconds: float, held_s: float
) -> None:
    """Guarantees 2, 8 and 14: sequenced = committed, dense, in order per key; the open transaction delays no other."""
    site.connection.execute(
        "CREATE TABLE public.versions AS SELECT 'k' || i AS key, 0 AS version FROM generate_series(0, 49) AS i"
    )
    counts = [Counter[str]() for _ in range(PRODUCERS)]
    until = monotonic() + seconds
    threads = [
        threading.Thread(target=produce, args=(site.database_url, n, until, counts[n])) for n in range(PRODUCERS)
    ]
    for thread in threads:
        thread.start()
    rounds: list[RoundResult] = []
    with connect_postgres(site.database_url, application="held") as held:
        with held.transaction():
            held.execute(INSERT, {"shard": 0, "key": "held", "version": 1})
            committed_before = sum(counts, Counter[str]()).total()
            began = monotonic()
            site.streamer.run(lambda: monotonic() - began > held_s, rounds.append)
        sequenced_meanwhile = sum(done.sequenced for done in rounds)
    for thread in threads:
        thread.join()
    site.streamer.drain()

    committed = sum(counts, Counter[str]())
    log = site.log()
    records = [record for shard in log.values() for record in shard]
    assert sequenced_meanwhile > committed_before + PRODUCERS
    assert len(records) == committed.total() + 1
    assert Counter(r.key for r in records) == committed + Counter(held=1)
    for shard in log.values():
        assert [record.offset for record in shard] == list(range(1, len(shard) + 1))
    for key, total in committed.items():
        versions = [r.data["version"] for shard in log.values() for r in shard if r.key == key]
        assert versions == list(range(1, total + 1))
