"""The argument of a canonical function: the application's tables, as queries."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select
from sqlalchemy.dialects import postgresql

from penstock.database.statements import quote
from penstock.declaring.declarations import ReconciliationSpec, table_named
from penstock.errors import DeclarationError, InvalidSetting
from penstock.reconciling.comparison import wrong_result

_FOR_SPARK = {"partitions", "partitioncolumn"}
"""Options of ``penstock.table`` that divide a read between tasks: a single reader needs none."""


class SparkNeededError(Exception):
    """A canonical function computes with DataFrames."""


@dataclass(frozen=True)
class Relation:
    """A table or a query; any method of a DataFrame that is called on it raises ``SparkNeededError``."""

    text: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise SparkNeededError(name)

    def __getitem__(self, _column: object) -> Any:
        raise SparkNeededError


class CanonicalTables:
    """The application's tables: the argument of ``canonical(tables)`` without Spark."""

    def __call__(self, table: Any, **options: str) -> Relation:
        """A table, given as a mapped class, a ``Table`` or a name; ``columns`` and ``where`` as in ``penstock.table``."""
        return _select(quote(*table_named(table)), options)

    def query(self, query: "str | Select[Any]", **options: str) -> Relation:
        """The result of a query, given as text or as SQLAlchemy's ``select``."""
        return _select(f"({query_text(query)}\n) AS q", options)

    @property
    def spark(self) -> Any:
        """The session; there is none."""
        raise SparkNeededError("spark")


def needs_spark(spec: ReconciliationSpec) -> bool:
    """True if the canonical function of a reconciliation computes with DataFrames."""
    try:
        spec.canonical(CanonicalTables())
    except SparkNeededError:
        return True
    return False


def canonical_query(spec: ReconciliationSpec) -> str:
    """The query for the rows that belong in a state."""
    try:
        given = spec.canonical(CanonicalTables())
    except SparkNeededError:
        raise DeclarationError(
            f"reconciliation {spec.name}: the canonical function computes with DataFrames, which needs Spark: --engine spark; "
            "or let it return a query"
        ) from None
    if isinstance(given, Relation):
        return given.text
    if isinstance(given, str | Select):
        return query_text(given)
    raise wrong_result(spec, given)


def _select(source: str, options: dict[str, str]) -> Relation:
    known = {name.lower(): value for name, value in options.items()}
    unknown = sorted(known.keys() - {"columns", "where"} - _FOR_SPARK)
    if unknown:
        raise InvalidSetting(f"tables: there is no option {unknown[0]!r}; known are columns, where")
    names = known.get("columns")
    columns = "*" if names is None else ", ".join(quote(n.strip()) for n in names.split(","))
    return Relation(f"SELECT {columns} FROM {source} WHERE {known.get('where', 'true')}")


def query_text(query: "str | Select[Any]") -> str:
    """A query as SQL, without a semicolon at its end."""
    if isinstance(query, str):
        return query.strip().rstrip(";")
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
    return str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
