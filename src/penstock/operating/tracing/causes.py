"""Finds the cause that keeps a record from its next step: the first that holds on its way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from time import monotonic

from penstock.channels.commands import RedisClient
from penstock.consuming.dead_lettering import how_to_resume
from penstock.database.store import Store
from penstock.declaring.kinds import get_traits
from penstock.display import format_count, format_seconds
from penstock.errors import PrivilegeMissing, ServerUnavailable, Unknown
from penstock.operating.consumers import how_to_go_on
from penstock.operating.tracing.story import (
    Diagnosis,
    OpenWriter,
    ReaderProgress,
    Situation,
    Story,
    StoryReader,
)
from penstock.records import Place, RecordId


def explain_unseen(record: int, situation: Situation, writers: Sequence[OpenWriter]) -> Diagnosis:
    """Returns the cause of an id of which nothing is visible."""
    drawn, removed_to = situation.drawn, situation.removed_to
    if drawn is not None and record > drawn:
        return Diagnosis(
            "unused id",
            f"no transaction has drawn the id {record} yet: the last one is {drawn}",
            "check the id and the database",
        )
    if writers:
        return explain_open(f"no row with the id {record} is committed", writers)
    hint = "look for the error in the application's log"
    drawn_by = (
        f"the id {record} was drawn, no row has it, and no transaction that could hold it is open"
    )
    if removed_to is None:
        return Diagnosis(
            "rolled back",
            f"{drawn_by}. Retention has removed nothing: the transaction that staged it was rolled "
            "back, or somebody has "
            "deleted the row",
            hint,
        )
    if record > removed_to:
        text = (
            f"{drawn_by}. Retention has not reached it: the transaction that staged it was rolled "
            "back"
        )
        return Diagnosis("rolled back", text, hint)
    return Diagnosis(
        "removed, or rolled back",
        f"{drawn_by}. Every consumer has passed records of about this id, and retention has "
        "removed them; or its transaction was rolled back",
    )


def explain_open(claim: str, writers: Sequence[OpenWriter]) -> Diagnosis:
    """Returns the cause of a record that may still appear: a transaction that staged is open."""
    first = writers[0]
    if first.pid is None:
        text = f"transaction {first.prepared!r} is prepared, {_age(first)}"
        fix = (
            f"COMMIT PREPARED '{first.prepared}', or ROLLBACK PREPARED; a transaction manager has "
            "left it"
        )
    else:
        doing = f"{first.application or 'unnamed'}, {first.state or 'state hidden'}"
        text = f"process {first.pid} ({doing}) has a transaction open, {_age(first)}"
        fix = f"end it in the application, or: SELECT pg_terminate_backend({first.pid})"
        if first.state is None:
            fix += "; to see state and age: GRANT pg_read_all_stats TO this role"
    others = f"; {len(writers) - 1} more have one" if len(writers) > 1 else ""
    cause = "open transaction" if first.pid is not None else "prepared transaction"
    return Diagnosis(
        cause,
        f"{claim}, and {text}, that wrote into staged records{others}: what it staged is invisible "
        "until it is committed",
        fix,
        writers=tuple(writers),
    )


def _age(writer: OpenWriter) -> str:
    return "since when is hidden" if writer.age_s is None else f"for {format_seconds(writer.age_s)}"


def explain_story(story: Story, situation: Situation) -> Diagnosis:
    """Returns the cause that holds back a record with a row, or a place in the journal."""
    for explain in (_unsequenced, _unknown, _unpublished, _waits_in_channel, _unapplied):
        if (cause := explain(story, situation)) is not None:
            return replace(cause, story=story)
    if story.state == "cancelled":
        return Diagnosis("cancelled", f"{_name(story)}: {story.why}", story=story)
    names = ", ".join(reader.consumer for reader in story.readers)
    return Diagnosis(
        "applied",
        f"{_name(story)} is applied by all who read it{names and f': {names}'}",
        story=story,
    )


def _name(story: Story) -> str:
    return f"record {story.id} ({story.place})"


def _unsequenced(story: Story, situation: Situation) -> Diagnosis | None:
    if story.offset is not None or story.state == "done" or story.transaction is None:
        return None
    if story.isolated is not None:
        return Diagnosis(
            "isolated",
            f"record {story.id} of {story.shard_name} is isolated and gets no offset: "
            f"{story.isolated}",
            "correct the row: penstock doctor has the statement",
        )
    ago = f"the last tick with records was {format_seconds(situation.tick_s)} ago"
    if story.is_seen:
        return Diagnosis(
            "missed",
            f"the last tick saw record {story.id} of {story.shard_name}, and the journal does not "
            "name it: the database was partly "
            "restored, or rows were changed by hand",
            "penstock doctor, then: penstock reset epoch",
        )
    if situation.has_policies:
        return Diagnosis(
            "row policy",
            f"record {story.id} is committed, and no tick has seen it; {ago}. Row-level security "
            "is enabled on staged_records: a "
            "streamer whose role it applies to stops with HiddenRows",
            "give the streamer's role BYPASSRLS, or: ALTER TABLE … DISABLE ROW LEVEL SECURITY",
        )
    connected = (
        f"{format_count(situation.streamers, 'streamer')} connected"
        if situation.streamers
        else "no streamer is connected"
    )
    return Diagnosis(
        "not ticked",
        f"record {story.id} of {story.shard_name} is committed, and no tick has seen it; {ago}, "
        f"and {connected}",
        "penstock stream, or penstock run; with requests that do the work: penstock doctor",
        story,
    )


def _unknown(story: Story, _: Situation) -> Diagnosis | None:
    if story.is_known or story.is_done or story.is_only_a_letter:
        return None
    if story.is_retired:
        return Diagnosis(
            "retired channel",
            f"{_name(story)}: the channel was retired, so that nothing publishes it and nobody "
            "reads it",
            "find out what staged it; to remove its records: penstock channels retire "
            f"{story.channel} --discard --apply",
        )
    fault = (
        "no such channel is registered" if story.kind is None else "the channel has no such shard"
    )
    return Diagnosis(
        "unknown shard",
        f"{_name(story)}: {fault}, so that nothing publishes it and nobody reads it",
        "declare the channel with this shard, and run penstock stream; or find out what staged it",
        story,
    )


def _unpublished(story: Story, situation: Situation) -> Diagnosis | None:
    if story.is_published or story.is_done or story.is_only_a_letter:
        return None
    if story.stopped is not None:
        return Diagnosis(
            "stopped shard",
            f"{_name(story)}: the streamer leaves the shard out: {story.stopped}",
            "remove the cause; the streamer tries again every few seconds",
        )
    text, refusal = f"{_name(story)} is sequenced", story.refusal
    if story.published is not None:
        text += f", and Redis has the shard up to offset {story.published}"
    if refusal is not None and refusal.is_certain:
        return Diagnosis(
            "refused by Redis",
            f"{text}: it refuses writes ({refusal.word}): {refusal.reason}",
            refusal.fix,
        )
    if story.redis is not None:
        return Diagnosis(
            "no answer from Redis",
            f"{text}; whether it is published is not known: {story.redis}",
            "penstock doctor",
        )
    if not situation.streamers:
        return Diagnosis(
            "not published", f"{text}; no streamer is connected", "penstock stream, or penstock run"
        )
    refuses = (
        ""
        if refusal is None
        else f", and Redis may refuse its writes ({refusal.word}): {refusal.reason}"
    )
    return Diagnosis(
        "not published",
        f"{text}; a streamer is connected{refuses}",
        "the streamer's log says what Redis refuses; "
        f"{'see penstock doctor' if refusal is None else refusal.fix}",
    )


def _waits_in_channel(story: Story, situation: Situation) -> Diagnosis | None:
    """Returns that a queue or an Ick has not handed it over yet, unless its readers say more."""
    if not story.readers or any(r.state not in {"behind", "applied"} for r in story.readers):
        return None
    if story.is_done or story.state in {None, "done"}:
        return None
    session = situation.find_session(story.readers[0].consumer)
    if session is not None and story.state in {"leased", "held", "waiting", "dirty"}:
        text = f"{_name(story)}: {story.why}; {story.readers[0].consumer} {session}"
        return Diagnosis(session.cause, text, session.how_to_go_on, story)
    return Diagnosis(
        story.state or "",
        f"{_name(story)}: {story.why}",
        None if story.state in {"leased", "held"} else "penstock status shows who takes what waits",
        story,
    )


_ORDER = ("halted", "paused", "unread", "dead-lettered", "parked", "waiting", "barrier", "behind")


def _unapplied(story: Story, situation: Situation) -> Diagnosis | None:
    if story.is_done:
        return None
    if not story.readers:
        return Diagnosis(
            "no reader",
            f"{_name(story)} is published, and no consumer of {story.channel} is registered",
            f"start one: penstock run, penstock {get_traits(story.kind).verb} NAME",
        )
    waiting = sorted(
        (reader for reader in story.readers if not reader.is_done),
        key=lambda reader: _ORDER.index(reader.state),
    )
    if not waiting:
        return None
    text, fix = _describe(waiting[0], story)
    cause, session = str(waiting[0].state), situation.find_session(waiting[0].consumer)
    if (
        session is not None
        and waiting[0].state in {"behind", "waiting"}
        and waiting[0].kind == "consumer"
    ):
        cause, text, fix = session.cause, f"{text}; it {session}", session.how_to_go_on
    others = ", ".join(f"{reader.consumer} {reader.state}" for reader in waiting[1:])
    return Diagnosis(cause, f"{_name(story)}: {text}{others and f'; also: {others}'}", fix)


def _describe(reader: ReaderProgress, story: Story) -> tuple[str, str | None]:
    """Returns the cause of a consumer's wait, and its remedy."""
    name, verb = reader.consumer, get_traits(story.kind).verb
    match reader.state:
        case "halted":
            remedy = how_to_resume(name, story.shard_name, reader.reason, reader.has_letters)
            return f"{name} is halted before it: {reader.reason}", f"fix the cause, {remedy}"
        case "paused":
            return f"{name} is before it: {reader.reason}", reader.resume
        case "unread":
            return (
                f"{name} has no checkpoint in {story.shard_name}",
                how_to_go_on(name, reader.kind, verb),
            )
        case "dead-lettered" | "parked":
            return _describe_letter(reader)
        case "waiting" | "barrier":
            is_waiting = (reader.reason or "").startswith("waiting")
            return f"{name} {'is' if is_waiting else 'waits:'} {reader.reason}", None
        case _:
            moved_at = f"{reader.at:%Y-%m-%d %H:%M:%S}" if reader.at else "never"
            text = (
                f"{name} is at offset {reader.checkpoint}, {format_count(reader.ahead, 'record')} "
                f"before it; its checkpoint last moved {moved_at} (UTC)"
            )
            hint = ", if it does not run; in more processes if it does not keep up"
            return text, how_to_go_on(name, reader.kind, verb, hint)


