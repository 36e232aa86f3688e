"""What a pipeline promises as a document, and the changes of it that break somebody."""

import json
from dataclasses import dataclass, make_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.command_line import CommandLine
from penstock import Ick, Log, Pipeline, Queue
from penstock.operating.contracts import find_breaks, make_asyncapi


class Base(DeclarativeBase):
    pass


class Ride(Base):
    __tablename__ = "rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    fare: Mapped[Decimal]
    note: Mapped[str | None]
    password: Mapped[str] = mapped_column(info={"secret": True})


@dataclass
class Stop:
    name: str


@dataclass
class Booked:
    id: int
    stops: list[Stop]
    kind: Literal["car", "bike"] = "car"


class Receipt(msgspec.Struct):
    ride: int


def make_pipeline() -> Pipeline:
    rides, booked, receipts = Log("rides"), Log("booked", payload=Booked), Queue("receipts")
    pipeline = Pipeline([rides, booked, Ick("index"), receipts])
    pipeline.stages(Ride, to=rides, key="id")
    pipeline.worker(reads=receipts, name="send", payload=Receipt)(lambda _s, _j: None)
    pipeline.consumer(reads=rides, name="totals")(lambda _s, _r: None)
    return pipeline


def test_the_document_lists_channels_messages_and_operations() -> None:
    made = make_asyncapi(make_pipeline(), "shop", "2.1.0")

    assert (made["asyncapi"], made["info"]) == ("3.0.0", {"title": "shop", "version": "2.1.0"})
    assert made["channels"]["rides"]["messages"]["rides"]["payload"] == {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "fare": {"type": "string"}, "note": {"type": ["string", "null"]}},
        "required": ["id", "fare", "note"],
    }
    booked = made["channels"]["booked"]["messages"]["Booked"]["payload"]
    assert booked["properties"]["stops"]["items"] == {"$ref": "#/components/schemas/Stop"}
    assert made["components"]["schemas"]["Stop"]["required"] == ["name"]
    assert made["components"]["schemas"]["Receipt"]["properties"] == {"ride": {"type": "integer"}}
    assert list(made["channels"]["index"]["messages"]) == ["member"]
    assert made["operations"]["totals"] == {"action": "receive", "channel": {"$ref": "#/channels/rides"}}
    assert made["operations"]["stage_booked"]["action"] == "send"
    assert list(find_breaks(json.loads(json.dumps(made)), made)) == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([("id", int), ("note", str)], []),
        ([("id", int), ("note", str), ("more", int, 0)], []),
        ([("id", int)], ["log: P.note is gone"]),
        ([("id", str), ("note", str)], ["log: P.id was integer, and is string"]),
        ([("id", int | None), ("note", str)], ["log: P.id was integer, and is integer or null"]),
        ([("id", int), ("note", str), ("more", int)], ["log: P.more is required now: old records may lack it"]),
        ([("id", int), ("note", str, "")], ["log: P.note may be missing now: readers expect it"]),
        ([("id", int), ("note", Literal["a"])], ["log: P.note was string, and is 'a' or string"]),
    ],
)
def test_a_change_breaks_those_who_read_old_records_or_new_ones(fields: Any, says: list[str]) -> None:
    def make(parts: Any) -> Any:
        return make_asyncapi(Pipeline([Log("log", payload=make_dataclass("P", parts))]), "t", "1")

    assert list(find_breaks(make([("id", int), ("note", str)]), make(fields))) == says


def test_parts_of_parts_are_compared_and_what_is_gone_is_named() -> None:
    old = make_asyncapi(make_pipeline(), "t", "1")
    new = make_asyncapi(make_pipeline(), "t", "1")
    new["components"]["schemas"]["Stop"]["properties"]["name"] = {"type": "integer"}
    new["components"]["schemas"]["Receipt"]["properties"] = {}
    del new["channels"]["rides"]["messages"]["rides"]
    del new["channels"]["index"]

    assert list(find_breaks(old, new)) == [
        "rides: message rides is gone",
        "booked: Booked.stops[].name was string, and is integer",
        "channel index is gone",
        "receipts: Receipt.ride is gone",
    ]


def test_the_command_prints_it_and_fails_where_something_breaks(penstock: CommandLine) -> None:
    printed = penstock("asyncapi", "--app", "shop:pipeline", "--version", "3.0.0")
    file = Path(penstock.directory, "asyncapi.json")
    file.write_text(printed.stdout)
    same = penstock("asyncapi", "--app", "shop:pipeline", "--check", str(file))
    file.write_text(printed.stdout.replace('"things"', '"others"'))
    broken = penstock("asyncapi", "--app", "shop:pipeline", "--check", str(file))
    unreadable = penstock("asyncapi", "--app", "shop:pipeline", "--check", "nowhere.json")

    assert json.loads(printed.stdout)["info"] == {"title": "shop:pipeline", "version": "3.0.0"}
    assert same.returncode == 0
    assert (broken.returncode, broken.stdout) == (4, "channel others is gone\n")
    assert unreadable.returncode == 2
