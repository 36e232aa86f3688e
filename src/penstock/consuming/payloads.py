"""Payloads as the application's own types: ``consumer(…, payload=Ride)`` gives ``record.payload`` as a ``Ride``."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from penstock.consuming.failures import Culprit, InvalidPayload
from penstock.declarations import ConsumerSpec
from penstock.records import Record


def with_payloads(consumer: ConsumerSpec, items: Any) -> Any:
    """The items, records with their ``payload`` validated if the consumer wants that.

    Raises:
        Culprit: A payload does not fit; raised from ``InvalidPayload``.
    """
    if consumer.payload is not None:
        _validate(_decoder(cast("Any", consumer.payload)), items)
    return items


def _validate(decode: Callable[[str], Any], records: Sequence[Record]) -> None:
    for index, record in enumerate(records):
        if "payload" not in record.__dict__:  # a batch that is retried was validated before
            try:
                record.__dict__["payload"] = decode(record.data_json)
            except InvalidPayload as error:
                raise Culprit(index) from error


@cache
def _decoder(model: Any) -> Callable[[str], Any]:
    """A function that makes a ``model`` of JSON text, and raises ``InvalidPayload`` if it cannot."""
    if hasattr(model, "__struct_fields__"):
        return _msgspec_decoder(model)
    validate = TypeAdapter[Any](model).validate_json

    def decode(text: str) -> Any:
        try:
            return validate(text)
        except ValidationError as error:
            raise InvalidPayload(_fields(error)) from None

    return decode


def _fields(error: ValidationError) -> str:
    """What is wrong with which field, without the values."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'payload'}: {each['msg']}"
        for each in error.errors(include_input=False, include_url=False, include_context=False)
    )


def _msgspec_decoder(model: Any) -> Callable[[str], Any]:
    import msgspec  # noqa: PLC0415  the application's: only a Struct brings it along

    decoding = msgspec.json.Decoder(model)

    def decode(text: str) -> Any:
        try:
            return decoding.decode(text)
        except msgspec.MsgspecError as error:
            raise InvalidPayload(str(error)) from None

    return decode
