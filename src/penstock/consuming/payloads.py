"""Payloads as the application's own types: ``consumer(…, payload=Ride)`` gives ``record.payload`` as a ``Ride``.

Pydantic validates its own models, dataclasses and TypedDicts, msgspec its Structs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.consuming.failures import Culprit, InvalidPayload
from penstock.database.driver_errors import first_line
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import DeclarationError
from penstock.records import Record, has_payload, set_payload

Decode = Callable[[str], Any]
"""Makes JSON text a model's instance, and raises ``InvalidPayload`` if it cannot."""


def make_decoder(consumer: ConsumerSpec) -> Decode | None:
    """The decoder of a consumer's payloads; None if it takes them as they are."""
    if consumer.payload is None:
        return None
    return make_model_decoder(consumer.payload, f"consumer {consumer.name}")


def make_model_decoder(model: Any, whose: str) -> Decode:
    """The decoder of a model."""
    try:
        return _msgspec_decoder(model) if hasattr(model, "__struct_fields__") else _pydantic_decoder(model)
    except Exception as error:
        raise DeclarationError(f"{whose}: payload={model.__name__} cannot be validated: {first_line(error)}") from error


def decode_payloads(decode: Decode, records: Sequence[Record]) -> None:
    """Gives each record its ``payload``."""
    for index, record in enumerate(records):
        if not has_payload(record):  # a batch that is retried was validated before
            try:
                set_payload(record, decode(record.data_json))
            except InvalidPayload as error:
                raise Culprit(index) from error


def _pydantic_decoder(model: Any) -> Decode:
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415  most consumers have no model

    validate = TypeAdapter[Any](model).validate_json

    def decode(text: str) -> Any:
        try:
            return validate(text)
        except ValidationError as error:
            # What is wrong with which field, without the values.
            faults = error.errors(include_input=False, include_url=False, include_context=False)
            raise InvalidPayload("; ".join(map(_fault, faults))) from None

    return decode


def _fault(fault: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, fault['loc'])) or 'payload'}: {fault['msg']}"


def _msgspec_decoder(model: Any) -> Decode:
    import msgspec  # noqa: PLC0415  the application's: only a Struct brings it along

    decoding = msgspec.json.Decoder(model)

    def decode(text: str) -> Any:
        try:
            return decoding.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidPayload(str(error)) from None

    return decode
