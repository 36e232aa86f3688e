"""What peers need: said in their heads, looked for, and told when it is missing."""

from pathlib import Path

import pytest

from penstock.bench.measuring import NotMeasured
from penstock.bench.peers import DIRECTORY, binaries_with, needs_of, peers_of
from penstock.bench.plant import Backlog, Plant


def with_postgres(root: Path, release: str, *extensions: str) -> Path:
    binaries = root / "lib/postgresql" / release / "bin"
    controls = root / "share/postgresql" / release / "extension"
    for directory in (binaries, controls):
        directory.mkdir(parents=True)
    for extension in extensions:
        (controls / f"{extension}.control").touch()
    return binaries


def test_the_newest_postgres_that_has_the_extension_is_taken(tmp_path: Path) -> None:
    with_postgres(tmp_path, "9", "pgq")
    expected = with_postgres(tmp_path, "15", "pgq", "other")
    with_postgres(tmp_path, "17", "other")

    assert binaries_with("pgq", tmp_path) == expected


def test_no_postgres_is_taken_that_lacks_it(tmp_path: Path) -> None:
    with_postgres(tmp_path, "17", "other")

    assert binaries_with("pgq", tmp_path) is None
    assert binaries_with("pgq", tmp_path / "empty") is None


def test_a_peer_says_in_its_head_what_it_needs() -> None:
    assert needs_of(DIRECTORY / "pgq.py")["extension"] == "pgq"
    assert needs_of(DIRECTORY / "skip_locked.py") == {}


def test_a_peer_is_measured_at_what_it_does() -> None:
    with Plant() as plant:
        consumers, relays = (peers_of(work, plant, Backlog(1)) for work in ("consume", "drain"))

    assert list(consumers) == ["article-consumer"]
    assert "article-consumer" not in relays
    assert "skip-locked" in relays


def test_a_peer_that_cannot_run_tells_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.peers.binaries_with", lambda *_: None)

    with (
        Plant() as plant,
        pytest.raises(NotMeasured, match="apt-get install postgresql-15-pgq3 pgqd"),
    ):
        peers_of("drain", plant, Backlog(1))["pgq"]()
