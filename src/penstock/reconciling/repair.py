"""A consumer's state, mended: the differing rows alone, or all of it together with its position.

Either is one transaction that holds the consumer's checkpoints.  Rows are mended while the consumer stands at a cut, where
they must be what the tables say.  A whole replacement needs no standing consumer: state and position are the cut's, and
what comes behind it is applied as ever.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from penstock.crashpoints import crashpoint
from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.declarations import ReconciliationSpec
from penstock.errors import BarrierMissed, DeclarationError, Gap, Refused, Unknown
from penstock.reconciling.comparison import Difference
from penstock.reconciling.cut import Cut
from penstock.records import Offset, Shard, ShardName


@dataclass(frozen=True, slots=True)
class Rows:
    """Canonical rows, each as JSON, and the columns that they have beside the key."""

    columns: tuple[str, ...]
    rows: Iterable[str]


@dataclass(frozen=True, slots=True)
class Replaced:
    """What a whole replacement did.

    Attributes:
        before: Rows that the state had.
        after: Rows that it has.
    """

    before: int
    after: int


def mend(  # noqa: PLR0913, PLR0917  what a repair needs
    connection: Connection,
    spec: ReconciliationSpec,
    at: Cut,
    differences: Sequence[Difference],
    columns: Sequence[str],
    run: int,
    schema: str = DEFAULT_SCHEMA,
) -> int:
    """Mends the rows of some keys, of a consumer that stands at a cut; gives how many it changed.

    Args:
        connection: In autocommit mode.
        spec: Which state.
        at: The cut that the canonical rows of the differences were read in.
        differences: What differs at this cut.
        columns: The columns that are compared, and set.
        run: Number of the run, for the audit.
        schema: The Penstock schema.

    Raises:
        BarrierMissed: The consumer does not stand at the cut any more.
        Refused: Records of the consumer are set aside.
        ServerUnavailable: Postgres does not answer; nothing, or all of it, was done.
    """
    sql_ = statements("penstock.reconciling", schema)
    with postgres_errors(f"mending {spec.state}"), connection.transaction():
        words = _Words(spec, columns, _types(connection, spec))
        standing = _locked(connection, spec, schema)
        if any(offset != at.offset_of(shard) for shard, offset in standing.items()):
            raise BarrierMissed(
                f"consumer {spec.consumer.name} does not stand at the cut any more: nothing was changed. Try again"
            )
        _refuse_dead_letters(connection, spec, at, schema)
        connection.execute(sql_["differences"])
        with connection.cursor().copy(
            "COPY pg_temp.penstock_differences (number, kind, key, expected) FROM STDIN"
        ) as copy:
            for number, difference in enumerate(differences):
                copy.write_row((number, difference.kind, difference.key, difference.expected))
        for statement in (words.keys, words.analyse, words.note_before, words.delete, words.update):
            connection.execute(statement)
        connection.execute(words.insert)
        connection.execute(words.note_after)
        connection.execute(sql_["note_repairs"], {"run": run})
        crashpoint("repair.before_commit")
    crashpoint("repair.after_commit")
    return len(differences)


def replace(
    connection: Connection,
    at: Cut,
    tables: Sequence[tuple[ReconciliationSpec, Rows]],
    schema: str = DEFAULT_SCHEMA,
) -> Replaced:
    """Puts canonical rows in the place of a consumer's whole state, and its checkpoints at the cut that they were read in.

    Args:
        connection: In autocommit mode.
        at: The cut.
        tables: Every table that the consumer keeps, and the rows that belong there.
        schema: The Penstock schema.

    Raises:
        DeclarationError: Canonical rows have a column that the state has not.
        Gap: What comes behind the cut has been removed meanwhile: nothing was changed.
        ServerUnavailable: Postgres does not answer; nothing, or all of it, was done.
    """
    sql_ = statements("penstock.reconciling", schema)
    spec = tables[0][0]
    before = after = 0
    with postgres_errors(f"replacing the state of {spec.consumer.name}"), connection.transaction():
        made = [_copied_in(connection, number, *table) for number, table in enumerate(tables)]
        # Retention takes the same lock: it removes nothing that the checkpoints are put back to.
        connection.execute(
            statements("penstock.database", schema)["lock_channel"],
            {"channel": spec.consumer.channel.name},
        )
        _locked(connection, spec, schema)
        _check_kept(connection, spec, at, schema)
        for words in made:
            before += connection.execute(words.delete_all).rowcount
            after += connection.execute(words.put_all).rowcount
        places = _places(spec, spec.consumer.channel.shard_names, at)
        connection.execute(sql_["put_checkpoints"], {**places, "epoch": at.epoch})
        connection.execute(sql_["drop_dead_letters"], places)
        crashpoint("replace.before_commit")
    crashpoint("replace.after_commit")
    return Replaced(before, after)


def _copied_in(
    connection: Connection, number: int, spec: ReconciliationSpec, rows: Rows
) -> "_Words":
    """The rows of one table, brought before anything is locked, and the statements over it."""
    incoming = sql.Identifier("pg_temp", f"penstock_incoming_{number}")
    words = _Words(spec, rows.columns, _types(connection, spec), incoming)
    connection.execute(
        sql.SQL("CREATE TEMPORARY TABLE {} (row jsonb NOT NULL) ON COMMIT DROP").format(
            sql.Identifier(f"penstock_incoming_{number}")
        )
    )
    with connection.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(incoming)) as copy:
        for row in rows.rows:
            copy.write_row((row,))
    return words


def _locked(
    connection: Connection, spec: ReconciliationSpec, schema: str
) -> Mapping[ShardName, Offset]:
    """The consumer's checkpoints, locked: it does nothing until we have committed."""
    channel = spec.consumer.channel.name
    rows = connection.execute(
        statements("penstock.reconciling", schema)["lock_checkpoints"],
        {"consumer": spec.consumer.name, "channel": channel},
    ).fetchall()
    return {ShardName(channel, Shard(shard)): Offset(offset) for shard, offset in rows}


