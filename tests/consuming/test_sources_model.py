"""A consumer of two sources, one of which is restored to earlier states, beside a plain model.

The model compares the records that were applied with those that the source's journal and its log hold: what both histories have is
applied once, what was lost stays applied, and nothing is applied of a shard whose history has diverged until that is accepted.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.clients import connect_redis
from fixtures.sources import Backup, Regions, Source
from penstock import Log, Pipeline
from penstock.channels.log.streams import extents, read
from penstock.channels.routing import log_keys
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.embedded import EmbeddedPostgres
from penstock.errors import DamagedJournal, HistoryDiverged, Refused, ServerUnavailable
from penstock.journal.journal_reader import log_epochs
from penstock.operating.reset.epoch import reset_epoch
from penstock.operating.reset.source_history import AcceptedShard, reset_source
from penstock.records import DEFAULT_SCOPE, Offset, Place, Record, ShardName

AWAY = "postgresql://postgres@127.0.0.1:1/none"
JOURNALED = """
SELECT e.shard, e.first_offset + n.position - 1, n.id, (extract(epoch FROM r.created_at) * 1000000)::bigint, r.key, e.epoch
FROM penstock.journal e, unnest(e.record_ids) WITH ORDINALITY AS n (id, position) JOIN penstock.staged_records r ON r.id = n.id
ORDER BY 1, 2
"""
EFFECT = text("INSERT INTO public.effects VALUES (:source, :shard, :offset, :key)")

YES_OR_NO = (True, False)
CHANGES: dict[str, dict[str, Sequence[Any]]] = {
    "stage": {"name": ("eu", "eu", "us"), "streams": YES_OR_NO},
    "stream": {"name": ("eu", "us")},
    "back_up": {},
    "restore": {"stages": YES_OR_NO},
    "lose_commits": {"drains": (True, True, False), "is_emptied": (True, False, False), "stages": YES_OR_NO},
    "recover": {"drains": YES_OR_NO},
    "open_epoch": {},
    "lose_the_log": {"of_source": ("eu", "us"), "is_emptied": YES_OR_NO},
    "drain": {"is_away": (False, False, True)},
    "accept": {"applies": YES_OR_NO},
}
"""What may happen, with the values of its arguments: each is a method."""

NAMES = [*CHANGES, *["drain", "lose_commits", "lose_commits", "recover", "recover"] * 2]

Known = tuple[int, int, str]
"""A record: its id, the time of its staging, and its key, which no other one has."""


@dataclass
class Facts:
    """What a shard's journal and log hold."""

    journal: list[Known]
    log: dict[int, Known]
    tail: int  # of the log
    epoch: int  # of the log
    epochs: list[int]  # in which the journal has given out each offset

    @property
    def has_lost(self) -> bool:
        """Whether the log has records that the source has lost."""
        last = max(self.log, default=0)
        return self.tail > len(self.journal) or (last > 0 and self.journal[last - 1] != self.log[last])


@dataclass
class PlainShard:
    """What the consumer has passed of a shard, by offset."""

    passed: list[Known] = field(default_factory=list)
    letters: dict[int, Known] = field(default_factory=dict)
    accepted: int = 0
    is_halted: bool = False

    @property
    def at(self) -> int:
        return len(self.passed)

    def has_diverged(self, journal: list[Known]) -> bool:
        return self.passed[-1:] != journal[: self.at][self.at - 1 :] if self.at else False

    def common(self, journal: list[Known]) -> int:
        """The last offset up to which both histories are one."""
        pairs = zip(self.passed, journal, strict=False)
        return next(
            (offset for offset, (ours, theirs) in enumerate(pairs) if ours != theirs), min(self.at, len(journal))
        )

    def due(self, facts: Facts, *, is_away: bool) -> list[Known]:
        """The records that a worker is to apply next."""
        if self.is_halted:
            return []
        if is_away:
            follows = self.accepted == facts.epoch != 0 and min(facts.log, default=self.at + 2) <= self.at + 1
            return [record for offset, record in sorted(facts.log.items()) if offset > self.at] if follows else []
        if self.has_diverged(facts.journal) or facts.has_lost:
            self.is_halted = True
            return []
        return facts.journal[self.at : facts.tail]


