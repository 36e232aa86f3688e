"""Producers: transactions with a change and its records, at a given rate or as fast as they can."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection as Pipe
from time import monotonic, sleep

from sqlalchemy.orm import sessionmaker

from benchmarks.application import CHANNEL, NOTE, Movement, get_pipeline
from benchmarks.backlogs import ACCOUNTS
from benchmarks.connections import connect
from benchmarks.watching.processes import start_process
from penstock.database.connections import Connection, make_engine

_STAGE = """
WITH change AS (
    INSERT INTO bench.movements
    SELECT id, account, id %% 977, %(note)s
    FROM unnest(%(ids)s::bigint[], %(accounts)s::bigint[]) AS r (id, account)
)
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT %(channel)s, r.shard, r.account::text, 'insert', 'movement',
       jsonb_build_object('id', r.id, 'account', r.account, 'cents', r.id %% 977, 'note', %(note)s::text)
FROM unnest(%(ids)s::bigint[], %(accounts)s::bigint[], %(shards)s::int[]) AS r (id, account, shard)
"""


@dataclass(frozen=True)
class ProducerLoad:
    """What a producer writes.

    Attributes:
        rate: Records per second.
        at_once: Records per transaction.
        seconds: Duration.
        in_sessions: Whether it is an application with SQLAlchemy's sessions, whose hooks stage records and nudge the streamer,
            rather than one that writes all in one statement of its own.
    """

    rate: int
    at_once: int
    seconds: float
    in_sessions: bool = False


@dataclass(frozen=True)
class Produced:
    """What was produced.

    Attributes:
        began: When the transaction of each record began, by the machine's monotonic clock.
        rate: Records per second that the producer reached.
    """

    began: dict[int, float]
    rate: float


def produce(database_url: str, load: ProducerLoad, shards: int) -> Produced:
    """Commits transactions at even intervals; after a late one, the next follow at once until the schedule is met."""
    connected = _commit_in_sessions if load.in_sessions else _commit_by_statement
    with connected(database_url, shards) as commit:
        return _produce(commit, load)


def _produce(commit: Callable[[range], None], load: ProducerLoad) -> Produced:
    began: dict[int, float] = {}
    start = monotonic()
    transactions = max(1, int(load.rate * load.seconds) // load.at_once)
    for number in range(transactions):
        due = start + number * load.at_once / load.rate
        if (left := due - monotonic()) > 0:
            sleep(left)
        ids = range(number * load.at_once, (number + 1) * load.at_once)
        now = monotonic()
        began.update(dict.fromkeys(ids, now))
        commit(ids)
    took = max(monotonic() - start, load.at_once / load.rate * transactions)
    return Produced(began, len(began) / took)


@contextmanager
def _commit_by_statement(database_url: str, shards: int) -> Iterator[Callable[[range], None]]:
    shard_for = _map_shards(shards)
    with connect(database_url) as connection:
        yield lambda ids: _commit(connection, ids, shard_for)


@contextmanager
def _commit_in_sessions(database_url: str, shards: int) -> Iterator[Callable[[range], None]]:
    engine = make_engine(database_url, application="bench")
    sessions = sessionmaker(engine)
    get_pipeline(shards).attach(sessions)

    def commit(ids: range) -> None:
        with sessions.begin() as session:
            session.add_all(Movement(id=n, account=n % ACCOUNTS, cents=n % 977, note=NOTE) for n in ids)

    try:
        yield commit
    finally:
        engine.dispose()


def produce_freely(database_url: str, producers: int, at_once: int, seconds: float, shards: int) -> tuple[int, float]:
    """Commits transactions of ``at_once`` records as fast as possible, from several processes.

    Returns the number of records and the seconds that they took.
    """
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                start_process(*(_produce_freely, database_url, number, producers, at_once, seconds, shards))
            )
            for number in range(producers)
        ]
        began = monotonic()
        for each in started:
            each.pipe.send("go")
        committed = sum(each.pipe.recv() for each in started)
        return committed, monotonic() - began


def _produce_freely(  # noqa: PLR0913, PLR0917  the arguments of a process
    pipe: Pipe, database_url: str, number: int, producers: int, at_once: int, seconds: float, shards: int
) -> None:
    shard_for = _map_shards(shards)
    committed = 0
    with connect(database_url) as connection:
        pipe.send("ready")
        pipe.recv()
        until = monotonic() + seconds
        for first in count(number * at_once, producers * at_once):
            if monotonic() >= until:
                break
            _commit(connection, range(first, first + at_once), shard_for)
            committed += at_once
    pipe.send(committed)


def _map_shards(shards: int) -> dict[int, int]:
    """The shard of each account."""
    channel = get_pipeline(shards).channels[CHANNEL]
    return {account: channel.shard_for(str(account)) for account in range(ACCOUNTS)}


def _commit(connection: Connection, ids: range, shard_for: Mapping[int, int]) -> None:
    accounts = [n % ACCOUNTS for n in ids]
    connection.execute(
        _STAGE,
        {
            "channel": CHANNEL,
            "note": NOTE,
            "ids": list(ids),
            "accounts": accounts,
            "shards": [shard_for[account] for account in accounts],
        },
        prepare=True,
    )
