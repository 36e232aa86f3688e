"""A server that is away for a moment ends no query."""

import threading
from collections.abc import Callable

import pytest

from fixtures.constants import SetConstants
from fixtures.proxy import Proxy, behind
from penstock.errors import InvalidSetting, ServerUnavailable
from penstock.spark.releases import ReadAllAvailable
from penstock.spark.sources.record_readers import StreamReader
from penstock.spark.sources.record_store import JournalStore, LogStore
from penstock.spark.sources.source_options import Options

RETRIES = {"fetchOffset.numRetries": "50", "fetchOffset.retryIntervalMs": "20"}


def make_options(where: dict[str, str], **given: str) -> Options:
    options = where | RETRIES | {"startingOffsets": "earliest"} | given
    return Options.parse("penstock.log", options, streaming=True)


def away(proxy: Proxy, seconds: float = 0.2) -> None:
    proxy.refuse()
    threading.Timer(seconds, proxy.heal).start()


@pytest.mark.parametrize("make_store", [LogStore, JournalStore])
def test_a_query_reads_on_when_its_server_is_back(
    where: dict[str, str],
    redis_proxy: Proxy,
    postgres_proxy: Proxy,
    make_store: Callable[[Options], LogStore | JournalStore],
    set_constants: SetConstants,
) -> None:
    set_constants("spark.sources.record_store", ENTRIES_A_READ=1, RECORDS_A_QUERY=10)
    proxy = redis_proxy if make_store is LogStore else postgres_proxy
    urls = {
        "redisUrl": behind(redis_proxy, where["redisUrl"]),
        "databaseUrl": behind(postgres_proxy, where["databaseUrl"]),
        "shards": "2",
    }
    reader = StreamReader(make_store(make_options(where | urls)))

    away(proxy)
    begin = reader.initialOffset()
    away(proxy)
    end = reader.latestOffset(begin, ReadAllAvailable())
    away(proxy)
    tasks = reader.partitions(begin, end)
    read: list[int] = []
    for task in tasks:
        for batch in reader.read(task):
            if not read:
                away(proxy)
            read += batch.column("id").to_pylist()

    assert sorted(read) == list(range(1, 101))


def test_an_outage_that_lasts_ends_the_query(where: dict[str, str]) -> None:
    options = make_options(where, redisUrl="redis://127.0.0.1:1/0", **{"fetchOffset.numRetries": "2"})

    with pytest.raises(ServerUnavailable):
        StreamReader(LogStore(options)).initialOffset()
    with pytest.raises(InvalidSetting, match=r"fetchOffset.numRetries is '-1'"):
        make_options(where, **{"fetchOffset.numRetries": "-1"})
