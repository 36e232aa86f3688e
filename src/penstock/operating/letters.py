"""Lists, drops and retries dead letters; workers retry them by ``consuming.letter_retry``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

import structlog

from penstock.consuming.handler import WorkerSetup
from penstock.consuming.letter_retry import (
    DeadLetterRow,
    LetterTrial,
    Retried,
    letter_key,
    letter_keys,
    make_record,
)
from penstock.consuming.transaction import HandlerTransaction
from penstock.database.connections import Database, connect_postgres, get_database_url
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec, WorkerSpec
from penstock.declaring.kinds import LogChannel
from penstock.errors import DeclarationError, ServerUnavailable, Unknown
from penstock.pipeline import Pipeline
from penstock.records import Place, Record
from penstock.schema.roles import check_privileges

log = structlog.get_logger("penstock.operator")

LOCK_TIMEOUT_S = 60.0
"""Seconds that a retry waits until no worker holds the shard."""


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """A choice of dead letters; None leaves an attribute open.

    Attributes:
        consumer: Name of the consumer.
        channel: Only letters of this channel.
        key: Only letters of this key.
        error: Only letters with this error class.
        since: Only letters that failed at this time or later: ISO 8601, or 2h for two hours ago.
        until: Only letters that failed before this time.
        retriable: Only letters of whose key no later record was applied.
    """

    consumer: str | None = None
    channel: str | None = None
    key: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    retriable: bool = False


class LetterPosition(NamedTuple):
    """The end of a page of the newest dead letters; that letter may be gone."""

    failed_at: datetime
    consumer: str
    channel: str
    shard: int
    offset: int


def newest(
    store: Store,
    letter_filter: LetterFilter = LetterFilter(),
    *,
    after: DeadLetterRow | LetterPosition | None = None,
    limit: int = 50,
) -> list[DeadLetterRow]:
    """Returns a page of dead letters, newest first; ``after`` is the last of the page before."""
    names = ("failed_at", "consumer", "channel", "shard", "offset")
    time, *position = (getattr(after, name) for name in names) if after else (None, "", "", 0, 0)
    begin = dict(zip((f"after_{name}" for name in names[1:]), position, strict=True))
    return _read(
        store,
        "dead_letters",
        {**asdict(letter_filter), "after_time": time, **begin, "limit": limit},
    )


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Dead letters of a consumer with the same class of error."""

    consumer: str
    channel: str
    error: str  # the class
    letters: int  # how many
    first_at: datetime  # time of the first failure
    last_at: datetime  # time of the last


MAX_GROUPED = 100_000
"""Dead letters that ``group`` counts at most: the newest."""


def group(
    store: Store, letter_filter: LetterFilter = LetterFilter(), *, limit: int | None = MAX_GROUPED
) -> list[LetterGroup]:
    """Returns the newest dead letters, counted by the class of their error, largest groups first.

    With ``limit=None``, it counts all.
    """
    values = {**asdict(letter_filter), "limit": limit}
    return [
        LetterGroup(*row)
        for row in store.rows(
            "dead_letter_groups", values, binary=True, doing="counting dead letters"
        )
    ]


def of_consumer(
    store: Store, consumer: str, letter_filter: LetterFilter = LetterFilter()
) -> list[DeadLetterRow]:
    """Returns a consumer's dead letters, or those that a filter takes, in the order of the log."""
    return _page(store, consumer, letter_filter, None, None)


def _page(
    store: Store,
    consumer: str,
    letter_filter: LetterFilter,
    after: DeadLetterRow | None,
    limit: int | None,
) -> list[DeadLetterRow]:
    names = ("channel", "shard", "offset")
    position = (getattr(after, name) for name in names) if after else ("", -1, -1)
    begin = dict(zip((f"after_{name}" for name in names), position, strict=True))
    return _read(
        store,
        "dead_letters_of",
        {**asdict(letter_filter), "consumer": consumer, **begin, "limit": limit},
    )


def find(store: Store, consumer: str, place: Place) -> DeadLetterRow:
    """Returns the dead letter of a consumer at a place; ``Unknown`` if there is none."""
    values = {
        "consumer": consumer,
        "channel": place.shard.channel,
        "shard": place.shard.shard,
        "offset": place.offset,
    }
    return at(_read(store, "dead_letter_at", values), place)


def _read(store: Store, name: str, values: dict[str, Any]) -> list[DeadLetterRow]:
    return [
        DeadLetterRow(*row)
        for row in store.rows(name, values, binary=True, doing="reading dead letters")
    ]


def at(letters: Iterable[DeadLetterRow], place: Place) -> DeadLetterRow:
    """Returns the dead letter at a place."""
    for letter in letters:
        if letter.place == place:
            return letter
    raise Unknown(f"no dead letter at {place}; penstock dead-letters list shows where they are")