class Restoring:
    """The first source is restored; of the second one everything is applied."""

    def __init__(self, dice: Random, regions: Regions, postgres: EmbeddedPostgres, client: redis.Redis) -> None:
        self.dice, self.regions, self.postgres, self.client = dice, regions, postgres, client
        self.connections: dict[str, psycopg.Connection] = {}
        self.eu, self.us = (  # which keep their records
            Source(name, url, regions.redis_url, Log("things", shards=2, source=name))
            for name, url in regions.urls.items()
        )
        self.backup: Backup | None = None
        self.refused: set[str] = set()
        self.numbers = count(1)
        self.shards = {shard: PlainShard() for source in (self.eu, self.us) for shard in source.channel.shard_names}
        self.effects: list[tuple[str, int, int, str]] = []
        self.is_registered = self.is_trimmed = self.needs_place = False
        for source in (self.eu, self.us):
            source.stream()

    def close(self) -> None:
        self.disconnect()
        self.drop_backup()

    def drop_backup(self) -> None:
        if self.backup is not None:
            self.postgres.drop_database(f"{self.backup.name}_older")
        self.backup = None

    def change(self) -> None:
        """Records, and changes."""
        self.stage("eu", streams=True)
        for name in self.dice.choices(NAMES, k=3):
            arguments = {argument: self.dice.choice(values) for argument, values in CHANGES[name].items()}
            print(f"{name}: {arguments}")  # noqa: T201  shown if the test fails
            getattr(self, name)(**arguments)
            self.check()

    def rows(self, url: str, query: str) -> list[tuple[Any, ...]]:
        if url not in self.connections:
            self.connections[url] = psycopg.connect(url, autocommit=True)
        return self.connections[url].execute(query.encode()).fetchall()

    def disconnect(self) -> None:
        """Nobody may be connected to a database that is copied."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    # --- the sources ---

    def stage(self, name: str, *, streams: bool) -> None:
        source: Source = getattr(self, name)
        with psycopg.connect(source.url, autocommit=True) as connection:
            for _ in range(self.dice.randint(1, 4)):
                shard, is_refused = self.dice.randint(0, 1), self.dice.random() < 0.3
                key = f"k{next(self.numbers)}"
                self.refused |= {key} if is_refused else set()
                connection.execute(
                    "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
                    "VALUES (%s, %s, %s, 'insert', 'thing', '1')",
                    [source.channel.name, shard, key],
                )
        if streams:
            self.stream(name)

    def stream(self, name: str) -> None:
        """One that has lost what was published refuses."""
        with suppress(HistoryDiverged, DamagedJournal):
            getattr(self, name).stream()

    def back_up(self) -> None:
        if self.needs_place:
            return
        self.drop_backup()
        self.disconnect()
        self.backup = Backup.of(self.eu, self.postgres)

    def restore(self, *, stages: bool) -> None:
        """Records that the backup has and that were published after it are sequenced with a new epoch."""
        if self.backup is None or self.needs_place:
            return
        self.disconnect()
        self.backup.restore()
        self.backup = None
        [(waiting,)] = self.rows(self.eu.url, "SELECT count(*) FROM penstock.staged_records")
        facts = self.facts(self.eu)
        if waiting > sum(len(each.journal) for each in facts.values()):
            self.open_epoch()
        facts = self.facts(self.eu)
        self.needs_place = any(
            self.shards[shard].has_diverged(each.journal)
            and not each.has_lost
            and each.epoch <= self.shards[shard].accepted
            for shard, each in facts.items()
        )
        if stages:
            self.stage("eu", streams=False)

    def lose_commits(self, *, drains: bool, is_emptied: bool, stages: bool) -> None:
        """The first source goes back, also of what was applied, and also with an emptied Redis."""
        self.stage("eu", streams=is_emptied)
        self.back_up()
        self.stage("eu", streams=True)
        if drains:
            self.drain(is_away=False)
        if is_emptied:
            self.lose_the_log("eu", is_emptied=True)
        self.restore(stages=stages)
        if stages:
            self.drain(is_away=False)

    def recover(self, *, drains: bool) -> None:
        self.open_epoch()
        self.stage("eu", streams=True)
        if drains:
            self.drain(is_away=False)
        self.accept(applies=True)

    def open_epoch(self) -> None:
        """Without a reason, nothing is opened."""
        with connect_postgres(self.eu.url, application="test") as connection:
            reset_epoch(connection, self.client, self.eu.pipeline, apply=True)

    def lose_the_log(self, of_source: str, *, is_emptied: bool) -> None:
        """Its entries are evicted, and come from the journal; or it is lost, and published again."""
        source: Source = getattr(self, of_source)
        self.is_trimmed = True
        for shard in source.channel.shard_names:
            keys = log_keys("penstock", shard)
            if is_emptied:
                self.client.delete(keys.stream, keys.epoch, keys.ends, keys.writes)
            else:
                self.client.xtrim(keys.stream, maxlen=0)

    def facts(self, source: Source) -> dict[ShardName, Facts]:
        shards = source.channel.shard_names
        journals: dict[int, list[Known]] = {shard.shard: [] for shard in shards}
        opened: dict[int, list[int]] = {shard.shard: [] for shard in shards}
        for number, _, *known, epoch in self.rows(source.url, JOURNALED):
            journals[number].append((known[0], known[1], known[2]))
            opened[number].append(epoch)
        ends, epochs = extents(self.client, "penstock", shards), log_epochs(self.client, DEFAULT_SCOPE, shards)
        return {
            shard: Facts(
                journals[shard.shard],
                {r.offset: (r.id, r.staged_us, r.key) for r in read(self.client, "penstock", shard, Offset(0), 1000)},
                ends[shard].tail,
                epochs.get(shard, 0),
                opened[shard.shard],
            )
            for shard in shards
        }

    # --- the consumer ---

    def drain(self, *, is_away: bool) -> None:
        """While the first source is away, what Redis holds of it in an accepted epoch is applied."""
        is_away = is_away and self.is_registered
        found = {shard: facts for source in (self.eu, self.us) for shard, facts in self.facts(source).items()}
        urls = {"eu": AWAY if is_away else self.eu.url, "us": self.us.url}
        regions = Regions(self.eu, self.us, self.regions.database_url, self.regions.redis_url, self.declare())
        if is_away:
            with pytest.raises(ServerUnavailable):
                regions.drain(urls)
        else:
            regions.drain(urls)
        self.is_registered = True
        for shard, facts in found.items():
            if not (is_away and shard.channel == "things@us"):  # drained after the first one, which has failed
                self.apply(shard, facts, is_away=is_away)

    def declare(self) -> Pipeline:
        things = Log("things", sources=["eu", "us"])
        pipeline = Pipeline([things])

        @pipeline.consumer(reads=things, name="totals", attempts=1)
        def totals(session: Session, records: Sequence[Record]) -> None:
            for record in records:
                values = {"source": record.source, "shard": record.shard, "offset": record.offset, "key": record.key}
                session.execute(EFFECT, values)
                if record.key in self.refused:
                    raise ValueError(record.key)

        return pipeline

    def apply(self, shard: ShardName, facts: Facts, *, is_away: bool) -> None:
        plain = self.shards[shard]
        due = plain.due(facts, is_away=is_away)
        if due and any(offset > plain.at for offset in facts.log):
            plain.accepted = facts.epoch
        for record in due:
            plain.passed.append(record)
            if record[2] in self.refused:
                plain.letters[plain.at] = record
            else:
                self.effects.append((shard.channel.partition("@")[2], shard.shard, plain.at, record[2]))

    def accept(self, *, applies: bool) -> None:
        """All shards of the first source; or one after the other, at a place, if no epoch shows where the histories part."""
        if not self.is_registered:
            return
        facts = self.facts(self.eu)
        [(epoch,)] = self.rows(self.eu.url, "SELECT max(epoch) FROM penstock.epochs")
        diverged = {s for s, each in facts.items() if self.shards[s].has_diverged(each.journal)}
        if self.needs_place or any(epoch <= self.shards[shard].accepted for shard in diverged):
            with pytest.raises(Refused) if not self.needs_place else suppress(Refused):
                self.reset(None, applies=False)
            places = [Place(s, Offset(self.shards[s].common(facts[s].journal))) for s in diverged]
            for place in places if self.needs_place else ():
                self.check_plan(self.reset(place, applies=applies), facts, epoch, applies=applies)
            self.needs_place = self.needs_place and not applies
            return
        self.check_plan(self.reset(None, applies=applies), facts, epoch, applies=applies)

    def reset(self, to: Place | None, *, applies: bool) -> tuple[AcceptedShard, ...]:
        with (
            connect_postgres(self.regions.database_url, application="test") as own,
            connect_postgres(self.eu.url, application="test") as there,
            connect_redis(self.regions.redis_url) as client,
        ):
            return reset_source(Store(own), Store(there), client, "totals", "eu", to=to, apply=applies)

    def check_plan(
        self, plan: Sequence[AcceptedShard], facts: dict[ShardName, Facts], epoch: int, *, applies: bool
    ) -> None:
        staged = {key for (key,) in self.rows(self.eu.url, "SELECT key FROM penstock.staged_records")}
        names = {str(shard): shard for shard in facts}
        assert len(plan) == 1 or {each.shard for each in plan} == names.keys()
        for each in plan:
            plain, journal = self.shards[names[each.shard]], facts[names[each.shard]].journal
            after = plain.common(journal)
            if len(plan) > 1 and plain.has_diverged(journal):
                # Records that the backup had are not known to be at the same offsets again.
                after = min(after, sum(opened <= plain.accepted for opened in facts[names[each.shard]].epochs))
            assert (each.before, each.after, each.in_doubt) == (plain.at, after, plain.at - after)
            assert (each.again, each.passed_over) == (max(0, min(plain.at, len(journal)) - after), 0)
            assert (each.dead_letters, each.resumes) == (sum(at > after for at in plain.letters), plain.is_halted)
            there = sum(key in staged for _, _, key in plain.passed[after:])
            assert (each.known, each.still_there) == (each.in_doubt, there) or self.is_trimmed
            if applies:
                plain.passed, plain.accepted, plain.is_halted = plain.passed[:after], epoch, False
                plain.letters = {at: record for at, record in plain.letters.items() if at <= after}

    # --- what is there ---

    def check(self) -> None:
        self.check_checkpoints()
        self.check_sources()

    def check_checkpoints(self) -> None:
        url = self.regions.database_url
        rows = self.rows(
            url,
            'SELECT channel, shard, "offset", epoch, record_id, staged_us, halted IS NOT NULL FROM penstock.checkpoints',
        )
        found = {ShardName(channel, shard): rest for channel, shard, *rest in rows}
        assert found.keys() == (self.shards.keys() if self.is_registered else set())
        for shard, (at, epoch, record_id, staged_us, is_halted) in found.items():
            plain = self.shards[shard]
            last = plain.passed[-1][:2] if plain.at else (None, None)
            assert (at, epoch, is_halted) == (plain.at, plain.accepted, plain.is_halted), shard
            assert (record_id, staged_us) == last, shard
        letters = self.rows(url, 'SELECT channel, shard, "offset", record_id, key FROM penstock.dead_letters')
        assert sorted(letters) == sorted(
            (shard.channel, shard.shard, at, known[0], known[2])
            for shard, plain in self.shards.items()
            for at, known in plain.letters.items()
        )
        effects = self.rows(url, "SELECT * FROM public.effects")
        assert sorted(effects) == sorted(self.effects)

    def check_sources(self) -> None:
        """It waits for no later record than the last one that both histories have."""
        for source in (self.eu, self.us):
            facts = self.facts(source)
            for shard, at in self.rows(source.url, 'SELECT shard, "offset" FROM penstock.checkpoints'):
                name = source.channel.shard_names[shard]
                assert at <= self.shards[name].common(facts[name].journal), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_consumer_of_sources_that_are_restored_matches_the_model(
    regions: Regions, postgres: EmbeddedPostgres, redis_client: redis.Redis, seed: int
) -> None:
    """Guarantees 5, 8 and 10: what a source has takes effect, once unless it was in doubt, and what it has lost no more."""
    with psycopg.connect(regions.database_url, autocommit=True) as connection:
        connection.execute("DROP TABLE public.effects")
        connection.execute('CREATE TABLE public.effects (source text, shard int, "offset" bigint, key text)')
    with closing(Restoring(Random(seed), regions, postgres, redis_client)) as restoring:
        for _ in range(5):
            restoring.change()
