"""Declared triggers at the command line: installed by init, checked by doctor and by every worker."""

import json
import subprocess

import pytest

from fixtures.command_line import CommandLine
from penstock.database.connections import Connection

APPLICATION = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from penstock import Log, Pipeline

class Base(DeclarativeBase): pass

class Thing(Base):
    __tablename__ = "things"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]

things = Log("things", shards=2)
pipeline = Pipeline([things])
pipeline.stages(Thing, to=things, key="id", capture="trigger", data=["id"])

@pipeline.consumer(reads=things)
def reader(session, records): pass
"""


@pytest.fixture
def shop(penstock: CommandLine, connection: Connection) -> CommandLine:
    """``penstock`` with an application that captures by trigger, and has its table."""
    (penstock.directory / "shop.py").write_text(APPLICATION)
    connection.execute("CREATE TABLE public.things (id int PRIMARY KEY, name text)")
    return penstock


def triggers(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    return [result for result in json.loads(done.stdout) if result["check"] == "triggers"]


@pytest.mark.slow
def test_init_installs_the_declared_triggers_and_the_workers_start(shop: CommandLine, connection: Connection) -> None:
    """Guarantee 7."""
    for worker in (("stream",), ("consume", "reader"), ("run", "--engine", "inline")):
        refused = shop(*worker)
        assert refused.returncode == 2
        assert "Thing is captured by trigger, and table" in refused.stderr
        assert "Traceback" not in refused.stderr
    [before] = triggers(shop("doctor", "--json"))

    first, second = shop("init"), shop("init")

    assert (before["grade"], "penstock init" in before["fix"]) == ("error", True)
    assert "table things: trigger installed" in first.stderr
    assert "trigger" not in second.stderr
    connection.execute("INSERT INTO public.things VALUES (1, 'a'), (2, 'b')")
    assert "2 records published" in shop("stream", "--drain").stderr
    assert "2 records applied" in shop("consume", "reader", "--drain").stderr
    [after] = triggers(shop("doctor", "--json"))
    assert (after["grade"], after["message"]) == ("ok", "1 installed, as their rules declare")


def test_init_prints_the_triggers_as_sql(shop: CommandLine, connection: Connection) -> None:
    """What it prints is what it installs."""
    printed = shop("init", "--sql").stdout
    _, _, sql = printed.partition("-- Captures changes of Thing")

    assert "CREATE TABLE" in printed
    connection.execute(sql.encode())

    assert "trigger" not in shop("init").stderr


def test_init_before_the_applications_tables_says_what_to_do(shop: CommandLine, connection: Connection) -> None:
    connection.execute("DROP TABLE public.things")

    done = shop("init")

    assert done.returncode == 2
    assert "Thing: relation" in done.stderr
    assert "Create or migrate the application's tables first" in done.stderr


def test_doctor_reports_a_trigger_without_a_rule(shop: CommandLine) -> None:
    shop("init")
    file = shop.directory / "shop.py"
    file.write_text(file.read_text().replace('capture="trigger", ', ""))

    [found] = triggers(shop("doctor", "--json"))

    assert found["grade"] == "warning"
    assert "stages again what the session's hooks stage" in found["message"]
