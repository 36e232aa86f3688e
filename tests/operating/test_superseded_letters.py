"""A dead letter is not retried unasked if a later record of its key was applied: its effect would come after the later one's."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import retain_now
from fixtures.intervals import take_for_fast
from penstock import Ick, Log, Pipeline, mark_dirty
from penstock.consuming import WorkerSetup, make_worker
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.operating.channels import reshard
from penstock.operating.consumers import rename as rename_consumer
from penstock.operating.letters import newest, of_consumer, retry
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.records import Offset, Record
from penstock.streaming import Streamer

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES (%(channel)s, %(shard)s, left(%(word)s, 1), 'said', 'word', to_jsonb(%(word)s::text))
"""
EFFECT = text("INSERT INTO public.effects (key, word) VALUES (:key, :word)")


class Desk:
    """A consumer that refuses the words of a set, and writes down all others; a word's key is its first letter."""

    def __init__(self, connection: Connection, streamer: Streamer, urls: tuple[str, str], things: Log) -> None:
        self.connection, self.streamer, self.urls = connection, streamer, urls
        self.flow, self.refused = Pipeline([things]), set[str]()
        self.things, self.name = things, "reader"
        self.declare()

    def declare(self, **options: Any) -> None:
        self.flow = Pipeline([self.things])
        spoken: dict[str, Any] = {"reads": self.things, "name": self.name, "attempts": 1}
        self.flow.consumer(**spoken, **options)(self.apply)

    def apply(self, session: Session, records: Sequence[Record]) -> None:
        if any(record.data in self.refused for record in records):
            raise ValueError("refused")
        for record in records:
            session.execute(EFFECT, {"key": record.key, "word": record.data})

    def say(self, *words: str, shard: int = 0) -> None:
        """Stages words of a key each, and has the consumer read them."""
        for word in words:
            values = {"channel": self.things.name, "shard": shard, "word": word}
            self.connection.execute(STAGE, values)
        self.streamer.drain()
        self.drain()

    def drain(self) -> None:
        with LogWorker(WorkerSetup(self.flow, self.flow.get_consumer(self.name), *self.urls)) as worker:
            worker.drain()

    def letters(self) -> list[DeadLetterRow]:
        return of_consumer(Store(self.connection), self.name)

    def superseded(self) -> dict[int, str]:
        """By offset, which later record each dead letter knows of."""
        return {letter.offset: letter.superseded_by for letter in self.letters()}

    def retry(self, letters: list[DeadLetterRow] | None = None, *, superseded: bool = False) -> list[str]:
        chosen = self.letters() if letters is None else letters
        done = retry(self.flow, chosen, self.urls[0], superseded=superseded)
        return [each.outcome for each in done]

    def effects(self, key: str = "a") -> list[str]:
        rows = self.connection.execute("SELECT word FROM public.effects WHERE key = %s ORDER BY number", (key,))
        return [word for (word,) in rows]


@pytest.fixture
def desk(things: Log, connection: Connection, streamer: Streamer, database_url: str, redis_url: str) -> Desk:
    connection.execute("CREATE TABLE public.effects (number int GENERATED ALWAYS AS IDENTITY, key text, word text)")
    return Desk(connection, streamer, (database_url, redis_url), things)


def test_it_is_retried_only_if_that_is_wanted(desk: Desk) -> None:
    """Guarantee 21: with the place of the first later record, however many there are."""
    desk.refused = {"a1"}
    desk.say("a1", "b1", "a2", "a3")
    desk.refused = set()
    desk.say("a4")

    [refused] = retry(desk.flow, desk.letters(), desk.urls[0])
    assert (refused.outcome, refused.letter.superseded_by) == ("superseded", "things/0 offset 3")
    assert "things/0 offset 3" in refused.reason
    assert desk.effects() == ["a2", "a3", "a4"]
    assert desk.retry(superseded=True) == ["applied"]
    assert desk.effects() == ["a2", "a3", "a4", "a1"]
    assert desk.letters() == []


def test_what_failed_again_later_does_not_count(desk: Desk) -> None:
    """Guarantee 21: all of a key that failed is retried in order, and another key does not matter."""
    desk.refused = {"a1", "a2"}
    desk.say("a1", "b1", "a2", "b2")
    desk.refused = set()

    assert desk.superseded() == {1: "", 3: ""}
    assert desk.retry() == ["applied", "applied"]
    assert desk.effects() == ["a1", "a2"]


def test_the_retry_of_a_later_one_supersedes_it(desk: Desk) -> None:
    desk.refused = {"a1", "a2", "a3"}
    desk.say("a1", "a2", "a3")
    desk.refused = set()

    assert desk.retry(desk.letters()[1:2]) == ["applied"]
    assert desk.superseded() == {1: "things/0 offset 2", 3: ""}
    assert desk.retry() == ["superseded", "applied"]
    assert desk.effects() == ["a2", "a3"]


def test_what_was_passed_over_does_not_supersede_it(desk: Desk) -> None:
    """An operator has moved the checkpoint: the later record had no effect."""
    desk.refused = {"a1"}
    desk.say("a1")
    desk.connection.execute("UPDATE penstock.checkpoints SET halted = 'later'")
    desk.say("a2")
    reset_checkpoint(Store(desk.connection), "reader", "latest", resume=True, apply=True)
    desk.refused = set()

    assert desk.retry() == ["applied"]
    assert desk.effects() == ["a1"]


