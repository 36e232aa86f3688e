"""Whatever key of a queue is lost, a sweep notices, and what the bodies of messages tell is there again."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from fixtures.queues import INDEXES, Given, Probe
from penstock.channels.queue.queue_messages import new_id
from penstock.declaring.unique import Unique

LEASE_AFTER_S = 31
"""A lease whose end was lost lasts for 30 s."""


class Filled:
    """A queue with messages in every state, of three tenants, two of which have limits."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.ids: dict[str, str] = {}
        probe.limit("slow", in_flight=1)
        probe.limit("paused", is_paused=True)
        probe.settle(self._lease("dead"), "dead", reason="bad")
        probe.settle(self._lease("failed"), "retry", delay_s=1)
        probe.pass_time(2)
        [self.failed] = probe.take(1)
        self.leased = self._lease("leased")
        probe.settle(self.failed, "retry")
        self._add("waiting", tenant="slow")
        self._add("waiting too", tenant="slow", key="k")
        self._add("paused", tenant="paused")
        self._add("delayed", delay_s=1000)
        self._add("deadline", tenant="paused", deadline=datetime.now(UTC) + timedelta(hours=9))
        self._add("unique", unique=Unique("one"), tenant="paused")
        self._add("queued", unique=Unique("two", until="queued"), tenant="paused")
        self._add("window", unique=Unique("three", window=600), tenant="paused")
        self.before = {name: probe.state(id_) for name, id_ in self.ids.items()}

    def _add(self, name: str, *, tenant: str = "t", **fields: object) -> None:
        self.ids[name] = new_id()
        self.probe.write(tenant, name, id=self.ids[name], **fields)  # type: ignore[arg-type]

    def _lease(self, name: str) -> Given:
        self._add(name)
        [given] = self.probe.take(1)
        return given

    def states(self) -> dict[str, str | None]:
        return {name: self.probe.state(id_) for name, id_ in self.ids.items()}


@pytest.fixture
def filled(probe: Probe) -> Filled:
    made = Filled(probe)
    assert set(made.before.values()) == {"waiting", "leased", "delayed", "dead"}
    assert probe.is_whole()
    return made


def everything(probe: Probe) -> list[str]:
    """All payloads in the order of delivery, once limits, delays and leases are over."""
    for tenant in ("slow", "paused"):
        probe.limit(tenant)
    probe.pass_time(2000)
    return probe.drain()


HARMLESS = {"takes", "dwell", "wakes", "limits"}


@pytest.mark.parametrize("name", [name for name in INDEXES if name not in HARMLESS])
def test_a_lost_key_is_noticed_and_rebuilt(name: str, filled: Filled) -> None:
    """Defect "meta lost" of the model we started from, for every key there is."""
    probe = filled.probe
    if not probe.client.delete(probe.key(name)):
        pytest.skip("nothing of this kind is in the queue")
    if name != "meta":
        assert not probe.is_whole()
    assert probe.sweep() == 0

    assert probe.is_whole()
    after = filled.states()
    if name == "messages":  # who held it is not known any more
        assert after.pop("leased") == "waiting"
        filled.before.pop("leased")
    assert after == filled.before
    assert sorted(everything(probe)) == sorted(filled.ids.keys() - {"dead"})


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_key_that_can_be_missed_costs_nothing(name: str, filled: Filled) -> None:
    filled.probe.client.delete(filled.probe.key(name))

    filled.probe.sweep()
    assert filled.states() == filled.before
    assert sorted(everything(filled.probe)) == sorted(filled.ids.keys() - {"dead"})


@pytest.mark.parametrize("name", ["ready", "blocked", "deadlines", "uniques", "ages", "accounts"])
def test_a_lost_key_is_noticed_though_another_call_made_it_again(name: str, filled: Filled) -> None:
    probe = filled.probe
    probe.write("soon", "late")
    probe.client.delete(probe.key(name))
    probe.write("other", "new", unique=Unique("new"))

    probe.sweep()
    assert probe.is_whole()
    assert filled.states() == filled.before
    assert sorted(everything(probe)) == sorted([*filled.ids.keys() - {"dead"}, "late", "new"])


@pytest.mark.parametrize("lost", ["uniques", "accounts"])
@pytest.mark.parametrize("state", ["waiting", "leased", "delayed", "dead"])
@pytest.mark.parametrize(
    "unique", [Unique("n", until="queued"), Unique("n"), Unique("n", window=600)], ids=lambda unique: unique.held_until
)
def test_a_unique_name_is_held_or_free_after_a_rebuild_as_before(
    unique: Unique, state: str, lost: str, probe: Probe
) -> None:
    """Of a dead letter that had it for a time, nothing but the lost key has said so."""
    [written] = probe.write("t", "x", unique=unique, delay_s=60 if state == "delayed" else 0)
    probe.write("other", "x")
    for given in probe.take(2) if state in {"leased", "dead"} else ():
        if state == "dead":
            probe.settle(given, "dead")
    assert probe.state(written.id) == state
    probe.client.delete(probe.key(lost))
    probe.sweep()

    is_held = {
        "queued": state in {"waiting", "delayed"},
        "running": state != "dead",
        "window": state != "dead" or lost == "accounts",
    }[unique.held_until]
    assert probe.write("t", "again", unique=unique)[0].duplicate_of == (written.id if is_held else None)


