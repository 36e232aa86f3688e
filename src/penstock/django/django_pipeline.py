"""The pipeline of a Django project.

Rules for its models, captured by trigger, and handlers that use its ORM.  Signals of Django's miss
``bulk_create``, ``update()`` and SQL, so that nothing here listens to them: a trigger of the
model's table sees them all.  The trigger is made for a class of SQLAlchemy's that has the columns
of the model.
"""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, ClassVar

from django.apps import apps
from django.db import connections
from django.db.models import Field, Model
from sqlalchemy import Column, MetaData, Table, types
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import registry
from typing_extensions import override

from penstock.declaring.declarations import Capture
from penstock.declaring.kinds import Channel
from penstock.errors import DeclarationError
from penstock.pipeline import Pipeline
from penstock.records import DEFAULT_SCOPE

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("smallint", "integer", "bigint"), types.BigInteger),
    **dict.fromkeys(("varchar", "char", "text", "citext", "inet", "cidr"), types.Text),
    **dict.fromkeys(("double precision", "real"), types.Double),
    "boolean": types.Boolean,
    "numeric": types.Numeric,
    "date": types.Date,
    "time": types.Time,
    "timestamp": types.DateTime,
    "timestamp with time zone": partial(types.DateTime, timezone=True),
    "interval": postgresql.INTERVAL,
    "uuid": types.Uuid,
    "jsonb": postgresql.JSONB,
}
"""For the names that Django gives Postgres' types.

A rule says of a column of another type that it has to be left out.
"""


class DjangoPipeline(Pipeline):
    """A pipeline whose rules take Django's models, and whose handlers write through its ORM.

        rides = Log("rides")
        pipeline = DjangoPipeline([rides])
        pipeline.stages(Ride, to=rides, key="id")

        @pipeline.consumer(reads=rides, each=True)
        def total(_, record):
            Total.objects.filter(id=1).update(fare=F("fare") + record.data["fare"])

    In rules, columns have the names of the model's attributes: of a foreign key ``rider_id``.  A
    field ``password`` is left out of payloads that do not name it, and so are those that the model
    lists in ``penstock_secret``.

    In a handler, plain or ``async def``, the database ``using`` is the transaction that carries the
    checkpoint.  Other databases are as ever.

    Attributes:
        using: The alias of the database that holds the models and Penstock's tables.
    """

    default_capture: ClassVar[Capture] = "trigger"

    def __init__(
        self,
        channels: Iterable[Channel] = (),
        *,
        using: str = "default",
        schema: str = DEFAULT_SCOPE.schema,
        namespace: str = DEFAULT_SCOPE.namespace,
    ) -> None:
        """Declares a pipeline; see ``Pipeline``.

        Args:
            channels: The channels that its rules and consumers may use.
            using: The alias of a database in ``DATABASES``.
            schema: The Postgres schema that holds Penstock's tables.
            namespace: First part of every Redis key.

        Raises:
            InvalidName: ``schema`` or ``namespace`` breaks the rule for names.
            DeclarationError: Two channels have one name.
        """
        super().__init__(channels, schema=schema, namespace=namespace)
        self.using = using
        self._models: dict[type[Any], type[Model]] = {}
        # Only workers need the driver.
        self.around(partial(_call_within, using), asynchronous=partial(_call_within_async, using))

    @override
    def find_mapped(self, model: type[Any]) -> type[Any]:
        """Returns the SQLAlchemy class with the columns of a model; any other class unchanged."""
        if not issubclass(model, Model):
            return model
        apps.check_models_ready()
        options = model._meta  # noqa: SLF001  public by its documentation
        concrete: Any = options.concrete_model or model  # an abstract one has none
        meta = concrete._meta  # noqa: SLF001  the same
        if meta.abstract or meta.parents:
            raise DeclarationError(
                f"staging rule of {model.__name__}: a trigger sees one table, and this model has "
                f"{'none' if meta.abstract else 'columns in several'}; declare rules for the "
                "models of the tables"
            )
        secret = {
            "password",
            *getattr(concrete, "penstock_secret", ()),
            *getattr(model, "penstock_secret", ()),
        }
        mapped = _map_model(concrete, frozenset(secret), self.using)
        self._models[mapped] = model
        return mapped

    @property
    def models(self) -> list[type[Model]]:
        """Models of its rules, in the order of their declaration."""
        return [self._models[rule.model] for rule in self.rules if rule.model in self._models]


def _call_within(using: str, call: Any, session: Any, items: Any) -> Any:
    if session is None:  # a job's handler without a transaction: its ORM commits by itself
        return call(session, items)
    from penstock.django.orm_connection import call_within  # noqa: PLC0415  psycopg

    return call_within(using, call, session, items)


async def _call_within_async(using: str, call: Any, session: Any, items: Any) -> Any:
    if session is None:
        return await call(session, items)
    from penstock.django.orm_connection import call_within_async  # noqa: PLC0415  the same

    return await call_within_async(using, call, session, items)


@cache
def _map_model(model: Any, secret: frozenset[str], using: str) -> type[Any]:
    """Makes the mapped class of a model: its name, its table and its columns."""
    meta = model._meta  # noqa: SLF001  the same
    keys = getattr(meta, "pk_fields", [meta.pk])  # several: from Django 5.2 on
    fields = [field for field in meta.local_concrete_fields if field.column is not None]
    columns = [
        Column(
            field.column,
            _find_type(field, using),
            key=field.attname,
            primary_key=field in keys,
            info={"secret": not secret.isdisjoint({field.name, field.attname})},
        )
        for field in fields
    ]
    mapped = type(model.__name__, (), {})
    registry().map_imperatively(mapped, Table(meta.db_table, MetaData(), *columns))
    return mapped


def _find_type(field: "Field[Any, Any]", using: str) -> types.TypeEngine[Any]:
    """Returns the type of a field's column."""
    name = field.db_type(connections[using]) or ""
    item = name.removesuffix("[]")
    if item != name:
        return types.ARRAY(_make_type(item))
    return _make_type(name)


def _make_type(name: str) -> types.TypeEngine[Any]:
    column_type: types.TypeEngine[Any] = _TYPES.get(
        name.partition("(")[0].strip(), types.NullType
    )()
    return column_type
