"""Composite keys, secret columns and headers of rules: the same by hooks and by trigger."""

import json
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, LargeBinary, Numeric
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from fixtures.application import Base, StagedRecords
from penstock import Ick, Log, Pipeline, mark_dirty, stage
from penstock.errors import DeclarationError, InvalidRecord
from penstock.schema.capture import install_triggers

SECRET = {"secret": True}


class HasToken:
    """A mixin: its columns are copied."""

    token: Mapped[str | None] = mapped_column(deferred=True, info=SECRET)


class Account(HasToken, Base):
    __tablename__ = "accounts"

    bank: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device: Mapped[UUID | None]
    owner: Mapped[str | None]
    password: Mapped[str | None] = mapped_column("password_hash", info=SECRET)
    pin: Mapped[bytes | None] = mapped_column(LargeBinary, info=SECRET)
    balance: Mapped[float | None] = mapped_column(Numeric(asdecimal=False), info={"secret": False})


BANKS = ["north", 'a "quoted" \\ name', "é\U0001f600\x7f", "tab\tline\nbell\x07\x1f\u2028", "7", "", ","]


def write(application: Engine, pipeline: Pipeline, *accounts: Account) -> None:
    """Writes through an attached session, after installing the declared triggers."""
    install_triggers(application, pipeline)
    maker = sessionmaker(application)
    pipeline.attach(maker)
    with maker.begin() as session:
        session.add_all(accounts)


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_a_composite_key_is_a_json_array(capture: Any, rides: Log, application: Engine, staged: StagedRecords) -> None:
    """The same text by hooks and by trigger, whatever the values: both choose the shard by it."""
    pipeline = Pipeline([rides])
    pipeline.stages(Account, to=rides, key=["bank", "number", "device"], data=["number"], capture=capture)
    device = UUID(int=7)
    write(application, pipeline, *(Account(bank=bank, number=n - 2, device=device) for n, bank in enumerate(BANKS)))

    records = sorted(staged(), key=lambda record: record.data["number"])
    assert [json.loads(r.key) for r in records] == [[bank, n - 2, str(device)] for n, bank in enumerate(BANKS)]
    assert records[0].key == f'["north", -2, "{device}"]'
    assert [r.key for r in records] == [
        json.dumps([bank, n - 2, str(device)], ensure_ascii=False) for n, bank in enumerate(BANKS)
    ]
    assert [r.shard for r in records] == [rides.shard_for(r.key) for r in records]


