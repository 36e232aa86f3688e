"""Probes: what an orchestrator and systemd learn of a worker."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.errors import QueryCanceled

from fixtures.clocks import Clock
from fixtures.command_line import CommandLine, Started
from fixtures.constants import SetConstants
from fixtures.flow import running
from fixtures.probing import ask
from fixtures.reader import Reader
from penstock import Pipeline
from penstock.database.connections import Connection
from penstock.errors import InvalidSetting
from penstock.observer import Event, HandlerBegan, HandlerEnded, LoopBegan, RoundEnded, ServerAway, Staged
from penstock.observing import listener as listener_module
from penstock.observing.listener import MAX_ANSWERS, MAX_CONNECTIONS, Answer, Listener
from penstock.observing.probes import Probes, notified_systemd, watchdog_interval_s
from penstock.streaming import Streamer
from penstock.testing import eventually


@pytest.fixture
def probes() -> Probes:
    return Probes()


def test_a_process_is_ready_once_each_loop_has_reached_both_servers_and_while_it_does(probes: Probes) -> None:
    assert probes.unready() == ["starting"]
    probes(LoopBegan("reader"))
    assert probes.unready() == ["reader: has not begun"]
    probes(RoundEnded("reader", 0.1))
    assert probes.readyz() == Answer(200, "ok\n")
    probes(ServerAway("reader", "redis", 0.1))
    assert probes.readyz() == Answer(503, "reader: waits for redis\n")
    assert probes.livez().status == 200
    probes(RoundEnded("reader", 0.1))
    assert probes.unready() == []


DRIVERS = ("psycopg.waiting", "redis", "py4j.clientserver")


@pytest.mark.parametrize("where", ["application", "psycopg_pool", *DRIVERS])
def test_what_a_silent_loop_does_decides_whether_it_is_alive_and_ready(where: str) -> None:
    """Every combination of what it has said last, of where it is, and of how long it has said nothing."""
    run = "def run(say, done, over):\n    say()\n    done.set()\n    over.wait()"
    loop: dict[str, Any] = {"__name__": where}
    exec(run, loop)  # a function of that module
    events: dict[str, list[Event]] = {
        "round": [RoundEnded("reader", 0.1)],
        "waits": [RoundEnded("reader", 0.1), ServerAway("reader", "redis", 0.1)],
        "handles": [RoundEnded("reader", 0.1), HandlerBegan("reader", "things", 1)],
        "has handled": [HandlerBegan("reader", "things", 1), RoundEnded("reader", 0.1), HandlerEnded("reader", "things", 1, 0.1, None)],
    }  # fmt: skip
    for name, said in events.items():
        clock, done, over = Clock(), threading.Event(), threading.Event()
        probes = Probes(clock)

        def say(said: Sequence[Event] = said, probes: Probes = probes) -> None:
            for event in said:
                probes(event)

        thread = threading.Thread(target=loop["run"], args=(say, done, over), daemon=True)
        thread.start()
        done.wait()
        for silent_s in (0, 10, 10.5, 60, 60.5):
            clock.now = 1000.0 + silent_s
            is_dead = silent_s > 60 and name != "handles" and where not in DRIVERS
            is_late = silent_s > 10 and name != "handles" and where in DRIVERS
            assert probes.dead() == ([f"reader: no round for {silent_s:.0f} s"] if is_dead else []), (name, silent_s)
            if name == "waits":
                assert probes.unready() == ["reader: waits for redis"]
            else:
                late = f"reader: has waited for a server's reply for {silent_s:.0f} s"
                assert probes.unready() == ([late] if is_late else []), (name, silent_s)
        over.set()
        thread.join()
        assert probes.dead() == ["reader: its thread has ended"]


def test_each_event_of_a_loop_is_heard_and_those_of_other_threads_are_not() -> None:
    clock = Clock()
    probes = Probes(clock)
    probes(LoopBegan("reader"))
    clock.now += 61
    for event in (Staged("things", 1), HandlerBegan("reader", "things", 1)):
        thread = threading.Thread(target=probes, args=(event,))
        thread.start()
        thread.join()
    assert probes.dead() == ["reader: no round for 61 s"]
    probes(Staged("things", 1))
    assert (probes.dead(), probes.unready()) == ([], ["reader: has not begun"])


def test_a_loop_that_waits_for_a_reply_is_alive_however_long_that_takes(
    probes: Probes, database_url: str, connection: Connection, set_constants: SetConstants
) -> None:
    """As a streamer does at its first tick after a long outage: to end it would make it begin again."""
    set_constants("observing.probes", SILENT_S=-1.0)
    ready, over = threading.Event(), threading.Event()
    with psycopg.connect(database_url) as opened:

        def loop() -> None:
            probes(RoundEnded("streamer", 0.1))
            with suppress(QueryCanceled):
                opened.execute("SELECT pg_sleep(60) -- a tick")
            ready.set()
            over.wait()

        thread = threading.Thread(target=loop)
        thread.start()
        ticking = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%-- a tick' AND state = 'active' AND pid <> pg_backend_pid()"
        eventually(lambda: connection.execute(ticking.encode()).rowcount > 0, "the statement runs")
        assert probes.dead() == []
        opened.cancel()
        ready.wait()
        assert probes.dead() == ["streamer: no round for 0 s"]
        over.set()
        thread.join()


@pytest.mark.usefixtures("twenty_records")
def test_a_halted_consumer_leaves_its_probes_green_and_those_of_the_streamer(
    reader: Reader, streamer: Streamer, flow: Pipeline, probes: Probes
) -> None:
    """Another process would stop at the same record: to start this one anew helps nobody."""

    def handler(*_: Any) -> None:
        raise ValueError

    flow.observe(probes)
    reader.declare(handler, attempts=1, on_poison="halt")
    with running(streamer.run, reader.worker().run):
        eventually(lambda: all(reader.checkpoints("halted")), "both shards are halted")
        eventually(lambda: len(probes._loops) == 2 and not probes.unready(), "both loops are ready")
        assert probes.dead() == []


def test_clients_that_send_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module._Handler, "timeout", 3600.0)
    with Listener("127.0.0.1:0", {"/livez": lambda _: Answer(200, "ok\n")}) as listener:
        address = ("127.0.0.1", listener.port)
        silent = [socket.create_connection(address, timeout=60) for _ in range(3 * MAX_CONNECTIONS)]
        for _ in range(3):
            assert ask(listener.port) == (200, "ok\n")
        assert silent[0].recv(1) == b"", "the oldest has made room"
        for each in silent:
            each.close()
        with socket.create_connection(address, timeout=60) as late:
            for _ in range(MAX_CONNECTIONS):
                with socket.create_connection(address, timeout=60) as gone:
                    gone.shutdown(socket.SHUT_WR)
                    assert gone.recv(1) == b""
            late.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert late.recv(100).startswith(b"HTTP/1.0 200"), "those that have gone need no room"


def test_a_client_whose_answer_takes_long_makes_room_for_nobody() -> None:
    """As those of metrics, while Postgres hangs."""
    arrived, over = threading.Semaphore(0), threading.Event()

    def wait(_: str) -> Answer:
        arrived.release()
        over.wait()
        return Answer(200, "late\n")

    with Listener("127.0.0.1:0", {"/metrics": wait}) as listener, ThreadPoolExecutor(MAX_ANSWERS) as clients:
        late = []
        for _ in range(MAX_ANSWERS):
            late.append(clients.submit(ask, listener.port, path="/metrics"))
            assert arrived.acquire(timeout=60)
        assert ask(listener.port, path="/metrics")[0] == 503
        over.set()
        assert [each.result() for each in late] == [(200, "late\n")] * MAX_ANSWERS
        assert ask(listener.port, path="/metrics")[0] == 200


def test_only_the_paths_are_answered_and_only_when_read() -> None:
    with Listener("0", {"/livez": lambda _: Answer(200, "ok\n")}) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", listener.port), timeout=60)
        assert ask(listener.port, path="/livez?verbose=1")[0] == 200
        assert ask(listener.port, "HEAD") == (200, "")
        assert ask(listener.port, path="/../livez") == (404, "/livez\n")
        assert ask(listener.port, "POST")[0] == 501
        with pytest.raises(InvalidSetting, match="Address already in use"):
            Listener(f"127.0.0.1:{listener.port}", {})
    for address in ("127.0.0.1", "65536", "127.0.0.1:-1", "127.0.0.1:\u0661", ""):
        with pytest.raises(InvalidSetting, match="give a port"):
            Listener(address, {})
    if has_ipv6():
        with Listener("[::1]:0", {"/livez": lambda _: Answer(200, "ok\n")}) as listener:
            socket.create_connection(("::1", listener.port), timeout=60).close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_systemd_hears_when_the_process_is_ready_that_it_lives_and_when_it_stops(
    probes: Probes, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with notified_systemd(probes, environment):
            probes(RoundEnded("reader", 0.1))
            assert [systemd.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]
        received = systemd.recv(100)
        while received == b"WATCHDOG=1":
            received = systemd.recv(100)
        assert received == b"STOPPING=1"

    with notified_systemd(probes, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}):
        pass


@pytest.mark.parametrize(("microseconds", "seconds"), [(None, 0), ("0", 0), ("20000", 0.01), ("30000000", 15)])
def test_systemd_hears_twice_within_the_time_of_its_watchdog_that_the_process_lives(
    microseconds: str | None, seconds: float
) -> None:
    assert watchdog_interval_s({} if microseconds is None else {"WATCHDOG_USEC": microseconds}) == seconds


def list_notifiers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "penstock-systemd"]


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "2000"}], ids=["unwatched", "watched"])
def test_systemd_hears_no_life_of_a_process_without_any(probes: Probes, watchdog: dict[str, str]) -> None:
    """At an abstract address; a process that is not watched says nothing between the two."""
    name, asked = f"penstock-{uuid4()}", list[int]()

    class Dead(Probes):
        def dead(self) -> list[str]:
            asked.append(1)
            return ["reader: its thread has ended"]

    eventually(lambda: not list_notifiers(), "those of other tests have ended")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.settimeout(30)
        probes = Dead()
        with notified_systemd(probes, {"NOTIFY_SOCKET": f"@{name}", **watchdog}):
            assert len(list_notifiers()) == 1
            probes(RoundEnded("reader", 0.1))
            if watchdog:
                eventually(lambda: len(asked) > 5, "it is asked again and again")
            else:
                eventually(lambda: not list_notifiers(), "it has said that it is ready")
        eventually(lambda: not list_notifiers(), "nothing more is said")
        systemd.setblocking(False)
        assert [systemd.recv(100) for _ in range(2)] == [b"READY=1", b"STOPPING=1"]
        with pytest.raises(BlockingIOError):
            systemd.recv(100)


def test_a_probe_needs_no_library_but_that_of_the_command_line() -> None:
    """It is asked every few seconds, beside the work."""
    program = (
        "import sys; from penstock.cli.app import app, _read_defaults; import penstock.cli.commands.probe; _read_defaults(is_help=False)"
        "; print([n for n in ('sqlalchemy', 'redis', 'psycopg', 'structlog', 'pydantic', 'prometheus_client') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_workers_answer_probes_and_have_metrics_of_what_they_have_done(
    penstock: CommandLine, started: Started, connection: Connection
) -> None:
    """Through the command, as in containers: what two processes count is what is in the tables."""
    connection.execute("CREATE TABLE public.effects (record_id bigint)")
    workers = [
        started(*words, "--listen", "0", "--log-format", "json")
        for words in (("run", "--engine", "inline"), ("consume", "reader"))
    ]
    ports = [
        next(line["port"] for line in map(json.loads, each.stderr) if line["event"] == "listening") for each in workers
    ]
    for port in ports:
        eventually(lambda port=port: ask(port, path="/readyz")[0] == 200, "the process is ready")  # type: ignore[misc]
    for _ in range(10):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'things', i % 2, 'k' || i, 'insert', 'thing', '{}' FROM generate_series(1, 100) AS i"
        )

    def count(which: str) -> float:
        texts = (ask(port, path="/metrics")[1] for port in ports)
        return sum(float(value) for text in texts for value in re.findall(f"{which}.*}} (.*)", text))

    counted = ['outcome="applied"', "stage_to_commit_seconds_count", 'step="added"']
    eventually(lambda: [count(each) for each in counted] == [1000] * 3, "all records are applied and counted")
    assert connection.execute("SELECT FROM public.effects").rowcount == 1000

    url = f"http://127.0.0.1:{ports[0]}/livez"
    assert penstock("probe", url).stdout == "ok\n"
    workers[0].send_signal(signal.SIGTERM)
    assert workers[0].wait() == 0
    away = penstock("probe", url)
    assert (away.returncode, away.stderr) == (1, f"127.0.0.1:{ports[0]} does not answer: ConnectionRefusedError\n")
    assert penstock("probe", "https://127.0.0.1/livez").returncode == 2
