"""Runs a module that ends with its parent: ``python -m penstock.demo.leashed MODULE ARGUMENT…``.

Its standard input is a pipe that the parent holds.  Whatever ends the parent, even SIGKILL, closes it; then the whole
process group goes, Spark's JVM included.
"""

import os
import runpy
import signal
import sys
import threading


def _watch() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Watches, and runs what it was given."""
    threading.Thread(target=_watch, name="leash", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
