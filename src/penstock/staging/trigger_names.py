"""A rule's trigger, and the names in it."""

import hashlib
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import class_mapper

from penstock.declarations import StagingRule
from penstock.errors import DeclarationError
from penstock.staging.rules import object_name


@dataclass(frozen=True, slots=True)
class Trigger:
    """A rule's function and triggers.

    Attributes:
        rule: The rule.
        name: Of the function and of the trigger on rows.
        schema: Schema of the table; None if the class leaves it to the search path.
        table: Name of the table.
        columns: Columns that the function reads.
        body: The function's body, as Postgres stores it.
        types: ``pg_trigger.tgtype`` of each trigger, by its name.
        statements: SQL that creates them, or replaces them if they exist.
        drop: SQL that drops them.
    """

    rule: StagingRule
    name: str
    schema: str | None
    table: str
    columns: tuple[str, ...]
    body: str
    types: dict[str, int]
    statements: tuple[str, ...]
    drop: tuple[str, ...]


def make_name(rule: StagingRule, suffix: str = "") -> str:
    """Makes the name of the function and the trigger: the same for each version of the rule, at most 63 bytes."""
    table: Any = class_mapper(rule.type, configure=False).local_table
    table_name = getattr(table, "name", "")  # a join has none
    identity = "\n".join((getattr(table, "schema", None) or "", table_name, rule.channel.name, object_name(rule)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    readable = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in table_name[:30])
    return "_".join(part for part in ("stage", readable, digest, suffix) if part)


def make_error(rule: StagingRule, reason: str) -> DeclarationError:
    """Makes the error for a rule that a trigger cannot capture."""
    return DeclarationError(f"staging rule of {rule.type.__name__}, capture by trigger: {reason}")
