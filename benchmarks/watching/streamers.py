"""Streamers that share the shards of a backlog, a process each."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection as Pipe

import structlog

from benchmarks.application import get_pipeline
from benchmarks.watching.processes import start_process
from penstock.streaming import Streamer
from penstock.streaming.share import parse_share


@contextmanager
def run_streamers(
    shares: Sequence[str], shards: int, database_url: str, redis_url: str
) -> Iterator[tuple[Callable[[], None], list[int]]]:
    """Starts a streamer for each share, such as ``1/2``; yields what makes all of them begin, and their process ids.

    Raises:
        NotMeasured: One of them could not connect.
    """
    with ExitStack() as stack:
        started = [
            stack.enter_context(start_process(_work, share, shards, database_url, redis_url)) for share in shares
        ]

        def begin() -> None:
            for each in started:
                each.pipe.send("begin")

        yield begin, [each.number for each in started]


def _work(pipe: Pipe, share: str, shards: int, database_url: str, redis_url: str) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    ended = threading.Event()
    streamer = Streamer(get_pipeline(shards), database_url, redis_url, share=parse_share(share))
    streamer.open()
    gc.collect()
    gc.freeze()
    pipe.send("ready")

    def listen() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            ended.set()

    try:
        pipe.recv()
    except EOFError:
        return
    threading.Thread(target=listen, daemon=True).start()
    streamer.run(ended.is_set)
