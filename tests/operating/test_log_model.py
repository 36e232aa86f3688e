"""What operators do to the consumers of a log, and to its shards, beside a plain model.

Dead letters come, are retried, dropped and superseded; checkpoints are moved; consumers are halted, paused, renamed and retired; shards
are added, and records are replayed: with two consumers, so that nothing that is done to one of them changes the other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from random import Random
from typing import Any

import pytest
import redis
from psycopg.types.json import Jsonb
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.intervals import take_for_fast
from fixtures.plain_log import PARKED, At, Move, PlainLetter, PlainLog, PlainReader, PlainReplay, Word
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.consuming import Consumed, WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.crash_points import install_crashpoint
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import NotReplayable, Refused, Unknown
from penstock.operating.channels import reshard
from penstock.operating.consumers import rename, retire
from penstock.operating.letters import LetterFilter, drop, of_consumer, request_retries, retry
from penstock.operating.pausing import pause, resume
from penstock.operating.replay import ReplayRequest, replay
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.operating.status.gathering import status
from penstock.records import Offset, Place, Record, Shard, ShardName
from penstock.streaming import Streamer

THINGS, COPIES = Log("things", shards=2, keep=timedelta(days=1)), Log("copies", shards=3)
BEGINNING = datetime(2026, 3, 1, tzinfo=UTC)
TABLE = """
CREATE TABLE public.effects (number serial, who text, shard int, "offset" bigint, word text)
"""
ERRORS = {"ValueError": ValueError, "LookupError": LookupError}

WHO, SHARDS, OFFSETS, YES_OR_NO = ("one", "one", "two"), range(4), range(7), (True, False)
INSERT = 'INSERT INTO public.effects (who, shard, "offset", word) VALUES (:who, :shard, :offset, :word)'
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 2, "start": "latest"},
    {"park_key": True},
    {"park_key": True, "batch": 2},
    {"halt_after": 2},
    {"halt_after": 3, "park_key": True},
    {"on_poison": "halt"},
)
POINTS = (
    *(("offset", offset) for offset in OFFSETS),
    *(("place", shard, offset) for shard in SHARDS for offset in OFFSETS[:4]),
    *(("time", minute) for minute in range(-1, 7)),
)
FILTERS = ({}, {}, {}, *({"key": key} for key in "abcd"), *({"error": error} for error in (*ERRORS, PARKED)))
CHANGES: dict[str, dict[str, Sequence[Any]]] = {
    "say": {"streams": (True, True, False)},
    "work": {
        "who": WHO,
        "part": (None, None, 0, 1),
        "is_fast": YES_OR_NO,
        "crash": (None, None, "after_read", "after_apply", "before_commit", "after_commit"),
        "passes": (1, 2, 3),
    },
    "retry_letters": {
        "who": WHO,
        "of": FILTERS,
        "chosen": (slice(None), slice(None), slice(1), slice(-1, None)),
        "is_repeated": YES_OR_NO,
        "superseded": YES_OR_NO,
        "crashes": YES_OR_NO,
        "fixes": ("", "ab", "abcd"),
    },
    "reset": {
        "who": WHO,
        "to": (None, None, *POINTS, *[("earliest",), ("latest",)] * 3),
        "shard": (None, *SHARDS[:3]),
        "resumes": YES_OR_NO,
        "applies": YES_OR_NO,
    },
    "replay": {
        "start": (None, None, *POINTS),
        "end": (*[None] * 30, *POINTS),
        "key": (None, None, *"abcd"),
        "shard": (None, None, *SHARDS),
        "is_again": YES_OR_NO,
        "way": ("plans", "applies", "applies", "dies"),
    },
    "go_back": {"who": WHO},
    "reshard_before_it_has_passed": {"who": WHO, "part": (0, 1)},
    "resume": {"who": WHO, "fixes": ("", "ab", "abcd")},
    "pause_and": {"who": ("one", "one", "channel"), "name": ("request", "rename", "retire", "reshard", "reset")},
    "break_the_handler": {"key": "abcd"},
    "lose_the_entries": {},
    "work_beside_another_process": {"who": WHO, "shard": (0, 1)},
    "request": {"who": WHO, "of": FILTERS},
    "drop": {"who": WHO, "of": FILTERS},
    "pause": {"who": ("one", "two", "channel"), "is_resumed": (True, True, False)},
    "reshard": {"shards": (1, 2, 3), "applies": YES_OR_NO},
    "rename": {"who": WHO, "applies": YES_OR_NO},
    "retire": {"who": WHO, "applies": YES_OR_NO},
    "cancel_replays": {},
    "look": {},
}
"""What may happen, with the values of its arguments: each is a method."""

NAMES = [
    *CHANGES,
    *["work", "work", "work", "retry_letters", "retry_letters", "reset", "go_back", "pause_and", "replay"] * 2,
]
REFUSALS = (None, None, *ERRORS)


class CrashError(Exception):
    """Simulates the end of the process."""


def make_point(point: tuple[Any, ...] | None) -> Any:
    match point:
        case ("offset", offset):
            return Offset(offset)
        case ("place", shard, offset):
            return Place(ShardName("things", Shard(shard)), Offset(offset))
        case ("time", minute):
            return BEGINNING + timedelta(minutes=minute)
        case ("earliest" | "latest" as end,):
            return end
        case _:
            return None


@contextmanager
def crashing(point: str, passes: int) -> Iterator[None]:
    """Ends a process when it passes a crash point for the time given."""
    numbers = count(1)

    def crash(name: str) -> None:
        if name == point and next(numbers) == passes:
            raise CrashError

    install_crashpoint(crash)
    try:
        yield
    except CrashError:
        pass
    finally:
        install_crashpoint(None)


class Operating:
    """One log, its streamer, and two consumers, by the names that they had first."""

    def __init__(self, dice: Random, connection: Connection, client: redis.Redis, urls: tuple[str, str]) -> None:
        self.dice, self.connection, self.client, self.urls = dice, connection, client, urls
        self.streamer = Streamer(Pipeline([THINGS, COPIES]), *self.urls)
        self.streamer.open()
        self.log, self.staged = PlainLog(2), list[Word]()
        self.refused: dict[str, str] = {}
        self.readers: dict[str, PlainReader] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.effects: list[tuple[str, int, int, str]] = []
        self.replays: dict[str, PlainReplay] = {}
        self.pauses: set[str] = set()
        self.workers: dict[tuple[str, int | None], LogWorker] = {}
        self.copies: list[tuple[int, int, int, str]] = []
        self.numbers, self.seen = count(1), 0

    def close(self) -> None:
        for who in self.readers:
            self.stop(who)
        self.streamer.close()

    def declare(self, seed: int) -> None:
        for name, options in (("one", KINDS[seed % 7]), ("two", KINDS[(seed + 3) % 7])):
            known = {key: value for key, value in options.items() if key != "batch"}
            self.readers[name], self.options[name] = PlainReader(name, **known), options
            print(f"{name}: {options}")  # noqa: T201  shown if the test fails

    def change(self) -> None:
        """Some words, and changes."""
        self.say(streams=True)
        for name in self.dice.choices(NAMES, k=5):
            self.do(name)

    def do(self, name: str, **known: Any) -> None:
        arguments = {argument: self.dice.choice(values) for argument, values in CHANGES[name].items()} | known
        print(f"{name}: {arguments}")  # noqa: T201  shown if the test fails
        getattr(self, name)(**arguments)
        self.check()

    # --- records and consumers ---

    def say(self, *, streams: bool) -> None:
        """Stages words of some keys, of which the handler refuses some."""
        for _ in range(self.dice.randint(2, 5)):
            key, minute, error = self.dice.choice("abcd"), self.dice.randint(0, 5), self.dice.choice(REFUSALS)
            word = Word(f"{key}{next(self.numbers)}", key, minute)
            print(f"{word}, {error}")  # noqa: T201  shown if the test fails
            if error:
                self.refused[word.text] = error
            self.connection.execute(
                "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at) "
                "VALUES ('things', %s, %s, 'said', 'word', %s, %s)",
                [THINGS.shard_for(key), key, Jsonb(word.text), BEGINNING + timedelta(minutes=minute)],
            )
            self.staged.append(word)
        if streams:
            self.stream()

    def stream(self) -> None:
        self.streamer.drain()
        for word in self.staged:
            self.log.append(word)
        self.staged.clear()

    def break_the_handler(self, key: str) -> None:
        """It refuses all words of a key, those that it has applied too."""
        words = (word.text for records in self.log.shards for word in records if word.key == key)
        self.refused |= dict.fromkeys(words, "LookupError")

    def fix_the_handler(self, keys: str) -> None:
        self.refused = {word: error for word, error in self.refused.items() if word[0] not in keys}

    def lose_the_entries(self) -> None:
        """Redis has evicted them: they come from the journal, in whichever order of shards."""
        if all(reader.halt_after == 100 for reader in self.readers.values()):
            for shard in range(len(self.log.shards)):
                self.client.xtrim(log_keys("penstock", ShardName("things", Shard(shard))).stream, maxlen=0)

    def work(
        self, who: str, part: int | None = None, crash: str | None = None, passes: int = 1, *, is_fast: bool = False
    ) -> None:
        """A process drains, begins anew if it dies, and retries what is requested; it goes on later, unless something was left."""
        worker = self.worker(who, part)
        if is_fast:
            take_for_fast(worker)
        if crash is not None:
            with crashing(f"consumer.{crash}", passes):
                self.drain(worker)
            worker.close()
        self.drain(worker)
        self.deliver(who, part)
        reader = self.readers[who]
        if any(letter.is_requested for letter in reader.letters.values()):
            worker.close()
            self.retry_requested(who, part)
        if reader.halted or sum(reader.lag(self.log).values()):
            worker.close()  # it would leave these shards alone for a while

    def retry_requested(self, who: str, part: int | None) -> None:
        """By a process that works in slices."""
        with self.make_worker(who, part) as worker:
            worker.slice(1000, lambda: False)
        taken = self.readers[who].take_requested()
        outcomes = [*self.readers[who].retry(self.refused, taken)]
        self.note_retried(who, taken, outcomes)

    def work_beside_another_process(self, who: str, shard: int) -> None:
        """It has the lock of one shard."""
        if len(self.log.sizes) > 1 or not self.readers[who].offsets:
            return
        with connect_postgres(self.urls[0], application="busy") as busy, busy.transaction():
            name = self.readers[who].name
            locks = "SELECT FROM penstock.checkpoints WHERE consumer = %s AND shard = %s FOR UPDATE"
            busy.execute(locks, [name, shard])
            worker = self.worker(who, None)
            self.drain(worker)
            worker.close()
            self.deliver(who, None, busy=shard)

    @staticmethod
    def drain(worker: LogWorker) -> None:
        rounds = count(1)

        def check(_: Consumed) -> None:
            assert next(rounds) < 200, "it does not come to an end"

        worker.drain(check)

    def worker(self, who: str, part: int | None) -> LogWorker:
        """The process that works on a part of a consumer's shards, or on all."""
        if (who, part) not in self.workers:
            self.workers[who, part] = self.make_worker(who, part)
        return self.workers[who, part]

    def make_worker(self, who: str, part: int | None) -> LogWorker:
        flow, shards = self.declare_reader(who), None if part is None else [part]
        return LogWorker(WorkerSetup(flow, flow.get_consumer(self.readers[who].name), *self.urls, shards=shards))

    def declare_reader(self, who: str) -> Pipeline:
        flow = Pipeline([THINGS, COPIES])

        def apply(session: Session, records: Sequence[Record]) -> None:
            for record in records:
                values = {"who": who, "shard": record.shard, "offset": record.offset, "word": record.data}
                session.execute(text(INSERT), values)
                if error := self.refused.get(record.data):
                    raise ERRORS[error](f"no {record.data}")

        flow.consumer(reads=THINGS, name=self.readers[who].name, attempts=1, **self.options[who])(apply)
        return flow

    def stop(self, who: str) -> None:
        """Ends its processes: it has another name now, or none."""
        for key in [key for key in self.workers if key[0] == who]:
            self.workers.pop(key).close()

    def deliver(self, who: str, part: int | None, busy: int | None = None) -> None:
        reader = self.readers[who]
        reader.register(self.log)
        reader.is_paused = bool(self.pauses & {who, "channel"})
        begins = [end - size for end, size in zip(self.log.ends, self.log.sizes, strict=True)]
        chosen = [
            first + number
            for first, size in zip(begins, self.log.sizes, strict=True)
            for number in range(size)
            if part is None or number % 2 == part
        ]
        self.effects += [(who, *effect) for effect in reader.deliver(self.log, self.refused, chosen, busy)]

    # --- dead letters ---

    def choose(self, who: str, of: dict[str, Any]) -> tuple[list[Any], list[tuple[At, PlainLetter]]]:
        """The letters that a filter takes, as they are listed and as they should be."""
        reader = self.readers[who]
        listed = of_consumer(Store(self.connection), reader.name, LetterFilter(**of))
        expected = [
            (at, PlainLetter(**vars(letter)))
            for at, letter in sorted(reader.letters.items())
            if of.get("key", letter.word.key) == letter.word.key
            and of.get("error", letter.reason.partition(":")[0]) == letter.reason.partition(":")[0]
        ]
        assert [(each.shard, each.offset) for each in listed] == [at for at, _ in expected]
        return listed, expected

    def retry_letters(
        self,
        who: str,
        of: dict[str, str],
        chosen: slice,
        fixes: str,
        *,
        is_repeated: bool,
        superseded: bool,
        crashes: bool,
    ) -> None:
        """By a command, which dies once, and which somebody gives again with what was listed before."""
        every, all_expected = self.choose(who, of)
        listed, expected = every[chosen], all_expected[chosen]
        self.fix_the_handler(fixes)
        flow = self.declare_reader(who)
        if crashes:
            with crashing("consumer.before_commit", 1):
                retry(flow, listed, self.urls[0], superseded=superseded)
        for _ in range(1 + is_repeated):
            done = retry(flow, listed, self.urls[0], superseded=superseded)
            outcomes = [*self.readers[who].retry(self.refused, expected, superseded=superseded)]
            assert [((each.letter.shard, each.letter.offset), each.outcome) for each in done] == outcomes
            self.note_retried(who, expected, outcomes)

    def note_retried(self, who: str, letters: list[tuple[At, PlainLetter]], outcomes: list[tuple[At, str]]) -> None:
        words = {at: letter.word.text for at, letter in letters}
        self.effects += [(who, *at, words[at]) for at, outcome in outcomes if outcome == "applied"]

    def request(self, who: str, of: dict[str, str]) -> None:
        listed, expected = self.choose(who, of)
        assert request_retries(Store(self.connection), listed) == len(expected)
        for at, _ in expected:
            self.readers[who].letters[at].is_requested = True

    def drop(self, who: str, of: dict[str, str]) -> None:
        listed, expected = self.choose(who, of)
        assert drop(Store(self.connection), listed) == len(expected)
        for at, _ in expected:
            del self.readers[who].letters[at]

    # --- operators ---

    def pause(self, who: str, *, is_resumed: bool) -> None:
        kind, name = ("channel", "things") if who == "channel" else ("consumer", self.readers[who].name)
        if who != "channel" and not self.readers[who].offsets:
            with pytest.raises(Unknown):
                pause(Store(self.connection), "consumer", name, reason="a deploy", by="ann")
        elif is_resumed:
            assert (resume(Store(self.connection), kind, name) is not None) == (who in self.pauses)  # type: ignore[arg-type]
            self.pauses.discard(who)
        else:
            pause(Store(self.connection), kind, name, reason="a deploy", by="ann")  # type: ignore[arg-type]
            self.pauses.add(who)

    def reset(self, who: str, to: tuple[Any, ...] | None, shard: int | None, *, resumes: bool, applies: bool) -> None:
        reader, options = self.readers[who], {"shard": shard, "resume": resumes, "apply": applies}
        try:
            moves = self.plan_reset(reader, to, shard, resumes=resumes)
        except (Refused, Unknown) as refusal:
            with pytest.raises(type(refusal)):
                reset_checkpoint(Store(self.connection), reader.name, make_point(to), **options)  # type: ignore[arg-type]
            return
        done = reset_checkpoint(Store(self.connection), reader.name, make_point(to), **options)  # type: ignore[arg-type]
        assert [Move(m.shard, m.before, m.after, m.dead_letters, m.resumes) for m in done] == moves
        assert [m.again - m.passed_over for m in done] == [m.before - m.after for m in moves]
        assert all(min(m.again, m.passed_over) == m.removed == 0 for m in done)
        for move in moves if applies else ():
            reader.move(move, resume=resumes)

    def go_back(self, who: str) -> None:
        """To before a record that has superseded a dead letter, which comes before the checkpoint."""
        self.do("work", who=who, part=None)
        later = [letter.later for letter in self.readers[who].letters.values() if letter.later is not None]
        if later:
            shard, offset = self.dice.choice(later)
            self.do("reset", who=who, to=("place", shard, offset - 1), shard=None, applies=True)

    def reshard_before_it_has_passed(self, who: str, part: int) -> None:
        self.do("reshard", applies=True)
        self.say(streams=True)
        self.do("work", who=who, part=part)
        self.do("look")

    def resume(self, who: str, fixes: str) -> None:
        """After the handler was fixed, or not."""
        self.fix_the_handler(fixes)
        self.do("reset", who=who, to=None, shard=None, resumes=True, applies=True)
        self.do("work", who=who, part=None)

    def pause_and(self, who: str, name: str) -> None:
        """Nothing is applied meanwhile, whatever is done to the consumer or the shards; and it goes on at the end."""
        reader = "one" if who == "channel" else who
        self.do("pause", who=who, is_resumed=False)
        self.do(name, **({} if name == "reshard" else {"who": reader}))
        self.do("request", who=reader, of={})
        self.say(streams=True)
        self.do("work", who=reader, part=None, crash=None)
        self.do("pause", who=who, is_resumed=True)
        self.do("work", who=reader, part=None)

    def plan_reset(
        self, reader: PlainReader, target: tuple[Any, ...] | None, shard: int | None, *, resumes: bool
    ) -> list[Move]:
        ends = [len(records) for records in self.log.shards]
        match target:
            case ("place", named, _) if shard not in {None, named}:
                raise Unknown
            case ("place", named, _):
                shard = named
            case _:
                pass
        if not reader.offsets or shard not in {None, *reader.offsets}:
            raise Unknown
        if target and target[0] == "offset" and shard is None and len(reader.offsets) > 1:
            raise Refused
        moves = reader.plan_moves(self.find_target(target), shard, resume=resumes)
        if any(not 0 <= move.after <= ends[move.shard] and move.after != move.before for move in moves):
            raise Refused
        return moves

    def find_target(self, target: tuple[Any, ...] | None) -> Callable[[int], int] | None:
        match target:
            case None:
                return None
            case ("time", minute):
                return lambda shard: self.log.before(shard, minute)
            case ("latest",):
                return lambda shard: len(self.log.shards[shard])
            case _:
                return lambda _: 0 if target[0] == "earliest" else target[-1]

    def reshard(self, shards: int, *, applies: bool) -> None:
        """Records that are staged and have no offset yet get theirs in the new shards."""
        before, first = self.log.sizes[-1], len(self.log.shards)
        if first > 6:
            return
        plan = reshard(Store(self.connection), "things", shards, apply=applies)
        lags = {r.name: (sum(r.lag(self.log).values()), len(r.halted)) for r in self.readers.values() if r.offsets}
        for copy in self.open_replays():
            ends = (len(records) for records in self.log.shards)
            lags[f"replay-{copy.number}"] = sum(ends) - sum(copy.offsets.values()), 0
        assert {each.consumer: (each.lag, each.halted) for each in plan.behind} == lags
        assert (plan.before, plan.after, plan.first_shard) == (before, shards, first)
        assert plan.applied == (applies and shards != before)
        if plan.applied:
            self.log.reshard(shards)
            for reader in self.readers.values():
                reader.reshard(range(first, first + shards))
            for copy in self.open_replays():
                copy.others |= dict.fromkeys(range(first, first + shards), 0)

    def rename(self, who: str, *, applies: bool) -> None:
        reader, names = self.readers[who], {"one": "uno", "uno": "one", "two": "due", "due": "two"}
        if not reader.offsets:
            with pytest.raises(Unknown):
                rename(Store(self.connection), reader.name, names[reader.name], apply=applies)
            return
        rename(Store(self.connection), reader.name, names[reader.name], apply=applies)
        if applies:
            reader.name = names[reader.name]
            self.stop(who)

    def retire(self, who: str, *, applies: bool) -> None:
        """When it begins again it is a new one."""
        reader = self.readers[who]
        if not reader.offsets:
            with pytest.raises(Unknown):
                retire(Store(self.connection), reader.name)
            return
        [found] = retire(Store(self.connection), reader.name, apply=applies)
        assert (found.passed, found.lag) == (sum(reader.offsets.values()), sum(reader.lag(self.log).values()))
        assert found.dead_letters == len(reader.letters)
        if applies:
            self.pauses.discard(who)
            self.stop(who)
            reader.retire()

    # --- replays ---

    def replay(self, start: Any, end: Any, key: str | None, shard: int | None, way: str, *, is_again: bool) -> None:
        request = ReplayRequest("things", "copies", make_point(start), make_point(end), key, shard)
        known = self.replays.get(request.text)
        if known is not None and known.has_ended and is_again:
            known = None
        copy = known or self.plan_replay(start, end, key, shard)
        refusal = Unknown if copy is None else NotReplayable if copy.has_ended and way != "plans" else None
        if copy is None or refusal is not None:
            with pytest.raises(refusal or Unknown):
                self.ask(request, apply=way != "plans", again=is_again)
            return
        planned = self.ask(request, apply=False, again=is_again)
        assert planned.records == (0 if copy.has_ended else copy.count(self.log))
        assert {each.shard: (each.first, each.last) for each in planned.shards} == copy.ranges
        if way == "plans":
            return
        self.replays[request.text] = copy
        self.carry_out(request, copy, dies=way == "dies", again=is_again)

    def ask(self, request: ReplayRequest, **options: Any) -> Any:
        with connect_postgres(self.urls[0], application="test") as connection:
            return replay(Store(connection), request, **options)

    def plan_replay(self, start: Any, end: Any, key: str | None, shard: int | None) -> PlainReplay | None:
        named = [point[1] for point in (start, end) if point and point[0] == "place"]
        only = shard if shard is not None or not named else named[0]
        shards = [each for each in range(len(self.log.shards)) if only in {None, each}]
        if not shards or any(each not in shards for each in named):
            return None
        ranges: dict[int, tuple[int, int]] = {}
        for each in shards:
            first, last = 1, len(self.log.shards[each])
            if start:
                first = self.log.before(each, start[-1]) + 1 if start[0] == "time" else max(1, start[-1])
            if end and end[0] != "time":
                last = min(last, end[-1])
            ranges |= {each: (first, last)} if first <= last else {}

        def chooses(word: Word) -> bool:
            return (
                key in {None, word.key}
                and (not start or start[0] != "time" or word.minute >= start[-1])
                and (not end or end[0] != "time" or word.minute < end[-1])
            )

        return PlainReplay(ranges, {each: first - 1 for each, (first, _) in ranges.items()}, chooses)

    def carry_out(self, request: ReplayRequest, copy: PlainReplay, *, dies: bool, again: bool) -> None:
        def die(_: int) -> None:
            if dies:
                raise CrashError

        if not copy.number:
            ends = {shard: len(records) for shard, records in enumerate(self.log.shards)}
            copy.others = {shard: end for shard, end in ends.items() if shard not in copy.ranges}
        left = [shard for shard, (_, last) in copy.ranges.items() if copy.done[shard] < last]
        try:
            done = self.ask(request, apply=True, again=again, on_batch=die)
            assert (done.staged, done.ended_at is not None) == (copy.staged + copy.count(self.log), True)
        except CrashError:
            left = left[:1]
        else:
            copy.has_ended = True
        copy.number = (
            self.connection.execute("SELECT max(replay) FROM penstock.replays").fetchall()[0][0]
            if not copy.number
            else copy.number
        )
        for shard in left:
            self.copies += [(copy.number, shard, *staged) for staged in copy.stage(self.log, shard)]

    def open_replays(self) -> list[PlainReplay]:
        return [copy for copy in self.replays.values() if not copy.has_ended]

    def cancel_replays(self) -> None:
        for copy in self.open_replays():
            retire(Store(self.connection), f"replay-{copy.number}", apply=True)
        self.replays = {request: copy for request, copy in self.replays.items() if copy.has_ended}

    # --- what is there ---

    def look(self) -> None:
        """At each consumer's lag, and at who is halted, waits or is paused."""
        found = status(Store(self.connection), self.client, Pipeline([THINGS, COPIES]))
        readers = {reader.name: (who, reader) for who, reader in self.readers.items() if reader.offsets}
        shown = {each.consumer: each for each in found.consumers}
        assert shown.keys() == readers.keys() | {f"replay-{copy.number}" for copy in self.open_replays()}
        for name, (who, reader) in readers.items():
            assert {each.shard: each.lag for each in shown[name].shards} == reader.lag(self.log)
            waits = {each.shard: each.waiting for each in shown[name].shards if each.waiting}
            expected = {shard: reader.waits_for(self.log, shard) for shard in reader.offsets}
            assert {shard: why.split()[2] for shard, why in waits.items()} == {
                shard: f"things/{earlier},"
                for shard, earlier in expected.items()
                if earlier is not None and reader.lag(self.log)[shard]
            }
            assert {each.shard for each in shown[name].shards if each.halted} == reader.halted.keys()
            assert (found.find_pause(shown[name]) is not None) == bool(self.pauses & {who, "channel"})

    def check(self) -> None:
        rows = self.connection.execute(
            'SELECT consumer, shard, "offset", applied, dead, halted FROM penstock.checkpoints'
        ).fetchall()
        expected = {
            (reader.name, shard): (offset, reader.applied[shard], reader.dead[shard])
            for reader in self.readers.values()
            for shard, offset in reader.offsets.items()
        }
        copied = Counter(copy[:2] for copy in self.copies)
        for copy in self.open_replays():
            for shard, offset in copy.offsets.items():
                expected[f"replay-{copy.number}", shard] = (offset, copied[copy.number, shard], 0)
        assert {(name, shard): tuple(rest) for name, shard, *rest, _ in rows} == expected
        halted = {(r.name, shard): why for r in self.readers.values() for shard, why in r.halted.items()}
        assert {(name, shard) for name, shard, *_, why in rows if why} == halted.keys()
        assert all(halted[name, shard] in why for name, shard, *_, why in rows if why)
        self.check_letters()
        self.check_effects()

    def check_letters(self) -> None:
        rows = self.connection.execute(
            "SELECT consumer, shard, \"offset\", key, data #>> '{}', attempts, parked, reason, "
            "       later_shard, later_offset, retry_requested_at IS NOT NULL FROM penstock.dead_letters "
            'ORDER BY consumer, shard, "offset"'
        ).fetchall()
        assert rows == sorted(
            (
                reader.name,
                *at,
                w.word.key,
                w.word.text,
                w.attempts,
                w.is_parked,
                w.reason,
                *(w.later or (None, 0)),
                w.is_requested,
            )
            for reader in self.readers.values()
            for at, w in reader.letters.items()
        )

    def check_effects(self) -> None:
        """Those of a key are in one order, whatever the order of the shards."""
        found = self.connection.execute(
            'SELECT number, who, shard, "offset", word FROM public.effects WHERE number > %s ORDER BY number',
            [self.seen],
        ).fetchall()
        self.seen = max([self.seen, *(number for number, *_ in found)])
        rows = [tuple(effect) for _, *effect in found]
        assert sorted(rows, key=lambda row: (row[0], row[-1][0])) == sorted(
            self.effects, key=lambda row: (row[0], row[-1][0])
        )
        self.effects.clear()
        copies = self.connection.execute(
            "SELECT (o ->> 'replay')::int, (o ->> 'shard')::int, (o ->> 'offset')::int, data #>> '{}' "
            "FROM penstock.staged_records, LATERAL (SELECT headers -> 'replayed-from' AS o) AS origin "
            "WHERE channel = 'copies' ORDER BY id"
        ).fetchall()
        assert copies == self.copies


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_log_and_its_consumers_match_the_model_whatever_operators_do(
    connection: Connection, redis_client: redis.Redis, database_url: str, redis_url: str, seed: int
) -> None:
    """Guarantees 5, 6 and 21."""
    connection.execute(TABLE)
    with closing(Operating(Random(seed), connection, redis_client, (database_url, redis_url))) as operating:
        operating.declare(seed)
        for _ in range(6):
            operating.change()
