"""What ``penstock init`` puts into a database.

initialise          creates and upgrades the tables; migrating: under one lock
revisions           which revisions a release works with
roles, role_plan    the database's roles and their rights
capture             the triggers of rules; alembic_operations, migration_text: the same in migrations
migrations          the tables in the migrations of the application's own Alembic
"""

from penstock.schema.migration_text import trigger_migration

__all__ = ["trigger_migration"]
