"""Everything that ``penstock init`` puts into a database.

initialise          creates and upgrades the tables, under one lock; what the migrations share
revisions           which revisions a release works with
roles, role_plan    the database's roles and their rights
capture             the triggers of rules; alembic_operations: the same in migrations
migrations          the tables in the migrations of the application's own Alembic
"""

from penstock.schema.capture import trigger_migration

__all__ = ["trigger_migration"]
