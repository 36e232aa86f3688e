"""Spark's own Python daemon, with Penstock imported, whose workers end quietly.

When Spark has closed their connections they end without a traceback.  At its end the JVM first
closes the connections of idle workers, then ends the daemon, which ends its workers.  A worker that
is faster answers on the closed connection; Spark's daemon prints a traceback of it, after a
success.  Nobody waits for the answer, so nothing is lost with it.

The daemon forks, so it imports nothing that starts a thread, as PyArrow does.  The workers share
the memory of what it imports, and need not import it, which takes a second of processor time in
each.

Workers that plan the batches of a streaming source are those of Spark's own daemon, whatever is
configured; ``end_quietly`` is for them.
"""

import gc
import sys
import traceback

from pyspark import daemon


class _Traceback:
    """Part of ``traceback`` that the daemon uses."""

    format_exc = staticmethod(traceback.format_exc)

    @staticmethod
    def print_exc() -> None:
        """Prints the exception that ends a worker, unless its connection is closed."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            traceback.print_exc()


def end_quietly() -> None:
    """Lets the calling worker end quietly; does nothing anywhere else."""
    main = sys.modules["__main__"]
    if getattr(main.__spec__, "name", None) == "pyspark.daemon":
        main.traceback = _Traceback  # type: ignore[attr-defined]


def preload() -> None:
    """Imports the modules of long tasks before the first fork.

    The few modules of the engine are not among it: they are above this package, and a worker
    imports them in 20 ms.
    """
    from pyspark import worker  # noqa: F401, PLC0415
    from pyspark.sql import datasource  # noqa: F401, PLC0415

    from penstock import consuming, logs, pipeline, streaming  # noqa: F401, PLC0415
    from penstock.spark import submission  # noqa: F401, PLC0415

    gc.freeze()  # a collection in a worker would copy the memory that it shares


def main() -> None:
    """Runs the daemon until Spark ends it."""
    preload()
    daemon.traceback = _Traceback  # type: ignore[attr-defined, assignment]
    daemon.manager()


if __name__ == "__main__":
    main()
