"""A payload that its consumer would not get as it was given is refused where it is staged, by the name of its field."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    SecretBytes,
    SecretStr,
    ValidationError,
    field_serializer,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import TypedDict

from fixtures.application import Ride
from fixtures.postgres import engine_url
from penstock import Job, Log, Pipeline, Queue, stage, stage_many
from penstock.embedded import EmbeddedPostgres
from penstock.errors import DeclarationError, InvalidRecord
from penstock.parsing import make_model_decoder


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: int


def make_dataclass(kind: Any) -> Any:
    """A model of each kind with one field, ``value``."""

    @dataclass
    class OfDataclass:
        value: kind

    return OfDataclass


def make_pydantic_dataclass(kind: Any) -> Any:
    @pydantic_dataclass
    class OfPydanticDataclass:
        value: kind

    return OfPydanticDataclass


def make_typed_dict(kind: Any) -> Any:
    class OfTypedDict(TypedDict):
        value: kind

    return OfTypedDict


def make_struct(kind: Any) -> Any:
    return msgspec.defstruct("OfStruct", [("value", kind)])


def make_pydantic(kind: Any) -> Any:
    class OfPydantic(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)

        value: kind

    return OfPydantic


MODELS: dict[str, Callable[[Any], Any]] = {
    "dataclass": make_dataclass,
    "pydantic dataclass": make_pydantic_dataclass,
    "TypedDict": make_typed_dict,
    "Struct": make_struct,
    "Pydantic": make_pydantic,
}


@dataclass
class Inner:
    amount: int = 1


@dataclass
class Wider(Inner):
    note: str = "lost"


class InnerModel(BaseModel):
    amount: int = 1


class WiderModel(InnerModel):
    note: str = "lost"


class InnerStruct(msgspec.Struct):
    amount: int = 1


class WiderStruct(InnerStruct):
    note: str = "lost"


BERLIN = timezone(timedelta(hours=2))
ALL = frozenset(MODELS)
PLAIN = frozenset({"dataclass", "TypedDict"})

# A type, a value, and the kinds of model in which the value comes back; in the others it is refused.
VALUES: list[tuple[Any, Any, frozenset[str]]] = [
    (timedelta, timedelta(days=1, hours=2), ALL),
    (timedelta, timedelta(days=-1, hours=2), ALL - PLAIN),
    (timedelta, timedelta(microseconds=-1), ALL - PLAIN),
    (datetime, datetime(2026, 11, 24, 9, 30, tzinfo=UTC), ALL),
    (datetime, datetime(2026, 11, 24, 9, 30, tzinfo=BERLIN), ALL),
    (datetime, datetime(2026, 11, 24, 9, 30), ALL),  # noqa: DTZ001
    (date, date(2026, 11, 24), ALL),
    (date, datetime(2026, 11, 24, 9, 30, tzinfo=UTC), frozenset()),
    (time, time(9, 30), ALL),
    (time, time(9, 30, tzinfo=BERLIN), ALL),
    (Decimal, Decimal("12.50"), ALL),
    (Decimal, Decimal("1E+3"), ALL),
    (Decimal, Decimal("NaN"), frozenset()),
    (Decimal, 0.1, ALL),
    (Decimal, "0.1", ALL),
    (float, 1e23, ALL),
    (float, float("nan"), frozenset()),
    (float, float("inf"), frozenset()),
    (float, Decimal("0.1"), ALL - {"Struct"}),
    (int, 2**70, ALL),
    (int, True, ALL - {"Struct"}),
    (int, Level.HIGH, ALL),
    (bytes, b"abc", ALL - PLAIN),
    (bytes, b"\xff", frozenset({"Struct"})),
    (set[int], {1, 2}, ALL - PLAIN),
    (frozenset[int], frozenset({1, 2}), ALL - PLAIN),
    (tuple[int, str], (1, "a"), ALL),
    (list[int], (1, 2), ALL),
    (Point, Point(1, 2), ALL),
    (Color, Color.RED, ALL),
    (Color, "red", ALL),
    (Color, "blue", frozenset()),
    (UUID, UUID(int=7), ALL),
    (str, UUID(int=7), ALL),
    (str, 7, frozenset()),
    (str | None, None, ALL),
    (Any, datetime(2026, 11, 24, tzinfo=UTC), ALL),
    (Any, {1: 2}, frozenset()),
    (dict[str, timedelta], {"a b": timedelta(hours=1)}, ALL),
    (dict[str, timedelta], {"a b": timedelta(hours=-25)}, ALL - PLAIN),
    (list[timedelta], [timedelta(hours=1), timedelta(hours=-25)], ALL - PLAIN),
]


jobs, things = Queue("jobs"), Log("things")


@pytest.fixture(scope="module")
def staging(postgres: EmbeddedPostgres, _template: str) -> Iterator[Any]:
    """Stages a payload of a model by each call that there is, and rolls back; all of them must agree."""
    engine = create_engine(engine_url(postgres.create_database("payload_models", template=_template)))

    def try_all(model: Any, payload: Any) -> InvalidRecord | None:
        log: Log[Any] = Log("things", payload=model)
        pipeline = Pipeline([jobs, log])

        @pipeline.worker(reads=jobs, payload=model)
        def work(session: Session, job: Job[Any]) -> None: ...

        named: Any = {"action": "a", "object": "o", "data": payload, "tenant": "t"}
        calls: list[Callable[[Session], Any]] = [
            lambda session: work.stage(session, payload, tenant="t"),
            lambda session: work.stage_many(session, [payload], tenant="t"),
            lambda session: log.stage(session, payload, key=1),
            lambda session: stage(session, to=jobs, **named),
            lambda session: stage(session.connection(), to=jobs, pipeline=pipeline, **named),
            lambda session: stage_many(session, [named], to=jobs),
            lambda session: stage_many(session, [], to=jobs, then=work.job(payload, tenant="t")),
            lambda _: pipeline.every("1h", to=jobs, name="hourly", data=payload),
        ]
        sessions = sessionmaker(engine)
        pipeline.attach(sessions)
        errors: list[InvalidRecord | None] = []
        for number, call in enumerate(calls):
            with sessions() as session:
                try:
                    call(session)
                except InvalidRecord as error:
                    errors.append(error)
                except DeclarationError:
                    errors.append(errors[0])  # only the last call declares
                else:
                    errors.append(None)
                    if number == 0:
                        [data] = session.execute(text("SELECT data::text FROM penstock.staged_records")).scalars()
                        make_model_decoder(model, "test")(data)
        assert len({error is None for error in errors}) == 1, errors
        return errors[0]

    yield try_all
    engine.dispose()
    postgres.drop_database("payload_models")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "value", "kept"), VALUES, ids=[f"{k} {v!r}" for k, v, _ in VALUES])
def test_a_value_comes_back_or_is_refused_by_its_field(
    staging: Any, model: str, kind: Any, value: Any, kept: frozenset[str]
) -> None:
    try:
        made = MODELS[model](kind)
        payload = made(value=value)
    except (DeclarationError, ValidationError):  # Pydantic's own refuse it when they are made
        return
    refused = staging(made, payload)

    if model in kept:
        assert refused is None
    else:
        assert refused is not None
        assert "value" in str(refused)
        assert "blue" not in str(refused)


class Address(BaseModel):
    ip: IPv4Address
    token: SecretStr


class Secrets(BaseModel):
    secret: SecretBytes = SecretBytes(b"swordfish")


class Written(BaseModel):
    token: SecretStr

    @field_serializer("token")
    def write(self, token: SecretStr) -> str:
        return token.get_secret_value()


class Excluded(BaseModel):
    amount: int = 1
    cached: list[int] | None = Field(default=None, exclude=True)


class Rooted(RootModel[dict[str, SecretStr]]): ...


class Nested(BaseModel):
    inner: InnerModel = InnerModel()
    any: Any = None


class NestedStruct(msgspec.Struct):
    inner: InnerStruct
    many: list[InnerStruct] = []


@dataclass
class NestedDataclass:
    inner: Inner
    many: list[Inner] = field(default_factory=list)


class Aware(BaseModel):
    at: AwareDatetime


class Typed(TypedDict):
    amount: int


@pydantic_dataclass
class Uncompared:
    token: SecretStr = field(compare=False)


NO_ZONE = datetime(2026, 11, 24)  # noqa: DTZ001


@pytest.mark.parametrize(
    ("model", "payload", "path"),
    [
        (Address, Address(ip=IPv4Address("10.0.0.1"), token=SecretStr("swordfish")), "data.token"),
        (Secrets, Secrets(), "data.secret"),
        (Written, Written(token=SecretStr("swordfish")), None),
        (Rooted, Rooted({"a": SecretStr("swordfish")}), "data.root.a"),
        (Excluded, Excluded(cached=[1]), None),
        (Nested, Nested(inner=WiderModel()), "data.inner.note"),
        (InnerModel, WiderModel(), "data.note"),
        (Nested, Nested(any=Inner()), None),
        (Nested, Nested(any=SecretStr("swordfish")), "data.any"),
        (Nested, Nested(any=object()), "data.any"),
        (NestedDataclass, NestedDataclass(Inner()), None),
        (NestedDataclass, NestedDataclass(Wider()), "data.inner.note"),
        (NestedDataclass, NestedDataclass(Inner(), [Inner(), Wider()]), "data.many[1].note"),
        (NestedDataclass, NestedDataclass(Inner(NO_ZONE)), "inner.amount"),  # type: ignore[arg-type]
        (NestedStruct, NestedStruct(WiderStruct()), "data.inner.note"),
        (NestedStruct, NestedStruct(InnerStruct(), [WiderStruct()]), "data.many[0].note"),
        (Aware, Aware.model_construct(at=NO_ZONE), "at"),
        (Typed, {"amount": 1, "note": "lost"}, "data.note"),
        (Typed, {}, "amount"),
        (Uncompared, Uncompared(token=SecretStr("swordfish")), "data.token"),
    ],
)
def test_secrets_subclasses_and_parts_are_refused_by_their_path(
    staging: Any, model: Any, payload: Any, path: str | None
) -> None:
    refused = staging(model, payload)

    assert (refused is None) == (path is None)
    if path is not None:
        assert path in str(refused)
        assert "swordfish" not in str(refused)


def test_a_schedules_data_is_checked_whichever_is_declared_first() -> None:
    """None is no payload of a worker that declares one: its job would be dead-lettered at each of its times."""
    pipeline = Pipeline([jobs])
    pipeline.every("1h", to=jobs, name="hourly")
    with pytest.raises(DeclarationError, match="schedule hourly: data: does not fit Inner"):
        pipeline.worker(reads=jobs, payload=Inner, name="work")(lambda _session, _job: None)
    assert pipeline.consumers == {}

    pipeline = Pipeline([jobs])
    with pytest.raises(DeclarationError, match="schedule work: data: does not fit Inner"):
        pipeline.worker(reads=jobs, payload=Inner, name="work", every="1h")(lambda _session, _job: None)  # type: ignore[call-overload]
    pipeline.every("1h", to=jobs, name="typed", data=Inner())
    pipeline.every("1h", to=jobs, name="written", data={"amount": 2})


def test_a_rule_that_does_not_fit_the_worker_of_its_queue_fails_the_flush(application: Engine) -> None:
    pipeline = Pipeline([jobs])
    pipeline.worker(reads=jobs, payload=Typed, name="work")(lambda _session, _job: None)
    pipeline.stages(Ride, to=jobs, tenant="id", data=["id"])
    with Session(application) as session:
        pipeline.attach(session)
        session.add(Ride(id=1))
        with pytest.raises(InvalidRecord, match="data: does not fit Typed: amount: Field required"):
            session.flush()
