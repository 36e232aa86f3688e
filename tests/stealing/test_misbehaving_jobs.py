"""What a job does, its caller does not notice: it raises, hangs, exits, forks, or is cut by the end of the process."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace

import pytest

from fixtures.constants import SetConstants
from fixtures.recruiting import MakeRecruiter, RunProgram
from penstock.engines.stealing import Outcome, Recruiter, time_left_s, when_idle
from penstock.engines.stealing import recruiter as recruiter_module
from penstock.testing import eventually


def wait_for(length: int, collected: Sequence[object]) -> None:
    eventually(lambda: len(collected) == length, f"{length} times")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What recruiters have logged, and nothing of others."""
    return [record.getMessage() for record in caplog.records if record.name == recruiter_module.__package__]


def raises() -> None:
    raise ValueError("4111 1111 1111 1111")


def exits() -> None:
    sys.exit("4111 1111 1111 1111")


def interrupts() -> None:
    raise KeyboardInterrupt


def generates() -> Iterator[None]:
    yield


async def raises_later() -> None:
    await asyncio.sleep(0)
    raise ValueError("4111 1111 1111 1111")


@pytest.mark.parametrize("job", [raises, exits, interrupts, generates, raises_later])
def test_a_job_that_fails_is_counted_and_the_next_one_runs(
    recruiter: Recruiter, caplog: pytest.LogCaptureFixture, job: Callable[[], object]
) -> None:
    recruiter.install(job, "bad", 1.0)

    assert recruiter.enlist()
    eventually(lambda: recruiter.counters()["bad"].failed == 1, "the failure is counted")
    recruiter.set_rate("bad", 0.0)
    recruiter.install(lambda: None, "good", 1.0)
    eventually(recruiter.enlist, "the thread is free")

    eventually(lambda: recruiter.counters()["good"].finished == 1, "the next job runs")
    [message] = messages(caplog)
    assert message.startswith("job bad failed: ")
    assert "4111" not in message


def test_a_failure_is_logged_once_a_minute(recruiter: Recruiter, caplog: pytest.LogCaptureFixture) -> None:
    recruiter.install(raises, "bad", 1.0)

    def failed() -> bool:
        recruiter.enlist()
        return recruiter.counters()["bad"].failed >= 5

    eventually(failed, "it fails again and again")
    assert len(messages(caplog)) == 1
    assert "ValueError" in caplog.text
    assert "test_misbehaving_jobs.py" in caplog.text


def test_an_asynchronous_job_is_awaited(recruiter: Recruiter) -> None:
    async def job() -> Outcome:
        await asyncio.sleep(0)
        assert time_left_s() <= 0.1
        return Outcome.GAVE_UP

    recruiter.install(job, "job", 1.0)

    recruiter.enlist()

    eventually(lambda: recruiter.counters()["job"].aborted == 1, "its outcome is counted")


def test_an_asynchronous_job_that_hangs_is_cancelled(make_recruiter: MakeRecruiter) -> None:
    recruiter = make_recruiter(budget_s=0.01, hangs_s=0.05)
    cancelled: list[bool] = []

    async def job() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    recruiter.install(job, "job", 1.0)

    recruiter.enlist()

    wait_for(1, cancelled)
    eventually(lambda: recruiter.counters()["job"].failed == 1, "it is counted")


def test_a_job_that_enlists_or_changes_its_recruiter_waits_for_nothing(recruiter: Recruiter) -> None:
    enlisted: list[bool] = []

    def job() -> None:
        enlisted.append(recruiter.enlist())
        recruiter.install(lambda: None, "other", 0.0)
        recruiter.uninstall("other")
        recruiter.counters()
        recruiter.close()

    recruiter.install(job, "job", 1.0)

    recruiter.enlist()

    eventually(lambda: recruiter.counters()["job"].finished == 1, "it ends")
    assert enlisted == [False]


