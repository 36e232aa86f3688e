"""Clients that book, correct and cancel rides over HTTP."""

import contextlib
import random
import threading
from collections import Counter, deque
from time import monotonic

import httpx

CLIENTS = 4
PAUSE_S = 0.03
"""Average pause of a client between two requests, in seconds."""

CHEAP_PAUSE_S = 0.01
"""The same between two health checks."""

RIDES_AT_HAND = 20
"""Number of latest rides that clients correct and cancel."""


class Simulator:
    """Several clients, one thread each.

    They share their rides, so that two of them sometimes change the same one.

    Attributes:
        retried: Transactions that the API retried after a serialization failure.
        cut: Requests whose process of the API ended before it had answered.
        health_checks: Cheap requests after the traffic.
    """

    def __init__(self, *urls: str, clients: int = CLIENTS) -> None:
        self.answers: Counter[int] = Counter()
        self.retried = self.cut = self.health_checks = 0
        self._urls, self._halt = urls, threading.Event()
        self._is_traffic_over = False
        self._booked: deque[int] = deque(maxlen=RIDES_AT_HAND)
        self._threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(clients)]

    def start(self) -> None:
        """Starts the clients."""
        for thread in self._threads:
            thread.start()

    @property
    def requests(self) -> int:
        """Requests that were answered, health checks included."""
        return sum(self.answers.values()) + self.health_checks

    def only_check_health(self) -> None:
        """Changes nothing from now on: the clients go on with cheap requests."""
        self._is_traffic_over = True

    def stop(self) -> None:
        """Stops the clients after their current requests."""
        self._halt.set()
        deadline = monotonic() + 15
        for thread in self._threads:
            if thread.ident is not None:  # if it was started
                thread.join(max(0.0, deadline - monotonic()))

    def _client(self, number: int) -> None:
        dice = random.Random(number)  # noqa: S311  not for secrets
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=url, timeout=30)) for url in self._urls]
            while not self._halt.wait(self._pause_s * dice.random() * 2):
                try:
                    self._once(dice.choice(clients), dice)
                except httpx.TransportError:  # it is started again
                    self.cut += 1

    @property
    def _pause_s(self) -> float:
        return CHEAP_PAUSE_S if self._is_traffic_over else PAUSE_S

    def _once(self, client: httpx.Client, dice: random.Random) -> None:
        if self._is_traffic_over:
            client.get("/health")
            self.health_checks += 1
            return
        answer = self._request(client, dice)
        self.answers[answer.status_code] += 1
        self.retried += int(answer.headers.get("x-attempts", "1")) - 1
        if answer.status_code == httpx.codes.CREATED:
            self._booked.append(answer.json()["id"])

    def _request(self, client: httpx.Client, dice: random.Random) -> httpx.Response:
        what, body = dice.random(), {"distance": round(dice.uniform(5, 1000), 2)}
        headers = {"x-decline": "1"} if dice.random() < 0.1 else {}  # noqa: PLR2004  one card in ten
        booked = list(self._booked)
        if booked and what < 0.3:  # noqa: PLR2004  three requests in ten correct
            return client.patch(f"/rides/{dice.choice(booked)}", json=body, headers=headers)
        if booked and what < 0.4:  # noqa: PLR2004  one in ten cancels; it may be cancelled already
            return client.delete(f"/rides/{dice.choice(booked)}")
        if what > 0.98:  # noqa: PLR2004  one in fifty is wrong
            return client.post("/rides", json={"distance": "far"})
        return client.post("/rides", json=body, headers=headers)
