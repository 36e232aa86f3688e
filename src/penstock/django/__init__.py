"""Penstock in a Django project: ``"penstock.django"`` in ``INSTALLED_APPS``, and a ``DjangoPipeline``.

django_pipeline   rules for models, captured by trigger, and handlers with the ORM
orm_connection    the ORM on the worker's session of Postgres, while a handler runs
apps              the settings; what migrate and check do
models, admin     dead letters in the admin
migrations        Penstock's tables
management        ``manage.py penstock``
testing           a test case whose commits go through the pipeline
"""

from penstock.django.django_pipeline import DjangoPipeline

__all__ = ["DjangoPipeline"]
