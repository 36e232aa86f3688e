"""Options of a table in Spark's catalog: ``CREATE TABLE rides USING penstock.log OPTIONS (channel 'rides')``.

Spark gives them to ``schema``, when the table is created, and to nothing later: a reader has only those of ``WITH (…)``.  It does
get the table's columns with their metadata, so the first column keeps the options.
"""

from collections.abc import Mapping
from typing import Any

from pyspark.sql.types import StructField, StructType

from penstock.display import mask
from penstock.errors import InvalidSetting

_OF_A_TABLE = "option."
"""What Spark puts before the options of a table when it is created; it gives them without it, too, among other properties."""

_KEPT = "penstock.options"
"""The metadata that has them."""

_URLS = {"databaseurl": "PENSTOCK_DATABASE_URL", "redisurl": "PENSTOCK_REDIS_URL"}


def find_table_options(given: Mapping[str, Any]) -> dict[str, str]:
    """The options of a table that is being created, with lower-case names; none for anything else."""
    options = {str(name).lower(): str(value) for name, value in given.items()}
    return {name.removeprefix(_OF_A_TABLE): value for name, value in options.items() if name.startswith(_OF_A_TABLE)}


def keep_options(source: str, columns: StructType, given: Mapping[str, Any]) -> StructType:
    """The columns of a source; those of a table that is being created keep its options.

    Raises:
        InvalidSetting: A table cannot keep one of them.
    """
    options = find_table_options(given)
    if not options:
        return columns
    for name, variable in _URLS.items():
        if name in options and mask(options[name]) != options[name]:
            raise InvalidSetting(
                f"{source}: option {name} has a password, which everyone who may read the table's columns would see; leave it out, "
                f"and set {variable} for the driver and the executors"
            )
    if options.get("pushfilters", "false").lower() != "false":
        raise InvalidSetting(
            f"{source}: pushFilters is for a DataFrame that is used once; leave it out of a table, which any query may name twice"
        )
    first, *others = columns
    kept = StructField(first.name, first.dataType, first.nullable, {_KEPT: options})
    return StructType([kept, *others])


def with_kept_options(columns: StructType, given: Mapping[str, Any]) -> dict[str, str]:
    """The options of a reader: those that its table's columns keep, and those of the query, which override them."""
    kept = (column.metadata.get(_KEPT, {}) for column in columns)
    options = {name: value for each in kept for name, value in each.items()}
    return options | {str(name).lower(): str(value) for name, value in given.items()}