def _describe_letter(reader: ReaderProgress) -> tuple[str, str]:
    name, letter = reader.consumer, f"{reader.consumer} '{reader.retry}'"
    retry = f"penstock dead-letters retry {letter}"
    if reader.state == "parked":
        text = f"{name} has parked it behind an earlier dead letter of its key"
        return text, f"retry that one, and what is parked behind it: {retry} --parked"
    text = f"{name} has dead-lettered it: {reader.reason}"
    if not reader.superseded_by:
        return text, retry
    fix = (
        f"drop it: penstock dead-letters drop {letter} --apply; or, if the handler does not depend "
        f"on order: {retry} --superseded"
    )
    return (
        f"{text}; and it may have applied a later record of its key ({reader.superseded_by})",
        fix,
    )


MAX_OF_KEY = 10
"""Newest records of a key, by default."""

FIRST_IDS = 10_000
"""Ids that the first step of a search for a key looks at; each further step looks at twice as
many."""


@dataclass(frozen=True, slots=True)
class KeySearch:
    """The newest records of a key, among those that were looked at within a time."""

    key: str
    ids: tuple[RecordId, ...]  # the oldest of them first
    since: int  # the id of the oldest record that was looked at; 1 if all were
    since_at: datetime | None = None  # when that was staged; None if all were looked at
    before: int | None = None  # the id before which the search began; None if at the newest

    def __str__(self) -> str:
        bounds = [f"from {self.since} on"] if self.since > 1 else []
        bounds += [] if self.before is None else [f"before {self.before}"]
        return f"the key {self.key!r}" + (f" among those {' and '.join(bounds)}" if bounds else "")


