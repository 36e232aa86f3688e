"""A log of Penstock in a topic of Kafka: at least once, in order by key.

penstock run --app relay_to_kafka:pipeline --engine inline
"""

import os
from collections.abc import Sequence
from functools import cache

from confluent_kafka import KafkaError, Message, Producer
from sqlalchemy.orm import Session

from penstock import Log, Pipeline, Record, Snooze

orders = Log("orders", shards=4)
pipeline = Pipeline([orders])

TIMEOUT_S = 10.0


@cache
def connect() -> Producer:
    """The producer of this process: idempotent, so that its own retries neither double nor reorder."""
    brokers = os.environ.get("KAFKA_BROKERS", "127.0.0.1:9092")
    return Producer(
        {"bootstrap.servers": brokers, "enable.idempotence": True, "delivery.timeout.ms": int(TIMEOUT_S * 1000)}
    )


@pipeline.consumer(reads=orders)
def to_kafka(_session: Session, records: Sequence[Record]) -> None:
    """Sends a batch, and passes its records only when the brokers have all of them; else the batch is sent again."""
    errors = list[KafkaError]()

    def note(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            errors.append(error)

    producer = connect()
    for record in records:
        producer.produce(
            "orders",
            key=record.key,
            value=record.data_json,
            headers={"penstock-place": str(record.place), "action": record.action, "object": record.object},
            on_delivery=note,
        )
    left = producer.flush(TIMEOUT_S * 2)
    if left or errors:
        raise Snooze(
            "5s", f"Kafka: {errors[0].name() if errors else 'no answer'}"
        )  # which is no attempt: no record is dead-lettered for it
