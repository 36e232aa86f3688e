"""A web process that recruits: uvicorn with Starlette, and the chores of the benchmark's pipeline."""

import socket
from multiprocessing.connection import Connection as Pipe
from threading import Thread

from benchmarks.application import BULK, four

RATE = 0.02
"""Of the chore with the highest rate."""


def serve(pipe: Pipe, path: str, database_url: str, redis_url: str) -> None:
    """Serves ``/plain`` and, with recruiting after the response, ``/recruiting``, on a Unix socket.

    Answers each message with how many chores have ended, and how many of them did work.
    """
    import uvicorn  # noqa: PLC0415  in the child alone
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.requests import Request  # noqa: PLC0415
    from starlette.responses import JSONResponse  # noqa: PLC0415
    from starlette.routing import Mount, Route  # noqa: PLC0415

    from penstock.engines.stealing import ASGIEnlister, Chores, Recruiter  # noqa: PLC0415

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse([{"id": n, "path": request.url.path} for n in range(20)])

    recruiter = Recruiter()
    chores = Chores(four, database_url, redis_url)
    weights = [chore.weight for chore in chores.all([BULK])]
    chores.install(recruiter, rate=RATE * sum(weights) / max(weights), consumers=[BULK])
    app = Starlette(routes=[Route("/", answer)])
    recruiting = ASGIEnlister(app, recruiter)
    both = Starlette(routes=[Mount("/plain", app), Mount("/recruiting", recruiting)])
    server = uvicorn.Server(uvicorn.Config(both, log_level="critical", lifespan="off"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        running = Thread(target=server.run, args=([listener],))
        running.start()
        pipe.send("ready")
        try:
            while True:
                pipe.recv()
                counters = list(recruiter.counters().values())
                finished = sum(c.finished for c in counters)
                pipe.send((finished + sum(c.aborted + c.failed for c in counters), finished))
        except (EOFError, OSError):
            server.should_exit = True
            running.join()