def test_what_will_be_applied_again_does_not_supersede_it(desk: Desk) -> None:
    """The checkpoint was moved back before the later record; one that stays applied still does."""
    desk.refused = {"a1", "b1"}
    desk.say("a1", "b1", "b2", "a2", "a3")
    desk.refused = set()

    reset_checkpoint(Store(desk.connection), "reader", Offset(3), shard=0, apply=True)

    assert desk.superseded() == {1: "", 2: "things/0 offset 3"}
    assert desk.retry() == ["applied", "superseded"]
    desk.drain()
    assert desk.effects() == ["a2", "a3", "a1", "a2", "a3"]


def test_it_is_known_after_the_records_are_gone(desk: Desk) -> None:
    """Guarantee 21: retention has removed the later record, and where it stood."""
    desk.refused = {"a1"}
    desk.say("a1", "a2")
    desk.say(*(f"b{number}" for number in range(5)))
    desk.connection.execute("UPDATE penstock.journal SET created_at = now() - interval '2h'")
    assert retain_now(desk.streamer) >= 2
    desk.refused = set()

    assert desk.retry() == ["superseded"]


def test_a_transaction_of_several_shards_supersedes_in_each(desk: Desk) -> None:
    """Guarantee 21: few records of many shards are applied together."""
    desk.refused = {"a1", "c1"}
    desk.say("a1")
    desk.say("c1", shard=1)
    desk.connection.execute(STAGE, {"channel": "things", "shard": 0, "word": "a2"})
    together: list[set[int]] = []

    def note(session: Session, records: Sequence[Record]) -> None:
        together.append({int(record.shard) for record in records})
        Desk.apply(desk, session, records)

    desk.flow = Pipeline([desk.things])
    desk.flow.consumer(reads=desk.things, name="reader", attempts=1)(note)
    with LogWorker(WorkerSetup(desk.flow, desk.flow.get_consumer("reader"), *desk.urls)) as worker:
        take_for_fast(worker)
        desk.connection.execute(STAGE, {"channel": "things", "shard": 1, "word": "c2"})
        desk.streamer.drain()
        worker.drain()

    assert together == [{0, 1}]
    assert sorted(letter.superseded_by for letter in desk.letters()) == ["things/0 offset 2", "things/1 offset 2"]


def test_a_later_record_in_another_shard_supersedes_it(desk: Desk) -> None:
    """Guarantee 6: the number of shards was changed in between."""
    desk.refused = {"a1"}
    desk.say("a1")
    reshard(Store(desk.connection), "things", 3, apply=True)
    desk.say("a2")

    [superseded] = desk.superseded().values()
    assert superseded.startswith("things/")
    assert superseded.removeprefix("things/")[:1] in "234"
    assert desk.retry() == ["superseded"]


def test_it_is_known_under_another_name_of_the_consumer(desk: Desk, connection: Connection) -> None:
    desk.refused = {"a1"}
    desk.say("a1", "a2")
    rename_consumer(Store(connection), "reader", "copies", apply=True)

    [letter] = of_consumer(Store(connection), "copies")
    assert letter.superseded_by == "things/0 offset 2"


def test_a_worker_that_applies_the_later_record_meanwhile_is_noticed(desk: Desk) -> None:
    """The transaction that would retry it looks: what was listed before does not count."""
    desk.refused = {"a1"}
    desk.say("a1")
    letters = desk.letters()
    desk.refused = set()
    desk.say("a2")

    assert letters[0].superseded_by == ""
    assert desk.retry(letters) == ["superseded"]
    assert desk.effects() == ["a2"]


def test_members_have_no_order(connection: Connection, database_url: str, redis_url: str, desk: Desk) -> None:
    """A member is brought up to date, whatever came before or after it."""
    index = Ick("index", shards=1)
    flow = Pipeline([index])
    refused = {"m"}

    @flow.consumer(reads=index, name="indexer", attempts=1)
    def read(_session: object, members: Sequence[str]) -> None:
        if refused & {*members}:
            raise ValueError("refused")

    with Streamer(flow, database_url, redis_url) as streamer:
        for member in ("m", "n"):
            with connection.transaction():
                mark_dirty(connection, to=index, members=[member], pipeline=flow)
            streamer.drain()
            with make_worker(flow, flow.get_consumer("indexer"), database_url, redis_url) as worker:
                worker.drain()
    refused.clear()
    letters = of_consumer(Store(connection), "indexer")

    assert [letter.superseded_by for letter in letters] == [""]
    assert [letter.superseded_by for letter in newest(Store(connection))] == [""]
    assert [each.outcome for each in retry(flow, letters, database_url)] == ["applied"]


def test_a_key_that_is_parked_waits_for_a_superseded_one(desk: Desk) -> None:
    """The consumer has parked keys only since then."""
    desk.refused = {"a1"}
    desk.say("a1", "a2")
    desk.declare(park_key=True)
    desk.refused = set()
    desk.say("a3")

    assert [(letter.offset, letter.parked) for letter in desk.letters()] == [(1, False), (3, True)]
    assert desk.retry() == ["superseded", "kept"]
    assert desk.retry(superseded=True) == ["applied", "applied"]
    assert desk.effects() == ["a2", "a1", "a3"]


def test_many_that_are_superseded_are_refused_without_asking_postgres(desk: Desk) -> None:
    """The list says it of each: 100,000 take no transaction each."""
    desk.refused = {"a1"}
    desk.say("a1", "a2")

    done = retry(desk.flow, desk.letters(), "postgresql://postgres@127.0.0.1:1/none")

    assert [each.outcome for each in done] == ["superseded"]