def test_a_composite_key_may_be_staged_explicitly(rides: Log, application: Engine, staged: StagedRecords) -> None:
    index = Ick("index")
    pipeline = Pipeline([rides, index])
    with Session(application) as session:
        pipeline.attach(session)
        stage(session, to=rides, key=("north", 7), action="a", object="o", data=None)
        mark_dirty(session, to=index, members=[("north", 7), (UUID(int=1), 1)])
        session.commit()

    assert [r.key for r in staged()] == ['["north", 7]', '["north", 7]', f'["{UUID(int=1)}", 1]']


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ((), "key: is of type tuple"),
        ((None, 1), r"key\[0\]: is of type NoneType"),
        ((1, (2, 3)), r"key\[1\]: is a tuple inside a tuple"),
        ((1, True), r"key\[1\]: is of type bool"),
        (("a\0", 1), r"key\[0\]: contains a NUL"),
        (("a" * 600, "b" * 600), "key: has 1208 characters"),
        (["a", "b"], "key: is of type list"),
    ],
)
def test_an_invalid_composite_key_names_its_part(key: object, field: str, rides: Log, application: Engine) -> None:
    with Session(application) as session:
        Pipeline([rides]).attach(session)
        with pytest.raises(InvalidRecord, match=field):
            stage(session, to=rides, key=key, action="a", object="o", data=None)


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_a_composite_member_marks_the_old_one_too(capture: Any, application: Engine, staged: StagedRecords) -> None:
    """Whichever of its columns changes; a member with a NULL in it marks nothing."""
    index = Ick("index")
    pipeline = Pipeline([index])
    pipeline.marks_dirty(Account, to=index, key=("bank", "owner"), capture=capture)
    write(application, pipeline, Account(bank="n", number=1, owner="a"), Account(bank="n", number=2))
    maker = sessionmaker(application)
    pipeline.attach(maker)
    with maker.begin() as session:
        for number, owner in ((1, "b"), (2, "c"), (1, None)):
            account = session.get_one(Account, ("n", number))
            account.owner = owner
            session.flush()
            session.expire(account)
        account = session.get_one(Account, ("n", 2))
        account.owner, account.balance = "c", 1.5  # its member stays the same
        session.flush()
        session.get_one(Account, ("n", 1)).bank = "m"  # its member is NULL before and after
        session.flush()
        unread = Account(bank="n", number=2)
        session.delete(session.merge(unread))

    assert [(r.action, r.key) for r in staged()] == [
        ("insert", '["n", "a"]'),
        ("update", '["n", "a"]'),
        ("update", '["n", "b"]'),
        ("update", '["n", "c"]'),
        ("update", '["n", "b"]'),
        ("update", '["n", "c"]'),
        ("delete", '["n", "c"]'),
    ]


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_the_default_payload_leaves_out_what_is_marked_secret(
    capture: Any, rides: Log, application: Engine, staged: StagedRecords
) -> None:
    """Guarantee 33: by insert, update and delete; a secret is staged only by name."""
    other = Log("other")
    pipeline = Pipeline([rides, other])
    pipeline.stages(Account, to=rides, key="number", capture=capture)
    pipeline.stages(Account, to=other, key="number", data=["password"], capture=capture)
    account = Account(bank="n", number=1, password="canary", pin=b"canary", token="canary")
    write(application, pipeline, account)
    maker = sessionmaker(application)
    pipeline.attach(maker)
    with maker.begin() as session:
        found = session.get_one(Account, ("n", 1))
        found.owner, found.password = "ada", "canary2"
        session.flush()
        session.delete(found)

    records = staged()
    default = [r.data for r in records if r.channel == "rides"]
    assert [set(data) for data in default] == [{"bank", "number", "device", "owner", "balance"}] * 3
    assert "canary" not in str(default)
    assert [r.data for r in records if r.channel == "other"] == [
        {"password": "canary"},
        {"password": "canary2"},
        {"password": "canary2"},
    ]


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_a_secret_is_no_key(capture: Any, rides: Log) -> None:
    """Guarantee 33: commands and the console show keys."""
    pipeline = Pipeline([rides])
    for key in ("password", ["bank", "password"]):
        with pytest.raises(DeclarationError, match="its key password is marked secret"):
            pipeline.stages(Account, to=rides, key=key, data=["number"], capture=capture)


HEADERS = {"version": 2, "from": "l'été \\ 50%: :x", "more": [1, None]}


@pytest.mark.parametrize("capture", ["orm", "trigger"])
def test_a_rule_gives_its_records_headers(capture: Any, rides: Log, application: Engine, staged: StagedRecords) -> None:
    pipeline = Pipeline([rides])
    pipeline.stages(Account, to=rides, key="number", data=["owner"], capture=capture, headers=HEADERS)
    write(application, pipeline, Account(bank="n", number=1))
    maker = sessionmaker(application)
    pipeline.attach(maker)
    with maker.begin() as session:
        session.get_one(Account, ("n", 1)).owner = "ada"
        session.flush()
        session.delete(session.get_one(Account, ("n", 1)))

    assert [r.headers for r in staged()] == [HEADERS] * 3


def test_headers_may_be_a_function_of_the_object(rides: Log, application: Engine, staged: StagedRecords) -> None:
    pipeline = Pipeline([rides])
    pipeline.stages(
        Account,
        to=rides,
        key="number",
        data=["owner"],
        headers=lambda account: {"bank": account.bank} if account.owner else None,
    )
    write(application, pipeline, Account(bank="n", number=1, owner="ada"), Account(bank="n", number=2))

    assert [r.headers for r in staged()] == [{"bank": "n"}, None]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"headers": {"at": b"x"}}, r"headers.at: is of type bytes"),
        ({"headers": ["x"]}, "headers: is of type list"),
        ({"headers": {"x": "y" * 70_000}}, "headers: 70008 bytes"),
        ({"headers": lambda _: {}, "capture": "trigger"}, "a trigger cannot call Python"),
        ({"key": []}, "key is empty"),
        ({"key": ["number", "nothing"]}, "has no attribute 'nothing'"),
        ({"key": ["number", "balance"], "capture": "trigger"}, "its key is of type"),
    ],
)
def test_an_invalid_part_of_a_rule_is_refused_when_it_is_declared(
    options: dict[str, Any], reason: str, rides: Log
) -> None:
    pipeline = Pipeline([rides])
    with pytest.raises(DeclarationError, match=reason):
        pipeline.stages(Account, **{"to": rides, "key": "number", "data": [], **options})


def test_a_key_of_one_name_in_a_list_is_that_name(rides: Log) -> None:
    assert Pipeline([rides]).stages(Account, to=rides, key=["number"]).key == "number"