def test_all_keys_but_the_bodies_lost_is_rebuilt(filled: Filled) -> None:
    probe = filled.probe
    for name in (*INDEXES, "limits"):
        probe.client.delete(probe.key(name))
    probe.sweep()

    assert probe.is_whole()
    expected = filled.before | {"leased": "waiting"}
    assert filled.states() == expected
    assert sorted(everything(probe)) == sorted(filled.ids.keys() - {"dead"})


def test_only_delayed_messages_are_rebuilt_too(probe: Probe) -> None:
    """There is no stream yet, and nobody writes one."""
    probe.write("t", "one", delay_s=10)
    probe.client.delete(probe.key("meta"))

    assert probe.take(1) == []
    probe.pass_time(11)
    assert probe.drain() == ["one"]
    assert probe.stats()["lost"] == 0


def test_a_queue_that_had_grown_is_found_whole_by_one_who_knows_fewer_streams(probe: Probe) -> None:
    probe.resize(32)
    for number in range(40):
        probe.write(f"t{number}", str(number))
    for name in (*INDEXES, "limits"):
        probe.client.delete(probe.key(name))
    for number in range(8):
        probe.client.delete(probe.key(str(number)))
    left = sum(probe.client.xlen(probe.key(str(number))) for number in range(8, 32))
    assert left
    probe.resize(8)

    probe.write("t", "new")
    assert len(probe.drain()) == left + 1


def test_attempts_are_kept_when_the_records_are(filled: Filled) -> None:
    probe = filled.probe
    for name in INDEXES:
        if name != "messages":
            probe.client.delete(probe.key(name))
    probe.sweep()
    probe.pass_time(LEASE_AFTER_S)

    attempts = {each.id: each.message.attempts for each in probe.take(100)}
    assert attempts[filled.ids["leased"]] == 2
    assert attempts[filled.ids["failed"]] >= 3


def test_attempts_are_those_of_the_bodies_when_the_records_are_lost(probe: Probe) -> None:
    """A body tells of the attempts before its message was last lined up."""
    probe.write("t", "one")
    for _ in range(2):
        [given] = probe.take(1)
        probe.settle(given, "retry", delay_s=1)
        probe.pass_time(1.1)
    assert probe.take(1)[0].message.attempts == 3
    probe.client.delete(probe.key("messages"))
    probe.sweep()

    assert probe.take(1)[0].message.attempts == 3


def test_the_order_of_a_key_survives_a_rebuild(probe: Probe) -> None:
    for number in range(20):
        probe.write("t", str(number), key="k")
    for name in INDEXES:
        probe.client.delete(probe.key(name))
    probe.write("t", "20", key="k")

    assert probe.drain() == [str(number) for number in range(21)]


def test_a_lease_goes_on_through_a_rebuild(filled: Filled) -> None:
    probe = filled.probe
    for name in INDEXES:
        if name != "messages":
            probe.client.delete(probe.key(name))
    probe.sweep()

    assert probe.extend(filled.leased)
    assert probe.settle(filled.leased)


def test_a_lease_is_stale_when_the_record_of_it_is_lost(filled: Filled) -> None:
    """Its message waits again: the worker that holds it cannot settle it any more."""
    probe = filled.probe
    probe.client.delete(probe.key("messages"))
    probe.sweep()

    assert not probe.extend(filled.leased)
    assert not probe.settle(filled.leased)


@pytest.mark.parametrize("when", range(16))
def test_messages_that_move_during_a_rebuild_are_counted_once(when: int, probe: Probe) -> None:
    """A tenant that may have one message in flight must not be blocked by one that was counted twice."""
    probe.limit("t", in_flight=1, bytes=100)
    probe.write("t", "second", delay_s=10)
    probe.write("t", "first", "third", "fourth")
    probe.settle(probe.take(1)[0], "retry", delay_s=10)
    probe.client.delete(probe.key("ready"))
    steps = [probe.rebuild_step(int(step == 0)) for step in range(when)]
    leased = probe.take(1)
    probe.pass_time(11)
    leased += probe.take(1)
    for given in leased:
        assert probe.settle(given, "retry")
    probe.sweep()
    probe.sweep()

    assert probe.is_whole(), steps
    for _ in range(4):
        [given] = probe.take(3)
        assert probe.take(1) == []
        assert probe.settle(given)
    assert probe.take(1) == []
    assert probe.write("t", "x" * 100)[0].is_kept
    assert not probe.write("t", "y")[0].is_kept


def test_two_rebuilds_at_once_end(filled: Filled) -> None:
    probe = filled.probe
    probe.client.delete(probe.key("meta"))
    assert probe.rebuild_step(1) == "rebuilding"
    assert probe.rebuild_step(1) == "rebuilding"
    probe.sweep()

    assert probe.is_whole()
    assert filled.states() == filled.before


