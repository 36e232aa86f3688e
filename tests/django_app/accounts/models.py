"""Accounts, and what is kept of them in tables of its own."""

from typing import Any

from django.db import models


class Tag(models.Model):  # noqa: DJ008  nobody shows it
    """On the other side of a field."""


class Account(models.Model):  # noqa: DJ008  the same
    """Has a field of each kind."""

    tags: Any = models.ManyToManyField(Tag)
    friends: Any = models.ManyToManyField("self", symmetrical=False)
    teams: Any = models.ManyToManyField("Team", through="Membership")


class Team(models.Model):  # noqa: DJ008  the same
    """Has accounts by a model of its own."""


class Membership(models.Model):  # noqa: DJ008  the same
    """Is a row of that table."""

    account = models.ForeignKey(Account, models.CASCADE)
    team = models.ForeignKey(Team, models.CASCADE)


class Veiled(Account):  # noqa: DJ008  the same
    """Stands for the table of accounts."""

    class Meta:
        proxy = True
