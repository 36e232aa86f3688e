"""The model that stands for dead letters in the admin.

It has permissions, and no table of its own.
"""

from django.db import models


class Letter(models.Model):  # noqa: DJ008  there are no objects of it
    """A record that a consumer could not apply."""

    class Meta:
        managed = False
        default_permissions = ("view",)
        permissions = (
            ("retry_letter", "Can have workers retry dead letters"),
            ("view_payload", "Can see the payloads of dead letters"),
        )
        verbose_name = "dead letter"
