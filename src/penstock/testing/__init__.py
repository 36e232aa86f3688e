"""Helpers for an application's own tests.

    make_record       a Record for the unit test of a handler, without a server; make_job: a Job for
                      that of a worker
    staged            what the application has staged, committed or not
    assert_staged     one staged record that matches; assert_not_staged: none that matches
    drained           runs streamer and consumers until nothing is left
    survives          the same rows whatever happens to the consumers: crashes, redelivery, an
                      emptied Redis, a second process
    eventually        waits for another process or thread

The pytest plugin (``pytest_penstock``, installed with Penstock) adds fixtures: a Postgres and a
Valkey for the run, and for each test a database with Penstock's tables.  See
docs/how-to/test-your-application.md.
"""

from penstock.testing.assertions import assert_not_staged, assert_staged, eventually, staged
from penstock.testing.draining import drained
from penstock.testing.samples import make_job, make_record
from penstock.testing.surviving import survives

__all__ = [
    "assert_not_staged",
    "assert_staged",
    "drained",
    "eventually",
    "make_job",
    "make_record",
    "staged",
    "survives",
]
