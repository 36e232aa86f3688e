"""Time of a request to an ASGI application that does nothing, in µs: alone, and with recruiting, in turn."""

import asyncio
import json
from statistics import median
from time import perf_counter
from typing import Any

from penstock.engines.stealing import ASGIEnlister, Recruiter

AT_ONCE, ROUNDS, RATE = 500, 100, 0.02


async def answer(_scope: Any, _receive: Any, send: Any) -> None:
    """The smallest application."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _send(_: object) -> None:
    pass


async def _time(app: Any) -> float:
    began = perf_counter()
    for _ in range(AT_ONCE):
        await app({"type": "http"}, None, _send)
    return (perf_counter() - began) / AT_ONCE * 1e6


async def _measure() -> tuple[float, float]:
    recruiter = Recruiter()
    recruiter.install(lambda: None, "job", RATE)
    recruiting = ASGIEnlister(answer, recruiter)
    took = [(await _time(answer), await _time(recruiting)) for _ in range(ROUNDS)]
    return median(alone for alone, _ in took), median(with_ for _, with_ in took)


print(json.dumps(asyncio.run(_measure())))