def search_key(store: Store, key: str, within_s: float, before: int | None = None) -> KeySearch:
    """Looks for the newest records of a key, from the last record back, until a time is over.

    The last step may take as long again, or be ended by the statement's timeout.  Another search
    goes on ``before`` the id that this one has come to.
    """
    ids: list[RecordId] = []
    started, step = monotonic(), FIRST_IDS
    doing = "looking for a key"
    start = until = store.value("newest_id", doing=doing)
    if before is not None:
        start = until = min(until, before - 1)
    while until > 0 and len(ids) < MAX_OF_KEY:
        values = {
            "key": key,
            "after": max(0, until - step),
            "until": until,
            "limit": MAX_OF_KEY - len(ids),
        }
        try:
            rows = store.rows("ids_of_key_between", values, doing=doing)
        except ServerUnavailable:  # older rows are slower to read: what was found is shown
            if until == start:
                raise
            break
        ids += [RecordId(id_) for (id_,) in rows]
        until, step = values["after"], 2 * step
        if monotonic() - started > within_s:
            break
    since = ids[-1] if len(ids) == MAX_OF_KEY else until + 1
    since_at = None
    if since > 1:
        since_at = store.value("staged_since", {"id": since}, binary=True, doing=doing)
    return KeySearch(key, tuple(reversed(ids)), since, since_at, before)