def _check_kept(connection: Connection, spec: ReconciliationSpec, at: Cut, schema: str) -> None:
    channel = spec.consumer.channel.name
    begins = connection.execute(
        statements("penstock.reconciling", schema)["journal_begins"], {"channel": channel}
    ).fetchall()
    for shard, first in begins:
        name = ShardName(channel, Shard(shard))
        if first > at.offset_of(name) + 1:
            raise Gap(
                f"{name}: the cut lies at offset {at.offset_of(name)}, the journal begins at {first} by now: what is between was removed "
                "while the canonical rows were made. Nothing was changed; try again, and keep records longer (Log.keep)"
            )


def _refuse_dead_letters(
    connection: Connection, spec: ReconciliationSpec, at: Cut, schema: str
) -> None:
    """A record that was set aside is a difference that is known; mended here, and tried again later, it would count twice."""
    shards = spec.consumer.channel.shard_names
    [(count,)] = connection.execute(
        statements("penstock.reconciling", schema)["dead_letters_before"], _places(spec, shards, at)
    ).fetchall()
    if count:
        raise Refused(
            f"consumer {spec.consumer.name} has set {count:,} records aside that the canonical rows know of. Try them again, or drop them, "
            "first: penstock dead-letters; or replace the whole state, which drops them: --whole"
        )


def _places(
    spec: ReconciliationSpec, shards: Sequence[ShardName], at: Cut
) -> dict[str, str | list[int]]:
    return {
        "consumer": spec.consumer.name,
        "channel": spec.consumer.channel.name,
        "shards": [int(shard.shard) for shard in shards],
        "offsets": [int(at.offset_of(shard)) for shard in shards],
    }


def _types(connection: Connection, spec: ReconciliationSpec) -> Mapping[str, str]:
    """The columns of the state's table, and their types in SQL.

    Raises:
        Unknown: There is no such table.
    """
    table = sql.Identifier(*filter(None, (spec.schema, spec.table))).as_string(None)
    rows = connection.execute(
        statements("penstock.reconciling")["column_types"], {"table": table}
    ).fetchall()
    if not rows:
        raise Unknown(f"reconciliation {spec.name}: there is no table {spec.state}")
    return dict(rows)


