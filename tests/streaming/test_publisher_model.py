"""Two publishers, each with what it has heard, while Redis is emptied or restored and the journal is trimmed.

The model is the journal and what each log holds.  A publisher believes its last reply; whatever it believes, the log stays a part of
the journal, and a publisher that looks again publishes all of it.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock import Ick, Log
from penstock.channels.ick.marking import update_progress
from penstock.channels.log.streams import extents, read
from penstock.channels.routing import ick_shard_keys, log_keys
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.errors import Fenced
from penstock.records import BEGINNING, Epoch, Offset, Shard, ShardName
from penstock.streaming.publisher import Published, Publisher, SlicePublisher
from penstock.streaming.sequencer import Tick, tick

CHANNELS: list[Log[Any] | Ick] = [
    Log("packed", shards=2),
    Log("plain", shards=1, entries="plain"),
    Ick("index", shards=1),
]
SHARDS = [shard for channel in CHANNELS for shard in channel.shard_names]
ICK = SHARDS[-1]
UNKNOWN = ShardName("unknown", Shard(0))
MOST = 3
STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT %s, %s, 'k' || i, 'insert', 'thing', '1' FROM generate_series(1, %s) i
"""

JOURNAL = "SELECT channel, shard, first_offset, record_ids FROM penstock.journal"
WHO = st.sampled_from([0, 0, 1, 1, 2])

Tails = dict[ShardName, int]


