"""Which errors of Spark are not the records' fault."""

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PythonException

from penstock.consuming.failures import reason
from penstock.engines.spark.spark_errors import _ENDED, in_one_line, is_spark_failure, reading_errors
from penstock.errors import ForeignLog, ServerUnavailable

FAILED = "Job aborted due to stage failure: Task 0 in stage 4.0 failed 2 times, most recent failure: Lost task 0.1 in stage 4.0 "


@pytest.mark.parametrize(
    "message",
    [
        f"{FAILED}(TID 5) (10.0.0.7 executor 1): ExecutorLostFailure (executor 1 exited caused by one of the running tasks)",
        f"{FAILED}(TID 5) (host executor driver): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
        f"{FAILED}(TID 5) (host executor 2): FetchFailed(BlockManagerId(1, host, 7337, None), shuffleId=0",
        "Job 7 cancelled part of cancelled job group penstock set-based",
        "Job 7 cancelled because SparkContext was shut down",
    ],
)
def test_an_executor_or_a_job_that_ended_is_sparks_fault(message: str) -> None:
    """Guarantee 13."""
    assert _ENDED.match(message)


@pytest.mark.parametrize(
    "message",
    [
        f"{FAILED}(TID 5) (host executor driver): org.apache.spark.SparkRuntimeException: [X] ExecutorLostFailure",
        f"{FAILED}(TID 5) (host executor driver): ValueError: Job 7 cancelled",
        "what a record says: Job 7 cancelled",
    ],
)
def test_what_a_record_says_makes_nothing_sparks_fault(message: str) -> None:
    """Guarantee 21: it would be tried for ever."""
    assert not _ENDED.match(message)


def test_a_broken_connection_to_the_jvm_is_sparks_fault_and_an_error_of_the_handler_is_not() -> None:
    assert is_spark_failure(Py4JNetworkError("Answer from Java side is empty"))
    assert not is_spark_failure(ValueError("ServerUnavailable: Job 7 cancelled"))


IN_A_UDF = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "shop.py", line 4, in parse
    return int(value)
ValueError: invalid literal

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "shop.py", line 6, in parse
    raise RuntimeError("no fare:\\nNone") from error
shop.NoFare: no fare:
None"""


def test_a_dead_letters_reason_is_what_a_udf_raised() -> None:
    """It was that "an exception was thrown from the Python worker"."""
    said = in_one_line(PythonException(IN_A_UDF))
    assert said is not None
    assert reason(said) == "PythonException: shop.NoFare: no fare:"
    assert in_one_line(PythonException("no traceback")) is None
    assert in_one_line(ValueError(IN_A_UDF)) is None


def test_an_error_of_reading_keeps_its_kind_and_quotes_nothing() -> None:
    """Guarantee 33."""
    with pytest.raises(ForeignLog, match="entry 7-1 was not written"), reading_errors("things/0 1-9"):
        raise RuntimeError("in a task:\npenstock.errors.ForeignLog: things/0: entry 7-1 was not written by Penstock")
    with pytest.raises(ServerUnavailable) as raised, reading_errors("things/0 1-9"):
        raise RuntimeError("secret")
    assert str(raised.value) == "reading things/0 1-9 on Spark: RuntimeError"
