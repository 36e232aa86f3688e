"""Changes something: shows a plan with its digest, does it if the plan is still the same, logs it.

The commands do the same, and every plan shows its command.  Actions are carried out with a login of
their own, which the console has only if it was given one.  Nothing here calls a handler.
"""

import hashlib
import shlex
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Any, cast, get_args
from urllib.parse import quote, urlencode

import structlog

from penstock.channels.commands import RedisClient
from penstock.channels.server import connect_redis
from penstock.console.access import Right, Visitor
from penstock.console.reading import ConnectionPool
from penstock.console.status_sampler import TIMEOUTS
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.database.registry import PauseKind
from penstock.database.store import Store
from penstock.display import format_count, to_json
from penstock.errors import InvalidName, Refused, Unknown
from penstock.operating import letters
from penstock.operating.consumers import find_halts
from penstock.operating.jobs.browsing import JobFilter, find_jobs, parse_filter
from penstock.operating.jobs.changes import cancel_jobs, jobs_command, move_due, retry_jobs
from penstock.operating.jobs.queue_limits import KINDS, LimitChange
from penstock.operating.pausing import (
    check_pausable,
    find_last_action,
    find_pause,
    note_action,
    pause,
    resume,
    run_schedule,
)
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.pipeline import Pipeline, get_scope
from penstock.records import Offset, Place, Shard, ShardName, parse_moment

log = structlog.get_logger("penstock.console")

