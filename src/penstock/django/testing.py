"""Tests of a Django project.

In a ``TestCase``, whose transaction is never committed, ``penstock.testing`` shows what is staged:
``staged(connection)``, ``assert_staged(connection, …)``.  What is to reach the handlers has to be
committed, which takes a ``PipelineTestCase``.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from django.test import TransactionTestCase

from penstock.database.connections import connect_postgres
from penstock.database.statements import quote
from penstock.django.apps import get_database_url, get_pipeline, get_setting
from penstock.logs import follow_application
from penstock.schema.initialise import initialise
from penstock.testing import drained
from penstock.testing.databases import delete_keys, embedded_redis


class PipelineTestCase(TransactionTestCase):
    """A test whose commits go through the pipeline.

        class RevenueTest(PipelineTestCase):
            def test_orders_add_up(self):
                Order.objects.create(customer="Ann", cents=500)
                self.drain()
                self.assertEqual(Revenue.objects.get().cents, 500)

    Each test begins without records.  Its Redis is that of ``PENSTOCK["TEST_REDIS_URL"]``, whose
    keys of the pipeline's namespace are deleted; without this setting it is a Valkey of the class's
    own, from ``penstock-outbox[embedded]``.
    """

    _redis_url: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        """Finds the Redis, or starts one."""
        super().setUpClass()
        follow_application()
        url = get_setting("TEST_REDIS_URL")
        if url is None:
            directory = cls.enterClassContext(TemporaryDirectory())
            url = cls.enterClassContext(embedded_redis(Path(directory, "redis")))
        cls._redis_url = url

    def setUp(self) -> None:
        """Makes Penstock's tables anew, and deletes the keys."""
        super().setUp()
        pipeline = get_pipeline()
        url, schema = get_database_url(pipeline.using), pipeline.scope.schema
        with connect_postgres(url, application="test") as connection:
            tables = ", ".join(quote(schema, name) for name in ("staged_records", "dead_letters"))
            connection.execute(f"TRUNCATE {tables}".encode())
        initialise(url, schema, revision="base")
        initialise(url, schema)
        delete_keys(self._redis_url, pipeline.scope.namespace)

    def drain(self, **options: Any) -> dict[str, int]:
        """Publishes committed records and has the consumers apply them, until nothing is left.

        Args:
            **options: Those of ``penstock.testing.drained``: ``consumers``, ``allow_dead_letters``,
                ``timeout_s``.

        Returns:
            For each consumer, how many records it has applied.

        Raises:
            AssertionError: As ``penstock.testing.drained``.
        """
        pipeline = get_pipeline()
        return drained(pipeline, get_database_url(pipeline.using), self._redis_url, **options)