def read_record(store: Store, letter: DeadLetterRow) -> Record | None:
    """Returns the record with its payload; None if the dead letter is gone."""
    row = store.row("dead_letter", letter_key(letter), binary=True, doing="reading a dead letter")
    return None if row is None else make_record(letter, row)


def drop(store: Store, letters: Sequence[DeadLetterRow]) -> int:
    """Gives dead letters up for ever, without an effect of their records; returns their number."""
    dropped = 0
    for letter in letters:
        with store.transaction("dropping a dead letter"):
            store.execute("lock_shard", letter_key(letter))
            removed = store.execute("remove_dead_letter", letter_key(letter)).rowcount
        dropped += removed
        if removed:
            log.warning(
                "dead letter dropped",
                consumer=letter.consumer,
                place=str(letter.place),
                record=letter.record_id,
            )
    return dropped


def request_retries(store: Store, letters: Sequence[DeadLetterRow]) -> int:
    """Asks the consumers' workers to retry dead letters; returns how many are still there.

    A worker takes them within seconds, while its consumer is not paused; each of them once.
    """
    return store.execute(
        "request_retries", letter_keys(letters), doing="requesting retries"
    ).rowcount


BATCH = 1_000
"""Dead letters whose retries are requested at once."""


def request_all(store: Store, consumer: str, letter_filter: LetterFilter) -> Iterator[int]:
    """Requests retries of all dead letters that a filter takes, in the order of the log.

    Yields the number of each batch.  A batch is a statement, and so a transaction unless one is
    open: 100,000 rows at once would be locked for seconds.
    """
    return (request_retries(store, page) for page in _batches(store, consumer, letter_filter))


def drop_all(store: Store, consumer: str, letter_filter: LetterFilter) -> Iterator[int]:
    """Drops all dead letters that a filter takes, in batches like ``request_all``."""
    return (drop(store, page) for page in _batches(store, consumer, letter_filter))


def _batches(
    store: Store, consumer: str, letter_filter: LetterFilter
) -> Iterator[list[DeadLetterRow]]:
    page = _page(store, consumer, letter_filter, None, BATCH)
    while page:
        yield page
        page = _page(store, consumer, letter_filter, page[-1], BATCH) if len(page) == BATCH else []


def retry(
    pipeline: Pipeline,
    letters: Sequence[DeadLetterRow],
    database: Database,
    *,
    superseded: bool = False,
    prepare: bool = True,
    make_frame: Callable[[Record], Any] | None = None,
) -> list[Retried]:
    """Retries dead letters in the order of the log, each in a transaction of its own."""
    consumers = {letter.consumer: pipeline.get_consumer(letter.consumer) for letter in letters}
    for consumer in consumers.values():
        if consumer.dataframe and make_frame is None:
            raise DeclarationError(
                f"consumer {consumer.name} is set-based (dataframe=True), and its dead letters are "
                "retried on Spark: "
                f"penstock dead-letters retry {consumer.name}"
            )
    if any(isinstance(consumer, WorkerSpec) for consumer in consumers.values()):
        # A job is staged again: the role needs the rights of a producer as well.
        with connect_postgres(
            get_database_url(database), application="dead letters", prepare=False
        ) as connection:
            check_privileges(Store(connection, pipeline.scope), "producer")
    retried: list[Retried] = []
    ordered = sorted(
        letters, key=lambda letter: (letter.consumer, letter.channel, letter.shard, letter.offset)
    )
    for (name, channel), group in groupby(
        ordered, key=lambda letter: (letter.consumer, letter.channel)
    ):
        consumer = _reading(consumers[name], channel)
        transaction = HandlerTransaction(WorkerSetup(pipeline, consumer, database, prepare=prepare))
        trial = LetterTrial(
            transaction, consumer, make_frame, patience_s=LOCK_TIMEOUT_S, superseded=superseded
        )
        try:
            for letter in group:
                retried.append(trial.run(letter))
                if retried[-1].outcome == "held":
                    raise ServerUnavailable(
                        f"retrying {letter.place}: {retried[-1].reason}, for {LOCK_TIMEOUT_S:.0f} "
                        "s now. Try again, or stop it"
                    )
                log.info(
                    "dead letter retried",
                    consumer=name,
                    place=str(letter.place),
                    outcome=retried[-1].outcome,
                )
        finally:
            transaction.close()
    return retried


def _reading(consumer: ConsumerSpec, channel: str) -> ConsumerSpec:
    """Returns the consumer; one of several sources as the reader of that log's source."""
    reads = consumer.channel
    if isinstance(reads, LogChannel) and reads.sources:
        return replace(consumer, channel=reads.of_source(channel.partition("@")[2]))
    return consumer
