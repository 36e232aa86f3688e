"""The Java that Spark is started with."""

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.errors import JavaMissing
from penstock.spark import submission

SETTINGS = """\
Property settings:
    java.class.version = 61.0
    java.home = {home}
    java.specification.version = {number}
    java.vm.specification.version = 99

openjdk version "ignored" 2025-04-15
"""


@pytest.mark.parametrize(("number", "expected"), [("1.8", 8), ("9", 9), ("17", 17), ("21", 21), ("25", 25)])
def test_every_format_of_a_java_version_is_parsed(number: str, expected: int) -> None:
    settings = SETTINGS.format(home="/usr/lib/jvm/some java", number=number)

    assert submission.parse_java(settings) == submission.Java(Path("/usr/lib/jvm/some java"), expected)


@pytest.mark.parametrize("settings", ["", "Error: could not create the Java Virtual Machine."])
def test_a_program_that_is_not_java_is_not_used(settings: str) -> None:
    assert submission.parse_java(settings) is None


def fake_java(directory: Path, number: str) -> Path:
    """A home whose ``java`` prints its settings to stderr, as Java does."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    settings = SETTINGS.format(home=directory, number=number)
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{settings}END\n")
    program.chmod(0o755)
    return directory


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java and without the wheel, and with an empty home."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(submission, "_wheels_java", lambda: None)
    monkeypatch.setattr(submission, "version", lambda _: "25.0.2.1")
    return tmp_path


def with_shell(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    monkeypatch.setenv("PATH", ":".join([*map(str, directories), "/usr/bin", "/bin"]))


def test_java_home_is_tried_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_path = fake_java(machine / "in path", "25")
    home = fake_java(machine / "home", "17")
    with_shell(monkeypatch, in_path / "bin")
    monkeypatch.setenv("JAVA_HOME", str(home))

    assert submission.find_java() == home


def test_an_old_java_home_is_passed_over_for_the_java_in_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_path = fake_java(machine / "in path", "21")
    with_shell(monkeypatch, in_path / "bin")
    monkeypatch.setenv("JAVA_HOME", str(fake_java(machine / "home", "1.8")))

    assert submission.find_java() == in_path


def test_without_any_java_the_error_says_what_was_found_and_what_to_install(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shell(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(machine / "home", "11")))

    with pytest.raises(JavaMissing, match=r"is Java 11") as error:
        submission.find_java()

    assert "penstock-outbox[java]" in str(error.value)


def test_the_shim_of_the_wheels_java_is_accessible_only_to_its_owner(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = machine / "a wheel's java"
    monkeypatch.setattr(submission, "_wheels_java", lambda: program)

    home = submission.find_java()

    assert home == submission.find_java()
    assert home.parent.stat().st_mode & 0o077 == 0
    assert [path.name for path in (home / "bin").iterdir()] == ["java"]

    text = (home / "bin" / "java").read_text()
    (home / "bin" / "java").write_text("of another release")
    assert (submission.find_java() / "bin" / "java").read_text() == text


def test_the_shim_drops_one_option_and_no_other(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = machine / "echo java"
    program.write_text('#!/bin/sh\nfor word in "$@"; do echo "[$word]" >&2; done\n')
    program.chmod(0o755)
    monkeypatch.setattr(submission, "_wheels_java", lambda: program)
    shim = submission.find_java() / "bin" / "java"

    with_shell(monkeypatch)
    words = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "Main"]
    answer = subprocess.run([shim, *words], capture_output=True, text=True, check=True)

    assert answer.stderr.split("\n") == ["[-cp]", "[a b]", "[]", "[Main]", ""]
