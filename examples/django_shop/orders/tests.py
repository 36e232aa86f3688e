"""Tests of the app."""

from unittest.mock import Mock

from django.db import connection, transaction
from django.test import TestCase

from orders.events import revenue, send_receipt
from orders.models import Order, Revenue
from penstock.django.testing import PipelineTestCase
from penstock.testing import assert_staged, make_record, staged


class StagingTest(TestCase):
    def test_an_order_is_staged(self) -> None:
        order = Order.objects.create(customer="Ann", cents=500)

        assert_staged(connection, to="orders", key=order.pk, action="insert", data={"cents": 500})

    def test_bulk_writes_are_staged(self) -> None:
        Order.objects.bulk_create([Order(customer="Ann", cents=500), Order(customer="Bob", cents=900)])
        Order.objects.update(cents=0)

        actions = [record.action for record in staged(connection)]
        self.assertEqual(actions, ["insert", "insert", "update", "update"])

    def test_a_job_is_staged_by_hand(self) -> None:
        with transaction.atomic():
            order = Order.objects.create(customer="Ann", cents=500)
            send_receipt.stage(connection, order.pk, tenant="Ann")

        assert_staged(connection, to="receipts", tenant="Ann")

    def test_a_handler_is_a_function(self) -> None:
        revenue(Mock(), [make_record({"customer": "Ann", "cents": 500}, action="insert")])

        self.assertEqual(Revenue.objects.get().cents, 500)


class PipelineTest(PipelineTestCase):
    def test_orders_add_up(self) -> None:
        with transaction.atomic():
            order = Order.objects.create(customer="Ann", cents=500)
            send_receipt.stage(connection, order.pk, tenant="Ann")
        Order.objects.bulk_create([Order(customer="Ann", cents=900)])

        self.assertEqual(self.drain(), {"revenue": 2, "send_receipt": 1})
        self.assertEqual(Revenue.objects.get().cents, 1400)

    def test_each_test_begins_without_records(self) -> None:
        self.assertEqual(staged(connection), [])
        self.assertEqual(self.drain(), {"revenue": 0, "send_receipt": 0})
