"""Creates Penstock's tables, as ``penstock init`` does.

Later releases upgrade them after each ``migrate``.
"""

from typing import Any

from django.db import migrations, models

from penstock.django.apps import create_tables, drop_tables


def _create(_: Any, editor: Any) -> None:
    create_tables(editor.connection.alias)


def _drop(_: Any, editor: Any) -> None:
    drop_tables(editor.connection.alias)


class Migration(migrations.Migration):
    """By a connection of their own."""

    atomic = False
    dependencies = ()
    operations = (
        migrations.RunPython(_create, _drop),
        migrations.CreateModel(
            name="Letter",
            fields=[
                (
                    "id",
                    models.AutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                )
            ],
            options={
                "verbose_name": "dead letter",
                "permissions": (
                    ("retry_letter", "Can have workers retry dead letters"),
                    ("view_payload", "Can see the payloads of dead letters"),
                ),
                "default_permissions": ("view",),
                "managed": False,
            },
        ),
    )
