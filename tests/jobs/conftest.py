"""Sessions of the pipeline; streamers and workers of queues in this process, closed with the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.jobs import JOBS
from penstock import Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.streaming import Streamer


@pytest.fixture
def sessions(working: Pipeline, engine: Engine) -> sessionmaker[Session]:
    made = sessionmaker(engine)
    working.attach(made)
    return made


@pytest.fixture
def streamer(working: Pipeline, database_url: str, redis_url: str) -> Iterator[Streamer]:
    made = Streamer(working, database_url, redis_url)
    yield made
    made.close()


@pytest.fixture
def start_worker(working: Pipeline, database_url: str, redis_url: str) -> Iterator[Callable[..., QueueWorker]]:
    """Opens workers of the pipeline's only consumer, or of one declared here."""
    opened: list[QueueWorker] = []

    def make(handler: Callable[..., Any] | None = None, **options: Any) -> QueueWorker:
        if handler is not None:
            options = {"name": "receipts", "concurrency": 1, "backoff": 0.01, **options}
            working.worker(reads=JOBS, **options)(handler)
        worker = QueueWorker(WorkerSetup(working, working.get_consumer("receipts"), database_url, redis_url))
        opened.append(worker)
        worker.open()
        return worker

    yield make
    for worker in opened:
        worker.close()