Wanted = RecordId | Place | str | KeySearch
"""A record by its number or its place, or the newest records of a key."""


def trace(
    store: Store,
    client: RedisClient,
    subject: Wanted,
    *,
    channel: str | None = None,
    limit: int = MAX_OF_KEY,
) -> tuple[Story, ...]:
    """Returns the story of a record, or of the newest records of a key, oldest first."""
    reader = StoryReader(store, client)
    stories = _read(reader, subject, channel, limit)
    if not stories:
        raise Unknown(f"nothing is known of {_describe_wanted(subject)}. Why: penstock explain")
    return stories


def explain(
    store: Store,
    client: RedisClient,
    subject: Wanted,
    *,
    channel: str | None = None,
    with_query: bool = False,
) -> Diagnosis:
    """Returns the first cause that keeps a record from its next step.

    Of a key, the oldest of its newest records that has not taken effect everywhere is explained, or
    else the newest.
    """
    reader = StoryReader(store, client)
    # Before the records: one that is committed in between is then found.
    writers = reader.read_writers(with_query=with_query)
    stories = _read(reader, subject, channel, MAX_OF_KEY)
    situation = reader.read_situation()
    if stories:
        story = next((story for story in stories if not story.is_done), stories[-1])
        return explain_story(story, situation)
    if isinstance(subject, Place):
        raise Unknown(f"the journal names no record at {subject}; retention may have removed it")
    if isinstance(subject, int):
        if situation.drawn is None:
            raise PrivilegeMissing(
                "this role may not see which ids were drawn: GRANT SELECT ON SEQUENCE "
                f"{store.scope.schema}.staged_records_id_seq TO it, or "
                f"connect as a member of {store.scope.schema}_viewer"
            )
        return explain_unseen(subject, situation, writers)
    if writers:
        return explain_open(f"no committed record has {_describe_wanted(subject)}", writers)
    return Diagnosis(
        "unknown key",
        f"no record has {_describe_wanted(subject)}, and no transaction that could hold one is "
        "open: none was staged, its transaction was rolled "
        "back, or retention has removed it",
        "check the key as it is staged, such as '7', or '[7, \"north\"]' if it has several parts",
    )


def _read(
    reader: StoryReader, subject: Wanted, channel: str | None, limit: int
) -> tuple[Story, ...]:
    if isinstance(subject, Place):
        record = reader.find_id(subject)
        ids = [] if record is None else [record]
    elif isinstance(subject, int):
        ids = [subject]
    elif isinstance(subject, KeySearch):
        ids = [*subject.ids]
    else:
        ids = reader.find_ids(subject, channel, limit)
    stories = (reader.read(id_) for id_ in ids)
    return tuple(story for story in stories if story and channel in {None, story.channel})


def _describe_wanted(subject: Wanted) -> str:
    if isinstance(subject, Place | KeySearch):
        return str(subject)
    return f"record {subject}" if isinstance(subject, int) else f"the key {subject!r}"
