"""The source of an Alembic migration that creates the triggers, for those who review the SQL of their migrations."""

from collections.abc import Iterable

from penstock.errors import DeclarationError
from penstock.staging.rules import Declarations
from penstock.staging.triggers import make_trigger


def trigger_migration(pipeline: Declarations, *, revision: str, down_revision: str | None = None) -> str:
    """Returns the source of an Alembic migration that creates the triggers of all rules with ``capture="trigger"``.

    Args:
        pipeline: Declares the rules.
        revision: Id of the migration.
        down_revision: Id of the migration before it.  Penstock's own tables must exist by then.

    Raises:
        DeclarationError: No rule has ``capture="trigger"``, or one cannot be captured by a trigger.
    """
    rules = [rule for rule in pipeline.rules if rule.capture == "trigger"]
    if not rules:
        raise DeclarationError('no staging rule has capture="trigger": there is nothing to migrate')
    triggers = [make_trigger(rule, pipeline.scope.schema) for rule in rules]
    up = [sql for trigger in triggers for sql in trigger.statements]
    down = [sql for trigger in reversed(triggers) for sql in trigger.drop]
    return _MIGRATION.format(revision=revision, down=down_revision, up=_render_list(up), drop=_render_list(down))


_MIGRATION = '''"""Penstock's triggers: stage changes to these tables, whichever client makes them.

Revision ID: {revision}
Revises: {down}
"""

from alembic import op

revision = {revision!r}
down_revision = {down!r}
branch_labels = None
depends_on = None

UP = [
{up}]

DOWN = [
{drop}]


def upgrade() -> None:
    for statement in UP:
        op.execute(statement.replace(":", r"\\:"))  # text() would take a colon for a parameter


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement.replace(":", r"\\:"))
'''


def _render_list(statements: Iterable[str]) -> str:
    """Renders the statements as the items of a Python list, one source line for each line of SQL."""
    lines: list[str] = []
    for statement in statements:
        parts = [repr(part) for part in statement.splitlines(keepends=True)]
        lines += ["    (", *(f"        {part}" for part in parts), "    ),"]
    return "\n".join(lines) + "\n"
