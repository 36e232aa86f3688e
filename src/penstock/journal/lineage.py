"""Compares the lineage of Postgres with what Redis has seen.

Runs on every new connection, before its first tick or record, and again once the server was started
since: behind a pooler, a connection survives a restore.
Redis behind the journal is filled by replay.  Redis ahead of the journal, or with another record at
its tail, means that Postgres has lost commits that were published, and stops everything until an
operator has decided.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import OnUnusable, ShardError, ask_each, leaving_out
from penstock.channels.log.streams import Extent, extents, last_records
from penstock.channels.routing import log_keys
from penstock.crash_points import crashpoint
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.errors import (
    DamagedJournal,
    ForeignLog,
    HistoryDiverged,
    ReadOnlyPostgres,
    SchemaMissing,
    ServerReplaced,
)
from penstock.journal.journal_reader import (
    JournaledRecord,
    has_record,
    journal_bounds,
    log_epochs,
    records_at,
    shards_to_compare,
)
from penstock.records import Epoch, LastRecord, Offset, Scope, ShardName


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Identifier of a cluster, from initdb, and timeline, which promotions and restores raise."""

    system_identifier: str
    timeline: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """A lineage that agrees with Redis.

    The newest epoch in Postgres, the server that opened it, and the one that answers.
    """

    epoch: Epoch
    recorded: ServerIdentity
    current: ServerIdentity

    @property
    def has_moved(self) -> bool:
        """True if the server was promoted or replaced, without losing anything published.

        A new epoch is due.
        """
        return self.recorded != self.current


def check_lineage(
    store: Store,
    client: RedisClient,
    *,
    declared: Iterable[ShardName] = (),
    on_unusable: OnUnusable | None = None,
) -> Epoch:
    """Compares Postgres with its own records and with Redis; returns the epoch to publish in.

    If the server was promoted or restored without losing anything published, it opens a new epoch,
    which fences off the publishers of the old one.

    Shards that are ``declared`` are compared even if Postgres no longer knows them; ``on_unusable``
    is called with one whose keys cannot be compared, None raises.
    """
    lineage = examine_lineage(store, client, declared=declared, on_unusable=on_unusable)
    return _open_epoch(store, lineage) if lineage.has_moved else lineage.epoch


def examine_lineage(
    store: Store,
    client: RedisClient,
    *,
    declared: Iterable[ShardName] = (),
    on_unusable: OnUnusable | None = None,
) -> Lineage:
    """Compares like ``check_lineage``, without opening an epoch."""
    current = server_identity(store)
    # Redis first: what it holds was in the journal before, and its epoch in Postgres.  Otherwise a
    # streamer at work would cause false alarms.
    shards = shards_to_compare(store, client, declared, on_unusable)
    logs = ask_each(partial(extents, client, store.scope.namespace), shards, on_unusable)
    epochs = ask_each(partial(log_epochs, client, store.scope), shards, on_unusable)
    newest_written = max(epochs.values(), default=Epoch(0))
    with postgres_errors("comparing epochs"):
        newest = store.row("newest_epoch")
        is_another = newest is not None and newest[1] != current.system_identifier
        went_back = store.row("transaction_ids_went_back", {"is_another": is_another})
    if newest is None or went_back is None:
        raise _no_epoch(store.scope)
    if went_back[0]:
        raise HistoryDiverged(
            "this database's transaction ids lie before those of its records or of its last tick: "
            "it was dumped and loaded, or restored into another cluster. Records staged since "
            "cannot be told from older ones. See docs: errors#historydiverged; then: penstock "
            "reset epoch"
        )
    _compare_epochs(newest_written, newest[0])
    _compare_tails(store, client, logs, on_unusable)
    if is_another:
        _check_ids(store)
    epoch, system_identifier, timeline = newest
    return Lineage(epoch, ServerIdentity(system_identifier, timeline), current)


def server_identity(store: Store) -> ServerIdentity:
    """Returns the identity of the server."""
    rows = store.rows("server_state", doing="reading the identity of Postgres")
    [(system_identifier, timeline, in_recovery, read_only)] = rows
    if in_recovery or read_only:
        raise ReadOnlyPostgres(
            "the streamer needs the primary: this Postgres is "
            + ("a standby" if in_recovery else "set to default_transaction_read_only")
            + ". Point database_url at the server that takes writes"
        )
    return ServerIdentity(system_identifier, timeline)


def server_start_us(store: Store) -> int:
    """Returns the start time of the server, in microseconds since 1970.

    Read before a comparison, it shows later that the server is still the one that was compared
    (``check_same_server``).
    """
    started_us = store.value("server_start", doing="reading the start of Postgres")
    return int(started_us)


def check_same_server(started_us: int, compared_us: int | None) -> None:
    """Raises ``ServerReplaced`` if Postgres was started since its history was compared."""
    if compared_us is not None and started_us != compared_us:
        raise ServerReplaced(
            "Postgres was restarted, restored or replaced; its history is compared with the log's "
            "again"
        )


def check_epoch(store: Store, written: Epoch) -> None:
    """Checks that Postgres knows the epoch in which a log was written."""
    newest = store.rows("newest_epoch", doing="comparing epochs")
    if not newest:
        raise _no_epoch(store.scope)
    _compare_epochs(written, newest[0][0])


