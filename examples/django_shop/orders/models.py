"""The models."""

from django.db import models


class Order(models.Model):
    """An order of a customer."""

    customer = models.CharField(max_length=100)
    cents = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.customer}: {self.cents}"


class Revenue(models.Model):
    """What a customer has ordered for: kept by a consumer."""

    customer = models.CharField(max_length=100, primary_key=True)
    cents = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.customer}: {self.cents}"
