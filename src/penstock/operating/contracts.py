"""Describes channels and payloads as a document of AsyncAPI 3, and finds changes that break users.

Old records stay in a log, and old readers beside it, while a new release is deployed: a change has
to be right both ways.
"""

from collections.abc import Iterator, Mapping
from datetime import date, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import inspect

from penstock.declaring.declarations import StagingRule
from penstock.declaring.kinds import Channel, LogChannel
from penstock.display import format_count
from penstock.pipeline import Pipeline

Document = dict[str, Any]

_TYPES: Mapping[type, Document] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    UUID: {"type": "string", "format": "uuid"},
    dict: {"type": "object"},
    list: {"type": "array"},
}
"""How staging writes the values of a column; what is missing is text."""

_SCHEMAS = "#/components/schemas/"


def make_asyncapi(pipeline: Pipeline, title: str, version: str) -> Document:
    """Returns the channels with the messages staged for them, and who sends and receives them."""
    schemas: Document = {}
    channels = {
        name: {
            "address": name,
            "description": f"{channel.kind}, {format_count(channel.shards, 'shard')}",
            "messages": _make_messages(pipeline, channel, schemas),
        }
        for name, channel in pipeline.channels.items()
    }
    sent = {
        f"stage_{name}": {"action": "send", "channel": {"$ref": f"#/channels/{name}"}}
        for name in channels
    }
    received = {
        spec.name: {"action": "receive", "channel": {"$ref": f"#/channels/{spec.channel.name}"}}
        for spec in pipeline.consumers.values()
        if spec.channel.name in channels
    }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": sent | received,
        "components": {"schemas": schemas},
    }


def _make_messages(pipeline: Pipeline, channel: Channel, schemas: Document) -> Document:
    """Returns a message for each declared payload and rule; any payload if nothing is declared."""
    if not channel.traits.has_payloads:
        return {
            "member": {
                "summary": "A key that is dirty",
                "payload": {"type": "object", "maxProperties": 0},
            }
        }
    declared = (
        [channel.payload] if isinstance(channel, LogChannel) and channel.payload is not None else []
    )
    read = [
        spec.payload
        for spec in pipeline.consumers.values()
        if spec.channel == channel and spec.payload is not None
    ]
    messages: Document = {
        model.__name__: {"payload": _describe_model(model, schemas)}
        for model in dict.fromkeys([*declared, *read])
    }
    for rule in pipeline.rules:
        if rule.channel == channel:
            name = rule.object or inspect(rule.model).local_table.name
            messages.setdefault(name, {"payload": _describe_rule(rule)})
    return messages or {"any": {"payload": {}}}


def _describe_model(model: Any, schemas: Document) -> Document:
    if hasattr(model, "__struct_fields__"):
        import msgspec  # noqa: PLC0415  the application's: only a Struct brings it along

        [schema], components = msgspec.json.schema_components(
            [model], ref_template=f"{_SCHEMAS}{{name}}"
        )
        schemas.update(components)
        return schema
    from pydantic import TypeAdapter  # noqa: PLC0415  most channels have no model

    schema = TypeAdapter(model).json_schema(ref_template=f"{_SCHEMAS}{{model}}")
    schemas.update(schema.pop("$defs", {}))
    return schema


def _describe_rule(rule: StagingRule) -> Document:
    """Returns the columns that a rule stages; anything, if a function builds the payload."""
    if callable(rule.data):
        return {}
    columns = {
        attribute.key: attribute.columns[0]
        for attribute in inspect(rule.model).column_attrs
        if (rule.data is None and not attribute.columns[0].info.get("secret"))
        or attribute.key in (rule.data or ())
    }
    return {
        "type": "object",
        "properties": {name: _describe_column(column) for name, column in columns.items()},
        "required": list(columns),
    }


def _describe_column(column: Any) -> Document:
    try:
        kind = column.type.python_type
    except NotImplementedError:
        return {}
    type_ = _TYPES.get(kind, {"type": "string"})
    return {**type_, "type": [type_["type"], "null"]} if column.nullable else dict(type_)


def find_breaks(old: Document, new: Document) -> Iterator[str]:
    """Yields a line for each change that breaks users of the old document or old records."""
    for name, channel in old.get("channels", {}).items():
        if (other := new["channels"].get(name)) is None:
            yield f"channel {name} is gone"
            continue
        for message, old_message in channel.get("messages", {}).items():
            if (new_message := other["messages"].get(message)) is None:
                yield f"{name}: message {message} is gone"
            else:
                yield from _compare(
                    f"{name}: {message}",
                    _Schema(old, old_message.get("payload", {})),
                    _Schema(new, new_message["payload"]),
                )


class _Schema:
    """A schema within its document."""

    def __init__(self, document: Document, schema: Document) -> None:
        while (name := schema.get("$ref", "")).startswith(_SCHEMAS):
            schema = document["components"]["schemas"][name.removeprefix(_SCHEMAS)]
        self.document, self.schema = document, schema

    def within(self, schema: Document) -> "_Schema":
        """Returns a schema of the same document."""
        return _Schema(self.document, schema)

    @property
    def types(self) -> frozenset[str]:
        """Returns what a value may be: types, constants, and those of its alternatives."""
        kinds = self.schema.get("type", [])
        kinds_found = {kinds} if isinstance(kinds, str) else set(kinds)
        for part in (*self.schema.get("anyOf", ()), *self.schema.get("oneOf", ())):
            kinds_found |= self.within(part).types
        constants = self.schema.get(
            "enum", [self.schema["const"]] if "const" in self.schema else []
        )
        return frozenset(kinds_found | {repr(part) for part in constants})


def _compare(
    path: str, old: _Schema, new: _Schema, compared: frozenset[int] = frozenset()
) -> Iterator[str]:
    if id(old.schema) in compared:  # a type that contains itself
        return
    compared |= {id(old.schema)}
    if old.types != new.types:
        yield f"{path} was {_name(old.types)}, and is {_name(new.types)}"
        return
    old_properties = old.schema.get("properties", {})
    new_properties = new.schema.get("properties", {})
    needed, needs = set(old.schema.get("required", ())), set(new.schema.get("required", ()))
    for name, part in old_properties.items():
        if name not in new_properties:
            yield f"{path}.{name} is gone"
        elif name in needed and name not in needs:
            yield f"{path}.{name} may be missing now: readers expect it"
        else:
            yield from _compare(
                f"{path}.{name}", old.within(part), new.within(new_properties[name]), compared
            )
    for name in sorted(needs - needed):
        yield f"{path}.{name} is required now: old records may lack it"
    if "items" in old.schema and "items" in new.schema:
        yield from _compare(
            f"{path}[]", old.within(old.schema["items"]), new.within(new.schema["items"]), compared
        )


def _name(types: frozenset[str]) -> str:
    return " or ".join(sorted(types)) or "anything"
