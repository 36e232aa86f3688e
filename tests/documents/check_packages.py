"""What a page, a message or a manifest installs is ours, or is pinned."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = "penstock-outbox"
LOCKS = [ROOT / name for name in ("requirements.lock", "requirements-image.lock", "requirements-java.lock")]
INSTALL = re.compile(r"""\b(?:pip|pipx|uv tool) install\b((?: +(?:'[^']*'|[^\s'"`|;&),]+))*)""")
OPTION_WITH_VALUE = {"-r", "--requirement", "--group", "--python", "-c", "--constraint", "--with"}
PACKAGE = re.compile(r"^'?([A-Za-z][\w.-]*)")
OLD_NAME = re.compile(r"""(?<![\w/.-])penstock(?:\\?\[[a-z{]|[=<>~!]=|-\*\.whl)|version\(["']penstock["']\)""")


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [
        ROOT / name
        for name in names
        if not name.endswith((".lock", ".png", ".svg")) and name != str(Path(__file__).relative_to(ROOT))
    ]


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(text: str) -> Iterator[str]:
    """The distributions that commands in a text install, by name."""
    for arguments in INSTALL.findall(text):
        words = iter(arguments.split())
        for word in words:
            if word in OPTION_WITH_VALUE:
                next(words, None)
            elif (name := PACKAGE.match(word)) and "/" not in word and "<" not in word:
                yield normalize(name[1])


def allowed() -> set[str]:
    """Ours, what the locks pin, and what pyproject.toml names for use by hand."""
    pinned = {
        normalize(name)
        for lock in LOCKS
        for name in re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==", lock.read_text(), re.MULTILINE)
    }
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    by_hand = {normalize(PACKAGE.match(entry)[1]) for entries in groups.values() for entry in entries}  # type: ignore[index]
    return {OURS} | pinned | by_hand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pip install 'penstock[zstd]'", ["penstock"]),
        ("uv pip install --group bench", []),
        ("pip install --no-cache-dir --requirement /requirements.lock", []),
        ("environment/bin/pip install 'penstock-outbox[worker]' pyarrow Venv_Pack", [OURS, "pyarrow", "venv-pack"]),
        ("installs it (pip install --upgrade penstock, here too)", ["penstock"]),
    ],
)
def test_names_are_read_from_a_command(text: str, names: list[str]) -> None:
    assert list(installed(text)) == names


def test_nothing_names_a_distribution_that_is_not_ours_or_pinned() -> None:
    """The name ``penstock`` belongs to another project on PyPI."""
    names = allowed()
    foreign = {
        str(path.relative_to(ROOT)): wrong
        for path in tracked()
        if (wrong := {*installed(text := path.read_text()), *OLD_NAME.findall(text)} - names)
    }

    assert foreign == {}
