"""Which settings go to Java on a command line, and which environment variables go to executors."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pyspark
import pytest

from penstock.errors import InvalidSetting
from penstock.spark.session import _choose_python
from penstock.spark.submission import (
    URLS,
    find_cluster,
    find_python,
    find_url,
    name_source,
    refuse_connect,
    set_urls,
    share,
    start_java,
)

SECRET_URL = "postgresql://shop:canary@db/shop"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", SECRET_URL)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "rediss://cache:6379/0")


def test_no_secret_is_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "penstock.spark.submission.SparkContext._ensure_initialized", lambda conf: started.extend(conf.getAll())
    )

    start_java({"spark.driver.memory": "1g", "spark.ssl.keyPassword": "canary", **share(URLS, "spark://head:7077", {})})

    assert started == [("spark.driver.memory", "1g")]


def test_executors_get_the_urls_of_sources_and_no_command_line_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "penstock.spark.submission.SparkContext._ensure_initialized", lambda conf: started.extend(conf.getAll())
    )
    monkeypatch.setattr(os, "environ", {})

    set_urls(SECRET_URL, "redis://cache", {"eu_north": SECRET_URL, "us": "postgresql:///us"})

    shared = share(URLS, "yarn", {})
    name = name_source("eu_north")
    assert name == "PENSTOCK_SOURCES__EU_NORTH"
    assert shared[f"spark.executorEnv.{name}"] == find_url(name) == SECRET_URL
    assert set(share(URLS, "k8s://head", {})) == {
        "spark.executorEnv.PENSTOCK_REDIS_URL",
        "spark.executorEnv.PENSTOCK_SOURCES__US",
    }
    start_java(shared)
    assert started == []


def test_kubernetes_shows_no_password_in_a_pod() -> None:
    def shared(master: str, **settings: str) -> set[str]:
        return {name.rpartition(".")[2] for name in share(URLS, master, settings)}

    assert shared("spark://head:7077") == shared("yarn") == set(URLS)
    assert shared("k8s://https://head:6443") == {"PENSTOCK_REDIS_URL"}
    key = "spark.kubernetes.executor.secretKeyRef.PENSTOCK_REDIS_URL"
    assert shared("k8s://https://head:6443", **{key: "penstock:redis-url"}) == set()


def test_an_executor_without_a_url_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_url("PENSTOCK_DATABASE_URL") == SECRET_URL

    monkeypatch.delenv("PENSTOCK_DATABASE_URL")

    with pytest.raises(InvalidSetting, match=r"secretKeyRef\.PENSTOCK_DATABASE_URL=NAME:KEY"):
        find_url("PENSTOCK_DATABASE_URL")


def test_a_python_that_is_only_in_the_archive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")

    with pytest.raises(InvalidSetting, match="unpack the archive in the directory"):
        _choose_python({}, None)
    with pytest.raises(InvalidSetting, match="PYSPARK_PYTHON is /nowhere/python"):
        _choose_python({"spark.pyspark.python": "/nowhere/python"}, None)
    _choose_python({"spark.pyspark.python": sys.executable}, None)
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize("place", ["", "a b", "file", "home"])
def test_tasks_on_this_machine_import_the_installed_pyspark(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Spark puts a zip without bytecode first; without a cache directory there is no script that takes it out."""
    installed = Path(pyspark.__file__).parent
    (tmp_path / "file").touch()
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "" if place == "home" else str(tmp_path / place))
    if place == "home":
        monkeypatch.setattr("penstock.spark.submission.Path.home", Mock(side_effect=RuntimeError))
    has_cache = place in {"", "a b"}

    _choose_python({}, "yarn")
    assert os.environ.pop("PYSPARK_PYTHON") == sys.executable
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert find_python() == sys.executable
    monkeypatch.setenv("SPARK_HOME", str(installed))
    _choose_python({}, None)

    python = os.environ["PYSPARK_PYTHON"]
    assert (python == sys.executable) is not has_cache
    zips = [str(installed / "python" / "lib" / "pyspark.zip"), "/kept"]
    show = "import sys, pyspark; print(sys.executable, pyspark.__file__, '/kept' in sys.path, *sys.argv[1:], sep='|')"
    environment = {"PYTHONPATH": os.pathsep.join(zips if has_cache else zips[1:])}
    shown = subprocess.run([python, "-c", show, "a b"], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip().split("|") == [sys.executable, pyspark.__file__, "True", "a b"]


def test_a_script_in_a_cache_of_somebody_else_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that is as it should be, too: its owner may replace it later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    script = find_python()
    (tmp_path / "penstock").chmod(0o777)

    assert find_python() == script != sys.executable
    assert (tmp_path / "penstock").stat().st_mode & 0o777 == 0o700

    monkeypatch.setattr("penstock.spark.submission.Path.chmod", Mock(side_effect=PermissionError))
    assert find_python() == sys.executable


@pytest.mark.parametrize(
    ("submitted", "master"), [({}, None), ({"spark.master": "local[*]"}, None), ({"spark.master": "yarn"}, "yarn")]
)
def test_the_cluster_is_that_of_spark_submit(submitted: dict[str, str], master: str | None) -> None:
    assert find_cluster(submitted) == master


CONNECT: list[tuple[str | None, dict[str, str], str]] = [
    ("sc://head:15002/;token=canary", {}, ""),
    (None, {"spark.remote": "sc://head:15002/;token=canary"}, ""),
    (None, {"spark.remote": "local"}, ""),
    ("local[2]", {"spark.api.mode": "Connect"}, ""),
    ("local[2]", {}, "sc://head:15002/;token=canary"),
]


@pytest.mark.parametrize(("master", "settings", "remote"), CONNECT)
def test_spark_connect_is_refused_without_its_address(
    master: str | None, settings: dict[str, str], remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_connect("local[2]", {"spark.api.mode": "classic"})
    monkeypatch.setenv("SPARK_REMOTE", remote)

    with pytest.raises(InvalidSetting, match="needs a driver of its own") as refused:
        refuse_connect(master, settings)

    assert "canary" not in str(refused.value)
