"""``penstock.log`` for PySpark, which looks for modules of such names.

SQL, Connect and pipelines need no registration.
"""

from contextlib import suppress
from typing import Any

with suppress(ImportError):  # without PySpark; an error here would hide the sources of others
    from pyspark.sql.datasource import DataSource

    class DefaultSource(DataSource):
        """Stands for the source until a query names it.

        PySpark imports all such modules in every application.
        """

        def __new__(cls, options: Any) -> Any:
            """The source itself."""
            from penstock.spark.sources import LogDataSource  # noqa: PLC0415  see above

            return LogDataSource(options)

        @classmethod
        def name(cls) -> str:
            """Its name for ``format``."""
            return "penstock.log"
