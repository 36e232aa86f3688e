"""The places of the how-to, in real servers with several processes, whose jobs also fail, exit, fork and hang."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import httpx
import psycopg
import pytest

from penstock.testing import eventually

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "let-requests-do-the-work.md"
BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

FILES = {
    "recruiting.py": """
        import os, sys, threading
        from pathlib import Path
        from penstock.engines.stealing import Recruiter

        def work():
            with Path(__file__).with_name("work").open("a") as file:
                file.write(f"{os.getpid()} {threading.current_thread().name}\\n")

        def fail():
            raise ValueError

        def leave():
            sys.exit(1)

        def fork():
            if child := os.fork():
                os.waitpid(child, 0)

        def hang():
            threading.Event().wait(1)

        recruiter = Recruiter(budget_s=0.05, hangs_s=0.2)
        recruiter.install(work, "work", 0.5)
        for job in (fail, leave, fork, hang):
            recruiter.install(job, job.__name__, 0.05)
        """,
    "fastapi_served.py": """
        import os
        from fastapi.responses import StreamingResponse
        from fastapi_app import app

        @app.get("/")
        def home():
            return str(os.getpid())

        @app.get("/stream")
        def stream():
            return StreamingResponse(iter([str(os.getpid())]))

        @app.get("/fail")
        def fail():
            raise ValueError
        """,
    "flask_served.py": """
        import os
        from flask_app import app

        @app.get("/")
        def home():
            return str(os.getpid())

        @app.get("/stream")
        def stream():
            return iter([str(os.getpid())])

        @app.get("/fail")
        def fail():
            raise ValueError
        """,
    "django_settings.py": """
        SECRET_KEY = "secret"
        ALLOWED_HOSTS = ["*"]
        ROOT_URLCONF = "django_urls"
        LOGGING_CONFIG = None
        """,
    "django_urls.py": """
        import os
        from django.http import HttpResponse, StreamingHttpResponse
        from django.urls import path

        def home(_):
            return HttpResponse(str(os.getpid()))

        async def stream(_):
            async def pieces():
                yield str(os.getpid())
            return StreamingHttpResponse(pieces())

        def fail(_):
            raise ValueError

        urlpatterns = [path("", home), path("stream", stream), path("fail", fail)]
        """,
    "prefork.py": """
        import importlib, os, signal, sys
        from wsgiref.simple_server import WSGIRequestHandler, make_server
        from recruiting import recruiter

        class Handler(WSGIRequestHandler):
            def log_message(self, *_):
                pass

        module, name = sys.argv[1].split(":")
        application = getattr(importlib.import_module(module), name)
        while not recruiter.enlist():  # the parent has a thread, too
            pass
        server = make_server("127.0.0.1", 0, application, handler_class=Handler)
        children = []
        for _ in range(2):
            child = os.fork()
            if not child:
                server.serve_forever()
            children.append(child)
        signal.signal(signal.SIGTERM, lambda *_: [os.kill(each, signal.SIGTERM) for each in children])
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        for child in children:
            os.waitpid(child, 0)
        """,
    "tasks.py": """
        import os
        from celery_app import app

        app.conf.broker_url = os.environ["BROKER"]

        @app.task(ignore_result=True)
        def nothing():
            pass

        @app.task(ignore_result=True)
        def fail():
            raise ValueError
        """,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The programs of the how-to, with jobs that leave a trace."""
    shown = dict(BLOCK.findall(PAGE.read_text()))
    for name, text in {**shown, **FILES}.items():
        (tmp_path / name).write_text(dedent(text))
    return tmp_path


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """Starts a Python program in the directory; it has to end by itself when it is asked to."""
    started: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "django_settings"}

    def run(*arguments: str, fds: tuple[int, ...] = (), **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=directory,
            env={**environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            pass_fds=fds,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        try:
            process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def recruits(directory: Path) -> dict[str, set[str]]:
    """The processes that did jobs, and the names of their threads."""
    found: dict[str, set[str]] = {}
    trace = directory / "work"
    for line in trace.read_text().splitlines() if trace.exists() else ():
        process, thread = line.split()
        found.setdefault(process, set()).add(thread)
    return found


def request_until_both_worked(client: httpx.Client, directory: Path) -> None:
    """Also until jobs of every kind have probably been drawn."""
    served: set[str] = set()
    count = 0

    def both_worked() -> bool:
        nonlocal count
        count += 1
        for path in ("/", "/stream"):
            response = client.get(path, headers={"connection": "close"})
            assert response.status_code == 200
            served.add(response.text.strip('"'))
        assert client.get("/fail", headers={"connection": "close"}).status_code == 500
        worked = recruits(directory)
        return count >= 60 and len(served) == 2 and served <= worked.keys()

    eventually(both_worked, "both processes served requests and did jobs", timeout_s=90, interval_s=0)
    assert {name for names in recruits(directory).values() for name in names} == {"penstock-job"}


@pytest.mark.parametrize("app", ["fastapi_served:app", pytest.param("django_asgi:application", marks=pytest.mark.slow)])
def test_the_workers_of_an_asgi_server_do_jobs(directory: Path, start: Start, app: str) -> None:
    path = str(directory / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        fd = str(listener.fileno())
        start("-m", "uvicorn", app, "--workers", "2", "--fd", fd, "--log-level", "critical", fds=(int(fd),))
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://app", timeout=60) as client:
            request_until_both_worked(client, directory)


@pytest.mark.parametrize("app", ["flask_served:app", pytest.param("django_wsgi:application", marks=pytest.mark.slow)])
def test_the_forked_workers_of_a_wsgi_server_do_jobs(directory: Path, start: Start, app: str) -> None:
    """The application was loaded, and the recruiter had a thread, before they were forked."""
    server = start("prefork.py", app)
    assert server.stdout is not None

    with httpx.Client(base_url=server.stdout.readline().strip(), timeout=60) as client:
        request_until_both_worked(client, directory)


@pytest.mark.slow
def test_the_forked_workers_of_celery_do_jobs(redis_url: str, directory: Path, start: Start) -> None:
    broker = redis_url.replace("unix://", "redis+socket://").partition("?")[0]
    worker = ["worker", "--pool", "prefork", "--concurrency", "2", "--loglevel", "critical"]
    start("-m", "celery", "-A", "tasks", *worker, BROKER=broker)

    def both_worked() -> bool:
        start("-c", "from tasks import *; [(nothing.delay(), fail.delay()) for _ in range(20)]", BROKER=broker).wait(20)
        return len(recruits(directory)) == 2

    eventually(both_worked, "both processes did jobs", timeout_s=180)
    assert set.union(*recruits(directory).values()) == {"penstock-job"}


SHOP = {
    "shop.py": """
        import os
        from penstock import Log, Pipeline, stage
        from sqlalchemy import create_engine, text
        from sqlalchemy.orm import sessionmaker

        DATABASE_URL, REDIS_URL = os.environ["SHOP_DATABASE"], os.environ["SHOP_REDIS"]
        orders = Log("orders")
        pipeline = Pipeline(channels=[orders])
        Session = sessionmaker(create_engine(DATABASE_URL.replace(":", "+psycopg:", 1)))
        pipeline.attach(Session)

        @pipeline.consumer(reads=orders)
        def revenue(session, records):
            cents = sum(record.data["cents"] for record in records)
            session.execute(text("UPDATE revenue SET cents = cents + :cents"), {"cents": cents})
        """,
    "shop_served.py": """
        from fastapi_app import app
        from penstock import stage
        from shop import Session, orders
        from sqlalchemy import text

        @app.post("/orders")
        def order():
            with Session.begin() as session:
                stage(session, to=orders, key=1, action="insert", object="order", data={"cents": 100})

        @app.get("/revenue")
        def revenue():
            with Session() as session:
                return session.scalar(text("SELECT cents FROM revenue"))
        """,
}


def test_the_requests_of_an_application_publish_and_consume_its_records(
    redis_url: str, database_url: str, directory: Path, start: Start
) -> None:
    """Guarantee 5: with the recruiter of the how-to, and no other process than the web server's two."""
    shown = dict(BLOCK.findall(PAGE.read_text()))
    often = shown["recruiting.py"].replace("rate=0.02", "rate=1.0")
    for name, text in {**SHOP, "recruiting.py": often}.items():
        (directory / name).write_text(dedent(text))
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE revenue AS SELECT 0 AS cents")
    path = str(directory / "socket")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        fd = listener.fileno()
        program = ["-m", "uvicorn", "shop_served:app", "--workers", "2", "--fd", str(fd)]
        start(*program, fds=(fd,), SHOP_DATABASE=database_url, SHOP_REDIS=redis_url)
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://app", timeout=60) as client:
            assert {client.post("/orders").status_code for _ in range(20)} == {200}
            eventually(lambda: client.get("/revenue").json() == 2000, "the orders are applied", timeout_s=90)
            assert {client.get("/revenue").json() for _ in range(50)} == {2000}


def test_the_other_programs_of_the_how_to_run(directory: Path, start: Start) -> None:
    (directory / "all_of_them.py").write_text(
        dedent(
            """
            import caching, own_jobs, sessions
            from recruiting import recruiter

            own_jobs.delete_thumbnails()
            print(caching.find_rating("ann"), caching.find_rating("bob"))
            with sessions.SessionLocal() as session:
                session.commit()
            import counting
            """
        )
    )

    output, _ = start("all_of_them.py").communicate(timeout=250)

    lines = output.splitlines()
    assert lines[:4] == ["c", "b", "a", "4.5 None"]
    assert [line.split()[:2] for line in lines[4:]] == [
        *([name, "2"] for name in ("work", "fail", "leave", "fork", "hang")),
        ["thumbnails", "2"],
    ]
