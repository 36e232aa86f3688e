"""The API reference, which is made of the docstrings, describes every public name."""

import re
import subprocess
import sys
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SECTION = re.compile(r"^## (?:class )?(\w+)\n\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```py\n.*?^```$", re.MULTILINE | re.DOTALL)


def test_every_public_name_is_described(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-W", "error", REFERENCE / "api.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")

    pages = {page.stem: SECTION.findall(page.read_text()) for page in tmp_path.glob("*.md")}
    modules = {page for page, sections in pages.items() if sections}
    listed = re.findall(r"^\| `([\w.]+)` \|", (REFERENCE / "api" / "README.md").read_text(), re.MULTILINE)

    assert modules == pages.keys() - {"README"} == {module.rpartition(".")[2] for module in listed}
    silent = [
        name for sections in pages.values() for name, text in sections if not re.search(r"\w", CODE.sub("", text))
    ]
    assert silent == []
