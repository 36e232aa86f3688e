"""Builds the documentation as a site, in ``site/``: ``make site``.

The menu is the map of ``README.md``; the pages of the API are written from the docstrings.  A link to a page or a heading that is not there fails the build, and so does a page that would
load something from another host: the site works without a network.  ``llms.txt`` lists the pages for programs that read.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SITE = ROOT / "site"
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)")
LOADS = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*(?:src|href)=["']?(https?:[^"' >]+)""")


def read_map() -> dict[str, list[tuple[str, str]]]:
    """The sections of the map, each with the titles and the paths of its pages; a page is in the first that names it."""
    sections: dict[str, list[tuple[str, str]]] = {}
    title, seen = "First week", set[str]()
    for line in (DOCS / "README.md").read_text().splitlines():
        title = line.removeprefix("## ") if line.startswith("## ") else title
        for _, path in LINK.findall(line):
            if path not in seen:
                seen.add(path)
                sections.setdefault(title, []).append((read_title(path), path))
    return sections


def read_title(path: str) -> str:
    """The heading of a page."""
    return (DOCS / path).read_text().partition("\n")[0].removeprefix("# ")


def configure(sections: dict[str, list[tuple[str, str]]]) -> str:
    """The generator's configuration."""
    pages = [{"Penstock": "README.md"}, *({title: [path for _, path in each]} for title, each in sections.items())]
    navigation = ",\n".join(
        f"  {{ {json.dumps(title)} = {json.dumps(found)} }}" for page in pages for title, found in page.items()
    )
    return f"""
[project]
site_name = "Penstock"
site_description = "Saves a change and its event in one Postgres transaction, and applies the event exactly once"
docs_dir = "docs"
site_dir = "site"
use_directory_urls = false
nav = [
{navigation}
]

[project.theme]
font = false
features = ["navigation.sections", "navigation.top", "content.code.copy", "search.highlight"]
palette = [
  {{ media = "(prefers-color-scheme: light)", scheme = "default" }},
  {{ media = "(prefers-color-scheme: dark)", scheme = "slate" }},
]
"""


def find_foreign() -> dict[str, list[str]]:
    """The pages that would load something from another host."""
    found = {str(page.relative_to(SITE)): LOADS.findall(page.read_text()) for page in SITE.rglob("*.html")}
    return {page: hosts for page, hosts in found.items() if hosts}


def main() -> None:
    """Builds the site."""
    sections = read_map()
    with TemporaryDirectory() as directory:
        work = Path(directory)
        shutil.copytree(DOCS, work / "docs")
        (work / "site.toml").write_text(configure(sections))
        api = [DOCS / "reference" / "api.py", work / "docs" / "reference" / "api"]
        subprocess.run([sys.executable, *api], check=True)  # noqa: S603  ours
        built = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "site.toml"],
            cwd=work,
            check=False,
            capture_output=True,
            text=True,
        )
        if built.returncode:
            sys.exit(built.stdout + built.stderr)
        shutil.rmtree(SITE, ignore_errors=True)
        shutil.copytree(work / "site", SITE)
    if foreign := find_foreign():
        sys.exit(f"loaded from elsewhere: {foreign}")
    lines = ["# Penstock", "", "> " + (ROOT / "README.md").read_text().splitlines()[2]]
    for title, pages in sections.items():
        lines += ["", f"## {title}", "", *(f"- [{name}]({path.removesuffix('.md')}.html)" for name, path in pages)]
    (SITE / "llms.txt").write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{len(list(SITE.rglob('*.html')))} pages in {SITE}\n")


if __name__ == "__main__":
    main()
