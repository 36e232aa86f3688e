"""The pages of the documentation that are made from the code: settings and commands.

python -m penstock.cli.reference            writes them
python -m penstock.cli.reference --check    ends with 1 if they are not as they would be written
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from penstock.cli.app import app
from penstock.cli.verbs import COMMON, OUR_OWN
from penstock.settings import PREFIX, described

MADE = "<!-- Made by `python -m penstock.cli.reference`; a test compares. -->"

EXIT_CODES = (
    (0, "ok"),
    (1, "failed; for `doctor`: an error was found; for `dead-letters retry`: one failed again"),
    (2, "used or set up wrongly"),
    (3, "Postgres or Redis cannot be reached"),
    (4, "differences or a loss found"),
    (5, "refused for safety: an operator has to decide"),
    (130, "a second Ctrl-C ended it at once"),
)


def pages() -> dict[str, str]:
    """The pages by their names."""
    return {"settings.md": "\n".join(_settings()), "commands.md": "\n".join(_commands())}


def _settings() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield MADE
    yield ""
    yield "Where does a command take a setting from?"
    yield "From the first of these that has it:"
    yield ""
    yield "1. the option of the command, such as `--database-url …`;"
    yield f"2. its twin in the environment, such as `{PREFIX}DATABASE_URL=…`;"
    yield "3. `[tool.penstock]` in the `pyproject.toml` of the working directory;"
    yield "4. its default."
    yield ""
    yield "URLs hold passwords: prefer the environment for them, because options show in the list of processes."
    yield "They are never written to logs or errors."
    yield ""
    yield "| setting | in the environment | takes | default | what it is |"
    yield "| --- | --- | --- | --- | --- |"
    for each in described().values():
        takes = each.values + (f" ({each.unit})" if each.unit else "")
        yield f"| `{each.name}` | `{each.variable}` | {takes} | {_code(each.shown_default)} | {each.sentence} |"
    yield ""
    yield "The option of a setting is its name with `-` for `_`: `--log-level`."
    yield ""
    yield "## In pyproject.toml"
    yield ""
    yield "```toml"
    yield "[tool.penstock]"
    yield 'app = "shop.events:pipeline"'
    yield 'engine = "inline"'
    yield "idle = 0.02"
    yield "```"
    yield ""


def _code(text: str) -> str:
    return "none" if text == "none" else f"`{text}`"


def _commands() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield MADE
    yield ""
    yield "Data goes to stdout, talk and the log to stderr; every command that only reads has `--json`."
    yield "Commands that change something an operator has to decide show a plan first; `--yes` carries it out."
    yield "SIGTERM and Ctrl-C end a worker in order: a batch is finished, or dropped and done again later."
    yield ""
    yield "| exit code | meaning |"
    yield "| --- | --- |"
    for code, meaning in EXIT_CODES:
        yield f"| {code} | {meaning} |"
    yield ""
    yield "Every command takes these [settings](settings.md) as options: " + _listed(COMMON) + "."
    yield ""
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        yield from _command(f"penstock {name}", command)


def _listed(names: Any) -> str:
    return ", ".join(f"`{described()[name].option}`" for name in names)


def _command(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner is not None:
        yield f"## {path}"
        yield ""
        yield (command.help or "").strip()
        yield ""
        for name, each in inner.items():
            yield from _command(f"{path} {name}", each)
        return
    own = [
        p
        for p in command.params
        if getattr(p, "rich_help_panel", None) != OUR_OWN and p.name != "help"
    ]
    taken = [p.name for p in command.params if getattr(p, "rich_help_panel", None) == OUR_OWN]
    arguments = [p for p in own if p.param_type_name == "argument"]
    options = [p for p in own if p.param_type_name == "option"]
    yield f"{'##' if path.count(' ') == 1 else '###'} {path}"
    yield ""
    yield "```"
    shown = [a.name.upper() if a.required else f"[{a.name.upper()}]" for a in arguments]
    yield " ".join([path, *shown, *(["[OPTIONS]"] if options or taken else [])])
    yield "```"
    yield ""
    yield " ".join((command.help or "").split())
    yield ""
    if own:
        yield "| | |"
        yield "| --- | --- |"
        for parameter in (*arguments, *options):
            yield f"| {_name(parameter)} | {' '.join((parameter.help or '').split())} |"
        yield ""
    extra = [name for name in taken if name not in COMMON]
    if extra:
        yield f"Of the settings, also: {_listed(extra)}."
        yield ""


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return f"`{names}`"
    return f"`{names} {(parameter.metavar or parameter.name.upper()).replace('|', '`, `')}`"


def main() -> None:
    """Writes the pages, or compares them."""
    place = Path(__file__).parents[3] / "docs" / "reference"
    stale = []
    for name, text in pages().items():
        page = place / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.parent.mkdir(parents=True, exist_ok=True)
                page.write_text(text, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {', '.join(stale) or 'nothing'}")
    if stale and "--check" in sys.argv:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
