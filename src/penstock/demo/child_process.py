"""Runs a module that ends with its parent: ``python -m penstock.demo.child_process MODULE ARGUMENT…``.

Its standard input is a pipe held open by the parent.  When the parent ends, even by SIGKILL, the pipe closes, and the
whole process group is killed, including Spark's JVM.
"""

import os
import runpy
import signal
import sys
import threading


def _watch_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Watches the parent and runs the given module."""
    threading.Thread(target=_watch_parent, name="parent watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
