"""Random places of a log: a seek, and ten records, in a long log and in a short one."""

import random
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from benchmarks.backlogs import Scale
from benchmarks.measuring import Case, Figures, NotMeasured, percentile
from benchmarks.servers import BenchServers
from penstock.batches.columns import Columns
from penstock.batches.entry import FIELDS, Entry
from penstock.channels.log.stream_entries import NAMES
from penstock.channels.routing import log_keys
from penstock.clients import LogReader
from penstock.records import Offset, Shard, ShardName

SHARD = ShardName("bench-seek", Shard(0))
PER_ENTRY = 500
LONG, SHORT = 50, 0.5
"""Records of the long and the short log, in records of a backlog: 5,000,000 and 50,000 at full scale."""

AT_ONCE = 10
SEEKS = 5_000
STAGED_US = 1_800_000_000_000_000
ENTRIES_A_CALL = 2_000

_ADD = """
local fields = {unpack(ARGV, 4)}
for number = ARGV[1] + 1, ARGV[2] do
  if fields[1] == "first" then
    fields[2] = string.format("%.0f", (number - 1) * ARGV[3] + 1)
  end
  redis.call("XADD", KEYS[1], string.format("%.0f-0", number * ARGV[3]), unpack(fields))
end
"""


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


def _fill(client: Any, entries: str, records: int) -> None:
    """Adds entries with the same values, which Redis repeats by itself: only their offsets differ."""
    note = random.randbytes(40).hex()  # noqa: S311  no secret
    row = ("key", "insert", "thing", f'{{"note":"{note}"}}', "")
    values: Sequence[object]
    if entries == "plain":
        per_entry, names, values = 1, NAMES, [1, *row, STAGED_US]
    else:
        columns = Columns.pack([(n, *row[:-2], f'{{"n":{n},{row[3][1:]}', "", STAGED_US) for n in range(PER_ENTRY)])
        per_entry, names = PER_ENTRY, FIELDS
        values = Entry(SHARD, Offset(1), columns).values()
    fields = [each for pair in zip(names, values, strict=True) for each in pair]
    stream = log_keys("penstock", SHARD).stream
    for first in range(0, records // per_entry, ENTRIES_A_CALL):
        last = min(first + ENTRIES_A_CALL, records // per_entry)
        client.eval(_ADD, 1, stream, first, last, per_entry, *fields)


def _measure(servers: BenchServers, entries: str, records: int) -> Figures:
    servers.empty_redis()
    with servers.redis() as client:
        _fill(client, entries, records)
        reader = LogReader(client, SHARD.channel)
        _seek(reader, records)  # not counted: scripts are loaded, connections made
        took = [_seek(reader, records) for _ in range(SEEKS)]
    servers.empty_redis()
    return {"": percentile(took, 0.99) * 1000, "-p50": percentile(took, 0.5) * 1000}


def _seek(reader: LogReader, records: int) -> float:
    at = random.randrange(1, records - AT_ONCE)  # noqa: S311  likewise
    began = perf_counter()
    found = reader.read(0, at, AT_ONCE)
    took = perf_counter() - began
    if found.records.offsets != [*range(at, at + AT_ONCE)]:
        raise NotMeasured(f"offsets {found.records.offsets} in place of {at} and those after it")
    return took
