"""Peers declare their requirements, which are looked up; a missing one is reported."""

from pathlib import Path

import pytest

from benchmarks.backlogs import Backlog
from benchmarks.measuring import NotMeasured
from benchmarks.peer_scripts import DIRECTORY, find_binaries_with, find_peers, parse_needs
from benchmarks.servers import BenchServers


def with_postgres(root: Path, release: str, *extensions: str) -> Path:
    binaries = root / "lib/postgresql" / release / "bin"
    controls = root / "share/postgresql" / release / "extension"
    for directory in (binaries, controls):
        directory.mkdir(parents=True)
    for extension in extensions:
        (controls / f"{extension}.control").touch()
    return binaries


def test_the_newest_postgres_with_the_extension_is_chosen(tmp_path: Path) -> None:
    with_postgres(tmp_path, "9", "pgq")
    expected = with_postgres(tmp_path, "15", "pgq", "other")
    with_postgres(tmp_path, "17", "other")

    assert find_binaries_with("pgq", tmp_path) == expected


def test_a_postgres_without_the_extension_is_not_chosen(tmp_path: Path) -> None:
    with_postgres(tmp_path, "17", "other")

    assert find_binaries_with("pgq", tmp_path) is None
    assert find_binaries_with("pgq", tmp_path / "empty") is None


def test_a_peer_declares_its_requirements_in_its_header() -> None:
    assert parse_needs(DIRECTORY / "pgq.py")["extension"] == "pgq"
    assert parse_needs(DIRECTORY / "skip_locked.py") == {}


def test_a_peer_is_measured_only_at_the_work_it_does() -> None:
    with BenchServers() as servers:
        consumers, relays = (find_peers(work, servers, Backlog(1)) for work in ("consume", "drain"))

    assert list(consumers) == ["article-consumer"]
    assert "article-consumer" not in relays
    assert "skip-locked" in relays


@pytest.mark.slow
def test_the_processor_time_of_a_peer_is_that_of_its_process_and_of_both_servers() -> None:
    with BenchServers() as servers:
        peers = find_peers("drain", servers, Backlog(2000, shards=1), costs=True)
        figures = peers["skip-locked-pipelined"]()

    parts = [figures[f"-{who}"] for who in ("worker", "postgres", "redis")]
    assert "-staged" in figures
    assert figures[""] == pytest.approx(sum(parts))


def test_a_peer_that_cannot_run_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peer_scripts.find_binaries_with", lambda *_: None)

    with BenchServers() as servers, pytest.raises(NotMeasured, match="apt-get install postgresql-15-pgq3 pgqd"):
        find_peers("drain", servers, Backlog(1))["pgq"]()
