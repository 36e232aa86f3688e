"""What changes something: first its plan, with a digest of it; then the change, if the plan is still the same; then a line in the log.

The commands do the same, and every plan shows the one that it stands for.  They are carried out with a login of their own, which
the console does not have unless it was given one.  Nothing here calls a handler.
"""

import hashlib
import shlex
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from urllib.parse import quote, urlencode

import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.server import connect_redis
from penstock.console.access import Right, Visitor
from penstock.console.reading import ConnectionPool
from penstock.console.status_sampler import TIMEOUTS
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.registry import Pause, PauseKind, read_pauses
from penstock.database.store import Store
from penstock.display import format_count, to_json
from penstock.errors import InvalidName, Refused, Unknown
from penstock.operating import letters
from penstock.operating.consumers import find_halts
from penstock.operating.jobs.browsing import JobFilter, find_jobs, parse_filter
from penstock.operating.jobs.changes import cancel_jobs, jobs_command, move_due, retry_jobs
from penstock.operating.jobs.queue_limits import KINDS, LimitChange
from penstock.operating.pausing import check_pausable, find_last_action, note_action, pause, resume
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.pipeline import Pipeline, get_scope
from penstock.records import Offset, Place, Shard, ShardName, parse_moment

log = structlog.get_logger("penstock.console")

