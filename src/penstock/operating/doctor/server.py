"""Postgres as a server: is it the primary, does it keep what it was given, who holds it up?"""

from collections.abc import Iterator

from penstock.database.statements import statements
from penstock.errors import ReadOnlyPostgres
from penstock.journal.lineage import server_identity
from penstock.operating.doctor.finding import Check, Examined, Finding, age

OLDEST_POSTGRES = 140_000
LONG_S = 60
"""A transaction that is open for longer, in seconds, is named."""

WRAPAROUND_WARNING, WRAPAROUND_ERROR = 1_000_000_000, 1_800_000_000
"""Transactions since the oldest that is not frozen: Postgres stops taking writes at about 2,140 million."""


def postgres(examined: Examined) -> Iterator[Finding]:
    """Reachable, new enough, the primary, writable."""
    version = examined.connection.info.server_version
    shown = f"Postgres {version // 10_000}.{version % 10_000}"
    if version < OLDEST_POSTGRES:
        yield Finding("postgres", "error", f"{shown} is too old", "upgrade to Postgres 14 or newer")
        return
    try:
        identity = server_identity(examined.connection, examined.schema)
    except ReadOnlyPostgres as error:
        yield Finding("postgres", "error", str(error), "point database_url at the primary")
        return
    yield Finding(
        "postgres",
        "ok",
        f"{shown}, primary, cluster {identity.system_identifier}, timeline {identity.timeline}",
    )


def durability(examined: Examined) -> Iterator[Finding]:
    """Does a commit survive a crash?"""
    names = ["fsync", "full_page_writes", "synchronous_commit"]
    rows = examined.connection.execute(
        statements(__package__, examined.schema)["settings"], {"names": names}
    )
    found: dict[str, str] = dict(rows.fetchall())
    off = [name for name in ("fsync", "full_page_writes") if found.get(name) == "off"]
    if off:
        yield Finding(
            "durability",
            "error",
            f"{' and '.join(off)} off: a crash of the machine can damage all data",
            " ".join(f"ALTER SYSTEM SET {name} = on;" for name in off),
        )
    elif found.get("synchronous_commit") == "off":
        yield Finding(
            "durability",
            "warning",
            "synchronous_commit is off: a crash can take back an application's last commits, records and changes alike. "
            "What was published stays: the journal commits synchronously",
            "ALTER SYSTEM SET synchronous_commit = on",
        )
    else:
        yield Finding(
            "durability", "ok", f"fsync on, synchronous_commit {found.get('synchronous_commit')}"
        )


def transaction_ids(examined: Examined) -> Iterator[Finding]:
    """How far is Postgres from refusing writes?"""
    [(used,)] = examined.connection.execute(
        statements(__package__, examined.schema)["transaction_ids"]
    ).fetchall()
    if used < WRAPAROUND_WARNING:
        yield Finding("transaction ids", "ok", f"{used:,} since the oldest that is not frozen")
        return
    yield Finding(
        "transaction ids",
        "error" if used >= WRAPAROUND_ERROR else "warning",
        f"{used:,} since the oldest that is not frozen; at about 2,140,000,000 Postgres stops taking writes",
        "VACUUM (FREEZE), and end what holds it up: long, idle and prepared transactions, replication slots",
    )


def long_transactions(examined: Examined) -> Iterator[Finding]:
    """Who is open for long?  Delays nobody's records but their own."""
    rows = examined.connection.execute(
        statements(__package__, examined.schema)["long_transactions"], {"longer_s": LONG_S}
    ).fetchall()
    for pid, application, state, seconds in rows:
        yield Finding(
            "long transactions",
            "warning",
            f"process {pid} ({application or 'unnamed'}, {state}) is in a transaction for {age(seconds)}",
            f"end it in its application, or SELECT pg_terminate_backend({pid})",
        )
    if not rows:
        yield Finding("long transactions", "ok", f"none is open for more than {LONG_S} s")


def prepared_transactions(examined: Examined) -> Iterator[Finding]:
    """The same for transactions that were prepared and left."""
    rows = examined.connection.execute(
        statements(__package__, examined.schema)["prepared_transactions"], {"longer_s": LONG_S}
    ).fetchall()
    for name, seconds in rows:
        yield Finding(
            "prepared transactions",
            "warning",
            f"{name!r} is prepared for {age(seconds)}, and not finished",
            "COMMIT PREPARED or ROLLBACK PREPARED it",
        )
    if not rows:
        yield Finding("prepared transactions", "ok", f"none waits for more than {LONG_S} s")


def pooler(examined: Examined) -> Iterator[Finding]:
    """Is there a pooler between?  It hands out process numbers of its own."""
    [(behind,)] = examined.connection.execute("SELECT pg_backend_pid()").fetchall()
    if behind == examined.connection.info.backend_pid:
        yield Finding("pooler", "ok", "none between us and Postgres")
    elif examined.prepare:
        yield Finding(
            "pooler",
            "warning",
            "something stands between us and Postgres; in transaction mode it may not keep prepared statements",
            "--no-prepare, unless it does (PgBouncer: max_prepared_statements > 0)",
        )
    else:
        yield Finding(
            "pooler", "ok", "one between us and Postgres, and statements are not prepared"
        )


CHECKS: tuple[Check, ...] = (
    postgres,
    durability,
    transaction_ids,
    long_transactions,
    prepared_transactions,
    pooler,
)
