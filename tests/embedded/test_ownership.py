"""What somebody else has put into the directory of the embedded servers is neither trusted nor followed."""

import os
import stat
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from fixtures.command_line import CommandLine
from penstock.embedded import EmbeddedRedis, EmbeddedServers
from penstock.embedded.directories import make_private, private_socket_directory, read_own
from penstock.errors import Refused, ServerUnavailable

SOMEBODY = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
PRIVATE = 0o711 if os.geteuid() == 0 else 0o700


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def noted(bare: CommandLine, database_url: str, redis_url: str) -> Iterator[CommandLine]:
    """Both ``url`` files, in a working directory that anybody can write to."""
    bare.environment["PENSTOCK_APP"] = "shop:pipeline"
    bare.directory.chmod(0o1777)
    for part, url in (("postgres", database_url), ("redis", redis_url)):
        directory = bare.directory / ".penstock" / part
        directory.mkdir(parents=True)
        (directory / "url").write_text(url)
    yield bare
    bare.directory.chmod(0o755)


@as_root
@pytest.mark.parametrize("which", [".penstock", ".penstock/redis", ".penstock/postgres/url"])
def test_the_url_of_another_users_server_is_refused(noted: CommandLine, which: str) -> None:
    trusted = noted("status")
    os.chown(noted.directory / which, SOMEBODY, SOMEBODY)

    for command in (("status",), ("doctor",), ("consumers", "list")):
        done = noted(*command)

        assert done.returncode == 5, done.stderr
        assert f"{which} belongs to user {SOMEBODY}" in done.stderr
        assert done.stdout == ""
    assert trusted.returncode == 0


def test_a_link_in_place_of_a_url_is_refused(noted: CommandLine) -> None:
    url = noted.directory / ".penstock/redis/url"
    url.rename(noted.directory / "elsewhere")
    url.symlink_to(noted.directory / "elsewhere")

    done = noted("status")

    assert done.returncode == 5
    assert "is a link" in done.stderr


@pytest.mark.parametrize("name", ["redis.log", "lock"])
def test_a_link_in_place_of_a_log_or_a_lock_is_not_followed(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "redis"
    directory.mkdir()
    (directory / name).symlink_to(victim)

    with pytest.raises(Refused, match=f"{name} is a link"):
        EmbeddedRedis(directory).start()

    assert victim.read_text() == "precious"
    assert mode(victim) != 0o600


def test_directories_of_servers_are_private(tmp_path: Path) -> None:
    directory = tmp_path / ".penstock"
    with EmbeddedRedis(directory / "redis") as server:
        assert mode(directory / "redis") == PRIVATE
        files = [path for path in (directory / "redis").iterdir() if path.is_file()]
        assert {path.name: oct(mode(path)) for path in files if mode(path) & 0o077} == {}
        assert server.is_running()
    make_private(tmp_path / "new", shared=True)
    assert mode(tmp_path / "new") == PRIVATE


def test_an_older_directory_is_closed_to_others(tmp_path: Path) -> None:
    for name in ("older", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)

    make_private(tmp_path / "older")
    make_private(tmp_path / "shared", shared=True)

    assert (mode(tmp_path / "older"), mode(tmp_path / "shared")) == (PRIVATE, 0o755)


@as_root
def test_another_users_directory_holds_no_servers(tmp_path: Path) -> None:
    directory = tmp_path / ".penstock"
    directory.mkdir()
    os.chown(directory, SOMEBODY, SOMEBODY)

    with pytest.raises(Refused, match="--data-directory"):
        EmbeddedServers(directory).start()
    assert list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, bare: CommandLine) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ServerUnavailable, match="Not a directory"):
        EmbeddedServers(tmp_path / "file" / "below").start()
    done = bare("init", "--data-directory", str(tmp_path / "file" / "below"))
    assert done.returncode == 3
    assert "--data-directory" in done.stderr


class Owner:
    """Owns a directory of sockets."""


def test_a_directory_of_sockets_goes_with_its_owner_and_not_with_a_fork_of_it() -> None:
    owners = [Owner()]
    directory = private_socket_directory(owners[0], None)
    child = get_context("fork").Process(target=owners.clear)
    child.start()
    child.join()

    assert (child.exitcode, directory.is_dir()) == (0, True)
    owners.clear()
    assert not directory.exists()


def test_a_missing_file_reads_as_nothing(tmp_path: Path) -> None:
    assert read_own(tmp_path / "none") == ""