Given = Mapping[str, str]
"""The fields of a form, or of an address."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an action would do."""

    title: str  # as a question's first words: ``Pause the consumer totals``
    changes: tuple[str, ...]  # one line each
    command: str  # the command that does the same
    fields: Mapping[str, str]  # identify what it is about: they are sent again
    back: str  # the page to return to
    act: Callable[[str], object]  # carries it out, in a transaction, for a visitor of that name
    rest: Iterable[object] = ()  # what is left of it after that, in steps that are transactions of their own
    notes: tuple[str, ...] = ()  # numbers of this moment, which may change before it is carried out
    asks_reason: bool = False  # true if a reason is asked for
    confirm: str = ""  # what has to be typed, if something is destroyed; empty otherwise
    last: int | None = None  # the number of the last action of this title: a plan is carried out once

    @property
    def digest(self) -> str:
        """Differs if the plan does, or once it was carried out."""
        planned = [self.title, self.changes, self.fields, self.last]
        return hashlib.sha256(to_json(planned).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ActingServers:
    """What an action is planned and carried out with."""

    store: Store
    stack: ExitStack
    redis_url: str

    @cached_property
    def client(self) -> RedisClient:
        """Redis, which few actions need: the others go on while it is away."""
        client: RedisClient = self.stack.enter_context(connect_redis(self.redis_url, timeouts=TIMEOUTS))
        return client


@dataclass(frozen=True, slots=True)
class Action:
    """An action, and how it is planned."""

    name: str
    right: Right
    plan: Callable[[ActingServers, Given], Plan]


class ChangedPlan(Exception):
    """What would be done is not what was shown, or was not confirmed."""


@dataclass(frozen=True)
class Acting:
    """Carries actions out."""

    pipeline: Pipeline | None
    pool: ConnectionPool | None  # of a login of its own; None if there is none
    redis_url: str = ""

    @property
    def is_possible(self) -> bool:
        """True if there is a login for it."""
        return self.pool is not None

    def plan(self, action: Action, given: Given) -> Plan:
        """What an action would do."""
        with self._servers() as servers:
            return self._plan(action, servers, given)

    def carry_out(self, action: Action, visitor: Visitor, given: Given) -> str:
        """Does it, if the plan is still the one that was shown, and was confirmed; returns the page to go to."""
        with self._servers() as servers:
            plan, store = self._plan(action, servers, given), servers.store
            if given.get("digest") != plan.digest:
                raise ChangedPlan("This has changed since the plan was shown. Here is the new one.")
            if given.get("confirm", "") != plan.confirm:
                raise ChangedPlan(f"Nothing was done: type {plan.confirm} to confirm.")
            with store.transaction(plan.title):
                plan.act(visitor.name)
                note_action(store, visitor.name, plan.title, plan.command)
            deque(plan.rest, maxlen=0)
        log.warning(
            "acted",
            action=action.name,
            by=visitor.name,
            **{n: v for n, v in plan.fields.items() if n not in {*KINDS, "unique"}},
        )
        return plan.back

    def _plan(self, action: Action, servers: ActingServers, given: Given) -> Plan:
        plan = action.plan(servers, given)
        return replace(plan, last=find_last_action(servers.store, plan.title))

    @contextmanager
    def _servers(self) -> Iterator[ActingServers]:
        if self.pool is None:
            raise Refused("this console only reads: it was given no login for acting (--acting-database-url)")
        with self.pool.connection() as connection, ExitStack() as stack:
            yield ActingServers(Store(connection, get_scope(self.pipeline)), stack, self.redis_url)


def _field(given: Given, name: str) -> str:
    if not given.get(name):
        raise InvalidName(f"{name} is missing")
    return given[name]


def _kind(given: Given) -> PauseKind:
    match _field(given, "kind"):
        case "consumer":
            return "consumer"
        case "channel":
            return "channel"
        case other:
            raise InvalidName(f"kind {other!r}: consumer or channel is wanted")


def _page(kind: str, name: str) -> str:
    return f"/{kind}s/{quote(name, safe='')}"


def _plan_pause(servers: ActingServers, given: Given) -> Plan:
    store = servers.store
    kind, name = _kind(given), _field(given, "name")
    check_pausable(store, kind, name)
    before = _find_pause(store, kind, name)
    reason = shlex.quote(given["reason"]) if given.get("reason") else "…"
    return Plan(
        f"Pause {kind} {name}",
        (
            "What is being applied ends; nothing is begun after it, in any process.",
            "Applications go on staging, the streamer publishing. Retention waits.",
            *([f"It is paused already, and only the reason changes: {before}"] if before is not None else []),
        ),
        f"penstock {kind}s pause {name} --reason {reason}",
        {"kind": kind, "name": name},
        _page(kind, name),
        lambda by: pause(store, kind, name, reason=given.get("reason", ""), by=by),
        asks_reason=True,
    )


def _find_pause(store: Store, kind: PauseKind, name: str) -> Pause | None:
    return next((each for each in read_pauses(store) if (each.kind, each.name) == (kind, name)), None)


def _plan_resume(servers: ActingServers, given: Given) -> Plan:
    store = servers.store
    kind, name = _kind(given), _field(given, "name")
    if (found := _find_pause(store, kind, name)) is None:
        raise Unknown(f"{kind} {name} is not paused")
    changes = (str(found), "It goes on within a second, where it was.")
    return Plan(
        f"Resume {kind} {name}",
        changes,
        found.how_to_resume,
        {"kind": kind, "name": name},
        _page(kind, name),
        lambda _: resume(store, kind, name),
    )


def _plan_go_on(servers: ActingServers, given: Given) -> Plan:
    store = servers.store
    name = _field(given, "name")
    moves = [each for each in reset_checkpoint(store, name, resume=True) if each.resumes]
    if not moves:
        raise Unknown(f"no shard of {name} is halted")
    for shard, reason in find_halts(store, name):
        # Some effects are in the database already, or records are missing: the reason says how to go on.
        if "penstock " in reason:
            raise Refused(
                f"{name} is halted in {shard} for a reason that names another way, and must not simply go on: penstock status says what to type"
            )
    changes = [f"{each.channel}/{each.shard} goes on behind offset {each.after}" for each in moves]
    if letters.newest(store, letters.LetterFilter(name), limit=1):
        retry = f"penstock dead-letters retry {name} --all"
        changes.append(f"It has dead letters: to keep the order of their keys, retry them before: {retry}")
    return Plan(
        f"Let the halted shards of {name} go on",
        ("The cause should be gone: otherwise they halt again.", *changes),
        f"penstock reset checkpoint {name} --resume --apply",
        {"name": name},
        _page("consumer", name),
        lambda _: reset_checkpoint(store, name, resume=True, apply=True),
    )


MAX_KINDS = 20
"""Errors that the plan of a retry lists."""

LETTER_FIELDS = ("consumer", "channel", "shard", "offset")
"""What names a dead letter."""

MAX_CHOSEN = 10_000
"""Jobs of one plan; another one takes the next."""


def _plan_retry(servers: ActingServers, given: Given) -> Plan:
    store = servers.store
    letter = _find_letter(store, given)
    command = f"penstock dead-letters retry {letter.consumer} '{letter.place}'"
    if letter.superseded_by:
        raise Refused(
            f"a later record of its key was applied since, at {letter.superseded_by}: a retry would bring back the older state. "
            f"If that is wanted: {command} --superseded"
        )
    changes = [f"A worker of {letter.consumer} calls its handler with it, within seconds, unless it is paused."]
    if letter.parked:
        changes.append("It is parked: it stays while an earlier dead letter of its key is there.")
    if letter.retry_requested_at is not None:
        changes.append("That was requested before, and no worker has taken it yet: does one run?")
    return Plan(
        f"Retry the dead letter of {letter.consumer} at {letter.place}",
        tuple(changes),
        command + (" --parked" if letter.parked else ""),
        {name: given[name] for name in LETTER_FIELDS},
        f"/dead-letters?consumer={quote(letter.consumer)}",
        lambda _: letters.request_retries(store, [letter]),
    )


def _plan_retry_all(servers: ActingServers, given: Given) -> Plan:
    consumer = _field(given, "consumer")
    return _plan_letters(
        servers.store,
        given,
        "retry",
        letters.request_all,
        f"Workers of {consumer} call its handler with them, in their order, unless it is paused.",
        "Those of whose key a later record was applied since stay as they are.",
    )


def _plan_drop_all(servers: ActingServers, given: Given) -> Plan:
    consumer = _field(given, "consumer")
    text = f"Their records will have had no effect in {consumer}, for ever."
    return replace(_plan_letters(servers.store, given, "drop", letters.drop_all, text), confirm=consumer)


def _plan_letters(
    store: Store,
    given: Given,
    verb: str,
    act: Callable[[Store, str, letters.LetterFilter], Iterator[int]],
    *changes: str,
) -> Plan:
    """All dead letters of a consumer that a filter takes, in batches."""
    fields = {name: given[name] for name in ("consumer", "channel", "error") if given.get(name)}
    consumer, error = _field(given, "consumer"), fields.get("error")
    of = letters.LetterFilter(consumer, fields.get("channel"), error=error, retriable=verb == "retry")
    groups = letters.group(store, of, most=None)
    if not groups:
        raise Unknown(f"{consumer} has no dead letter of these" + (" that could be retried" if of.retriable else ""))
    # Not those that come after the plan: it does not count them.
    of = replace(of, until=max(group.last_at for group in groups) + timedelta(microseconds=1))
    batches, more = act(store, consumer, of), len(groups) - MAX_KINDS
    options = "".join(f" --{name} {shlex.quote(fields[name])}" for name in ("channel", "error") if name in fields)
    return Plan(
        f"{verb.capitalize()} {format_count(sum(group.letters for group in groups), 'dead letter')} of {consumer}",
        (
            *(f"{group.letters:,} of {group.channel}, {group.error}" for group in groups[:MAX_KINDS]),
            *([f"and others, of {format_count(more, 'further error')}"] if more > 0 else []),
            *changes,
        ),
        f"penstock dead-letters {verb} {consumer} --all{options}{' --apply' if verb == 'drop' else ''}",
        fields,
        f"/dead-letters?consumer={quote(consumer)}",
        lambda _: next(batches),
        batches,
    )


def _plan_drop(servers: ActingServers, given: Given) -> Plan:
    store = servers.store
    letter = _find_letter(store, given)
    place = str(letter.place)
    return Plan(
        f"Drop the dead letter of {letter.consumer} at {place}",
        (f"Record {letter.record_id} will have had no effect in {letter.consumer}, for ever.",),
        f"penstock dead-letters drop {letter.consumer} '{place}' --apply",
        {name: given[name] for name in LETTER_FIELDS},
        f"/dead-letters?consumer={quote(letter.consumer)}",
        lambda _: letters.drop(store, [letter]),
        confirm=letter.consumer,
    )


def _plan_cancel(servers: ActingServers, given: Given) -> Plan:
    queue, of, notes = _choose_jobs(servers, given)
    is_one, is_tenant = len(of.ids or ()) == 1, replace(of, tenant=None, up_to=None) == JobFilter()
    title = f"Cancel job {(of.ids or ('',))[0]} of {queue}" if is_one else f"Cancel jobs of {queue}"
    return _make_jobs_plan(
        "cancel",
        f"Cancel the jobs of a tenant in {queue}" if is_tenant and of.tenant else title,
        (
            f"{'It' if is_one else 'They'} will have no effect, for ever.",
            "A worker that has begun to write for one is asked to roll back: it does, unless it commits at this moment.",
        ),
        replace(_JobChange(servers, queue, of, given, notes), confirm=queue),
        lambda: cancel_jobs(servers.store, servers.client if of.state else None, queue, of),
    )


def _plan_retry_jobs(servers: ActingServers, given: Given) -> Plan:
    queue, of = _read_jobs(given)
    if not (planned := retry_jobs(servers.store, servers.client, queue, of)):
        raise Unknown(f"{queue} has no such job, and no dead letter of one")
    counts: Counter[tuple[str, str]] = Counter()
    for each in planned:
        counts[each.state, each.outcome] += each.jobs
    notes = tuple(f"{jobs:,} {state}: {outcome}" for (state, outcome), jobs in counts.most_common())
    return _make_jobs_plan(
        "retry",
        f"Retry jobs of {queue}",
        (
            "Those that are scheduled, or wait after a failure, are due now. Dead letters are staged again, as new jobs.",
        ),
        _JobChange(servers, queue, of, given, notes),
        lambda: retry_jobs(servers.store, servers.client, queue, of, apply=True),
    )


def _plan_move_due(servers: ActingServers, given: Given) -> Plan:
    queue, of, notes = _choose_jobs(servers, given)
    text = _field(given, "due")
    moment = parse_moment(text)
    return _make_jobs_plan(
        "move-due",
        f"Move jobs of {queue}",
        (
            f"They are due {'in' if isinstance(moment, timedelta) else 'at'} {text}.",
            "Those that a worker has, and those with a unique name, stay as they are.",
        ),
        _JobChange(servers, queue, of, given, notes, text),
        lambda: move_due(
            servers.store,
            servers.client,
            queue,
            of,
            datetime.now(UTC) + moment if isinstance(moment, timedelta) else moment,
        ),
    )


@dataclass(frozen=True)
class _JobChange:
    """The jobs that an action changes."""

    servers: ActingServers
    queue: str
    of: JobFilter
    given: Given
    notes: tuple[str, ...]
    due: str = ""
    confirm: str = ""


def _make_jobs_plan(
    verb: str, title: str, changes: tuple[str, ...], change: _JobChange, run: Callable[[], object]
) -> Plan:
    """It is noted first, and then done in steps: thousands of jobs are not locked at once."""
    kept = ("id", "tenant", "key", "unique", "state", "before", "all", "due")
    fields = {name: change.given[name] for name in kept if change.given.get(name)}
    shown = {name: text for name, text in fields.items() if name not in {"all", "due"}}
    return Plan(
        title,
        (*changes, *(["None that is staged after this plan."] if change.of.up_to else [])),
        jobs_command(replace(change.of, up_to=None), verb, change.queue, *filter(None, [change.due])),
        {"channel": change.queue, **fields, **({"up_to": str(change.of.up_to)} if change.of.up_to else {})},
        f"/jobs?{urlencode({'queue': change.queue, **({} if 'id' in shown else shown)})}",
        lambda _: None,
        (run() for _ in range(1)),
        confirm=change.confirm,
        notes=change.notes,
    )


def _read_jobs(given: Given) -> tuple[str, JobFilter]:
    queue, of = _field(given, "channel"), parse_filter(given)
    if replace(of, up_to=None) == JobFilter() and not given.get("all"):
        raise InvalidName("which jobs? Give id, tenant, key, unique, state or before; or all=on")
    return queue, of


def _choose_jobs(servers: ActingServers, given: Given) -> tuple[str, JobFilter, tuple[str, ...]]:
    """The queue, the jobs up to the newest of this moment or of the plan that was shown, and how many these are now."""
    queue, of = _read_jobs(given)
    count, last = 0, 0
    for page in find_jobs(servers.store, servers.client if of.state else None, queue, of):
        if chosen := page[: MAX_CHOSEN - count]:
            count, last = count + len(chosen), chosen[-1].id
        if count >= MAX_CHOSEN:
            break
    if not count:
        raise Unknown(f"{queue} has no such job that is not done")
    more = [f"A plan takes up to {MAX_CHOSEN:,}; another one takes the next."] if count >= MAX_CHOSEN else []
    return queue, replace(of, up_to=of.up_to or last), (f"{format_count(count, 'job')} now.", *more)


def _plan_limit(servers: ActingServers, given: Given) -> Plan:
    store = servers.store
    change = _read_change(given)
    before = change.find(store)
    return Plan(
        change.title,
        (change.describe(before), "The streamer brings them to Redis within a second or two, also for what waits."),
        change.command,
        {name: given[name] for name in ("channel", change.kind, *change.limits)},
        f"{_page('channel', change.queue)}/limits",
        lambda _: change.apply(store),
    )


def _read_change(given: Given) -> LimitChange:
    """Limits for the tenant, or else the key, whose name may be empty; without any limit, those that were set are taken back."""
    kind = next((kind for kind in KINDS if kind in given), None)
    if kind is None:
        raise InvalidName("tenant or key is missing")
    names = [each.name for each in fields(KINDS[kind]) if given.get(each.name)]
    limits = {name: name == "is_paused" or _parse_limit(name, given[name]) for name in names}
    return LimitChange(_field(given, "channel"), kind, given[kind], limits)


def _parse_limit(name: str, text: str) -> float:
    try:
        return float(text) if name in {"rate", "weight"} else int(text)
    except ValueError:
        raise InvalidName(f"{name} {text!r}: a number is wanted") from None


def _find_letter(store: Store, given: Given) -> DeadLetterRow:
    consumer, channel, shard, offset = (_field(given, name) for name in LETTER_FIELDS)
    if not (shard.isdecimal() and offset.isdecimal()):
        raise InvalidName("shard and offset are numbers")
    place = Place(ShardName(channel, Shard(int(shard))), Offset(int(offset)))
    return letters.find(store, consumer, place)


ACTIONS: Mapping[str, Action] = {
    each.name: each
    for each in (
        Action("pause", "pause", _plan_pause),
        Action("resume", "pause", _plan_resume),
        Action("go-on", "move", _plan_go_on),
        Action("retry", "retry", _plan_retry),
        Action("retry-all", "retry", _plan_retry_all),
        Action("drop", "drop", _plan_drop),
        Action("drop-all", "drop", _plan_drop_all),
        Action("cancel", "drop", _plan_cancel),
        Action("retry-jobs", "retry", _plan_retry_jobs),
        Action("move-due", "retry", _plan_move_due),
        Action("limit", "pause", _plan_limit),
    )
}
"""The actions, by the last part of their address."""
