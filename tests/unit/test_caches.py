"""Each cache is keyed by all that its value depends on, and so is each digest: with one input changed, the value is another one.

What keeps values, and what makes digests, is found in the source: what is new has to be listed here.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import class_mapper, registry
from starlette.requests import Request

from penstock import Log, Pipeline, Queue, TenantLimits
from penstock.channels import scripts
from penstock.channels.ick import reservations
from penstock.channels.queue.declared_limits import encode_declaration
from penstock.channels.routing import QueueKeys, choose_hand, group_keys
from penstock.console import access, rendering
from penstock.console.actions import Plan
from penstock.database import executor, statements, tables, transactions
from penstock.database.transactions import Timeouts
from penstock.declaring.kinds import shard_for_key
from penstock.declaring.schedules import ScheduleSpec
from penstock.declaring.unique import MAX_NAME_BYTES, KeyLimits, Unique
from penstock.records import Shard, ShardName
from penstock.schema import roles
from penstock.spark.sources import batch_content
from penstock.staging import guard, nudge, payload_models, rows, stored_rows, triggers
from penstock.streaming import queues, scheduler

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
A, B = ShardName("rides", Shard(1)), ShardName("rides", Shard(2))

Calls = list[tuple[Any, ...]]


def vary(first: tuple[Any, ...], *others: Iterable[Any]) -> Calls:
    """A call, and one with another value of each argument in turn."""
    return [first] + [
        (*first[:place], value, *first[place + 1 :]) for place, values in enumerate(others) for value in values
    ]


@dataclass
class Compared:
    n: int = 0


@dataclass
class Uncompared:
    n: int = field(default=0, compare=False)


def make_mapper(name: str) -> Any:
    mapped = type(name, (), {})
    columns = [Column("id", Integer, primary_key=True), Column("a", Integer), Column("b", Integer)]
    registry().map_imperatively(mapped, Table(name, MetaData(), *columns))
    return class_mapper(mapped)


ONE, OTHER = make_mapper("one"), make_mapper("other")


def find_statement(mapper: Any, names: tuple[str, ...], lock: Any, is_single: bool) -> str:  # noqa: FBT001  varied
    made = stored_rows._find_statement(mapper, names, lock, is_single=is_single)
    return str(made.compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]


OWN = [Timeouts(), Timeouts(statement_s=50), Timeouts(lock_s=50)]
HANDLERS = [Timeouts(), Timeouts(handler_s=50), Timeouts(handler_lock_s=50)]

CACHES: dict[str, tuple[Callable[..., Any], Calls]] = {
    "channels/routing.group_keys": (group_keys, vary(("a", A, "g"), ["b"], [B], ["h"])),
    "channels/routing._names": (QueueKeys.all, vary((QueueKeys("a:"), 2), [QueueKeys("b:")], [3])),
    "channels/routing.choose_hand": (choose_hand, vary(("a", 16, 3), ["b"], [4], [5])),
    "channels/scripts.script": (scripts.script, [("log/append",), ("log/read",), ("ick/add",)]),
    "channels/scripts.with_fragments": (scripts.with_fragments, [("log/append",), ("log/read",), ("ick/add",)]),
    "database/executor._numbered": (executor._numbered, [(b"%(a)s",), (b"%(b)s",), (b"%(a)s %(b)s %(a)s",)]),
    "database/executor._open_with": (executor._open_with, vary((b"SELECT 1", b"SELECT 2, "), [b"SELECT 3"], [b"SELECT 4, "])),
    "database/executor._begin_text": (executor._begin_text, vary((2, True, True), [None, 3], [None, False], [None, False])),
    "database/executor._make_texts": (
        executor._make_texts,
        vary((160_000, 1.0, None), [170_000], [2.0], HANDLERS),
    ),
    "database/statements.directory": (statements.directory, [("lua",), ("migrations",)]),
    "database/statements.statements": (statements.statements, [("a",), ("b",)]),
    "database/tables.staged_records": (lambda schema: tables.staged_records(schema).fullname, [("a",), ("b",)]),
    "database/transactions.own_settings": (transactions.own_settings, vary((160_000, None), [170_000], OWN)),
    "database/transactions.table_settings": (transactions.table_settings, [(160_000,), (170_000,)]),
    "database/transactions.handler_settings": (
        transactions.handler_settings,
        vary((160_000, 1.0, None), [170_000], [2.0], HANDLERS),
    ),
    "schema/roles.rights": (roles.rights, [(role,) for role in ("owner", "producer", "streamer", "consumer", "viewer", "monitor")]),
    "schema/roles.working_rights": (roles.working_rights, [("producer",), ("streamer",), ("consumer",)]),
    "staging/guard._search_cached": (guard._search_cached, [("INSERT INTO a VALUES (1)",), ("UPDATE a SET b = 1",), ("DELETE FROM b",)]),
    "staging/payload_models._compares_every_field": (payload_models._compares_every_field, [(Compared,), (Uncompared,)]),
    "staging/rows.insert_sql": (
        lambda schema, form, returning: rows.insert_sql(schema, form, returning=returning),
        vary(("a", "$1", False), ["b"], [":rows"], [True]),
    ),
    "staging/stored_rows._statements": (
        find_statement,
        vary((ONE, ("a",), None, True), [OTHER], [("b",), ("a", "b")], ["update", "delete"], [False]),
    ),
}  # fmt: skip

ELSEWHERE = {
    "batches/columns._zstd": "without inputs",
    "console/rendering._templates": "without inputs",
    "display.find_release": "without inputs",
    "django/django_pipeline._map_model": "tests/django_app",
    "parsing._decoder": "without inputs",
    "schema/revisions.newest_shipped": "without inputs",
    "staging/rows._make_statement": "of a text alone",
    "spark/sources/task_process._freeze": "once a process",
    "spark/sources/task_process._postgres": "tests/spark/test_task_process.py",
    "spark/sources/task_process._redis_client": "tests/spark/test_task_process.py",
    "staging/nudge._last_commits": "below",
    "staging/rows._addresses": "below",
    "staging/rows._engines": "below",
    "staging/rows._labels": "of a text alone",
    "staging/payload_models._find_decoder": "tests/staging/test_payload_models.py",
}


REGISTRIES = {
    "engines/stealing/enlisting._attached",
    "engines/stealing/recruiter._recruiters",
    "logs._chosen",
    "parallel.before_abandoned",
    "staging/guard._engines",
    "staging/guard._watched",
    "staging/rule_checks._pipelines",
    "staging/rule_checks._unconfigured",
    "staging/rule_checks._warned",
    "staging/rules._attached",
    "staging/rules._own_classes",
}
"""What a process remembers that cannot be made anew."""


LIMITS: dict[str, Any] = {
    "weight": 2.0,
    "elastic": 3,
    "in_flight": 3,
    "rate": 4.0,
    "burst": 5,
    "bytes": 6,
    "is_paused": True,
}
"""Another value of each limit."""


def limit_each(kind: Any, name: str) -> list[dict[str, Any]]:
    """Limits of a name that differ in one of their fields."""
    return [{name: kind(**{"rate": 1.0, each.name: LIMITS[each.name]})} for each in fields(kind)]


def make_limits(tenants: dict[str, Any], keys: dict[str, Any], within: str) -> str:
    return encode_declaration(tenants, keys, within).version


def make_plan_digest(title: str, changes: tuple[str, ...], fields: dict[str, str]) -> str:
    return Plan(title, changes, "", fields, "", lambda _: ()).digest


def make_tag(body: str) -> str:
    request = Request({"type": "http", "headers": [], "method": "GET", "path": "/"})
    return rendering.respond(request, body, "text/html").headers["etag"]


def make_function_name(schema: str | None, table: str, channel: Log, label: str | None) -> str:
    mapped = type("Mapped", (), {})
    registry().map_imperatively(
        mapped, Table(table, MetaData(), Column("id", Integer, primary_key=True), schema=schema)
    )
    rule = Pipeline([channel]).stages(mapped, to=channel, key="id", object=label, capture="trigger")
    return triggers.make_name(rule)


def make_version(shards: int, key: str, data: list[str], when: str | None, schema: str) -> str:
    mapped = type("Mapped", (), {})
    columns = [Column("id", Integer, primary_key=True), Column("a", Integer)]
    registry().map_imperatively(mapped, Table("rides", MetaData(), *columns))
    channel = Log("rides", shards=shards)
    rule = Pipeline([channel]).stages(mapped, to=channel, key=key, data=data, when=when, capture="trigger")
    return triggers.make_trigger(rule, schema).body.split("\n")[1]


SCHEDULE: dict[str, list[Any]] = {
    "name": ["a", "b"],
    "queue": [Queue("q"), Queue("r")],
    "every": ["0 3 * * *", "0 4 * * *"],
    "tenant": [None, "t"],
    "data": [1, 2],
    "timezone": ["UTC", "Europe/Berlin"],
    "catch_up": ["one", "all", "skip"],
    "key": [None, "k"],
    "unique": [
        None,
        Unique("u"),
        Unique("v"),
        Unique("u", "queued"),
        Unique("u", window=60),
        Unique("u", within="tenant"),
    ],
    "deadline": [None, "30m"],
    "priority": ["normal", "high"],
}
"""The fields of a schedule, each with some values."""


def declare(*values: Any) -> Any:
    return scheduler.make_declaration(ScheduleSpec(**dict(zip(SCHEDULE, values, strict=True))))


def store_name(name: str) -> str:
    record: Any = type("Record", (), {"unique": (name,)})
    return queues._stored_name(record)


LONG = "n" * (MAX_NAME_BYTES + 1)

DIGESTS: dict[str, tuple[Callable[..., Any], Calls]] = {
    "channels/queue/declared_limits.encode_declaration": (
        make_limits,
        vary(
            ({"t": TenantLimits(rate=1)}, {"k": KeyLimits(rate=1)}, "queue"),
            [{}, {"u": TenantLimits(rate=1)}, *limit_each(TenantLimits, "t")],
            [{}, {"l": KeyLimits(rate=1)}, *limit_each(KeyLimits, "k")],
            ["tenant"],
        ),
    ),
    "channels/ick/reservations._request_for": (
        reservations._request_for,
        vary(("r", ["a", "b"]), ["q"], [[], ["a"], ["ab"], ["b", "a"], ["a", "b", ""], ["a", b"c"], [1]]),
    ),
    "console/access._digest": (access._digest, [("a",), ("b",), ("",)]),
    "console/actions.digest": (make_plan_digest, vary(("a", ("b",), {"c": "d"}), ["b"], [(), ("b", "c")], [{}, {"c": "e"}])),
    "console/rendering.respond": (make_tag, [("a",), ("b",), ("",)]),
    "declaring/kinds.shard_for_key": (shard_for_key, vary(("a", 1000), ["b", b"c"], [999])),
    "spark/sources/batch_content._digest": (batch_content._digest, [("a",), ("b",)]),
    "spark/sources/batch_content.digest_texts": (batch_content.digest_texts, [(t,) for t in ([], ["a"], ["b"], ["a", "a"], ["a", "b"], ["ab"])]),
    "staging/triggers.make_name": (make_function_name, vary((None, "t", Log("a"), None), ["s"], ["u"], [Log("b")], ["o"])),
    "staging/triggers.make_trigger": (make_version, vary((2, "id", ["id"], None, "penstock"), [3], ["a"], [["a"], ["id", "a"]], ["a > 1"], ["other"])),
    "streaming/queues._stored_name": (store_name, [("a",), ("b",), ("a\0",), (LONG,), (LONG[:-1],), (LONG + "n",), (LONG[:-1] + "m",)]),
    "streaming/scheduler.make_declaration": (
        declare,
        vary(tuple(values[0] for values in SCHEDULE.values()), *(values[1:] for values in SCHEDULE.values())),
    ),
}  # fmt: skip

DIGESTS_ELSEWHERE = {
    "channels/routing._numbers": "above, of choose_hand",
    "channels/scripts.script": "above",
    "spark/reconcile/log_examiner.examine": "in Spark",
    "spark/submission.find_python": "of the whole text of the script that it names; tests/unit/test_submission.py",
    "spark/sources/reservation_sequence._reserve": "tests/spark/test_ick_source.py",
    "streaming/sequencer._prepared_call": "tests/streaming/test_pooler.py",
}


@pytest.mark.parametrize("name", [*CACHES, *DIGESTS])
def test_another_input_gives_another_value_whatever_was_asked_for_before(name: str) -> None:
    function, calls = CACHES.get(name) or DIGESTS[name]
    values = [function(*call) for call in calls]

    assert all(one != other for place, one in enumerate(values) for other in values[:place])
    assert [function(*call) for call in reversed(calls)] == values[::-1]


DIGESTING = ("sha1", "sha256", "md5", "blake2b", "xxhash64", "crc32")
SUSPECT = re.compile(
    rf"cache|Weak|{'|'.join(DIGESTING)}|^\w+: .+ = (\{{\}}|\[\]|dict|set|list|defaultdict)", re.MULTILINE
)


@cache
def walk() -> list[tuple[str, ast.AST]]:
    """The nodes of the modules that may keep or digest something, each with its module."""
    texts = {str(path.relative_to(SOURCE).with_suffix("")): path.read_text() for path in SOURCE.rglob("*.py")}
    return [(name, node) for name, text in texts.items() if SUSPECT.search(text) for node in ast.walk(ast.parse(text))]


def test_every_cache_is_listed() -> None:
    found = set()
    for module, node in walk():
        if isinstance(node, ast.FunctionDef) and any(map(_is_cache, node.decorator_list)):
            found.add(f"{module}.{node.name}")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_cache(node.value.func):
            found.update(f"{module}.{each.id}" for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.Module):
            found.update(f"{module}.{name}" for name in _find_memories(node))

    assert found - {"operating/doctor/pipeline_checks.has_letters"} == CACHES.keys() | ELSEWHERE.keys() | REGISTRIES


def test_every_digest_is_listed() -> None:
    functions = [(module, node) for module, node in walk() if isinstance(node, ast.FunctionDef)]

    found = {f"{module}.{node.name}" for module, node in functions if any(map(_is_digest, ast.walk(node)))}

    assert found == DIGESTS.keys() | DIGESTS_ELSEWHERE.keys()
    assert [each.name for each in fields(ScheduleSpec)] == [*SCHEDULE]


def test_the_tests_of_others_are_there() -> None:
    named = {where for where in {**ELSEWHERE, **DIGESTS_ELSEWHERE}.values() if where.startswith("tests/")}
    assert [where for where in named if not (SOURCE.parents[1] / where).exists()] == []


def _is_cache(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Name) and node.id in {"cache", "lru_cache"}


def _find_memories(module: ast.Module) -> Iterator[str]:
    """Names in a module of what is empty at first, and is filled."""
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _is_constant(node):
            value = node.value
            made = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
            is_empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("[]{}")
            if is_empty or made.startswith("Weak") or made in {"dict", "set", "list", "defaultdict"}:
                yield node.target.id


def _is_constant(node: ast.AnnAssign) -> bool:
    return ast.unparse(node.annotation).startswith("Mapping")


def _is_digest(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", "")) in DIGESTING


def test_what_a_database_said_is_remembered_of_it_alone() -> None:
    """By engine, or by host, port and name."""
    addresses = [("h", 1, "d"), ("i", 1, "d"), ("h", 2, "d"), ("h", 1, "e")]
    known = [rows.known_at(*address) for address in addresses * 2]
    assert {id(each) for each in known[:4]} == {id(each) for each in known[4:]}
    assert len({id(each) for each in known}) == len(addresses)

    engines = [create_engine("sqlite://") for _ in range(2)]
    connections = [engine.connect() for engine in engines * 2]
    assert [rows.known_to_engine(each) is rows.known_to_engine(connections[0]) for each in connections] == [
        True,
        False,
    ] * 2
    for connection in connections:
        connection.close()
    for engine in engines:
        engine.dispose()


def test_a_pause_is_that_of_an_engine_and_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(nudge, "monotonic", lambda: now[0])
    one, other = create_engine("sqlite://"), create_engine("sqlite://")
    asked = [(one, "a"), (one, "b"), (other, "a")]

    assert [nudge._has_paused(*each) for each in asked] == [True] * 3
    now[0] += nudge.PAUSE_S / 2
    assert [nudge._has_paused(*each) for each in asked] == [False] * 3
    now[0] += 1.5 * nudge.PAUSE_S
    assert [nudge._has_paused(*each) for each in asked] == [True] * 3
