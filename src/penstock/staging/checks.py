"""What is checked of a staging rule when it is declared: mistakes are refused, and blind spots get a warning.

Nothing here configures the mappers: classes that they refer to may still be undefined.
"""

from sqlalchemy.orm import class_mapper

from penstock.declaring.declarations import Queue, StagingRule
from penstock.declaring.kinds import refuse_sources
from penstock.errors import DeclarationError, InvalidRecord
from penstock.staging.messages import refuse_reserved
from penstock.staging.payload import headers_text
from penstock.staging.rules import Declarations, is_secret, key_names, object_name, tenant_names
from penstock.staging.triggers import check_columns, make_error, make_name


def check_rule(rule: StagingRule, pipeline: Declarations) -> None:
    """Finds the mistakes in a rule that show when it is declared, before any object changes.

    Args:
        rule: The rule.
        pipeline: Declares it, and has not taken it yet.

    Raises:
        DeclarationError: The class is not mapped, it lacks an attribute that the rule names, a part of the rule is
            invalid, or a trigger is to capture it and cannot.
    """
    where = f"staging rule of {rule.model.__name__}"
    refuse_sources(rule.channel, where, "a source alone stages into it: Log(…, source=…)")
    # inspect() would configure the mappers now, while classes they refer to may still be undefined.
    if not hasattr(rule.model, "__mapper__"):
        raise DeclarationError(f"{where}: the class is not mapped; map it before declaring the rule")
    names = () if rule.data is None or callable(rule.data) else tuple(rule.data)
    for name in (*names, *key_names(rule), *tenant_names(rule)):
        if not hasattr(rule.model, name):
            raise DeclarationError(f"{where}: {rule.model.__name__} has no attribute {name!r}")
    _check_key(rule, where)
    _check_headers(rule, where)
    if rule.capture == "trigger":
        _check_trigger(rule, pipeline)


def _check_key(rule: StagingRule, where: str) -> None:
    """Refuses a secret as key or tenant: these are shown by commands and in logs."""
    columns = class_mapper(rule.model, configure=False).columns
    for name in (*key_names(rule), *tenant_names(rule)):
        if is_secret(columns.get(name)):
            part = "key" if name in key_names(rule) else "tenant"
            raise DeclarationError(
                f"{where}: its {part} {name} is marked secret, and {part}s are shown in logs and by commands; "
                "take another column"
            )


def _check_headers(rule: StagingRule, where: str) -> None:
    if rule.headers is not None and not callable(rule.headers):
        try:
            headers_text(rule.headers)
            if isinstance(rule.channel, Queue):
                refuse_reserved(rule.headers)
        except InvalidRecord as error:
            raise DeclarationError(f"{where}: {error}") from error


def _check_trigger(rule: StagingRule, pipeline: Declarations) -> None:
    """Refuses a rule that a trigger cannot capture, or whose trigger would take the place of another rule's."""
    check_columns(rule)
    name = make_name(rule)
    for other in pipeline.rules:
        if other.capture == "trigger" and make_name(other) == name:
            raise make_error(
                rule,
                f"another rule stages {object_name(rule)} to channel {rule.channel.name} by trigger already; "
                "declare one rule for both, or give this one an object=… of its own",
            )
