"""Checks Postgres as a server, and what this login may do in it."""

from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address

from penstock.database.connections import is_direct
from penstock.database.statements import quote
from penstock.display import format_seconds
from penstock.errors import ReadOnlyPostgres, UnsafeSetting
from penstock.journal.lineage import server_identity
from penstock.operating.doctor.check import (
    Check,
    CheckContext,
    CheckResult,
    Results,
    error,
    warning,
)
from penstock.schema.initialise import check_encoding
from penstock.schema.roles import (
    Right,
    RoleName,
    describe,
    grant_sql,
    lacking,
    rights,
    working_rights,
)

OLDEST_POSTGRES = 140_000
LONG_S = 60
"""A transaction open for longer is a warning; in seconds."""

WRAPAROUND_WARNING, WRAPAROUND_ERROR = 1_000_000_000, 1_800_000_000
"""Transactions since the oldest unfrozen one: Postgres refuses writes at about 2,140 million."""


def postgres(context: CheckContext) -> Results:
    """Checks that Postgres is reachable, new enough, the primary, and writable."""
    version = context.store.connection.info.server_version
    server = f"Postgres {version // 10_000}.{version % 10_000}"
    if version < OLDEST_POSTGRES:
        yield error(f"{server} is too old", "upgrade to Postgres 14 or newer")
        return None
    try:
        identity = server_identity(context.store)
    except ReadOnlyPostgres as refused:
        yield error(str(refused), "point database_url at the primary")
        return None
    return f"{server}, primary, cluster {identity.system_identifier}, timeline {identity.timeline}"


def encoding(context: CheckContext) -> Results:
    """Checks that the database can hold every character."""
    try:
        check_encoding(context.store.connection)
    except UnsafeSetting as unsafe:
        yield error(str(unsafe), "move to a database in UTF8")
    return "UTF8"


def encryption(context: CheckContext) -> Results:
    """Checks that a connection across a network is encrypted, and its certificate verified."""
    connection = context.store.connection.pgconn
    options = {option.keyword: option.val for option in connection.info}
    mode = (options.get(b"sslmode") or b"prefer").decode()
    yield examine_encryption(
        context.store.connection.info.host, mode, encrypted=connection.ssl_in_use
    )
    return None


def examine_encryption(host: str, mode: str, *, encrypted: bool) -> CheckResult:
    """Returns the result for a connection."""
    fix = (
        "add to database_url: sslmode=verify-full&sslrootcert=/path/ca.pem (or sslrootcert=system)"
    )
    if _is_local(host):
        return CheckResult("encryption", "ok", "Postgres is on this machine")
    if not encrypted:
        return warning(f"the connection to {host} is not encrypted: others may read it", fix)
    if mode not in {"verify-full", "verify-ca"}:
        return warning(
            f"the connection to {host} is encrypted, but sslmode={mode} verifies no certificate: "
            "another server may answer",
            fix,
        )
    return CheckResult("encryption", "ok", f"the certificate of {host} is verified ({mode})")


