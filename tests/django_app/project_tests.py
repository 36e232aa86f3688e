"""What is tested in the process of the example's own tests: the admin and the command line of a project."""

import os

from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command, execute_from_command_line
from django.db import connection, transaction

from orders.events import send_receipt
from orders.models import Order
from penstock.django.testing import PipelineTestCase
from penstock.testing import staged

LETTERS = "/admin/penstock/letter/"


class ProjectTest(PipelineTestCase):
    def test_a_dead_letter_is_seen_and_retried_in_the_admin(self) -> None:
        with transaction.atomic():
            order = Order.objects.create(customer="Ann", cents=-1)
            send_receipt.stage(connection, order.pk, tenant="Ann")
        self.drain(allow_dead_letters=True)
        Order.objects.update(cents=5)
        user = User.objects.create_user("otto", is_staff=True)
        self.client.force_login(user)
        self.assertEqual(self.client.get(LETTERS).status_code, 403)

        def may(name: str) -> None:
            user.user_permissions.add(Permission.objects.get(codename=name))

        may("view_letter")
        seen = self.client.get(LETTERS)
        self.assertContains(seen, "send_receipt")
        [(name, _)] = seen.context["letters"]
        one = f"{LETTERS}{name}/change/"
        for page in (LETTERS, one):
            self.assertNotContains(self.client.get(page), "nobody sends")
        self.assertEqual(self.client.post(LETTERS, {"letter": name}).status_code, 403)

        may("view_payload")
        for page in (LETTERS, one):
            self.assertContains(self.client.get(page), "nobody sends")

        with connection.cursor() as cursor:
            cursor.execute("UPDATE penstock.dead_letters SET data = repeat('9', 5000)::jsonb")  # nobody can parse it
            self.assertContains(self.client.get(one), "9" * 5000)
            cursor.execute("UPDATE penstock.dead_letters SET data = to_jsonb(%s)", [order.pk])
        place = {"consumer": "", "channel": "", "shard": "0", "offset": "0"}
        for wrong in ({"failed_at": "x"}, *({"failed_at": "2026-11-27", "shard": each} for each in ("x", "9" * 20))):
            self.assertContains(self.client.get(LETTERS, {**place, **wrong}), "send_receipt")
        for answer in (
            self.client.get(LETTERS, {"of": "\0"}),
            self.client.get(LETTERS, {**place, "failed_at": "2026-11-27", "channel": "\0"}),
            self.client.get(f"{LETTERS}%00/change/"),
            self.client.post(LETTERS, {"letter": "\0 orders/0 offset 1"}),
        ):
            self.assertEqual(answer.status_code, 400)
        self.assertContains(
            self.client.get(LETTERS, {**place, "failed_at": "2020-01-01T00:00:00+00:00"}), "No dead letters"
        )

        may("retry_letter")
        answer = self.client.post(LETTERS, {"letter": [name, "nobody orders/0 offset 1", "x"]}, follow=True)
        self.assertContains(answer, "Workers retry 1 dead letter within")
        self.assertContains(answer, "retry requested")  # no worker runs that would take it
        call_command("penstock", "dead-letters", "retry", "send_receipt", "--all", "--redis-url", self._redis_url)
        self.drain()
        self.assertContains(self.client.get(LETTERS), "No dead letters")
        self.assertEqual(self.client.get(one).status_code, 404)

    def test_the_command_line_has_the_settings_of_the_project(self) -> None:
        with self.assertRaises(CommandError) as failed:
            call_command("penstock", "dead-letters", "retry", "nobody", "orders/0 offset 1")
        self.assertEqual(failed.exception.returncode, 2)
        with self.assertRaises(SystemExit) as ended:
            execute_from_command_line(["manage.py", "penstock", "verify", "--redis-url", self._redis_url])
        self.assertEqual(ended.exception.code, 0)
        self.assertNotIn("PENSTOCK_DATABASE_URL", os.environ)

    def test_migrations_are_complete_and_can_be_taken_back(self) -> None:
        call_command("makemigrations", check=True, verbosity=0)
        call_command("migrate", "penstock", "zero", verbosity=0)
        Order.objects.create(customer="Ann", cents=1)
        call_command("migrate", "penstock", verbosity=0)
        call_command("migrate", "orders", "zero", verbosity=0)  # the rule's table is not there for a while
        call_command("migrate", verbosity=0)
        Order.objects.create(customer="Ann", cents=2)

        self.assertEqual([record.data["cents"] for record in staged(connection)], [2])

    def test_each_schema_that_is_migrated_is_captured(self) -> None:
        """As django-tenants migrates: it sets the search path of Django's connection, and calls ``migrate``."""
        for schema in ("t1", "t2"):
            with connection.cursor() as cursor:
                cursor.execute(f"CREATE SCHEMA {schema}")
            self.addCleanup(lambda schema: connection.cursor().execute(f"DROP SCHEMA {schema} CASCADE"), schema)
        self.addCleanup(lambda: connection.cursor().execute("SET search_path TO DEFAULT"))
        for schema in ("t1", "t2", "DEFAULT"):
            with connection.cursor() as cursor:
                cursor.execute(f"SET search_path TO {schema}")
            call_command("migrate", verbosity=0)
            Order.objects.create(customer=schema, cents=1)

        self.assertEqual(
            [(record.data["customer"], record.headers) for record in staged(connection)],
            [("t1", {"schema": "t1"}), ("t2", {"schema": "t2"}), ("DEFAULT", None)],
        )
