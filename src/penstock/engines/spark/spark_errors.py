"""The meaning of Spark's errors: a fault of Spark or of a server, or of what was computed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PythonException

from penstock import errors
from penstock.errors import CodecMissing, ForeignLog, Gap, PenstockError, ServerUnavailable
from penstock.spark.session import is_jvm_alive

_ENDED = re.compile(
    r"Job \S+ cancelled|[^:]*SparkContext was shut ?down|Job aborted due to stage failure: "
    r".{0,200}?\(TID \d+\) \([^()]*\): (?:[\w.]+: )?(?:ExecutorLostFailure|FetchFailed|Python "
    r"worker exited)"
)
"""Beginning of Spark's messages about lost executors and ended jobs: the records are not at fault.

Only the beginning: behind it stands what a task said, which may be anything.
"""

_OF_PENSTOCK = re.compile(
    r"^\W*(?:[\w.]+: "
    r")*?(?:penstock\.errors\.)?(ServerUnavailable|ForeignLog|DamagedEntry|CodecMissing|Gap): (.*)",
    re.MULTILINE,
)
"""The line of an error that a task has raised while it read records."""


MAX_CAUSES = 5
"""Number of causes of an error that are named."""


class RecordsLost(Exception):
    """Some of the records are not where they were read: the cause of a ``ServerUnavailable``."""


class JobFailed(Exception):
    """A job of Spark failed in a handler; the text is Spark's, without the stack of Java."""


def is_spark_failure(error: BaseException) -> bool:
    """True if Spark or a server failed under a handler, so that the same records may pass later."""
    if not is_jvm_alive():
        return True
    match error:
        case Py4JJavaError():
            return bool(_ENDED.match(java_message(error)))
        case Py4JError():
            return True
        case PythonException():
            return bool(_OF_PENSTOCK.search(str(error)))
        case _:
            return False


def java_message(error: Py4JJavaError) -> str:
    """Extracts Java's message from the text of an error."""
    return str(error.java_exception.getMessage())


def in_one_line(error: BaseException) -> Exception | None:
    """Returns a job's error with the failure as its first line, the reason of a dead letter.

    None for other errors.
    """
    match error:
        case Py4JJavaError():
            return JobFailed(java_message(error))
        case PythonException() if text := raised_in_python(str(error)):
            return PythonException(text)
        case _:
            return None


def name_java_error(error: Py4JJavaError) -> str:
    """Names the classes of Java's error and its causes; their texts may quote a value."""
    names: list[str] = []
    cause = error.java_exception
    while cause is not None and len(names) < MAX_CAUSES:
        names.append(cause.getClass().getSimpleName())
        cause = cause.getCause()
    return ", caused by ".join(names)


def name_reason(text: str) -> str:
    """Names a failure in one line: the end of the traceback, if there is one.

    Of other errors than Penstock's, it names only the class: their texts may quote a value.
    """
    reason = raised_in_python(text)
    if reason is None:
        return next(iter(text.splitlines()), "")
    return reason if reason.startswith("penstock.errors.") else reason.partition(":")[0]


def raised_in_python(text: str) -> str | None:
    """Returns class and first line of the error of Spark's Python process.

    None if the text has no traceback.
    """
    _, traceback, raised = text.rpartition("Traceback (most recent call last):")
    if not traceback:
        return None
    # What is indented are the places; what follows the error is the rest of its text, or Java's
    # stack.
    return next((line for line in raised.splitlines() if line[:1].strip()), "Traceback")


@contextmanager
def reading_errors(subject: str) -> Iterator[None]:
    """Translates errors of the tasks that read records."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        match = _OF_PENSTOCK.search(str(error))
        if match is None:
            # Not Spark's text, which may quote what it has read.
            raise ServerUnavailable(
                f"reading {subject} on Spark: {type(error).__name__}"
            ) from error
        kind, message = getattr(errors, match[1]), match[2].strip()
        if issubclass(kind, (ForeignLog, CodecMissing)):
            raise kind(message) from error
        if kind is Gap:
            raise ServerUnavailable(message) from RecordsLost(str(error))
        raise ServerUnavailable(f"reading {subject} on Spark: {message}") from error