class Publishing(RuleBasedStateMachine):
    """A log with packed entries, one with plain ones, an Ick, and rows of a channel that nobody has registered."""

    connection: Connection
    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.connection.execute("TRUNCATE penstock.staged_records, penstock.journal")
        self.journal: dict[ShardName, dict[int, int]] = {shard: {} for shard in SHARDS}  # offset: record id
        self.logs: dict[ShardName, set[int]] = {shard: set() for shard in SHARDS}  # offsets
        self.marked: set[str] = set()
        self.older: tuple[dict[bytes, bytes], dict[ShardName, set[int]], set[str]] = ({}, self.logs, set())
        self.ticked = tick(Store(self.connection))
        self.publishers = [self.make(1), self.make(1), self.make(1, most=MOST)]
        self.zombie: Publisher | None = None
        self.epoch = 1

    def make(self, epoch: int, most: int | None = None) -> Publisher:
        servers: Any = (Store(self.connection), self.client)
        made = (
            SlicePublisher(*servers, epoch=Epoch(epoch), max_records=most)
            if most
            else Publisher(*servers, epoch=Epoch(epoch))
        )
        made.refresh()
        return made

    # --- the model ---

    def ends(self, logs: Mapping[ShardName, set[int]]) -> Tails:
        return {shard: max(offsets, default=0) for shard, offsets in logs.items()}

    def beliefs(self, publisher: Publisher) -> Tails:
        return {shard: publisher.tails.log.get(shard, BEGINNING) for shard in SHARDS}

    def read_logs(self) -> dict[ShardName, set[int]]:
        found = {
            shard: set(map(int, read(self.client, "penstock", shard, BEGINNING, 1000).offsets)) for shard in SHARDS[:-1]
        }
        marked_up_to = update_progress(self.client, "penstock", [ICK])[ICK].marked_up_to
        return {**found, ICK: set(range(1, marked_up_to + 1))}

    # --- rules ---

    @rule(shard=st.sampled_from([*SHARDS, *SHARDS, UNKNOWN]), count=st.sampled_from([1, 7, 7, 120]))
    def stage(self, shard: ShardName, count: int) -> None:
        self.connection.execute(STAGE, (shard.channel, shard.shard, count))

    @rule()
    def tick(self) -> None:
        """A streamer's: it may die before it publishes any of this, and others hear of it later."""
        self.ticked = tick(Store(self.connection))
        for channel, number, first, ids in self.connection.execute(JOURNAL).fetchall():
            if (shard := ShardName(channel, number)) in self.journal:
                self.journal[shard] |= {first + place: id_ for place, id_ in enumerate(ids)}

    @rule(who=WHO)
    def publish_tick(self, who: int) -> None:
        ticked, publisher = self.ticked, self.publishers[who]
        before = dict(publisher.tails.journal)
        publisher.tails.advance_target(ticked.tails, ticked.firsts)
        tails = {shard: tail for shard, tail in ticked.tails.items() if shard != UNKNOWN}
        assert publisher.tails.journal == {**before, **{s: max(t, before.get(s, t)) for s, t in tails.items()}}
        self.publish(publisher, ticked)

    @rule(who=WHO)
    def publish_again(self, who: int) -> None:
        self.publish(self.publishers[who], None)

    def publish(self, publisher: Publisher, ticked: Tick | None) -> None:
        targets, beliefs, before = dict(publisher.tails.journal), self.beliefs(publisher), self.ends(self.logs)
        lacking = [shard for shard in SHARDS if targets.get(shard, BEGINNING) > beliefs[shard]]
        done = publisher.publish(ticked.inline_records if ticked else ())
        added = self.note(targets)
        assert done.added == added
        assert publisher.tails.journal == targets
        if isinstance(publisher, SlicePublisher):
            inline = 0 if ticked is None else ticked.sequenced
            assert added <= MOST + inline
            return
        assert sorted(done.healed) == sorted(shard for shard in lacking if beliefs[shard] > before[shard])
        self.check_known(done, lacking, targets, beliefs, before)
        added = self.note(targets, publisher.publish())
        for shard in lacking:
            assert self.ends(self.logs)[shard] == max(before[shard], targets[shard]), shard
            assert publisher.tails.log[shard] == self.ends(self.logs)[shard]
        assert publisher.tails.backlog == 0

    def check_known(
        self,
        done: Published,
        lacking: list[ShardName],
        targets: Mapping[ShardName, Offset],
        beliefs: Tails,
        before: Tails,
    ) -> None:
        """Records that were sent and are in the log already; of an Ick that is ahead, only whole batches count."""
        known = 0
        for shard in lacking:
            begin = max(beliefs[shard], min(self.journal[shard]) - 1)
            if shard != ICK or before[shard] >= targets[shard]:
                known += max(0, min(before[shard], targets[shard]) - begin)
        assert done.known == known

    def note(self, targets: Mapping[ShardName, Offset], done: Published | None = None) -> int:
        """Takes what the logs hold now, which is more than before, and nothing that was not to be published."""
        found, added = self.read_logs(), 0
        for shard in SHARDS:
            new = found[shard] - self.logs[shard]
            if shard == ICK:
                new &= self.journal[shard].keys()
                self.marked |= {str(self.journal[shard][offset]) for offset in new}
            assert self.logs[shard] <= found[shard]
            assert all(offset <= targets.get(shard, BEGINNING) for offset in new)
            added += len(new)
        self.logs = found
        assert done is None or done.added == added
        return added

    @rule(who=WHO)
    def look_again(self, who: int) -> None:
        publisher = self.publishers[who]
        publisher.refresh()
        assert publisher.tails.journal == {shard: max(rows) for shard, rows in self.journal.items() if rows}
        assert self.beliefs(publisher) == self.ends(self.logs)
        lacks = {shard: max(rows) - self.ends(self.logs)[shard] for shard, rows in self.journal.items() if rows}
        assert publisher.tails.backlog == sum(lacks.values())
        assert {*publisher.tails.lacking} == {shard for shard, records in lacks.items() if records}

    @rule(who=st.integers(0, 1), records=st.integers(1, 9))
    def resend(self, who: int, records: int) -> None:
        """What a publisher has sent lately, as after a lost reply."""
        publisher, before = self.publishers[who], self.read_logs()
        beliefs, had_all = self.beliefs(publisher), publisher.tails.backlog == 0
        done = publisher.resend(records)
        if had_all and all(beliefs[shard] <= self.ends(before)[shard] for shard in SHARDS):
            assert (done.added, self.read_logs()) == (0, before)
        self.note({shard: Offset(max(rows, default=0)) for shard, rows in self.journal.items()})

    @rule()
    def save(self) -> None:
        keys: Any = self.client.keys()
        self.older = ({key: self.client.dump(key) or b"" for key in keys}, self.read_logs(), set(self.marked))

    @rule(wholly=st.booleans())
    def lose(self, *, wholly: bool) -> None:
        """Redis comes back empty, or as it was."""
        self.client.flushall()
        keys, logs, marked = ({}, {shard: set() for shard in SHARDS}, set()) if wholly else self.older
        for key, value in keys.items():
            self.client.restore(key, 0, value)
        self.logs, self.marked = {shard: set(offsets) for shard, offsets in logs.items()}, set(marked)

    @rule(shard=st.sampled_from(SHARDS), rows=st.integers(1, 3))
    def retain(self, shard: ShardName, rows: int) -> None:
        """What all consumers have passed leaves the journal, but for its last row."""
        found = self.connection.execute(
            "WITH gone AS (DELETE FROM penstock.journal WHERE (channel, shard) = (%(channel)s, %(shard)s) AND first_offset IN "
            "(SELECT first_offset FROM penstock.journal WHERE (channel, shard) = (%(channel)s, %(shard)s) AND last_offset <= %(tail)s "
            "AND first_offset < (SELECT max(first_offset) FROM penstock.journal WHERE (channel, shard) = (%(channel)s, %(shard)s)) "
            "ORDER BY first_offset LIMIT %(rows)s) RETURNING last_offset) SELECT coalesce(max(last_offset), 0) FROM gone",
            {"channel": shard.channel, "shard": shard.shard, "rows": rows, "tail": self.ends(self.logs)[shard]},
        ).fetchone()
        assert found is not None
        self.journal[shard] = {offset: id_ for offset, id_ in self.journal[shard].items() if offset > found[0]}

    @precondition(lambda self: self.epoch < 3)
    @rule()
    def begin_an_epoch(self) -> None:
        """The publishers are replaced; one of the former ones goes on."""
        self.epoch += 1
        self.zombie = self.publishers[0]
        self.publishers = [self.make(self.epoch), self.make(self.epoch), self.make(self.epoch, most=MOST)]
        for shard in SHARDS:
            self.client.set(log_keys("penstock", shard).epoch, self.epoch)

    @precondition(lambda self: self.zombie is not None)
    @rule()
    def a_zombie_wakes(self) -> None:
        """One of an older epoch writes nothing where a newer one has written; a Redis put back to before that knows of none."""
        assert self.zombie is not None
        epochs = {int(self.client.get(log_keys("penstock", shard).epoch) or 0) for shard in SHARDS}
        before = self.read_logs()
        self.zombie.refresh()
        if max(epochs) < self.epoch:
            targets = dict(self.zombie.tails.journal)
            self.note(targets, self.zombie.publish())
        elif self.zombie.tails.backlog and epochs == {self.epoch}:
            with pytest.raises(
                Fenced, match=f"is in epoch {self.epoch}, this streamer in the older epoch {self.epoch - 1}"
            ):
                self.zombie.publish()
            assert self.read_logs() == before

    @invariant()
    def the_logs_are_parts_of_the_journal(self) -> None:
        for shard in SHARDS[:-1]:
            records = read(self.client, "penstock", shard, BEGINNING, 1000)
            assert {int(r.offset) for r in records} == self.logs[shard]
            for record in records:
                assert self.journal[shard].get(record.offset, record.id) == record.id
            assert extents(self.client, "penstock", [shard])[shard].tail == max(self.logs[shard], default=0)
        assert self.client.zcard(ick_shard_keys("penstock", ICK).ick.dirty) >= (1 if self.marked else 0)
        assert self.client.exists(log_keys("penstock", UNKNOWN).stream) == 0

    def teardown(self) -> None:
        """In the end, a publisher that looks again publishes everything."""
        self.tick()
        self.look_again(0)
        self.publish(self.publishers[0], None)
        assert self.ends(self.logs) == {shard: max(rows, default=0) for shard, rows in self.journal.items()}


def check(connection: Connection, client: redis.Redis, *, examples: int) -> None:
    for channel in CHANNELS:
        register_channel(Store(connection), channel)
    machine = type("Checked", (Publishing,), {"connection": connection, "client": client})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30))


@pytest.mark.slow
def test_logs_become_the_journal_whatever_publishers_believe(connection: Connection, redis_client: redis.Redis) -> None:
    """Guarantees 1, 3 and 9."""
    check(connection, redis_client, examples=15)


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_logs_become_the_journal_over_many_runs(connection: Connection, redis_client: redis.Redis) -> None:
    check(connection, redis_client, examples=300)
