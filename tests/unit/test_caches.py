"""Each cache is keyed by all that its value depends on: with one input changed, the value is the one that is made anew."""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import scripts
from penstock.channels.routing import QueueKeys, choose_hand, group_keys
from penstock.database import executor, statements, tables, transactions
from penstock.database.transactions import Timeouts
from penstock.records import Shard, ShardName
from penstock.schema import roles
from penstock.staging import guard, rows

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
A, B = ShardName("rides", Shard(1)), ShardName("rides", Shard(2))

Calls = list[tuple[Any, ...]]


def vary(first: tuple[Any, ...], *others: Iterable[Any]) -> Calls:
    """A call, and one with another value of each argument in turn."""
    return [first] + [
        (*first[:place], value, *first[place + 1 :]) for place, values in enumerate(others) for value in values
    ]


OWN = [Timeouts(), Timeouts(statement_s=50), Timeouts(lock_s=50)]
HANDLERS = [Timeouts(), Timeouts(handler_s=50), Timeouts(handler_lock_s=50)]

CACHES: dict[str, tuple[Callable[..., Any], Calls]] = {
    "channels/routing.group_keys": (group_keys, vary(("a", A, "g"), ["b"], [B], ["h"])),
    "channels/routing._names": (QueueKeys.all, vary((QueueKeys("a:"), 2), [QueueKeys("b:")], [3])),
    "channels/routing.choose_hand": (choose_hand, vary(("a", 16, 3), ["b"], [4], [5])),
    "channels/scripts.script": (scripts.script, [("log/append",), ("log/read",), ("ick/add",)]),
    "database/executor._setting_texts": (
        executor._setting_texts,
        vary((160_000, 1.0, None), [170_000], [2.0], HANDLERS),
    ),
    "database/statements.directory": (statements.directory, [("lua",), ("migrations",)]),
    "database/statements.statements": (
        statements.statements,
        vary(("penstock.streaming", "a"), ["penstock.database"], ["b"]),
    ),
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
    "staging/rows.insert_sql": (
        lambda schema, form, returning: rows.insert_sql(schema, form, returning=returning),
        vary(("a", "$1", False), ["b"], [":rows"], [True]),
    ),
}  # fmt: skip

ELSEWHERE = {
    "batches/columns._zstd": "without inputs",
    "console/rendering._templates": "without inputs",
    "django/django_pipeline._map_model": "tests/django_app",
    "parsing._decoder": "without inputs",
    "schema/revisions.newest_shipped": "without inputs",
    "staging/rows._make_statement": "of a text alone",
    "spark/sources/task_process._freeze": "once a process",
    "spark/sources/task_process._redis_client": "tests/unit/test_task_process.py",
    "staging/payload_models._compares_every_field": "tests/staging/test_payload_models.py",
    "staging/payload_models._find_decoder": "tests/staging/test_payload_models.py",
}


@pytest.mark.parametrize("name", CACHES)
def test_another_input_gives_another_value_whatever_was_asked_for_before(name: str) -> None:
    function, calls = CACHES[name]
    values = [function(*call) for call in calls]

    assert all(one != other for place, one in enumerate(values) for other in values[:place])
    assert [function(*call) for call in reversed(calls)] == values[::-1]


def test_every_cache_is_listed() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        module = str(path.relative_to(SOURCE).with_suffix(""))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(map(_is_cache, node.decorator_list)):
                found.add(f"{module}.{node.name}")
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_cache(node.value.func):
                found.update(f"{module}.{each.id}" for each in node.targets if isinstance(each, ast.Name))

    assert found - {"operating/doctor/pipeline_checks.has_letters"} == CACHES.keys() | ELSEWHERE.keys()


def _is_cache(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Name) and node.id in {"cache", "lru_cache"}
