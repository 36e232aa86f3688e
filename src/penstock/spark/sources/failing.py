"""Errors of a source in one line.

PySpark puts the traceback of a worker's exception into the error that the user sees.  Ours name the option or the record and
what to do, so the fifteen lines between would only hide that.  A worker ends after an error, so the variable outlives nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock.spark_daemon import end_quietly

# Every worker of Spark's own daemons that looks up, makes or plans a source imports this module.  Spark closes its connection
# after an idle minute, long before a large table has been read.
end_quietly()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Makes PySpark show an error of Penstock without its traceback; also a decorator."""
    try:
        yield
    except PenstockError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