def _is_local(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def durability(context: CheckContext) -> Results:
    """Checks that a commit survives a crash."""
    names = ["fsync", "full_page_writes", "synchronous_commit"]
    settings: dict[str, str] = {row[0]: row[1] for row in context.rows("settings", names=names)}
    off = [name for name in ("fsync", "full_page_writes") if settings.get(name) == "off"]
    if off:
        fix = (
            " ".join(f"ALTER SYSTEM SET {name} = on;" for name in off) + " SELECT pg_reload_conf()"
        )
        yield error(f"{' and '.join(off)} off: a crash of the machine can damage all data", fix)
    elif settings.get("synchronous_commit") == "off":
        yield warning(
            "synchronous_commit is off: a crash can lose an application's last commits, records "
            "and changes alike. "
            "Published records stay: the journal commits synchronously",
            "ALTER SYSTEM SET synchronous_commit = on; SELECT pg_reload_conf()",
        )
    return f"fsync on, synchronous_commit {settings.get('synchronous_commit')}"


def transaction_ids(context: CheckContext) -> Results:
    """Checks that Postgres is far from refusing writes for lack of transaction ids."""
    [(used,)] = context.rows("transaction_ids")
    age = f"{used:,} since the oldest unfrozen one"
    if used >= WRAPAROUND_WARNING:
        yield (error if used >= WRAPAROUND_ERROR else warning)(
            f"{age}; at about 2,140,000,000 Postgres refuses writes",
            "VACUUM (FREEZE), and end what blocks it: long, idle and prepared transactions, "
            "replication slots",
        )
    return age


def long_transactions(context: CheckContext) -> Results:
    """Checks that no transaction is open for long; one that is delays only its own records."""
    for pid, application, state, seconds in context.rows("long_transactions", longer_s=LONG_S):
        yield warning(
            f"process {pid} ({application or 'unnamed'}, {state}) has been in a transaction for "
            f"{format_seconds(seconds)}",
            f"end it in its application, or SELECT pg_terminate_backend({pid})",
        )
    [(sees_others,)] = context.rows("sees_others")
    if not sees_others:
        login = context.store.connection.info.user
        yield warning(
            f"{login} does not see the transactions of other roles",
            f"GRANT pg_read_all_stats TO {quote(login)};",
        )
    return f"none open for more than {LONG_S} s"


def prepared_transactions(context: CheckContext) -> Results:
    """Checks that no prepared transaction is unfinished for long."""
    for name, seconds in context.rows("prepared_transactions", longer_s=LONG_S):
        message = f"{name!r} was prepared {format_seconds(seconds)} ago and is not finished"
        yield warning(message, "COMMIT PREPARED or ROLLBACK PREPARED it")
    return f"none waiting for more than {LONG_S} s"


def pooler(context: CheckContext) -> Results:
    """Tells whether statements are prepared: only on direct connections."""
    yield from ()
    if is_direct(context.store.connection):
        return "connected to Postgres directly"
    return "connected through a pooler; statements are not prepared"


_WORK: Mapping[RoleName, str] = {
    "producer": "stage",
    "streamer": "stream",
    "consumer": "consume",
    "viewer": "view",
    "monitor": "monitor",
}

_SET_BY_POSTGRES = ("created_at", "xid")
_SEE_ROLES = "penstock init --roles shows what to revoke"

Missing = dict[RoleName, list[Right]]


def privileges(context: CheckContext) -> Results:
    """Checks that this login has all privileges of each work that it has some of."""
    login = context.store.connection.info.user
    missing: Missing = {role: lacking(context.store, _needed(role)) for role in _WORK}
    complete = [role for role in _WORK if not missing[role]]
    partial = _find_partial(missing, complete)
    if not complete and not partial:
        partial = [min(_WORK, key=lambda role: len(missing[role]))]
    for role in partial:
        message = f"{login} lacks privileges to {_WORK[role]}: {describe(missing[role])}"
        yield warning(message, _make_grants(context, role, missing[role], login))
    if surplus := [] if len(complete) == len(_WORK) else _find_surplus(context):
        message = (
            f"{login} may set the columns that order or hide staged records: {describe(surplus)}"
        )
        yield warning(message, _SEE_ROLES)
    return f"{login} has the privileges to {', '.join(_WORK[role] for role in complete)}"


def _needed(role: RoleName) -> frozenset[Right]:
    return rights(role) if role in {"viewer", "monitor"} else working_rights(role)


def _find_surplus(context: CheckContext) -> list[Right]:
    """Returns columns of staged records that only Postgres should set, but this login may."""
    columns = [Right("TABLE", "staged_records", "INSERT", name) for name in _SET_BY_POSTGRES]
    missing = lacking(context.store, columns)
    return [right for right in columns if right not in missing]


def _find_partial(missing: Missing, complete: list[RoleName]) -> list[RoleName]:
    """Returns works that privileges of the login hint at, but no work that it may do explains.

    It looks at tables alone: everyone may call functions unless that was revoked.
    """
    explained = frozenset[Right]().union(*(rights(role) for role in complete))
    granted = {role: _needed(role) - set(missing[role]) for role in missing if missing[role]}
    unexplained = {
        role: {
            r
            for r in granted[role] - explained
            if r.kind == "TABLE" and replace(r, column="") not in explained
        }
        for role in granted
    }
    largest = max(map(len, unexplained.values()), default=0)
    return [
        role
        for role, unexplained_rights in unexplained.items()
        if unexplained_rights and len(unexplained_rights) == largest
    ]


def _make_grants(context: CheckContext, role: RoleName, missing: list[Right], login: str) -> str:
    """Returns a grant of the work's group role, if there is one; else of single privileges."""
    candidates = context.rows("group_roles", ending=f"_{role}")
    for (group,) in candidates:
        if not lacking(context.store, _needed(role), group):
            return f"GRANT {quote(group)} TO {quote(login)};"
    return " ".join(f"{grant};" for grant in grant_sql(missing, context.scope.schema, login))


SERVER: tuple[Check, ...] = (
    postgres,
    encoding,
    encryption,
    durability,
    transaction_ids,
    long_transactions,
    prepared_transactions,
    pooler,
)
