"""The recipes of ``examples``, each with real servers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from fixtures.documents import ROOT
from penstock.database.connections import connect_postgres
from penstock.operating.letters import of_consumer
from penstock.testing import drained


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")


def test_fastapi(engine: Engine, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    fastapi_app = import_module("fastapi_app")
    fastapi_app.Base.metadata.create_all(engine)
    with TestClient(fastapi_app.app) as client:
        answer = client.post("/orders?cents=500")
        refused = client.post("/orders?cents=much")
        assert drained(fastapi_app.pipeline, database_url, redis_url) == {"invoices": 1}
        assert client.get("/console/").status_code in {401, 403}
    with Session(engine) as session:
        [invoice] = session.scalars(select(fastapi_app.Invoice))

    assert (answer.status_code, refused.status_code) == (201, 422)
    assert (invoice.order_id, invoice.cents) == (answer.json()["id"], 500)


@contextmanager
def serving(respond: Callable[[bytes, Any], int]) -> Iterator[str]:
    """An endpoint of a customer."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(respond(body, self.headers))
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
        expected = webhooks.sign(headers["webhook-id"], headers["webhook-timestamp"], body)
        assert headers["webhook-signature"] == f"v1,{expected}"
        received.append(headers["webhook-id"])
        return 204

    def refuse(body: bytes, _: Any) -> int:
        refused.append(body)
        return 500

    monkeypatch.setattr(webhooks, "FAILURES", 2)
    with serving(accept) as good, serving(refuse) as bad, serving(lambda *_: 410) as gone:
        with Session(engine) as session, session.begin():
            for tenant, url in (("good", good), ("bad", bad), ("gone", gone)):
                webhooks.deliver.stage(session, webhooks.Webhook(url, "order.paid", {"id": 7}), tenant=tenant)
        drained(webhooks.pipeline, database_url, redis_url, allow_dead_letters=True)
        with connect_postgres(database_url, application="test") as connection:
            letters = {each.key: each.reason for each in of_consumer(connection, "deliver")}

    assert len(received) == 1
    assert len(refused) == 2  # and then it is left alone
    assert webhooks.breakers.keys() == {"bad", "gone"}
    assert list(letters) == ["gone"]
    assert "the endpoint is gone" in letters["gone"]
