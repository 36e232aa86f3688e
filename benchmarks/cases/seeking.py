"""Random places of a log: a seek, and ten records, in a long log and in a short one."""

import random
from collections.abc import Iterator
from time import perf_counter

from benchmarks.backlogs import Scale
from benchmarks.measuring import Case, Figures, NotMeasured, percentile
from benchmarks.servers import BenchServers
from penstock.batches import Columns
from penstock.channels.log import Appended, Batch, LogReader, append_ahead, evict
from penstock.records import Epoch, Offset, Shard, ShardName

SHARD = ShardName("bench-seek", Shard(0))
PER_ENTRY = 500
LONG, SHORT = 50, 0.5
"""Records of the long and the short log, in records of a backlog: 5,000,000 and 50,000 at full scale."""

AT_ONCE = 10
SEEKS = 5_000
STAGED_US = 1_800_000_000_000_000


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Both forms of entries, each beside a log of a hundredth of its length."""
    long, short = int(scale.records * LONG), int(scale.records * SHORT)
    return [
        Case(
            name=name,
            unit="ms",
            sentence=f"a seek to a random offset of a log of {long:,} {entries} records, and a read of {AT_ONCE} (p99; -p50)",
            ours=lambda entries=entries: _measure(servers, entries, long),  # type: ignore[misc]  # a loop's value
            limits={
                f"{short:,} records": lambda entries=entries: _measure(servers, entries, short)  # type: ignore[misc]  # likewise
            },
            better="less",
            rounds=scale.few_rounds,
        )
        for name, entries in (("log-seek", "packed"), ("log-seek-plain", "plain"))
    ]


def _make_batches(records: int, entries: str) -> Iterator[Batch]:
    """Batches with the same columns, which is quick; their offsets differ."""
    rows = [
        (
            n,
            f"key-{n}",
            "insert",
            "thing",
            f'{{"note":"{random.randbytes(40).hex()}"}}',  # noqa: S311  no secret
            "",
            STAGED_US,
        )
        for n in range(PER_ENTRY)
    ]
    columns = Columns.pack(rows)
    for first in range(1, records + 1, PER_ENTRY):
        yield Batch(SHARD, Epoch(1), Offset(first), first == 1, columns, plain=entries == "plain")


def _measure(servers: BenchServers, entries: str, records: int) -> Figures:
    servers.empty_redis()
    with servers.redis() as client:
        for _, reply in append_ahead(client, "penstock", _make_batches(records, entries)):
            if not isinstance(reply, Appended):
                raise NotMeasured(f"the log could not be filled: {type(reply).__name__}")
        reader = LogReader(client, SHARD.channel)
        _seek(reader, records)  # not counted: scripts are loaded, connections made
        took = sorted(_seek(reader, records) for _ in range(SEEKS))
        evict(client, "penstock", SHARD, Offset(records + 1))
    return {"": percentile(took, 0.99) * 1000, "-p50": percentile(took, 0.5) * 1000}


def _seek(reader: LogReader, records: int) -> float:
    at = random.randrange(1, records - AT_ONCE)  # noqa: S311  likewise
    began = perf_counter()
    found = reader.read(0, at, AT_ONCE)
    took = perf_counter() - began
    if found.records.offsets != [*range(at, at + AT_ONCE)]:
        raise NotMeasured(f"offsets {found.records.offsets} in place of {at} and those after it")
    return took
