"""``penstock.staged`` for PySpark, which looks for modules of such names: SQL, Connect and pipelines need no registration."""

from contextlib import suppress

with suppress(
    ImportError
):  # without penstock[spark]; an error here would hide the sources of others
    from penstock.spark.sources.staged import StagedSource as DefaultSource  # noqa: F401  PySpark takes it by its name
