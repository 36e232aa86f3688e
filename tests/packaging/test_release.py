"""``make release`` writes a release into a checkout, and what is built of a commit is the same each time."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata

from fixtures.documents import ROOT

CHANGELOG = """# Changelog

## [Unreleased]

### Staging

- A thing is new: [a page](docs/how-to/upgrade.md).
- ⚠ Type `penstock init --roles`: [privileges](docs/how-to/privileges.md), [elsewhere](https://example.org).

## [0.1.0] - 2026-11-01

- The first.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "upgrades").mkdir(parents=True)
    for name in ("pyproject.toml", "docs/upgrades/README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def cut(checkout: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / ".ci" / "release"),
        "cut",
        version,
        "--root",
        str(checkout),
        "--day",
        "2026-12-24",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_release_has_its_version_its_changelog_and_its_upgrade_page(checkout: Path) -> None:
    done = cut(checkout, "0.2.0")

    assert done.returncode == 0, done.stderr
    assert '\nversion = "0.2.0"\n' in (checkout / "pyproject.toml").read_text()
    unreleased, section, before = (checkout / "CHANGELOG.md").read_text().split("\n## [")[1:]
    assert unreleased == "Unreleased]\n\n- Nothing yet.\n"
    assert section == "0.2.0] - 2026-12-24\n" + CHANGELOG.partition("[Unreleased]\n")[2].partition("\n## [")[0]
    assert before == "0.1.0] - 2026-11-01\n\n- The first.\n"
    page = (checkout / "docs" / "upgrades" / "0.2.0.md").read_text()
    assert "[privileges](../how-to/privileges.md), [elsewhere](https://example.org)" in page
    assert "A thing is new" not in page
    assert "- [To 0.2.0](0.2.0.md)\n" in (checkout / "docs" / "upgrades" / "README.md").read_text()


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.0.9", "is no version after"),
        ("0.2", "three numbers"),
        ("0.1.0", "has 0.1.0 already"),
        ("0.3.0", "nothing is under"),
    ],
)
def test_what_is_no_release_is_refused_and_changes_nothing(checkout: Path, version: str, says: str) -> None:
    if version == "0.3.0":
        assert cut(checkout, "0.2.0").returncode == 0
    before = {path: path.read_text() for path in checkout.rglob("*") if path.is_file()}

    done = cut(checkout, version)

    assert done.returncode == 1
    assert says in done.stderr
    assert {path: path.read_text() for path in checkout.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")
def test_a_commit_is_built_to_the_same_bytes_anywhere_and_its_metadata_is_valid(wheel: Path, tmp_path: Path) -> None:
    """Twice, in another directory, with files of another age."""
    source = tmp_path / "elsewhere"
    sdist = next(wheel.parent.glob("*.tar.gz"))
    shutil.unpack_archive(sdist, source)
    [root] = source.iterdir()
    (root / "PKG-INFO").unlink()  # which an sdist adds to the source
    for path in root.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(root)]
    subprocess.run(build, check=True, capture_output=True)

    for built in (wheel, sdist):
        again = tmp_path / built.name
        assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(built.read_bytes()).digest(), built.name
    metadata = next(name for name in ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    assert Metadata.from_email(ZipFile(wheel).read(metadata), validate=True).name == "penstock-outbox"
