"""Alembic operations that create and drop declared triggers, for an application's own Alembic.

    from alembic import op
    import penstock.schema.alembic_operations  # adds the two operations to op
    from shop.events import Order, pipeline

    def upgrade() -> None:
        op.create_penstock_triggers(pipeline, Order)

    def downgrade() -> None:
        op.drop_penstock_triggers(pipeline, Order)

Both work with every driver, asynchronous ones too, and offline (``alembic upgrade --sql``); a
``schema_translate_map`` of the connection says in which schema the tables are.  They render the
rules as they are when the migration runs.  After a change of a rule, write another migration with
``create_penstock_triggers``, which replaces the trigger; until it has run, ``penstock doctor`` and
every worker's start fail.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from alembic.operations import MigrateOperation, Operations

from penstock.errors import DeclarationError
from penstock.schema.capture import make_triggers
from penstock.staging.rules import Declarations
from penstock.staging.triggers import Trigger

__all__ = ["TriggerOperation"]


@Operations.register_operation("create_penstock_triggers", "create")
@Operations.register_operation("drop_penstock_triggers", "drop")
@dataclass
class TriggerOperation(MigrateOperation):
    """Executes the SQL of some triggers, in order."""

    statements: list[str]

    @classmethod
    def create(cls, operations: Operations, pipeline: Declarations, *classes: type[Any]) -> None:
        """Creates the triggers of the classes, or replaces them if they exist.

        Args:
            operations: Given by Alembic.
            pipeline: Declares rules with ``capture="trigger"`` for the classes.
            classes: The mapped classes.  Their tables must exist by then, and Penstock's own.

        Raises:
            DeclarationError: No class is given, or one has no rule with ``capture="trigger"``.
        """
        triggers = _find_triggers(operations, pipeline, classes)
        operations.invoke(cls([sql for trigger in triggers for sql in trigger.statements]))

    @classmethod
    def drop(cls, operations: Operations, pipeline: Declarations, *classes: type[Any]) -> None:
        """Drops the triggers of the classes, if they exist; see ``create``.

        Raises:
            DeclarationError: No class is given, or one has no rule with ``capture="trigger"``.
        """
        triggers = _find_triggers(operations, pipeline, classes)
        operations.invoke(cls([sql for trigger in triggers for sql in trigger.drop]))


@Operations.implementation_for(TriggerOperation)
def _execute(operations: Operations, operation: TriggerOperation) -> None:
    for statement in operation.statements:
        # text() would take a colon for a parameter
        operations.execute(statement.replace(":", r"\:"))


def _find_triggers(
    operations: Operations, pipeline: Declarations, classes: Iterable[type[Any]]
) -> list[Trigger]:
    """Finds the triggers of the classes, in the order of their rules' declaration."""
    models, connection = tuple(classes), operations.get_context().connection  # none offline
    options = connection.get_execution_options() if connection is not None else {}
    triggers = make_triggers(pipeline, options.get("schema_translate_map"))
    chosen = [trigger for trigger in triggers if trigger.rule.model in models]
    missing = [
        cls.__name__ for cls in models if all(trigger.rule.model is not cls for trigger in chosen)
    ]
    if missing or not models:
        raise DeclarationError(
            f'no staging rule with capture="trigger" is declared for {missing[0]}'
            if missing
            else "which triggers? Give the mapped classes: op.create_penstock_triggers(pipeline, "
            "Order)"
        )
    return chosen
