"""Clients that book, correct and cancel rides over HTTP, as fast as they are told to."""

import random
import threading
from collections import Counter
from time import monotonic

import httpx

CLIENTS = 4
PAUSE_S = 0.01
"""Pause of a client between two requests, in seconds."""


class Simulator:
    """Several clients, a thread each.

    Attributes:
        answers: Number of answers by status.
    """

    def __init__(self, url: str, clients: int = CLIENTS) -> None:
        self.answers: Counter[int] = Counter()
        self._url, self._halt = url, threading.Event()
        self._threads = [
            threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(clients)
        ]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends, after the requests that are under way."""
        self._halt.set()
        deadline = monotonic() + 15
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _client(self, number: int) -> None:
        dice = random.Random(number)  # noqa: S311  not for secrets
        booked: list[int] = []
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._halt.wait(PAUSE_S * dice.random() * 2):
                answer = self._request(client, dice, booked)
                self.answers[answer.status_code] += 1
                if answer.status_code == httpx.codes.CREATED:
                    booked.append(answer.json()["id"])

    @staticmethod
    def _request(client: httpx.Client, dice: random.Random, booked: list[int]) -> httpx.Response:
        what, body = dice.random(), {"distance": round(dice.uniform(5, 1000), 2)}
        headers = {"x-decline": "1"} if dice.random() < 0.1 else {}  # noqa: PLR2004  one card in ten
        if booked and what < 0.2:  # noqa: PLR2004  one request in five corrects
            return client.patch(f"/rides/{dice.choice(booked)}", json=body, headers=headers)
        if booked and what < 0.3:  # noqa: PLR2004  one in ten cancels
            ride = booked.pop(dice.randrange(len(booked)))
            return client.delete(f"/rides/{ride}")
        if what > 0.98:  # noqa: PLR2004  one in fifty is wrong
            return client.post("/rides", json={"distance": "far"})
        return client.post("/rides", json=body, headers=headers)
