"""Rules for Django's models: each write of their tables is staged, whichever way the ORM or SQL makes it."""

import datetime as dt
import decimal
import uuid
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import Ick, Log
from penstock.django import DjangoPipeline
from penstock.errors import DeclarationError
from penstock.schema.capture import install_triggers
from penstock.testing import staged

LOG, INDEX = Log("parcels"), Ick("index")


@cache
def make_models() -> Any:
    """Models, once Django is set up; each has a table but the abstract one."""
    from django.contrib.postgres.fields import ArrayField  # noqa: PLC0415  after the settings
    from django.db import models  # noqa: PLC0415  the same

    class Depot(models.Model):  # noqa: DJ008  nobody shows it
        class Meta:
            app_label = "parcels"

    class Parcel(models.Model):  # noqa: DJ008  the same
        depot = models.ForeignKey(Depot, models.CASCADE)
        weight = models.DecimalField(max_digits=9, decimal_places=2)
        sent_at = models.DateTimeField()
        due = models.DateField()
        gate = models.TimeField()
        patience = models.DurationField()
        code = models.UUIDField()
        extra = models.JSONField()
        address = models.GenericIPAddressField()
        labels = ArrayField(models.CharField(max_length=9))
        counts = ArrayField(models.IntegerField(), default=list)
        fragile = models.BooleanField(default=False, db_column="is_fragile")
        speed = models.FloatField(default=0.5)
        password = models.CharField(max_length=9)
        pin = models.SlugField()
        penstock_secret: tuple[str, ...] = ("pin",)

        class Meta:
            app_label = "parcels"

    class Insured(Parcel):  # noqa: DJ008  the same
        class Meta:
            app_label = "parcels"

    class Veiled(Parcel):  # noqa: DJ008  the same
        penstock_secret = ("address", "depot")  # by the name of the field

        class Meta:
            app_label, proxy = "parcels", True

    class Anonymous(Parcel):  # noqa: DJ008  the same
        penstock_secret = ("depot_id",)  # by that of its attribute

        class Meta:
            app_label, proxy = "parcels", True

    class Thing(models.Model):  # noqa: DJ008  the same
        class Meta:
            app_label, abstract = "parcels", True

    class Scan(models.Model):  # noqa: DJ008  the same
        image = models.BinaryField()

        class Meta:
            app_label = "parcels"

    visit = None
    if hasattr(models, "CompositePrimaryKey"):

        class Visit(models.Model):  # noqa: DJ008  the same
            pk = models.CompositePrimaryKey("depot", "day")
            depot = models.IntegerField()
            day = models.DateField()
            note = models.TextField()

            class Meta:
                app_label = "parcels"

        visit = Visit
    made = (Depot, Parcel, Insured, Veiled, Anonymous, Thing, Scan)
    return SimpleNamespace(**{each.__name__: each for each in made}, Visit=visit)


VALUES: dict[str, Any] = {
    "weight": decimal.Decimal("1.50"),
    "sent_at": dt.datetime(2026, 11, 27, 12, tzinfo=dt.UTC),
    "due": dt.date(2026, 11, 28),
    "gate": dt.time(8, 30),
    "patience": dt.timedelta(days=1, hours=2),
    "code": uuid.UUID(int=7),
    "extra": {"n": [1]},
    "address": "10.0.0.1",
    "labels": ["a", "b"],
    "counts": [3, 1],
    "password": "hunter2",
    "pin": "1234",
}

PAYLOAD = {
    "id": 1,
    "depot_id": 7,
    "weight": "1.50",
    "sent_at": "2026-11-27T12:00:00.000000+00:00",
    "due": "2026-11-28",
    "gate": "08:30:00.000000",
    "patience": "P1DT2H",
    "code": "00000000-0000-0000-0000-000000000007",
    "extra": {"n": [1]},
    "address": "10.0.0.1",
    "labels": ["a", "b"],
    "counts": [3, 1],
    "fragile": False,
    "speed": 0.5,
}


def test_every_write_of_a_model_is_staged_without_its_secrets(db: Any, database_url: str) -> None:
    """Guarantee 7: signals would miss all but the first."""
    models = make_models()
    pipeline = DjangoPipeline([LOG, INDEX])
    pipeline.stages(models.Parcel, to=LOG, key="id")
    pipeline.marks_dirty(models.Parcel, to=INDEX, key="depot_id", on="insert")
    with db.connection.schema_editor() as editor:
        editor.create_model(models.Depot)
        editor.create_model(models.Parcel)
    install_triggers(database_url, pipeline)
    models.Depot.objects.create(id=7)

    with db.transaction.atomic():
        models.Parcel.objects.create(depot_id=7, **VALUES)
        models.Parcel.objects.bulk_create([models.Parcel(depot_id=7, **VALUES)])
        models.Parcel.objects.update(speed=1)
        with db.connection.cursor() as cursor:
            cursor.execute("UPDATE parcels_parcel SET speed = 2 WHERE id = 1")
        models.Parcel.objects.all().delete()

        found = staged(db.connection)
        assert [(r.channel, r.key, r.action) for r in found if r.channel == "index"] == [("index", "7", "insert")] * 2
        records = [r for r in found if r.channel == "parcels"]
        assert records[0].data == PAYLOAD
        assert [(r.key, r.action) for r in records[:2]] == [("1", "insert"), ("2", "insert")]
        assert sorted((r.key, r.action) for r in records[2:]) == sorted(
            [("1", "update"), ("2", "update"), ("1", "update"), ("1", "delete"), ("2", "delete")]
        )


@pytest.mark.usefixtures("db")
def test_a_proxy_model_stands_for_its_table_and_adds_its_own_secrets() -> None:
    models, pipeline = make_models(), DjangoPipeline([LOG])
    parcel, veiled, anonymous = map(pipeline.find_mapped, (models.Parcel, models.Veiled, models.Anonymous))

    secrets = [{c.key for c in each.__table__.columns if c.info["secret"]} for each in (parcel, veiled, anonymous)]
    of_all = {"password", "pin"}
    assert secrets == [of_all, of_all | {"address", "depot_id"}, of_all | {"depot_id"}]
    assert (veiled.__table__.name, veiled.__name__) == (parcel.__table__.name, parcel.__name__)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Insured", {"key": "id"}, "columns in several"),
        ("Thing", {"key": "id"}, "has none"),
        ("Scan", {"key": "id"}, "image is of type .*leave it out"),
        ("Depot", {"key": "id", "capture": "orm"}, "leave it out"),
        ("Depot", {"key": "pk"}, "no attribute 'pk'"),
    ],
)
@pytest.mark.usefixtures("db")
def test_what_a_trigger_cannot_capture_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        DjangoPipeline([LOG]).stages(getattr(make_models(), name), to=LOG, **options)


@pytest.mark.usefixtures("db")
def test_a_class_of_the_applications_own_is_itself() -> None:
    assert DjangoPipeline([LOG]).find_mapped(SimpleNamespace) is SimpleNamespace


@pytest.mark.usefixtures("db")
def test_a_primary_key_of_several_columns_is_no_column() -> None:
    if (visit := make_models().Visit) is None:
        pytest.skip("from Django 5.2 on")

    columns = DjangoPipeline([LOG]).find_mapped(visit).__table__.columns
    assert {column.key: column.primary_key for column in columns} == {"depot": True, "day": True, "note": False}
