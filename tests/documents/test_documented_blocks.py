"""Every block that a page shows is run: its Python in the order of the page, in one namespace.

Each test gives what its page supposes: what a reader has already is in the namespace, and servers are the test's own.
Commands are in ``test_documented_commands.py``.
"""

import os
import re
import sys
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
import redis
from alembic.migration import MigrationContext
from alembic.operations import Operations
from opentelemetry import trace
from prometheus_client import generate_latest
from sqlalchemy import Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from fixtures.command_line import load_settings
from fixtures.documents import BLOCK, DOCS, ROOT, blocks, run_page
from fixtures.postgres import engine_url
from penstock import Log, Pipeline, errors
from penstock.clients import DirtyList, LogWriter
from penstock.errors import UnstagedChanges
from penstock.observer import ShardStopped, Streamed
from penstock.schema.capture import install_triggers
from penstock.testing import drained, staged
from staging.test_connections import make_django

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

RUN_BY = {
    "docs/how-to/hear-of-trouble.md": "streaming/test_troubles.py",
    "docs/how-to/open-the-console.md": "console/test_console_access.py",
    "README.md": "documents/test_documented_commands.py",
    "docs/explanation/queues.md": "channels/queue/test_page.py",
    "docs/how-to/archive-a-log.md": "spark/test_sinks.py",
    "docs/how-to/keep-things-for-a-time.md": "structures/test_structures_page.py",
    "docs/how-to/let-requests-do-the-work.md": "stealing/test_frameworks.py",
    "docs/how-to/put-the-migrations-beside-yours.md": "migrations/test_beside_your_own.py",
    "docs/how-to/read-a-log.md": "channels/test_read_a_log_page.py",
    "docs/how-to/read-several-sources.md": "consuming/test_one_of_several_sources.py",
    "docs/how-to/share-a-log.md": "channels/groups/test_share_a_log_page.py",
    "docs/how-to/test-your-application.md": "testing_plugin/test_plugin.py",
    "docs/how-to/use-with-django.md": "django_app/test_django_project.py",
    "docs/how-to/write-a-handler.md": "documents/test_documented_handlers.py",
    "docs/reference/spark.md": "spark/test_pages_on_spark.py",
    "docs/tutorial/a-copy-that-is-right.md": "documents/test_tutorial.py",
    "docs/tutorial/a-queue-of-jobs.md": "documents/test_tutorial.py",
    "docs/tutorial/first-pipeline.md": "documents/test_tutorial.py",
}
"""The test that runs a page's blocks, if it is not one of these."""


def test_all_python_is_run() -> None:
    """By a test of this file, or by one that names the page."""
    own = set(re.findall(r'run_page\(\s*"([^"]+)"', Path(__file__).read_text()))
    shown = {str(page.relative_to(ROOT)) for page in PAGES if blocks(page, "python")}

    assert own | RUN_BY.keys() == shown
    assert not own & RUN_BY.keys()
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(), test


class Base(DeclarativeBase):
    """What the applications of the pages have already."""


class Ride(Base):
    __tablename__ = "rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    fare: Mapped[int] = mapped_column(default=1)
    email: Mapped[str] = mapped_column(default="ann@example.org")
    receipt_sent: Mapped[bool] = mapped_column(default=False)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="new")
    total: Mapped[int] = mapped_column(default=0)
    account_id: Mapped[int] = mapped_column(default=7)


class IndexedRide(Base):
    __tablename__ = "indexed_rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    words: Mapped[str]


