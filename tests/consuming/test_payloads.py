"""Payloads as the application's own types: validated once, and dead-lettered if invalid."""

import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

from fixtures.flow import OpenWorker, Site
from penstock import Log, Pipeline
from penstock.database.store import Store
from penstock.errors import DeclarationError
from penstock.operating.letters import of_consumer
from penstock.records import Offset, Record, RecordId, Shard


@dataclass
class AsDataclass:
    number: int
    fare: Decimal


class AsTypedDict(TypedDict):
    number: int
    fare: Decimal


class AsStruct(msgspec.Struct):
    number: int
    fare: Decimal


class AsModel(BaseModel):
    number: int
    fare: Decimal


MODELS = [AsDataclass, AsTypedDict, AsStruct, AsModel]


@pytest.mark.parametrize("each", [False, True], ids=["batch", "each"])
@pytest.mark.parametrize("model", MODELS)
def test_a_handler_gets_its_type_and_an_invalid_payload_is_dead_lettered(
    site: Site, open_worker: OpenWorker, model: type[Any], *, each: bool
) -> None:
    """Guarantee 21: at once, without further attempts, and the reason contains no value."""
    site.connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        """SELECT 'things', 0, i::text, 'insert', 'thing',
                  CASE WHEN i = 4 THEN '{"number": "secret"}' ELSE '{"number": 7, "fare": "1.50"}' END::jsonb
           FROM generate_series(1, 9) i"""
    )
    site.streamer.drain()
    seen: list[Any] = []

    def one(_: Session, record: Record[Any]) -> None:
        assert record.payload is record.payload
        seen.append(record.payload)

    def several(session: Session, records: Sequence[Record[Any]]) -> None:
        for record in records:
            one(session, record)

    options: dict[str, Any] = {"payload": model, "each": each}
    site.flow.consumer(reads=site.things, name="reader", **options)(one if each else several)
    open_worker().drain()

    wanted: Any = {"number": 7, "fare": Decimal("1.50")}
    assert seen == [wanted if model is AsTypedDict else model(**wanted)] * 8
    [letter] = of_consumer(Store(site.connection), "reader")
    assert (letter.offset, letter.attempts) == (4, 1)
    assert letter.reason.startswith("InvalidPayload: ")
    assert "number" in letter.reason or "$.number" in letter.reason
    assert "secret" not in letter.reason


def test_without_a_model_the_payload_is_the_data() -> None:
    record: Record[Any] = Record("c", Shard(0), Offset(1), RecordId(1), "k", "insert", "thing", '{"number": 7}')
    assert record.payload == {"number": 7}


class OldTypedDict(typing.TypedDict):
    number: int


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Pydantic takes it since Python 3.12")
def test_a_model_that_cannot_be_validated_is_refused_where_it_is_declared(flow: Pipeline, things: Log) -> None:
    with pytest.raises(DeclarationError, match=r"typing_extensions\.TypedDict"):
        flow.consumer(reads=things, name="reader", payload=OldTypedDict)(lambda _session, _records: None)
    with pytest.raises(DeclarationError, match=r"typing_extensions\.TypedDict"):
        Log("typed", payload=OldTypedDict)


@pytest.mark.parametrize("model", [dict, list[int], "Ride", 7])
def test_an_argument_that_is_not_a_model_is_refused(flow: Pipeline, things: Log, model: Any) -> None:
    with pytest.raises(DeclarationError, match="a dataclass, a TypedDict"):
        flow.consumer(reads=things, name="reader", payload=model)(lambda _session, _records: None)
