"""The names of the package, which are imported at their first use."""

import subprocess
import sys

import pytest

import penstock
import penstock.spark


@pytest.mark.parametrize("package", [penstock, penstock.spark])
def test_every_public_name_is_there(package: object) -> None:
    assert all(getattr(package, name).__name__ == name for name in package.__all__)  # type: ignore[attr-defined]


def test_a_name_that_is_not_there_is_an_error_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'nothing'"):
        penstock.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'penstock\.spark' has no attribute 'nothing'"):
        penstock.spark.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_spark_planner_loads_no_driver_and_only_its_own_source() -> None:
    """Each of them is a process of its own, and spent a second of processor time on it, or half of one; two seconds."""
    script = "import sys, penstock.engines.spark.epochs, pyspark_penstock_log as log; print(*sys.modules)"
    of_log = "; log.DefaultSource({}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script + of_log], capture_output=True, text=True, check=True)

    of_engine, of_log = done.stdout.splitlines()
    assert not set(of_engine.split()) & {"sqlalchemy", "psycopg", "redis", "structlog", "adbc_driver_manager"}
    assert not set(of_log.split()) & {f"penstock.spark.sources.{each}" for each in ("dirty_members", "table_reader")}
