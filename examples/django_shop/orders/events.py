"""The pipeline: which models are staged, and who consumes them."""

from collections.abc import Sequence

from django.db.models import F

from orders.models import Order, Revenue
from penstock import Job, Log, Queue, Record
from penstock.django import DjangoPipeline

orders = Log("orders")
receipts = Queue("receipts")
pipeline = DjangoPipeline([orders, receipts])
pipeline.stages(Order, to=orders, key="id")  # every insert, update and delete, with all columns


@pipeline.consumer(reads=orders)
def revenue(_: object, records: Sequence[Record]) -> None:
    for record in records:
        if record.action == "insert":
            order = record.data
            total, _created = Revenue.objects.get_or_create(customer=order["customer"])
            Revenue.objects.filter(pk=total.pk).update(cents=F("cents") + order["cents"])


@pipeline.worker(reads=receipts)
async def send_receipt(_: object, job: Job) -> None:
    order = await Order.objects.aget(id=job.data)
    if order.cents < 0:
        raise ValueError("nobody sends a negative receipt")
