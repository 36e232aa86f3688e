"""The project's words are those of Postgres, Redis, Kafka and SQLAlchemy; what stood in their place stays away.

The table below is the only place that holds the retired words.  Its patterns are searched in every line of the project,
and in the files' paths.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ["src", "lua", "migrations", "tests", "benchmarks", "docs"]
SUFFIXES = {".py", ".lua", ".sql", ".md", ".toml", ".ini", ".mako", ".properties"}

RETIRED = {
    # liveness
    r"(?i)\bsigns? of life\b": "heartbeat",
    r"(?i)\bpulses?\b": "heartbeat",
    r"\bPatience\b": "takeover_after_s",
    r"(?i)\b(stood|stands?|standing) still\b": "stale holder; paused; halted",
    # translation of errors
    r"\banswering\(": "postgres_errors, redis_errors",
    r"\bunwrapped\b": "driver_error",
    # the connection between Spark's driver and its tasks
    r"(?i)\bleash(ed|es)?\b": "ControlChannel, ControlServer",
    r"\bclass Holder\b": "ControlServer",
    r"(?i)\btaut\b": "is_open",
    r"\bis_cut\b|\.cut\(": "close; a cut is what reconcile makes",
    r"\bdef _?cut\(items\b": "another verb; a cut is what reconcile makes",
    # one run of a loop
    r"\bPass\b": "RoundResult",
    r"(?i)\b(a|an|one|each|every|this|the|next|last|idle|another|second|first) pass(es)?\b": "round",
    r"\b_?Turn\b|\bTURN_S\b|\b_turn\b": "round",
    r"(?i)\b(a|one|each|every|this|the|its|next|last|longest|shard's) turns?\b(?! (on|off|into)\b)": "round",
    r"\b_look\b|:name look\b|\blook_each\b|\bLook\(|\bclass Look\b": "inspect_shards, ShardState",
    r"(?i)\b(a|one|two|each|every|last) looks?\b(?!-up)": "round, inspection",
    r"\blooking\.py\b": "inspection.py",
    # what goes to Redis
    r"(?i)\bportions?\b": "batch",
    r"\bLITTLE\b|\blittle\s*[:=(]|(?i:\blittle of\b|\bis little\b)": "inline_records, MAX_INLINE_RECORDS",
    r"(?i)\bat[_ ]hand\b": "prefetched",
    r"\.want\(|\bdef want\b|\bself\._wanted\b": "advance_target",
    # marks of an Ick
    r"(?i)\btelling\b": "marking",
    r"(?i)\btold\b(?! (apart|from)\b)": "marked; logged; passed; called with",
    r"(?i)(?<!overflow=\")\bfold(s|ed|ing)?\b(?!=)": "coalesce",  # ``fold=`` is a datetime's
    r"(?i)\bpassages?\b": "progress",
    # the history of a server
    r"\bpast\.py\b|\bcheck_past\b": "lineage.py, check_lineage",
    r"(?i)\b(the|a|its|another|changed|Postgres'|same|whose|older|whole) past\b(?! (reservation|the|a|an|it)\b)": "lineage",
    r"\bChangedPast\b": "HistoryDiverged",
    # records that fail
    r"(?i)\bset(s|ting)?[ _]aside\b": "dead-letter",
    r"(?i)\bgiven up\b": "dead-lettered",
    # the command line
    r"(?i)\bmend(s|ed|ing)?\b": "fix, repair",
    r"\bcli[./](looking|mending|running|verbs)\b": "cli/commands, a command",
    # functions that make or parse
    r"\bdef \w+_of\(": "make_…, parse_…, get_…, find_…",
    # the consumers' modules
    r"\bconsuming[./](dirty|loop|delivering|applying)\b": "ick_worker, log_worker, worker, delivery",
    r"\bDirtyMember\b": "ReservedMember",
    # what verify finds
    r"(class |-> |[:|\[(,] ?)(Found|Stray|Stretch|Fault|Standing)\b|\b(Found|Stray|Stretch|Fault|Standing)\(": (
        "Finding, UnexpectedEntry, OffsetRange, FindingKind, CurrentReservation"
    ),
    # the rest
    r"(?i)\bmischief\b": "faults",
    r"(?i)(\b|_)plant(s|ed|ing)?(\b|_)": "BenchServers, seed_drift; running pipeline",
    r"\b_Words\b": "RepairStatements",
    r"\bclass Turns\b|\bTurns\(": "ReservationSequence",
    r"(?i)\bshel(f|ves)\b": "SetPartition",
    r"(?i)\bdoomed\b": "deleted",
    r"\bcalled: ": "object_name; a noun",
    r"(?i)\btelemetry\b": "crash points",
    r"\bpenstock[./]testing[./](postgres|redis|servers?|processes|directories)\b": "embedded/",
    r"\bframes=(True|False)\b|\bframes: bool\b": "dataframe=True",
    # private phrases
    r"(?i)\bturns? the wheel\b": "execution engine",
    r"(?i)\b(servers?|Postgres|Valkey) of our own\b": "embedded Postgres and Valkey",
    r"(?i)\bwhoever\b": "the subject's name",
}
"""Each retired pattern with what is written in its place."""


@cache
def texts() -> dict[str, str]:
    """Each file's path and text, by the path."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in FOLDERS:
        found += (p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)
    found.remove(Path(__file__))
    paths = {path.relative_to(ROOT).as_posix(): path for path in found}
    return {name: f"{name}\n{path.read_text(encoding='utf-8')}" for name, path in paths.items()}


@cache
def lowered() -> dict[str, str]:
    return {name: text.lower() for name, text in texts().items()}


def places(retired: str) -> Iterator[str]:
    """Where a pattern matches: path, number of the line (0 for the path itself), line.

    Most files have none.  They are skipped by a pattern that matches more, and starts with a letter: ``re`` is several
    times as fast then as behind ``\\b``, or with ``(?i)``.
    """
    cased = not retired.startswith("(?i)")
    wider = re.compile((retired if cased else retired.removeprefix("(?i)").lower()).removeprefix(r"\b"))
    for name, text in (texts() if cased else lowered()).items():
        if wider.search(text) is None:
            continue
        as_written = texts()[name]
        for match in re.finditer(retired, as_written):
            number = as_written.count("\n", 0, match.start())
            yield f"{name}:{number}: {as_written.splitlines()[number].strip()}"


def test_retired_words_stay_away() -> None:
    found = {instead: there for pattern, instead in RETIRED.items() if (there := sorted(places(pattern)))}

    assert not found, "\n".join(f"write {instead} in\n" + "\n".join(there) for instead, there in found.items())


def test_the_patterns_are_searched_where_people_read() -> None:
    assert {"src/penstock/errors.py", "lua/log/append.lua", "README.md"} < texts().keys()
