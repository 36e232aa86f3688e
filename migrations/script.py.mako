"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
Create Date: ${create_date}
"""

from penstock.schema.initialise import execute

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

# One statement each: asyncpg takes no more.
UP = ("",)
DOWN = ("",)


def upgrade() -> None:
    execute(*UP)


def downgrade() -> None:
    execute(*DOWN)