def check_tails(
    store: Store,
    client: RedisClient,
    shards: Sequence[ShardName],
    on_unusable: OnUnusable | None = None,
) -> None:
    """Checks that each shard's log ends at or before its journal, with the same record."""
    # Redis first: what it holds was in the journal before.  Otherwise a streamer at work would
    # cause false alarms.
    logs = ask_each(partial(extents, client, store.scope.namespace), shards, on_unusable)
    _compare_tails(store, client, logs, on_unusable)


def _no_epoch(scope: Scope) -> SchemaMissing:
    return SchemaMissing(
        f"schema {scope.schema} has no epoch or no tick; was it created by hand? Create it with: "
        "penstock init"
    )


def _compare_epochs(written: Epoch, newest: Epoch) -> None:
    if written > newest:
        raise HistoryDiverged(
            f"the log was written in epoch {written}, Postgres knows only {newest}: Postgres has "
            "lost commits, or a reset was not finished. See docs: errors#historydiverged; then: "
            "penstock reset epoch"
        )


def _compare_tails(
    store: Store,
    client: RedisClient,
    logs: Mapping[ShardName, Extent],
    on_unusable: OnUnusable | None = None,
) -> None:
    """Refuses a log that is ahead of the journal, or that has another record at its tail."""
    unusable: set[ShardName] = set()

    def leave_out(shard: ShardName, error: ShardError) -> None:
        if on_unusable is None:
            raise error
        unusable.add(shard)
        on_unusable(shard, error)

    filled = [shard for shard, extent in logs.items() if extent.entries]
    newest = last_records(client, store.scope.namespace, filled, leave_out)
    journal = journal_bounds(store, logs)
    journaled = records_at(store, {s: last.place.offset for s, last in newest.items()})
    for shard in [shard for shard in logs if shard not in unusable]:
        tail, end, last = logs[shard].tail, journal[shard][1], newest.get(shard)
        with leaving_out(shard, on_unusable):
            if tail > end:
                ahead = f"{shard}: the log goes to offset {tail}, the journal only to {end}"
                raise _explain_ahead(store, ahead, end, last)
            if last is not None and shard in journaled and not journaled[shard].is_same_as(last):
                raise _explain_other(store, journaled[shard], last)


def _check_ids(store: Store) -> None:
    """Refuses another cluster that would give out ids again."""
    table = {"table": quote(store.scope.schema, "staged_records")}
    is_behind = store.value("ids_behind", table, doing="comparing ids")
    if is_behind is not False:
        problem = (
            "the next id of staged_records is in use: the database was copied without its "
            "sequences, as by logical replication"
            if is_behind
            else "this is another cluster than before, and this role cannot see whether its "
            "sequences were copied: GRANT SELECT ON SEQUENCE "
            f"{store.scope.schema}.staged_records_id_seq TO it, or penstock init --roles, "
            "and start it again"
        )
        raise HistoryDiverged(
            f"{problem}. See docs: errors#historydiverged; then: penstock reset epoch"
        )


def _explain_ahead(
    store: Store, ahead: str, end: Offset, last: LastRecord | None
) -> ForeignLog | DamagedJournal | HistoryDiverged:
    """Explains why a log is ahead of its journal.

    A foreign id, a deleted journal row, or lost commits.
    """
    if last is not None and last.place.offset <= end:
        stream = log_keys(store.scope.namespace, last.place.shard).stream
        return ForeignLog(
            f"{ahead}, and the last record in the log is at {last.place.offset}: something else "
            f"has added an entry and removed it. DEL {stream}: the streamer replays it from the "
            "journal"
        )
    if last is not None and has_record(store, last):
        return _damaged(f"{ahead}. Postgres has the log's last record ({last.id}), so rows of")
    return HistoryDiverged(
        f"{ahead}: Postgres has lost commits that were published (restored to a point in time, "
        "failed over without its last commits), or this is another database. See docs: "
        "errors#historydiverged; then: penstock reset epoch"
    )


def _explain_other(
    store: Store, journaled: JournaledRecord, last: LastRecord
) -> DamagedJournal | HistoryDiverged:
    """Explains why the journal has another record at the log's tail.

    A deleted journal row, or lost commits.
    """
    differs = f"{last.place}: the log holds record {last.id}, the journal has {journaled.id} there"
    if last.id != journaled.id and has_record(store, last):
        return _damaged(f"{differs}. Postgres has both, so rows of")
    return HistoryDiverged(
        differs
        + (" of another time" if last.id == journaled.id else "")
        + ": Postgres has lost commits that were published, or two databases write to one "
        "namespace. See docs: errors#historydiverged; then: penstock reset epoch"
    )


def _damaged(begin: str) -> DamagedJournal:
    return DamagedJournal(
        f"{begin} the journal were deleted by something other than Penstock, and their offsets "
        "given to other records. See docs: errors#damagedjournal; then: penstock reset epoch"
    )


def _open_epoch(store: Store, lineage: Lineage) -> Epoch:
    """Opens a new epoch, because the server is another one and nothing published was lost."""
    following, old, new = Epoch(lineage.epoch + 1), lineage.recorded, lineage.current
    cluster = "the same" if old.system_identifier == new.system_identifier else "another"
    reason = (
        f"timeline {old.timeline} to {new.timeline}, cluster {cluster}; the log is not ahead "
        "of the journal"
    )
    with store.transaction("opening an epoch"):
        store.connection.execute("SET LOCAL synchronous_commit = on")
        store.execute("open_epoch", {"epoch": following, "reason": reason, **asdict(new)})
        store.execute("move_tick", {"epoch": following})
        crashpoint("epoch.before_commit")
    crashpoint("epoch.after_commit")
    return following