def test_no_job_sees_what_another_has_set(recruiter: Recruiter) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    seen: list[str] = []

    def job() -> None:
        seen.append(tenant.get())
        tenant.set("ann")

    recruiter.install(job, "job", 1.0)
    tenant.set("bob")

    for count in (1, 2):
        eventually(recruiter.enlist, "the thread is free")
        wait_for(count, seen)

    assert seen == ["none", "none"]


class Hanging:
    """A job that hangs until it is released, each run by itself."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self._releases: dict[threading.Thread, threading.Event] = {}

    def __call__(self) -> None:
        thread = threading.current_thread()
        released = self._releases[thread] = threading.Event()
        self.threads.append(thread)
        released.wait(60)

    def release(self, number: int) -> threading.Thread:
        thread = self.threads[number]
        self._releases[thread].set()
        return thread


def test_another_thread_takes_over_from_one_that_hangs(
    make_recruiter: MakeRecruiter, caplog: pytest.LogCaptureFixture
) -> None:
    recruiter, hanging = make_recruiter(budget_s=0.01, hangs_s=0.05), Hanging()
    recruiter.install(hanging, "hanging", 1.0)
    recruiter.enlist()
    wait_for(1, hanging.threads)
    recruiter.set_rate("hanging", 0.0)
    recruiter.install(lambda: None, "good", 1.0)

    eventually(recruiter.enlist, "another thread takes over")

    eventually(lambda: recruiter.enlist() or recruiter.counters()["good"].finished, "its job is done")
    hanging.release(0).join(60)
    assert not hanging.threads[0].is_alive()
    counters = recruiter.counters()["hanging"]
    assert (counters.recruited, counters.failed, counters.finished) == (1, 1, 0)

    def said() -> list[logging.LogRecord]:
        return [each for each in caplog.records if "job hanging has not returned" in each.getMessage()]

    eventually(said, "it is logged")
    assert [each.levelno for each in said()] == [logging.ERROR]


def test_a_recruiter_with_four_threads_that_hang_stops_until_one_returns(
    make_recruiter: MakeRecruiter, caplog: pytest.LogCaptureFixture
) -> None:
    recruiter, hanging = make_recruiter(budget_s=0.01, hangs_s=0.05), Hanging()
    recruiter.install(hanging, "hanging", 1.0)

    for number in (1, 2, 3, 4):
        eventually(recruiter.enlist, f"thread {number} has the job")
        wait_for(number, hanging.threads)

    def stopped() -> bool:
        assert not recruiter.enlist()
        return "4 threads hang in their jobs: no job is done until one returns" in caplog.text

    eventually(stopped, "the recruiter stops")
    assert len(set(hanging.threads)) == 4
    recruiter._supervisor._limits = replace(recruiter._supervisor._limits, hangs_s=600.0)  # of the thread to come
    hanging.release(1).join(60)
    eventually(recruiter.enlist, "it works again")
    wait_for(5, hanging.threads)
    hanging.release(4)
    eventually(lambda: recruiter.counters()["hanging"].finished == 1, "and its job is done")
    for number in (0, 2, 3):
        hanging.release(number).join(60)
    assert recruiter.counters()["hanging"].finished == 1
    assert recruiter.counters()["hanging"].failed == 4
    assert caplog.text.count("4 threads hang") == 1


@pytest.fixture
def patient_recruiter(make_recruiter: MakeRecruiter, set_constants: SetConstants) -> Recruiter:
    """It waits for its job when it is closed, however slow the machine."""
    set_constants("engines.stealing.recruiter", MAX_END_S=60.0)
    return make_recruiter(budget_s=60.0, hangs_s=100.0, idle_s=0.05)


def test_a_closed_recruiter_does_nothing_more(patient_recruiter: Recruiter) -> None:
    recruiter = patient_recruiter
    left: list[float] = []
    began = threading.Event()

    def job() -> None:
        began.set()
        while time_left_s() > 0:
            threading.Event().wait(0.001)
        left.append(time_left_s())

    recruiter.install(job, "job", 1.0)
    recruiter.enlist()
    assert began.wait(60)

    recruiter.close()

    assert left == [0.0]
    assert not recruiter.enlist()


def test_a_recruiter_closed_while_it_hangs_starts_no_other_thread(make_recruiter: MakeRecruiter) -> None:
    recruiter, hanging = make_recruiter(budget_s=0.01, hangs_s=0.05), Hanging()
    recruiter.install(hanging, "hanging", 1.0)
    recruiter.enlist()
    wait_for(1, hanging.threads)

    recruiter.close()
    eventually(recruiter._supervisor._in_charge.hanging, "it hangs")

    assert [recruiter.enlist() for _ in range(3)] == [False] * 3
    assert len(hanging.threads) == 1
    hanging.release(0)


def test_what_a_job_keeps_open_is_closed_when_the_thread_is_idle(patient_recruiter: Recruiter) -> None:
    recruiter = patient_recruiter
    closed: list[str] = []
    runs: list[int] = []

    def close() -> None:
        closed.append(threading.current_thread().name)

    def job() -> None:
        runs.append(1)
        when_idle(close)
        when_idle(close)

    recruiter.install(job, "job", 1.0)
    recruiter.enlist()
    eventually(lambda: closed, "it is closed")
    eventually(recruiter.enlist, "the thread takes another job")
    eventually(lambda: len(runs) == 2, "which runs")

    recruiter.close()

    assert closed == ["penstock-job"] * 2


def test_a_job_that_forks_ends_its_child(recruiter: Recruiter, tmp_path: object) -> None:
    """The child must not serve requests, run the rest of the test, or flush what its parent has not."""
    statuses: list[int] = []
    parent = os.getpid()

    def job() -> None:
        child = os.fork()
        if child:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif fails:
            raise ValueError

    recruiter.install(job, "job", 1.0)
    for count, fails in enumerate((False, True), start=1):  # noqa: B007  read by the job
        eventually(recruiter.enlist, "the thread is free")
        wait_for(count, statuses)

    assert os.getpid() == parent
    assert statuses == [0, 1]


@pytest.mark.slow
def test_a_forked_process_has_its_own_thread_counters_and_draws(run_program: RunProgram) -> None:
    """Also if a job runs, a counter is read, or a job is installed in the parent at that moment."""
    lines = run_program(
        """
        import os, threading, time
        from penstock.engines.stealing import Recruiter

        recruiter = Recruiter()
        release = threading.Event()
        parent = os.getpid()
        recruiter.install(lambda: os.getpid() == parent and release.wait(30), "half", 0.5)
        while not recruiter.enlist():
            pass

        def read():
            while not release.is_set():
                recruiter.counters()
                recruiter.install(lambda: None, "other", 0.0)
                recruiter.uninstall("other")

        threading.Thread(target=read).start()

        def in_child():
            before = recruiter.counters()["half"]
            assert (before.enlisted, before.recruited, before.seconds) == (0, 0, 0.0), before
            draws = ""
            for _ in range(64):
                recruited = recruiter.counters()["half"].recruited
                recruiter.enlist()
                draws += str(recruiter.counters()["half"].recruited - recruited)
            deadline = time.monotonic() + 60
            while not recruiter.counters()["half"].finished and time.monotonic() < deadline:
                recruiter.enlist()
            os.write(1, f"{draws} {recruiter.counters()['half'].finished > 0}\\n".encode())

        children = []
        for _ in range(20):
            child = os.fork()
            if not child:
                try:
                    in_child()
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        assert recruiter.counters()["half"].finished == 0
        release.set()
        """
    )

    draws, finished = zip(*(line.split() for line in lines), strict=True)
    assert len(set(draws)) == len(draws) == 20
    assert set(finished) == {"True"}


ENDLESS = {
    "waits": ["time.sleep(1000)", "asyncio.run(asyncio.sleep(1000))"],
    "imports": ["import psycopg, pydantic, redis, structlog"],
    "computes and has a thread": [
        "while True: pass",
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); time.sleep(99)",
    ],
    "writes": ["while True: sys.stdout.write('.'); sys.stdout.flush()", "while True: log.error('again')"],
    "waits for a server": [
        "psycopg.connect(host=directory.name, port=1)",
        "redis.Redis(unix_socket_path=silent).ping()",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_process_ends_while_a_job_runs(run_program: RunProgram, kind: str) -> None:
    """Also while it waits for a server that accepts connections and never answers."""
    run_program(
        """
        import asyncio, concurrent.futures.thread, logging, socket, sys, tempfile, threading, time
        from penstock.engines.stealing import Recruiter

        log = logging.getLogger("job")
        log.addHandler(logging.StreamHandler(sys.stdout))
        directory = tempfile.TemporaryDirectory()
        silent = directory.name + "/.s.PGSQL.1"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(silent)
        listener.listen()
        listener.detach()  # stays open to the end of the process

        def recruit(body):
            began = threading.Event()

            def job():
                began.set()
                exec(body)

            recruiter = Recruiter()
            recruiter.install(job, "job", 1.0)
            recruiter.enlist()
            began.wait()
            return recruiter

        loaded, *bodies = sys.argv[1:]
        exec(loaded)  # what jobs have imported; while the process ends they can import nothing
        recruiters = [recruit(body) for body in bodies]
        threading.Event().wait(0.05)
        directory.cleanup()
        """,
        "import psycopg, redis" if kind == "waits for a server" else "",
        *ENDLESS[kind],
    )


def test_a_job_is_shown_the_end_of_the_process(run_program: RunProgram) -> None:
    lines = run_program(
        """
        import threading, time
        from penstock.engines.stealing import Recruiter, time_left_s, when_idle

        began = threading.Event()

        def job():
            when_idle(lambda: print("closed", flush=True))
            began.set()
            while time_left_s() > 0:
                time.sleep(0.001)
            print("stopped", flush=True)

        recruiter = Recruiter(budget_s=50)
        recruiter.install(job, "job", 1.0)
        recruiter.enlist()
        began.wait()
        """
    )

    assert lines == ["stopped", "closed"]


def test_all_recruiters_are_asked_to_end_before_one_is_waited_for(
    make_recruiter: MakeRecruiter, set_constants: SetConstants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the end of the process does; each job waits for the other one."""
    recruiters = [make_recruiter(budget_s=100, hangs_s=200) for _ in range(2)]
    monkeypatch.setattr(recruiter_module, "_recruiters", recruiters)
    set_constants("engines.stealing.recruiter", MAX_END_S=100.0)
    began, both_asked = threading.Semaphore(0), threading.Barrier(2)

    def job() -> None:
        began.release()
        while time_left_s() > 0:
            threading.Event().wait(0.001)
        both_asked.wait(60)

    for recruiter in recruiters:
        recruiter.install(job, "job", 1.0)
        recruiter.enlist()
        assert began.acquire(timeout=60)

    recruiter_module._close_all()

    assert [recruiter.counters()["job"].finished for recruiter in recruiters] == [1, 1]


def test_where_no_thread_can_be_started_the_job_is_dismissed(run_program: RunProgram) -> None:
    lines = run_program(
        """
        import logging, resource, sys
        from penstock.engines.stealing import Recruiter

        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        recruiter = Recruiter()
        recruiter.install(lambda: None, "job", 1.0)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 24, -1))

        print([recruiter.enlist() for _ in range(3)], recruiter.counters()["job"].dismissed)
        """
    )

    assert lines[0].startswith("job start of a thread failed: RuntimeError")
    assert lines[1:] == ["[False, False, False] 3"]
