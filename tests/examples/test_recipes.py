"""The recipes of ``examples``, each with real servers."""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import nats
import pytest
from fastapi.testclient import TestClient
from litestar.testing import TestClient as LitestarClient
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from fixtures.command_line import CommandLine
from fixtures.documents import ROOT
from penstock import Log, Pipeline, stage
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.operating.letters import of_consumer
from penstock.records import is_place
from penstock.testing import drained, eventually


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")


def test_fastapi(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    fastapi_app = import_module("fastapi_app")
    fastapi_app.Base.metadata.create_all(engine)
    with TestClient(fastapi_app.app, raise_server_exceptions=False) as client:
        with engine.begin() as connection:  # refused at the commit
            connection.execute(
                text("ALTER TABLE orders ADD CONSTRAINT few UNIQUE (cents) DEFERRABLE INITIALLY DEFERRED")
            )
        answer = client.post("/orders?cents=500")
        refused, failed = client.post("/orders?cents=much"), client.post("/orders?cents=500")
        assert drained(fastapi_app.pipeline, database_url, redis_url) == {"invoices": 1}
        assert client.get("/console/").status_code in {401, 403}
    with Session(engine) as session:
        [invoice] = session.scalars(select(fastapi_app.Invoice))

    assert (answer.status_code, refused.status_code, failed.status_code) == (201, 422, 500)
    assert (invoice.order_id, invoice.cents) == (answer.json()["id"], 500)


@contextmanager
def serving(respond: Callable[[bytes, Any], int]) -> Iterator[str]:
    """An endpoint of a customer."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(respond(body, self.headers))
            self.send_header("Location", "/login")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def test_webhooks_are_signed_and_a_dead_endpoint_is_left_alone(
    engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhooks = import_module("webhooks")
    received, refused = list[str](), list[bytes]()

    def accept(body: bytes, headers: Any) -> int:
        expected = webhooks.sign("good", headers["webhook-id"], headers["webhook-timestamp"], body)
        assert headers["webhook-signature"] == f"v1,{expected}"
        received.append(headers["webhook-id"])
        return 204

    def refuse(body: bytes, _: Any) -> int:
        refused.append(body)
        return 500

    monkeypatch.setattr(webhooks, "FAILURES", 2)
    with (
        serving(accept) as good,
        serving(refuse) as bad,
        serving(lambda *_: 410) as gone,
        serving(lambda *_: 302) as moved,
    ):
        with Session(engine) as session, session.begin():
            for tenant, url in (("good", good), ("bad", bad), ("gone", gone), ("moved", moved)):
                webhooks.deliver.stage(session, webhooks.Webhook(url, "order.paid", {"id": 7}), tenant=tenant)
        drained(webhooks.pipeline, database_url, redis_url, allow_dead_letters=True)
        with connect_postgres(database_url, application="test") as connection:
            letters = {each.key: each.reason for each in of_consumer(Store(connection), "deliver")}

    assert len(received) == 1
    assert len(refused) == 2  # and then it is left alone
    assert webhooks.breakers.keys() == {"bad", "gone", "moved"}  # and a redirect is no delivery
    assert list(letters) == ["gone"]
    assert "the endpoint is gone" in letters["gone"]


def test_sqlmodel(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    app = import_module("sqlmodel_app")
    app.SQLModel.metadata.create_all(engine, checkfirst=True)
    with app.sqlmodel.Session(engine) as session:
        ann, bob = app.Rider(name="Ann"), app.Rider(name="Bob")
        session.add_all([ann, bob])
        session.commit()
        ann.name = "Anne"
        session.delete(bob)
        session.commit()
    drained(app.pipeline, database_url, redis_url)
    with app.sqlmodel.Session(engine) as session:
        greetings = session.exec(app.sqlmodel.select(app.Greeting)).all()

    assert [greeting.text for greeting in greetings] == ["Hello, Anne!"]


def test_flask_sqlalchemy(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    flask_app = import_module("flask_app")
    flask_app.Base.metadata.create_all(engine)
    app = flask_app.create_app()
    client = app.test_client()
    answers = [client.post("/posts", data={"author": author, "text": "…"}) for author in ("Ann", "Bob", "Ann")]
    assert [answer.status_code for answer in answers] == [201, 201, 201]
    with app.app_context():
        flask_app.db.engine.dispose()
    drained(flask_app.pipeline, database_url, redis_url)

    with Session(engine) as session:
        assert dict(session.execute(select(flask_app.Author.name, flask_app.Author.posts)).all()) == {
            "Ann": 2,
            "Bob": 1,
        }


def test_litestar(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    litestar_app = import_module("litestar_app")
    litestar_app.Base.metadata.create_all(engine)
    with LitestarClient(litestar_app.app) as client:
        answer = client.post("/tables?seats=4")
        assert drained(litestar_app.pipeline, database_url, redis_url) == {"shifts": 1}
        assert client.get("/console/").status_code in {401, 403}
    with Session(engine) as session:
        [shift] = session.scalars(select(litestar_app.Shift))

    assert answer.status_code == 201
    assert (shift.table_id, shift.seats) == (answer.json()["id"], 4)


def test_celery_gets_the_tasks_of_transactions_that_commit(
    engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    celery_outbox = import_module("celery_outbox")
    monkeypatch.setattr(celery_outbox.app.conf, "broker_url", "memory://")
    with celery_outbox.Sessions(bind=engine) as session:
        celery_outbox.send_later(session, "mails.welcome", key="ann", name="Nobody")
        session.rollback()
        celery_outbox.send_later(session, "mails.welcome", key="ann", name="Ann")
        session.commit()
    drained(celery_outbox.pipeline, database_url, redis_url)
    with celery_outbox.app.connection_for_read() as connection, connection.SimpleQueue("celery") as tasks:
        task = tasks.get(block=False)
        assert len(tasks) == 0

    assert (task.headers["task"], task.decode()[1]) == ("mails.welcome", {"name": "Ann"})
    assert is_place(task.headers["id"])


def test_a_relay_to_nats(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = import_module("relay_to_nats")
    with nats_server() as url:
        monkeypatch.setenv("NATS_URL", url)
        stage_orders(engine, relay.pipeline, relay.orders)
        asyncio.run(add_stream(url))
        drained(relay.pipeline, database_url, redis_url)
        drain_again(engine, relay.pipeline, database_url, redis_url)
        messages = asyncio.run(read_stream(url))

    assert sorted(messages) == sorted((f"order-{n % 5}", n) for n in range(50))  # each once, although sent twice
    for key in range(5):
        assert [n for of, n in messages if of == f"order-{key}"] == list(range(key, 50, 5))


async def add_stream(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="orders", subjects=["orders.>"])
    await client.close()


async def read_stream(url: str) -> list[tuple[str, int]]:
    client = await nats.connect(url)
    subscription = await client.jetstream().subscribe("orders.>", ordered_consumer=True)
    pending = (await client.jetstream().stream_info("orders")).state.messages
    found = [await subscription.next_msg(timeout=10) for _ in range(pending)]
    await client.close()
    return [((message.headers or {})["penstock-key"], json.loads(message.data)["n"]) for message in found]


@contextmanager
def nats_server() -> Iterator[str]:
    """A server of NATS, with streams, that ends with the test."""
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [
                Path(sys.executable).with_name("nats-server"),
                "-js",
                "-sd",
                directory,
                "-p",
                "-1",
                "--ports_file_dir",
                directory,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as server,
    ):
        try:
            ports = Path(directory, f"nats-server_{server.pid}.ports")
            eventually(ports.exists, "the server has a port")
            yield json.loads(ports.read_text())["nats"][0]
        finally:
            server.terminate()


def test_a_relay_to_kafka(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = import_module("relay_to_kafka")
    cluster = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock"})
    [broker] = cluster.list_topics(timeout=10).brokers.values()
    monkeypatch.setenv("KAFKA_BROKERS", f"{broker.host}:{broker.port}")
    stage_orders(engine, relay.pipeline, relay.orders)
    drained(relay.pipeline, database_url, redis_url)
    reader = confluent_kafka.Consumer(
        {"bootstrap.servers": f"{broker.host}:{broker.port}", "group.id": "test", "auto.offset.reset": "earliest"}
    )
    partitions = reader.list_topics("orders").topics["orders"].partitions
    reader.assign(
        [confluent_kafka.TopicPartition("orders", each, confluent_kafka.OFFSET_BEGINNING) for each in partitions]
    )
    messages = reader.consume(50, timeout=20)
    reader.close()
    relay.connect.cache_clear()

    assert len(messages) == 50
    for key in range(5):
        of_key = [
            json.loads(message.value() or b"")["n"] for message in messages if message.key() == f"order-{key}".encode()
        ]
        assert of_key == list(range(key, 50, 5))


def stage_orders(engine: Engine, pipeline: Pipeline, orders: Log) -> None:
    with Session(engine) as session, session.begin():
        pipeline.attach(session)
        for number in range(50):
            stage(session, to=orders, key=f"order-{number % 5}", action="insert", object="order", data={"n": number})


def drain_again(engine: Engine, pipeline: Pipeline, database_url: str, redis_url: str) -> None:
    """Lets the consumer deliver everything again, as after a crash before its commit."""
    with engine.begin() as connection:
        connection.execute(text('UPDATE penstock.checkpoints SET "offset" = 0'))
    drained(pipeline, database_url, redis_url)


def test_a_sensor_waits_for_what_is_not_applied(
    engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, penstock: CommandLine
) -> None:
    fresh, app = import_module("fresh"), import_module("sqlmodel_app")
    monkeypatch.setattr(fresh, "subprocess", SimpleNamespace(run=lambda command, **_: penstock(*command[1:])))
    app.SQLModel.metadata.create_all(engine)

    def add_rider(name: str) -> None:
        with app.sqlmodel.Session(engine) as session:
            session.add(app.Rider(name=name))
            session.commit()

    add_rider("Ann")
    drained(app.pipeline, database_url, redis_url)
    assert fresh.is_fresh("greetings")
    assert not fresh.is_fresh("greetings", "somebody")

    add_rider("Bob")  # and nothing publishes it
    assert not fresh.is_fresh("greetings", most_behind_s=0.0)
