"""Payloads of a declared model.

A value that a consumer would not get back equal is refused when it is staged.

A payload is written as JSON, and its consumer makes it an instance of the model again.  The same is
done here: JSON that the model does not take would be dead-lettered, and a value that comes back as
another one would reach the handler: a secret as stars, the fields of a subclass lost.  A value of
another type than its field's is taken if its JSON is that of what comes back: ``"red"`` for
``Color.RED``, a datetime for a field that takes anything, which comes back as text.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from typing_extensions import is_typeddict

from penstock.declaring.kinds import LARGEST_MAX_BYTES
from penstock.errors import InvalidRecord
from penstock.parsing import Decode, InvalidPayload, make_model_decoder, parse_json
from penstock.staging.payload import CONVERTED, as_plain, get_members, json_text, make_path

_MISSING = object()


def checked_model(value: object, model: Any) -> object:
    """Returns the value if it is an instance of the model, or if there is no model."""
    if not _is_instance(value, model):
        raise InvalidRecord(
            "payload",
            f"is of type {type(value).__name__}; {model.__name__} is declared: "
            f"payload={model.__name__}",
        )
    return value


def _is_instance(value: object, model: Any) -> bool:
    expected = dict if is_typeddict(model) else model
    return not isinstance(expected, type) or isinstance(value, expected)


@dataclass(frozen=True, slots=True)
class TypedPayload:
    """The declared model of a payload, and the application's payload, if it is known."""

    model: Any
    given: object = _MISSING

    def check(self, text: str, field: str) -> None:
        """Checks the JSON as consumers will.

        Compares what comes back with the payload if that is an instance of the model.  Raises
        ``InvalidRecord``.
        """
        if (decode := _find_decoder(self.model)) is None:
            return
        try:
            decoded = decode(text)
        except InvalidPayload as error:
            raise InvalidRecord(
                f"{field}data", f"does not fit {self.model.__name__}: {error}"
            ) from None
        if not _is_instance(self.given, self.model) or _is_equal(self.given, decoded):
            return
        if (fault := _find_difference(self.given, decoded, f"{field}data")) is not None:
            path, value = fault
            raise InvalidRecord(
                path,
                f"is of type {type(value).__name__}, which does not survive a round trip through "
                f"JSON as a part of {self.model.__name__}: give it a type that JSON keeps, or a "
                "serializer whose output its validator reads",
            )


@cache
def _find_decoder(model: Any) -> Decode | None:
    """Returns the decoder of a model.

    None without Pydantic, which an application that only stages may lack.
    """
    try:
        return make_model_decoder(model, "staging")
    except ImportError:
        return None


def _is_equal(original: Any, decoded: Any) -> bool:
    """True if all fields of an instance equal the decoded ones: the fast path for almost all."""
    if type(original) is not type(decoded):
        return False
    compares_all = _compares_every_field(type(original))  # type: ignore[arg-type]  # a class has a hash
    return compares_all and bool(original == decoded)


@cache
def _compares_every_field(kind: Any) -> bool:
    declared: dict[str, Any] = getattr(kind, "__dataclass_fields__", {})
    return all(field.compare for field in declared.values())


def _find_difference(original: Any, decoded: Any, path: str) -> tuple[str, object] | None:
    """Finds the first part of a value that differs when decoded; returns its path and the part."""
    members, returned = get_members(original), get_members(decoded)
    if members is None or returned is None or not _is_related(type(original), type(decoded)):
        return None if _is_same(original, decoded) else (path, original)
    for name, member in members.items():
        inner = f"{path}[{name}]" if isinstance(name, int) else make_path(path, str(name))
        if (fault := _find_difference(member, returned.get(name, _MISSING), inner)) is not None:
            return fault
    return None


def _is_related(original: type, decoded: type) -> bool:
    return (
        issubclass(original, decoded)
        or issubclass(decoded, original)
        or {original, decoded} == {list, tuple}
    )


def _is_same(original: Any, decoded: Any) -> bool:
    """True if they are equal, or if one is the written form of the other."""
    try:
        if original == decoded:
            return True
        if type(original) is type(decoded) or not (
            isinstance(original, CONVERTED) or get_members(original) is not None
        ):
            return False
        forms = [_as_json(original), *_as_libraries_write(original)]
        returned = _as_json(decoded)
    except Exception:  # noqa: BLE001  an ``__eq__`` of the application's, or what is no JSON
        return False
    return returned in forms or str(returned) in map(str, forms)  # 0.1 for Decimal("0.1")


def _as_json(value: object) -> Any:
    return parse_json(json_text(as_plain(value, "data"), "data", LARGEST_MAX_BYTES))


def _as_libraries_write(value: object) -> Iterator[Any]:
    """Yields the forms in which Pydantic and msgspec write a value of a field of any type."""
    for library, write in (("pydantic_core", "to_jsonable_python"), ("msgspec", "to_builtins")):
        if library in sys.modules:
            yield getattr(sys.modules[library], write)(value)
