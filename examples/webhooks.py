"""Webhooks: signed, retried with growing pauses, and one customer's dead endpoint delays nobody else.

Staged in the transaction of what happened:    deliver.stage(session, Webhook(url, "order.paid", {…}), tenant=customer)
Sent by workers:                               penstock work --app webhooks:pipeline

Signatures and headers are those of Standard Webhooks, so that customers verify them with its libraries.
"""

import base64
import hashlib
import hmac
import json
import os
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from sqlalchemy.orm import Session

from penstock import DeadLetter, Job, Pipeline, Queue, Snooze

SECRET = os.environ.get("WEBHOOK_SECRET", "a-secret-of-your-own").encode()  # of which each customer's is made
TIMEOUT_S = 10.0
FAILURES, PAUSE_S = 5, 600.0
"""An endpoint that has failed so many times in a row is left alone for so long, in seconds."""

GONE = 410


class EndpointFailed(Exception):
    """An endpoint has not taken a message: it is tried again, later each time."""


@dataclass
class Breaker:
    """How a customer's endpoint is, as far as this process knows."""

    failures: int = 0
    open_until: float = 0.0


breakers: defaultdict[str, Breaker] = defaultdict(Breaker)


@dataclass
class Webhook:
    """What is sent where.  Have a proxy refuse the addresses of your own network: a customer chooses the URL."""

    url: str
    event: str
    data: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.url.startswith(("https://", "http://")):
            raise ValueError("the URL of a webhook begins with https://")


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is no delivery: it would be followed by a GET without the message, and to wherever it says."""

    def redirect_request(self, *_: object) -> None:
        """Follows none; its status is an error."""


opener = urllib.request.build_opener(NoRedirects)


webhooks = Queue("webhooks", streams=32)
pipeline = Pipeline([webhooks])


@pipeline.worker(reads=webhooks, payload=Webhook, attempts=12, backoff="5s", limit="30s")
def deliver(_session: Session, job: Job[Webhook]) -> Snooze | DeadLetter | None:
    """Sends one; after twelve attempts it is a dead letter."""
    breaker = breakers[job.tenant]
    if (left := breaker.open_until - monotonic()) > 0:
        return Snooze(left)  # which is no attempt
    status = send(job)
    if status == GONE:
        return DeadLetter("the endpoint is gone")
    if status in range(200, 300):
        breakers.pop(job.tenant, None)
        return None
    breaker.failures += 1
    if breaker.failures >= FAILURES:
        breaker.failures, breaker.open_until = 0, monotonic() + PAUSE_S
    raise EndpointFailed(f"status {status}")


def send(job: Job[Webhook]) -> int:
    """The status of the answer; 0 if there was none.  The id is the same at each attempt: customers skip what they have seen."""
    body = json.dumps({"type": job.payload.event, "data": job.payload.data}).encode()
    id_, sent_at = str(job.id), f"{datetime.now(UTC).timestamp():.0f}"
    headers = {
        "Content-Type": "application/json",
        "webhook-id": id_,
        "webhook-timestamp": sent_at,
        "webhook-signature": f"v1,{sign(job.tenant, id_, sent_at, body)}",
    }
    request = urllib.request.Request(job.payload.url, body, headers)  # noqa: S310  checked where the webhook is made
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return 0


def sign(customer: str, id_: str, sent_at: str, body: bytes) -> str:
    """The signature of a message, with a secret of the customer's own: others cannot forge what it verifies."""
    secret = hmac.digest(SECRET, customer.encode(), hashlib.sha256)
    signed = b".".join((id_.encode(), sent_at.encode(), body))
    return base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
