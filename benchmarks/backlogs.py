"""How much is measured, and the backlogs of staged rows that most cases start from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.application import AROUND_A_NOTE, CHANNEL, Form, get_pipeline
from benchmarks.measuring import Contestant, Figures
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.pipeline import Pipeline
from penstock.records import ShardName
from penstock.streaming import Streamer

ROWS_A_TRANSACTION = 1000
ACCOUNTS = 1000
FEW_ROUNDS = 3


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        records: Records of a backlog with payloads of 200 bytes; fewer where payloads are larger.
        seconds: Duration of a load at a given rate.
        rounds: How often each contestant is measured.
    """

    records: int
    seconds: float
    rounds: int

    @property
    def few_rounds(self) -> int:
        """Rounds of a case that takes minutes."""
        return min(self.rounds, FEW_ROUNDS)

    @property
    def large_backlog(self) -> "Backlog":
        """A backlog for contestants that take seconds to reach their speed."""
        return Backlog(self.records * 10)


QUICK = Scale(records=10_000, seconds=1.0, rounds=1)
FULL = Scale(records=100_000, seconds=10.0, rounds=5)


@dataclass(frozen=True)
class Backlog:
    """Staged rows that wait to be streamed.

    Attributes:
        records: Number of rows.
        payload_bytes: Bytes of JSON in each.
        shards: Number of shards of the channel.
        form: How the log keeps them.
        in_words: Whether most of a payload is English words rather than letters that hardly compress.
        observed: Whether the work has metrics and probes.
    """

    records: int
    payload_bytes: int = 200
    shards: int = 4
    form: Form = "packed"
    in_words: bool = False
    observed: bool = False

    def kept_as(self, form: Form) -> "Backlog":
        """The same rows, for a log of another form."""
        return replace(self, form=form)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that the rows are staged for."""
        return get_pipeline(self.shards, self.form, observed=self.observed)

    @property
    def shard_names(self) -> Sequence[ShardName]:
        """The shards of the channel."""
        return self.pipeline.channels[CHANNEL].shard_names

    @property
    def streams(self) -> list[str]:
        """The Redis streams that the rows are published to."""
        return [log_keys(self.pipeline.scope.namespace, shard).stream for shard in self.shard_names]

    @property
    def database(self) -> str:
        """Name of the database that holds the rows."""
        kind = "_words" if self.in_words else ""
        return f"backlog_{self.records}_{self.payload_bytes}_{self.shards}{kind}"


VARIANTS: dict[str, Form] = {"plain entries": "plain", "zstd": "zstd"}
"""The other forms, by the names of the variants of a case."""

OBSERVED = "metrics"


def make_variants(measure: Callable[[Backlog], Figures], backlog: Backlog, *names: str) -> dict[str, Contestant]:
    """Variants of a case that measures a backlog: the same rows in a log of another form; all forms if none is named."""
    return {name: partial(measure, backlog.kept_as(VARIANTS[name])) for name in names or VARIANTS}


def make_observed(measure: Callable[[Backlog], Figures], backlog: Backlog) -> dict[str, Contestant]:
    """The variant with metrics and probes."""
    return {OBSERVED: partial(measure, replace(backlog, observed=True))}


NOTHING = Backlog(0)
"""A fresh start: a database in which nothing was ever staged, and an empty Redis."""

# Hard to compress, as payloads of ids, prices and names are.
_LETTERS = """
    left((SELECT string_agg(encode(sha256((n * 1000 + part)::text::bytea), 'base64'), '')
          FROM generate_series(1, 1 + %(note)s / 44) part), %(note)s)
"""

_WORDS = """
    left((SELECT string_agg(
              (ARRAY['accepted', 'account', 'after', 'amount', 'balance', 'before', 'booked', 'branch', 'card', 'charged',
                     'checked', 'city', 'closed', 'confirmed', 'counter', 'country', 'customer', 'declined', 'deposit',
                     'driver', 'fee', 'invoice', 'limit', 'open', 'order', 'paid', 'pending', 'refund', 'reserved',
                     'street', 'transfer', 'withdrawn'])[1 + get_byte(sha256((n * 1000 + part)::text::bytea), 0) %% 32],
              ' ')
          FROM generate_series(1, 1 + %(note)s / 4) part), %(note)s)
"""

_FILL = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT %(channel)s,
       ('x' || substr(encode(sha256((n %% %(accounts)s)::text::bytea), 'hex'), 1, 8))::bit(32)::bigint %% %(shards)s,
       (n %% %(accounts)s)::text, 'insert', 'movement',
       jsonb_build_object('id', n, 'account', n %% %(accounts)s, 'cents', n %% 977, 'note',
{note})
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n
"""


def fill(connection: Connection, backlog: Backlog) -> None:
    """Stages the backlog, in addition to the rows that are there."""
    register_channel(Store(connection, backlog.pipeline.scope), backlog.pipeline.channels[CHANNEL])
    connection.execute("SET synchronous_commit = off")
    query = _FILL.format(note=_WORDS if backlog.in_words else _LETTERS).encode()
    note = max(0, backlog.payload_bytes - AROUND_A_NOTE)
    for first in range(1, backlog.records + 1, ROWS_A_TRANSACTION):
        connection.execute(
            query,
            {
                "channel": CHANNEL,
                "shards": backlog.shards,
                "accounts": ACCOUNTS,
                "note": note,
                "first": first,
                "last": min(first + ROWS_A_TRANSACTION - 1, backlog.records),
            },
        )
    connection.execute("VACUUM ANALYZE penstock.staged_records")
    connection.execute("CHECKPOINT")


def drain(backlog: Backlog, database_url: str, redis_url: str) -> int:
    """Sequences and publishes the whole backlog; returns the number of records."""
    streamer = Streamer(backlog.pipeline, database_url, redis_url)
    try:
        return streamer.drain()
    finally:
        streamer.close()


def unsequence(connection: Connection) -> None:
    """Makes every staged record new again, as if nothing had ever been sequenced."""
    connection.execute(
        "TRUNCATE penstock.journal, penstock.checkpoints, penstock.dead_letters, penstock.channels, penstock.ticks, bench.movements"
    )
    connection.execute("INSERT INTO penstock.ticks (tick, snapshot, epoch) VALUES (0, '1:1:', 1)")
