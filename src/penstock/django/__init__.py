"""Penstock in a Django project.

``"penstock.django"`` in ``INSTALLED_APPS``, and a ``DjangoPipeline``.

django_pipeline   rules for models, captured by trigger, and handlers with the ORM
orm_connection    the ORM on the worker's session of Postgres, while a handler runs
apps              the settings; what migrate and check do
models, admin     dead letters in the admin
migrations        Penstock's tables
management        ``manage.py penstock``
testing           a test case whose commits go through the pipeline

``--app penstock.django:pipeline`` is the pipeline of the project whose settings
``DJANGO_SETTINGS_MODULE`` names, in any process.
"""

from typing import Any

from penstock.django.django_pipeline import DjangoPipeline

__all__ = ["DjangoPipeline"]


def __getattr__(name: str) -> Any:
    """The project's pipeline, once Django is set up."""
    if name != "pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import django  # noqa: PLC0415  not while Django loads this app

    from penstock.django.apps import get_pipeline  # noqa: PLC0415  the same

    django.setup()
    return get_pipeline()