@pytest.fixture
def tables(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def test_icks(redis_client: redis.Redis) -> None:
    """The pipeline of the page is run in ``test_documented_handlers.py``."""
    indexed: list[bytes] = []

    def mark() -> None:
        DirtyList(redis_client, "ride-index").add({"ride-19": 1.0})

    run_page(
        "docs/explanation/icks.md",
        {"client": redis_client, "index": indexed.extend, "Ride": Ride, "IndexedRide": IndexedRide},
        then={1: mark},
    )

    assert indexed == [b"ride-19"]
    stats = DirtyList(redis_client, "ride-index").stats()
    assert stats is not None
    assert stats.total.size == 0


def test_follow_a_trace(
    tables: Engine, rides: Log, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    pipeline, sessions = Pipeline([rides]), sessionmaker(tables)
    pipeline.stages(Ride, to=rides, key="id", capture="trigger")
    install_triggers(tables, pipeline)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", sdk.TracerProvider(shutdown_on_exit=False))
    names = {"pipeline": pipeline, "rides": rides, "SessionLocal": sessions, "text": text}
    run_page("docs/how-to/follow-a-trace.md", names)

    with trace.get_tracer("shop").start_as_current_span("request") as span, sessions.begin() as session:
        session.add(Ride(id=1))
    with sessions() as session:
        [record] = staged(session)
        assert (record.headers or {})["traceparent"].split("-")[1] == f"{span.get_span_context().trace_id:032x}"
    assert drained(pipeline, database_url, redis_url) == {"send_receipt": 2}  # its own UPDATE is captured, too


def test_work_stealing(database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"pipeline": Pipeline([Log("rides")]), "DATABASE_URL": database_url, "REDIS_URL": redis_url}

    def measure_twice() -> None:
        names["chores"].measure()()
        gauges = names["chores"].gauges
        for at in (gauges.measured_at - 10, gauges.measured_at):
            names["advisor"].observe(replace(gauges, measured_at=at))

    try:
        run_page("docs/explanation/work-stealing.md", names, then={1: measure_twice})
    finally:
        names["recruiter"].close()

    assert "penstock.stream" in capsys.readouterr().out


def test_a_budget() -> None:
    names = run_page("docs/how-to/bound-the-memory-of-redis.md", {})
    assert names["rides"].memory_bytes == 64 << 20


def test_the_job_and_its_tests(tables: Engine, database_url: str, redis_url: str) -> None:
    mails: list[str] = []
    sessions = sessionmaker(tables)
    names: dict[str, Any] = {"Ride": Ride, "mail": lambda to, **_: mails.append(to), "Session": sessions}
    names["write"] = print
    names["mail_async"] = print
    run_page("docs/how-to/do-the-jobs-of-a-queue.md", names)
    names["pipeline"].attach(sessions)
    names["pipeline"]._schedules.clear()  # one of them is due every ten minutes
    with tables.begin() as connection:
        found = connection.execute(text("DELETE FROM penstock.staged_records RETURNING data")).scalars()
        assert [*found] == [{"ride": 17}, {"email": "a@example.com"}, {"ride": 17}, {"ride": 18}]
        connection.execute(text("DELETE FROM penstock.job_groups"))
    with sessions.begin() as session:
        session.add(Ride(id=7))
    names["test_a_job"](sessions)
    names["test_the_flow"](sessions, lambda: drained(names["pipeline"], database_url, redis_url))

    assert mails == ["ann@example.org"] * 2


def test_a_reconciliation() -> None:
    """The one of ``examples/shop``, which ``test_documented_commands.py`` runs, is the same."""
    rides = Log("rides")
    names = run_page("docs/how-to/reconcile-every-night.md", {"rides": rides, "pipeline": Pipeline([rides])})

    assert names["pipeline"].get_reconciliation("ride_copies").table == "ride_copies"


def test_another_member_and_the_trigger_of_a_retired_channel(
    tables: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = Log("orders")
    pipeline = Pipeline([orders])
    pipeline.stages(Order, to=orders, key="id", capture="trigger")
    install_triggers(database_url, pipeline)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE rides ADD COLUMN rider_id bigint")
        connection.execute("CREATE TABLE rider_index AS SELECT 7 AS rider_id")
        query = "SELECT proname FROM pg_proc WHERE proname LIKE 'stage_orders_%'"
        [(function,)] = connection.execute(query).fetchall()
    monkeypatch.setenv("DATABASE_URL", engine_url(database_url))
    with tables.begin() as connection_:
        op = Operations(MigrationContext.configure(connection_))
        import penstock.schema.alembic_operations  # noqa: F401, PLC0415  adds its operations

        names = run_page(
            "docs/how-to/change-channels.md", {"op": op}, {"stage_orders_1f0c2ab9": function}, {1: connection_.commit}
        )
    names["engine"].dispose()

    with psycopg.connect(database_url) as connection:
        connection.execute("INSERT INTO orders VALUES (1, 'new', 5, 7)")
        query = "SELECT channel, key FROM penstock.staged_records ORDER BY 1"
        assert connection.execute(query).fetchall() == [("riders-to-index", "7")]


def test_stage_your_changes(tables: Engine, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule by trigger, and what follows it, is an alternative to the first rule: it is declared in a pipeline of its own."""
    orders = Log("orders")
    by_trigger = Pipeline([orders])
    django = make_django(database_url)
    sessions = sessionmaker(tables)
    names: dict[str, Any] = {"Order": Order, "Session": sessions, "url": database_url}
    events = ModuleType("events")
    events.Order, events.pipeline = Order, by_trigger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.events", events)
    first: list[Pipeline] = []

    def declare_by_trigger() -> None:
        first.append(names["pipeline"])
        names.update(pipeline=by_trigger, orders=orders)

    def migrate() -> None:
        with tables.begin() as connection:
            with Operations.context(MigrationContext.configure(connection)):
                names["upgrade"]()
            connection.exec_driver_sql("INSERT INTO orders VALUES (7, 'new', 5, 7)")
            with Operations.context(MigrationContext.configure(connection)):
                names["downgrade"]()
        names.update(pipeline=first[0], orders=first[0].channels["orders"])

    class ChangedByDjango:
        pk = 7

        def save(self) -> None:
            with django.connection.cursor() as cursor:
                cursor.execute("UPDATE orders SET status = 'sent' WHERE id = 7")

    run_page(
        "docs/how-to/stage-your-changes.md",
        names,
        then={3: declare_by_trigger, 5: migrate, 8: lambda: names.update(order=ChangedByDjango())},
    )
    django.connections.close_all()

    with psycopg.connect(database_url) as connection:
        query = "SELECT channel, key, action, data->>'status' FROM penstock.staged_records ORDER BY id"
        assert connection.execute(query).fetchall() == [
            ("orders", "7", "insert", "new"),
            ("orders", "1", "insert", "confirmed"),
            ("orders", "1", "confirmed", None),
            ("orders", "7", "update", "paid"),
            ("receipts", "7", "send", None),
            ("orders", "7", "paid", None),
            ("orders", "7", "paid", None),
        ]


def test_errors(redis_client: redis.Redis, redis_url: str) -> None:
    with LogWriter.connect(redis_url, "rides") as writer:
        writer.append([1])
    names = {"client": redis_client}
    run_page("docs/reference/errors.md", names, {"redis://localhost:6379": redis_url})


def test_a_job_of_a_cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is the command; ``tests/cli/test_commands_on_a_cluster.py`` submits such a one to a cluster."""
    monkeypatch.setattr(sys, "argv", ["job.py", "--version"])
    with pytest.raises(SystemExit) as ended:
        run_page("docs/how-to/run-on-your-cluster.md", {})

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("penstock ")


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [settings] = blocks(DOCS / "reference" / "settings.md", "toml")
    [strict] = blocks(DOCS / "how-to" / "stage-your-changes.md", "toml")
    (tmp_path / "pyproject.toml").write_text(settings)
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)

    loaded = load_settings(directory=tmp_path)

    assert (loaded.app, loaded.engine, loaded.idle) == ("shop.events:pipeline", "inline", 0.02)
    [action] = tomllib.loads(strict)["tool"]["pytest"]["ini_options"]["filterwarnings"]
    with warnings.catch_warnings():
        warnings.filterwarnings(action.split("::")[0], category=getattr(errors, action.rpartition(".")[2]))
        with pytest.raises(UnstagedChanges):
            warnings.warn("a session is not attached", UnstagedChanges, stacklevel=1)


def test_an_alarm_and_a_registry(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = Pipeline([Log("rides")])
    names = run_page("docs/how-to/watch-it-from-outside.md", {"pipeline": pipeline})
    names["REGISTRY"].unregister(names["metrics"])  # OpenTelemetry's own has no provider, and drops what it is given

    pipeline.observers(Streamed(added=1))
    pipeline.observers(ShardStopped("rides", 2, "ForeignLog"))

    assert capsys.readouterr().out == "trouble: ShardStopped(channel='rides', shard=2, error='ForeignLog')\n"
    assert b"penstock_streamer_records_total" in generate_latest(names["metrics"])


def test_statements(database_url: str) -> None:
    """Those on privileges are run in ``test_documented_commands.py``."""
    [fenced] = blocks(DOCS / "how-to" / "keep-things-for-a-time.md", "sql")
    [revision] = blocks(DOCS / "reference" / "errors.md", "sql")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE reports AS SELECT 17 AS id, '' AS body, 3 AS fence")
        for number, changed in ((2, 0), (3, 1), (4, 1)):
            done = connection.execute(fenced.encode(), {"body": "b", "number": number})
            assert done.rowcount == changed
        query = "SELECT version_num FROM penstock.alembic_version"
        before = connection.execute(query).fetchall()
        connection.execute("DROP TABLE penstock.alembic_version")
        connection.execute(revision.encode())
        assert connection.execute(query).fetchall() == before


def test_the_other_languages_are_known() -> None:
    """What else pages show is output, or meant for a program that is not here."""
    shown = {
        (kind, page.stem)
        for page in PAGES
        for kind, _ in BLOCK.findall(page.read_text())
        if kind not in {"python", "console", "sh", "text", ""}
    }

    assert shown == {
        ("json", "logs"),  # tests/documents/check_logs.py
        ("yaml", "watch-with-prometheus"),  # Prometheus's own
        ("toml", "open-the-console"),  # tests/console/test_console_access.py
        ("sql", "keep-things-for-a-time"),
        ("sql", "errors"),
        ("sql", "privileges"),
        ("sql", "spark"),  # tests/spark/test_pages_on_spark.py
        ("toml", "settings"),
        ("toml", "stage-your-changes"),
        ("toml", "test-your-application"),  # tests/testing_plugin/test_plugin.py
        ("javascript", "log-format"),  # tests/documents/test_log_format.py
        ("sql", "stage-from-other-languages"),  # tests/staging/test_by_sql.py
        ("javascript", "stage-from-other-languages"),  # the same
        ("ruby", "stage-from-other-languages"),  # the same
        ("go", "stage-from-other-languages"),  # nobody has a driver of Go
        ("ini", "watch-it-from-outside"),  # tests/observing/test_probes.py
        ("yaml", "watch-it-from-outside"),  # the same command
        ("yaml", "run-on-your-cluster"),
        ("dockerfile", "deploy"),
        ("dockerfile", "run-on-your-cluster"),
    }
