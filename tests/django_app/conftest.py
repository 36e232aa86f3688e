"""Django at the test's database, and the pipeline of a project."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from penstock import Log
from penstock.django import DjangoPipeline
from staging.test_connections import make_django

ACCOUNTS = Log("accounts")


@pytest.fixture
def db(database_url: str) -> Iterator[Any]:
    found = make_django(database_url)
    yield found
    found.connections.close_all()


@pytest.fixture
def pipeline(db: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[DjangoPipeline]:
    """The pipeline that the setting names."""
    from django.test import override_settings  # noqa: PLC0415  after the settings

    module, pipeline = ModuleType("accounts_events"), DjangoPipeline([ACCOUNTS])
    module.pipeline = pipeline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accounts_events", module)
    with override_settings(PENSTOCK={"PIPELINE": "accounts_events:pipeline"}):
        yield pipeline
