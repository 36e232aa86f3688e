"""The API reference is as the docstrings are, and describes every public name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = sorted((REFERENCE / "api").glob("*.md"))
SECTION = re.compile(r"^## (?:class )?(\w+)\n\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```py\n.*?^```$", re.MULTILINE | re.DOTALL)


def test_the_api_reference_is_up_to_date() -> None:
    """If not: make pages."""
    check = [sys.executable, "-W", "error", str(REFERENCE / "api.py"), "--check"]

    done = subprocess.run(check, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "stale: nothing\n", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_public_name_is_described(page: Path) -> None:
    sections = SECTION.findall(page.read_text())

    assert sections or page.stem == "README"
    assert [name for name, text in sections if not re.search(r"\w", CODE.sub("", text))] == []