def test_one_lost_message_is_said_by_the_reader_that_finds_it_missing(probe: Probe) -> None:
    probe.write("t", "x")
    probe.client.delete(*(probe.key(str(stream)) for stream in range(8)))

    with capture_logs() as logs, probe.queue().reader() as reader:
        assert reader.read() == []

    assert [(each["log_level"], each["count"]) for each in logs if "lost" in each["event"]] == [("error", 1)]


def test_a_deleted_stream_costs_its_messages_which_are_counted_and_no_others(probe: Probe) -> None:
    for number in range(40):
        probe.write(f"t{number}", str(number))
    entries: Any = probe.client.xrange(probe.key("3"))
    gone = {fields[b"payload"].decode() for _, fields in entries}
    assert 0 < len(gone) < 40
    probe.client.delete(probe.key("3"))

    assert probe.sweep() == len(gone)
    assert probe.stats()["lost"] == len(gone)
    assert probe.is_whole()
    assert set(probe.drain()) == {str(number) for number in range(40)} - gone


def test_a_stream_deleted_under_a_reader_is_counted_as_lost(probe: Probe) -> None:
    probe.write("t", "one", "two")
    for number in range(8):
        probe.client.delete(probe.key(str(number)))

    taken = probe.round(10, request="r")
    assert (taken.messages, taken.lost) == ([], 2)
    assert probe.is_whole()


def test_deleted_bodies_of_delayed_and_dead_messages_are_counted_as_lost(probe: Probe) -> None:
    probe.write("t", "late", delay_s=10)
    [written] = probe.write("t", "dead")
    [given] = probe.take(1)
    probe.settle(given, "dead", reason="bad")
    probe.client.delete(probe.key("parked"))

    assert probe.run(probe.shard.explain(written.id)) is not None
    assert probe.sweep() == 2
    assert probe.is_whole()
    assert probe.stats()["lost"] == 2


def test_a_leased_message_whose_body_is_gone_becomes_no_empty_dead_letter(probe: Probe) -> None:
    probe.write("t", "one")
    [given] = probe.take(1)
    for number in range(8):
        probe.client.delete(probe.key(str(number)))
    assert probe.settle(given, "dead", reason="bad")

    stats = probe.stats()
    assert (stats["dead"], stats["lost"], stats["leased"]) == (0, 1, 0)
    assert probe.is_whole()


def test_a_deadline_of_a_message_whose_body_is_gone_does_not_stop_the_sweep(probe: Probe) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=5)
    probe.write("t", "late", delay_s=10, deadline=soon)
    probe.client.delete(probe.key("parked"))
    probe.pass_time(6)

    assert probe.sweep() == 1
    assert probe.is_whole()


def test_entries_of_others_in_a_stream_are_removed(probe: Probe) -> None:
    probe.write("t", "one")
    probe.client.xadd(probe.key("0"), {"field": "value"})

    probe.sweep()
    assert probe.is_whole()
    assert probe.drain() == ["one"]


def test_accounts_that_were_lost_are_noticed_though_the_sweep_makes_one_of_them_again(probe: Probe) -> None:
    """The sweep buries the tenant's only message, and so writes an account that knows nothing of before."""
    late = datetime.fromtimestamp(probe.now_ms() / 1000 + 5, UTC)
    probe.limit("t", in_flight=1)
    probe.write("t", "held")
    [held] = probe.take(1)
    probe.write("t", "late", deadline=late)
    probe.pass_time(10)
    probe.client.delete(probe.key("accounts"))

    probe.sweep()
    probe.done([held])
    probe.write("t", "next")
    assert probe.is_whole()
    assert probe.drain() == ["next"]


def test_a_message_that_was_leased_during_a_rebuild_comes_back_before_later_ones(probe: Probe) -> None:
    probe.write("t", "0", "1")
    probe.done(probe.take(1))
    [first] = probe.take(1)
    probe.client.delete(probe.key("accounts"))
    probe.sweep()
    probe.write("t", "2")

    probe.settle(first, "release")
    assert probe.drain() == ["1", "2"]


def test_a_clock_that_was_far_ahead_takes_the_queues_with_it_and_what_was_timed_by_it(probe: Probe) -> None:
    """It would stay ahead for another two hours, and all that follows would come an hour late."""
    hour = 3600.0
    probe.limit("slow", rate=1 / 20)
    probe.sweep()
    probe.pass_time(hour)
    probe.sweep()
    probe.write("t", "held", "tried again")
    _, retried = probe.take(2, lease_s=30)
    probe.settle(retried, "retry", delay_s=20.0)
    probe.write("slow", "first", "second")
    probe.write("t", "named", unique=Unique("n", window=20.0))
    assert len(probe.drain()) == 2

    probe.correct(hour)
    for _ in range(2):
        assert probe.take(5) == []
        probe.sweep()
    server_s, microseconds = probe.client.time()
    assert abs(probe.now_ms() / 1000 - server_s - microseconds / 1e6) < 5

    probe.pass_time(40)
    assert sorted(probe.drain()) == ["held", "second", "tried again"]
    assert probe.write("t", "again", unique=Unique("n", window=20.0))[0].is_new
    assert probe.run(probe.shard.sweep(interval_s=1.0)) == 0
    assert probe.is_whole()