Form = Mapping[str, str]
"""Fields of a form, or of an address."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an action would do."""

    title: str  # as a question's first words: ``Pause the consumer totals``
    changes: tuple[str, ...]  # one line each
    command: str  # the command that does the same
    fields: Mapping[str, str]  # identify what it is about: they are sent again
    back: str  # the page to return to
    # carries it out for a visitor of that name, in steps: the first in the transaction that notes
    # it, the others in their own, after it
    act: Callable[[str], Iterable[object]]
    notes: tuple[str, ...] = ()  # numbers of this moment, which may change before it is carried out
    asks_reason: bool = False  # true if a reason is asked for
    confirm: str = ""  # what has to be typed, if something is destroyed; empty otherwise
    # the number of the last action of this title: a plan is carried out once
    last: int | None = None

    @property
    def digest(self) -> str:
        """Differs if the plan does, or once it was carried out."""
        planned = [self.title, self.changes, self.fields, self.last]
        return hashlib.sha256(to_json(planned).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ActingServers:
    """Servers with which an action is planned and carried out."""

    store: Store
    stack: ExitStack
    redis_url: str

    @cached_property
    def client(self) -> RedisClient:
        """Returns Redis, which few actions need: the others go on while it is away."""
        client: RedisClient = self.stack.enter_context(
            connect_redis(self.redis_url, timeouts=TIMEOUTS)
        )
        return client


@dataclass(frozen=True, slots=True)
class Action:
    """An action, with the function that plans it."""

    name: str
    right: Right
    plan: Callable[[ActingServers, Form], Plan]


class ChangedPlan(Exception):
    """Raised if what would be done is not what was shown, or was not confirmed."""


@dataclass(frozen=True)
class Acting:
    """Carries actions out."""

    pipeline: Pipeline | None
    pool: ConnectionPool | None  # of a login of its own; None if there is none
    redis_url: str = ""

    def plan(self, action: Action, form: Form) -> Plan:
        """Returns what an action would do."""
        with self._servers() as servers:
            return self._plan(action, servers, form)

    def carry_out(self, action: Action, visitor: Visitor, form: Form) -> str:
        """Carries out an action and returns the page to go to.

        Raises ``ChangedPlan`` unless the plan is still the one that was shown, and was confirmed.
        """
        with self._servers() as servers:
            plan, store = self._plan(action, servers, form), servers.store
            if form.get("digest") != plan.digest:
                raise ChangedPlan("This has changed since the plan was shown. Here is the new one.")
            if form.get("confirm", "") != plan.confirm:
                raise ChangedPlan(f"Nothing was done: type {plan.confirm} to confirm.")
            with store.transaction(plan.title):
                steps = iter(plan.act(visitor.name))
                next(steps, None)
                note_action(store, visitor.name, plan.title, plan.command)
            deque(steps, maxlen=0)
        log.warning(
            "acted",
            action=action.name,
            by=visitor.name,
            **{n: v for n, v in plan.fields.items() if n not in {*KINDS, "unique"}},
        )
        return plan.back

    def _plan(self, action: Action, servers: ActingServers, form: Form) -> Plan:
        plan = action.plan(servers, form)
        return replace(plan, last=find_last_action(servers.store, plan.title))

    @contextmanager
    def _servers(self) -> Iterator[ActingServers]:
        if self.pool is None:
            raise Refused(
                "this console only reads: it was given no login for acting (--acting-database-url)"
            )
        with self.pool.connection() as connection, ExitStack() as stack:
            yield ActingServers(Store(connection, get_scope(self.pipeline)), stack, self.redis_url)


def _field(form: Form, name: str) -> str:
    if not form.get(name):
        raise InvalidName(f"{name} is missing")
    return form[name]


def _kind(form: Form) -> PauseKind:
    text = _field(form, "kind")
    if text not in get_args(PauseKind):
        raise InvalidName(f"kind {text!r}: give {' or '.join(get_args(PauseKind))}")
    return cast("PauseKind", text)


def _page(kind: str, name: str) -> str:
    return "/schedules" if kind == "schedule" else f"/{kind}s/{quote(name, safe='')}"


def _plan_pause(servers: ActingServers, form: Form) -> Plan:
    store = servers.store
    kind, name = _kind(form), _field(form, "name")
    check_pausable(store, kind, name)
    current = find_pause(store, kind, name)
    reason = shlex.quote(form["reason"]) if form.get("reason") else "…"
    changes = [
        "Work in progress is finished, and no process starts anything new.",
        "Applications continue to stage, and the streamer to publish. Retention waits.",
    ]
    if kind == "schedule":
        changes = ["No job of it is staged, by any streamer, until it is resumed."]
    if current is not None:
        changes.append(f"It is paused already, and only the reason changes: {current}")
    return Plan(
        f"Pause {kind} {name}",
        tuple(changes),
        f"penstock {kind}s pause {name} --reason {reason}",
        {"kind": kind, "name": name},
        _page(kind, name),
        lambda visitor: [pause(store, kind, name, reason=form.get("reason", ""), by=visitor)],
        asks_reason=True,
    )


def _plan_resume(servers: ActingServers, form: Form) -> Plan:
    store = servers.store
    kind, name = _kind(form), _field(form, "name")
    if (current := find_pause(store, kind, name)) is None:
        raise Unknown(f"{kind} {name} is not paused")
    catch_up = "It catches up as after an outage, and continues with its next time."
    outcome = (
        catch_up if kind == "schedule" else "It continues within a second, where it was paused."
    )
    changes = (str(current), outcome)
    return Plan(
        f"Resume {kind} {name}",
        changes,
        current.how_to_resume,
        {"kind": kind, "name": name},
        _page(kind, name),
        lambda _: [resume(store, kind, name)],
    )


def _plan_run(servers: ActingServers, form: Form) -> Plan:
    name = _field(form, "name")
    check_pausable(servers.store, "schedule", name)
    return Plan(
        f"Run schedule {name} now",
        ("A streamer that declares it stages one more job within a second.",),
        f"penstock schedules run {name}",
        {"name": name},
        "/schedules",
        lambda _: _run(lambda: run_schedule(servers.store, name)),
    )


def _plan_go_on(servers: ActingServers, form: Form) -> Plan:
    store = servers.store
    name = _field(form, "name")
    moves = [move for move in reset_checkpoint(store, name, resume=True) if move.resumes]
    if not moves:
        raise Unknown(f"no shard of {name} is halted")
    for shard, reason in find_halts(store, name):
        # Some effects are in the database already, or records are missing: the reason says how to
        # go on.
        if "penstock " in reason:
            raise Refused(
                f"{name} is halted in {shard} for a reason that needs another command: see "
                "penstock status"
            )
    changes = [f"{move.channel}/{move.shard} continues after offset {move.after}" for move in moves]
    if letters.newest(store, letters.LetterFilter(name), limit=1):
        retry = f"penstock dead-letters retry {name} --all"
        changes.append(f"{name} has dead letters: to keep the order of their keys, first: {retry}")
    return Plan(
        f"Resume the halted shards of {name}",
        ("Fix the cause first: otherwise they halt again.", *changes),
        f"penstock reset checkpoint {name} --resume --apply",
        {"name": name},
        _page("consumer", name),
        lambda _: reset_checkpoint(store, name, resume=True, apply=True),
    )


MAX_KINDS = 20
"""Errors that the plan of a retry lists."""

LETTER_FIELDS = ("consumer", "channel", "shard", "offset")
"""Fields that name a dead letter."""

MAX_CHOSEN = 10_000
"""Jobs of one plan; make another plan for the others."""


def _plan_retry(servers: ActingServers, form: Form) -> Plan:
    store = servers.store
    letter = _find_letter(store, form)
    if letter.superseded_by:
        raise Refused(
            f"a later record of its key was applied since, at {letter.superseded_by}: a retry "
            "would bring back the older state. To retry it anyway: "
            f"penstock dead-letters retry {letter.consumer} '{letter.place}' --superseded"
        )
    name = letter.consumer
    changes = [
        f"A worker of {name} calls its handler with it, within seconds, unless it is paused."
    ]
    if letter.parked:
        changes.append("It is parked, and stays until earlier dead letters of its key are gone.")
    if letter.retry_requested_at is not None:
        changes.append(
            "A retry has already been requested, and no worker has taken it yet: is one running?"
        )
    retry = partial(letters.request_retries, store, [letter])
    plan = _make_letter_plan("retry", letter, changes, retry)
    return replace(plan, command=f"{plan.command} --parked") if letter.parked else plan


def _make_letter_plan(
    verb: str, letter: DeadLetterRow, changes: Sequence[str], act: Callable[[], object]
) -> Plan:
    values = letter.consumer, letter.channel, str(letter.shard), str(letter.offset)
    return Plan(
        f"{verb.capitalize()} the dead letter of {letter.consumer} at {letter.place}",
        tuple(changes),
        f"penstock dead-letters {verb} {letter.consumer} '{letter.place}'",
        dict(zip(LETTER_FIELDS, values, strict=True)),
        f"/dead-letters?consumer={quote(letter.consumer)}",
        lambda _: _run(act),
    )


def _plan_letters(verb: str, servers: ActingServers, form: Form) -> Plan:
    """Returns a plan for all dead letters of a consumer that a filter takes, in batches."""
    names = ("consumer", "channel", "error")
    fields: dict[str, Any] = {name: form[name] for name in names if form.get(name)}
    consumer, store, is_drop = _field(form, "consumer"), servers.store, verb == "drop"
    letter_filter = letters.LetterFilter(**fields, retriable=not is_drop)
    groups = letters.group(store, letter_filter, limit=None)
    if not groups:
        raise Unknown(
            f"{consumer} has no such dead letter"
            + (" that could be retried" if letter_filter.retriable else "")
        )
    # Not those that come after the plan: it does not count them.
    until = max(group.last_at for group in groups) + timedelta(microseconds=1)
    letter_filter = replace(letter_filter, until=until)
    counts = [f"{group.letters:,} of {group.channel}, {group.error}" for group in groups]
    if unlisted := len(counts[MAX_KINDS:]):
        further = format_count(unlisted, "further error")
        counts = [*counts[:MAX_KINDS], f"and others, of {further}"]
    options = "".join(
        f" --{name} {shlex.quote(fields[name])}" for name in names[1:] if name in fields
    )
    changes = [f"Their records will never take effect in {consumer}."]
    if not is_drop:
        changes = [
            f"Workers of {consumer} call its handler with them, in order, unless it is paused.",
            "Letters stay if a later record of their key was applied.",
        ]
    count = format_count(sum(group.letters for group in groups), "dead letter")
    act = letters.drop_all if is_drop else letters.request_all
    return Plan(
        f"{verb.capitalize()} {count} of {consumer}",
        (*counts, *changes),
        f"penstock dead-letters {verb} {consumer} --all{options}{' --apply' if is_drop else ''}",
        fields,
        f"/dead-letters?consumer={quote(consumer)}",
        lambda _: act(store, consumer, letter_filter),
        confirm=consumer if is_drop else "",
    )


def _plan_drop(servers: ActingServers, form: Form) -> Plan:
    letter = _find_letter(servers.store, form)
    change = f"Record {letter.record_id} will never take effect in {letter.consumer}."
    drop = partial(letters.drop, servers.store, [letter])
    plan = _make_letter_plan("drop", letter, [change], drop)
    return replace(plan, command=f"{plan.command} --apply", confirm=letter.consumer)


def _plan_cancel(servers: ActingServers, form: Form) -> Plan:
    queue, job_filter, notes = _choose_jobs(servers, form)
    ids = job_filter.ids or ()
    changes = (
        f"{'It' if len(ids) == 1 else 'They'} will never take effect.",
        (
            "A worker that has begun to write for one is asked to roll back: it does, unless it "
            "commits at this moment."
        ),
    )
    client = servers.client if job_filter.state else None
    plan = _make_jobs_plan(
        "cancel", changes, form, job_filter, partial(cancel_jobs, servers.store, client, queue)
    )
    title = f"Cancel job {ids[0]} of {queue}" if len(ids) == 1 else plan.title
    if job_filter.tenant and replace(job_filter, tenant=None, up_to=None) == JobFilter():
        title = f"Cancel the jobs of a tenant in {queue}"
    return replace(plan, title=title, notes=notes, confirm=queue)


def _plan_retry_jobs(servers: ActingServers, form: Form) -> Plan:
    queue, job_filter = _read_jobs(form)
    retry = partial(retry_jobs, servers.store, servers.client, queue)
    if not (planned := retry(job_filter)):
        raise Unknown(f"{queue} has no such job, and no dead letter of one")
    counts: Counter[tuple[str, str]] = Counter()
    for group in planned:
        counts[group.state, group.outcome] += group.jobs
    notes = tuple(f"{jobs:,} {state}: {outcome}" for (state, outcome), jobs in counts.most_common())
    change = (
        "Delayed jobs, and jobs that wait after a failure, become due now. Dead letters are "
        "staged again, as new jobs."
    )
    plan = _make_jobs_plan("retry", (change,), form, job_filter, partial(retry, apply=True))
    return replace(plan, notes=notes)


def _plan_move_due(servers: ActingServers, form: Form) -> Plan:
    # While Redis is away, the move would be noted, and not done.
    queue, job_filter, notes = _choose_jobs(servers, form, asks_redis=True)
    moment = parse_moment(text := _field(form, "due"))
    changes = (
        f"They are due {'in' if isinstance(moment, timedelta) else 'at'} {text}.",
        "Jobs that a worker has, and jobs with a unique name, stay as they are.",
    )

    def move(job_filter: JobFilter) -> object:
        due = datetime.now(UTC) + moment if isinstance(moment, timedelta) else moment
        return move_due(servers.store, servers.client, queue, job_filter, due)

    return replace(_make_jobs_plan("move-due", changes, form, job_filter, move), notes=notes)


def _run(run: Callable[[], object], *, is_later: bool = False) -> Iterator[object]:
    """Runs in the transaction that notes a plan, or in a step after it."""
    if is_later:
        yield None
    yield run()


def _make_jobs_plan(
    verb: str,
    changes: tuple[str, ...],
    form: Form,
    job_filter: JobFilter,
    act: Callable[[JobFilter], object],
) -> Plan:
    """Returns a plan that is noted first, and then done in steps.

    Thousands of jobs are not locked at once.
    """
    queue = form["channel"]
    names = ("id", "tenant", "key", "unique", "state", "before", "all", "due")
    fields = {name: form[name] for name in names if form.get(name)}
    filters = {name: text for name, text in fields.items() if name not in {"all", "due"}}
    if job_filter.up_to:
        changes = (*changes, "Jobs staged after this plan stay as they are.")
        fields["up_to"] = str(job_filter.up_to)
    due = [form["due"]] if verb == "move-due" else []
    title = verb.partition("-")[0].capitalize()
    return Plan(
        f"{title} jobs of {queue}",
        changes,
        jobs_command(replace(job_filter, up_to=None), verb, queue, *due),
        {"channel": queue, **fields},
        f"/jobs?{urlencode({'queue': queue, **({} if 'id' in filters else filters)})}",
        lambda _: _run(lambda: act(job_filter), is_later=True),
    )


def _read_jobs(form: Form) -> tuple[str, JobFilter]:
    queue, job_filter = _field(form, "channel"), parse_filter(form)
    if replace(job_filter, up_to=None) == JobFilter() and not form.get("all"):
        raise InvalidName("which jobs? Give id, tenant, key, unique, state or before; or all=on")
    return queue, job_filter


def _choose_jobs(
    servers: ActingServers, form: Form, *, asks_redis: bool = False
) -> tuple[str, JobFilter, tuple[str, ...]]:
    """Returns the queue, its jobs up to the newest now or in the plan that was shown, and notes.

    The notes say how many jobs these are now.
    """
    queue, job_filter = _read_jobs(form)
    count, last = 0, 0
    for page in find_jobs(
        servers.store, servers.client if asks_redis or job_filter.state else None, queue, job_filter
    ):
        if chosen := page[: MAX_CHOSEN - count]:
            count, last = count + len(chosen), chosen[-1].id
        if count >= MAX_CHOSEN:
            break
    if not count:
        raise Unknown(f"{queue} has no such job that is not done")
    notes = [f"{format_count(count, 'job')} now."]
    if count >= MAX_CHOSEN:
        notes.append(f"A plan takes up to {MAX_CHOSEN:,}; make another plan for the others.")
    return queue, replace(job_filter, up_to=job_filter.up_to or last), tuple(notes)


def _plan_limit(servers: ActingServers, form: Form) -> Plan:
    store = servers.store
    change = _read_change(form)
    current = change.find(store)
    return Plan(
        change.title,
        (
            change.describe(current),
            "The streamer copies them to Redis within two seconds, for waiting jobs, too.",
        ),
        change.command,
        {name: form[name] for name in ("channel", change.kind, *change.limits)},
        f"{_page('channel', change.queue)}/limits",
        lambda _: _run(lambda: change.apply(store)),
    )


def _read_change(form: Form) -> LimitChange:
    """Returns limits for the tenant, or else the key, whose name may be empty.

    Without any limit, those that were set are taken back.
    """
    kind = next((kind for kind in KINDS if kind in form), None)
    if kind is None:
        raise InvalidName("tenant or key is missing")
    names = [field.name for field in fields(KINDS[kind]) if form.get(field.name)]
    limits = {name: name == "is_paused" or _parse_limit(name, form[name]) for name in names}
    return LimitChange(_field(form, "channel"), kind, form[kind], limits)


def _parse_limit(name: str, text: str) -> float:
    try:
        return float(text) if name in {"rate", "weight"} else int(text)
    except ValueError:
        raise InvalidName(f"{name} {text!r}: give a number") from None


def _find_letter(store: Store, form: Form) -> DeadLetterRow:
    consumer, channel, shard, offset = (_field(form, name) for name in LETTER_FIELDS)
    if not (shard.isdecimal() and offset.isdecimal()):
        raise InvalidName("shard and offset are numbers")
    place = Place(ShardName(channel, Shard(int(shard))), Offset(int(offset)))
    return letters.find(store, consumer, place)


ACTIONS: Mapping[str, Action] = {
    action.name: action
    for action in (
        Action("pause", "pause", _plan_pause),
        Action("resume", "pause", _plan_resume),
        Action("run", "retry", _plan_run),
        Action("go-on", "move", _plan_go_on),
        Action("retry", "retry", _plan_retry),
        Action("retry-all", "retry", partial(_plan_letters, "retry")),
        Action("drop", "drop", _plan_drop),
        Action("drop-all", "drop", partial(_plan_letters, "drop")),
        Action("cancel", "drop", _plan_cancel),
        Action("retry-jobs", "retry", _plan_retry_jobs),
        Action("move-due", "retry", _plan_move_due),
        Action("limit", "pause", _plan_limit),
    )
}
"""Actions, by the last part of their address."""