class _Words:
    """The statements over a state's table: its names come from the declaration, and are quoted.

    Rows are JSON, and their values go through their text, which every type of Postgres can read: a document or an array
    comes as the text of one.
    """

    def __init__(
        self,
        spec: ReconciliationSpec,
        columns: Sequence[str],
        types: Mapping[str, str],
        incoming: sql.Identifier = sql.Identifier("pg_temp", "penstock_incoming_0"),  # noqa: B008  it is constant
    ) -> None:
        lacking = [column for column in (*spec.key, *columns) if column not in types]
        if lacking:
            raise DeclarationError(
                f"reconciliation {spec.name}: {spec.state} has no column {lacking[0]!r}; it has {', '.join(types)}"
            )

        def value(row: LiteralString, column: str) -> sql.Composed:
            return sql.SQL("CAST({} ->> {} AS {})").format(
                sql.SQL(row), sql.Literal(column), sql.SQL(types[column])
            )

        everything = (*spec.key, *columns)
        self._names: dict[str, sql.Composable] = {
            "table": sql.Identifier(*filter(None, (spec.schema, spec.table))),
            "same": _same(spec.key, "s", "k"),
            "set": sql.SQL(", ").join(
                sql.SQL("{} = {}").format(sql.Identifier(column), value("d.expected", column))
                for column in columns
            ),
            "columns": sql.SQL(", ").join(map(sql.Identifier, everything)),
            "incoming_rows": incoming,
            "incoming": sql.SQL(", ").join(value("i.row", column) for column in everything),
            "expected": sql.SQL(", ").join(value("d.expected", column) for column in everything),
            "key_values": sql.SQL("").join(
                sql.SQL(", {} AS {}").format(value("d.key", column), sql.Identifier(column))
                for column in spec.key
            ),
        }
        self.delete_all = self._made("DELETE FROM {table}")
        self.put_all = self._made(
            "INSERT INTO {table} ({columns}) SELECT {incoming} FROM {incoming_rows} i"
        )
        self.keys = self._made(
            'CREATE TEMPORARY TABLE penstock_keys ON COMMIT DROP AS SELECT d.number AS "penstock number" {key_values} '
            "FROM pg_temp.penstock_differences d"
        )
        self.analyse = self._made("ANALYZE pg_temp.penstock_keys")
        self.note_before = self._noted("before")
        self.note_after = self._noted("after")
        # What is not wanted, and what is there several times.
        self.delete = self._made(
            "DELETE FROM {table} s USING pg_temp.penstock_keys k, pg_temp.penstock_differences d "
            """WHERE {same} AND d.number = k."penstock number" AND (d.expected IS NULL OR d.kind = 'doubled')"""
        )
        self.update = self._made(
            "UPDATE {table} s SET {set} FROM pg_temp.penstock_keys k, pg_temp.penstock_differences d "
            """WHERE {same} AND d.number = k."penstock number" AND d.kind = 'different'"""
        )
        # Another operator may have put the row there since: at the same cut, so the same row.
        self.insert = self._made(
            "INSERT INTO {table} ({columns}) SELECT {expected} FROM pg_temp.penstock_differences d "
            "WHERE d.kind IN ('missing', 'doubled') AND d.expected IS NOT NULL AND NOT EXISTS ("
            """SELECT FROM {table} s, pg_temp.penstock_keys k WHERE {same} AND k."penstock number" = d.number)"""
        )

    def _noted(self, column: str) -> sql.Composed:
        """Writes down the rows of each key as they are."""
        return sql.SQL(
            "UPDATE pg_temp.penstock_differences d SET {column} = rows.found FROM ("
            'SELECT k."penstock number" AS number, CASE count(*) WHEN 1 THEN jsonb_agg(to_jsonb(s)) -> 0 ELSE jsonb_agg(to_jsonb(s)) END AS found '
            'FROM {table} s, pg_temp.penstock_keys k WHERE {same} GROUP BY k."penstock number") rows WHERE rows.number = d.number'
        ).format(column=sql.Identifier(column), **self._names)

    def _made(self, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(**self._names)


def _same(key: Sequence[str], one: LiteralString, other: LiteralString) -> sql.Composable:
    """Rows of one key."""
    if not key:
        return sql.SQL("true")
    return sql.SQL(" AND ").join(
        sql.SQL(one + ".{0} = " + other + ".{0}").format(sql.Identifier(column)) for column in key
    )
