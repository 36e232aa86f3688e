"""Work stealing: an application's processes do the pipeline's chores in slices between their work.

    request ──▶ response ──▶ enlist ──▶ one random number: no job, or one ──▶ the recruiter's thread
    ──▶ counters

The third engine, beside ``inline`` and ``spark``.

A job never runs in the caller's thread: if it hangs, raises, forks or calls ``sys.exit``, the
request does not notice.  A call of ``enlist`` draws one job at most, and a process does one job at
a time.  Nothing is retried: a job that gives up or fails is counted, and is drawn again some time.

Importing this package imports no driver of Redis or Postgres; jobs import what they need, in the
recruiter's thread.

    recruiter   the jobs, and ``enlist``
    sampler     the job that a random number draws, and the numbers of each
    job_threads one thread in charge of jobs, and the supervisor that replaces one that hangs; what
    a job may ask
    chores      the pipeline's own jobs; tools: the streamer and the workers that they use, and
                their connections
    advice      how far the pipeline is behind, and the rates that keep up
    enlisting   where an application enlists: middleware, sessions, caches; slices of structures in
                Redis as jobs
"""

from penstock.engines.stealing.advice import Advice, Advisor, ConsumerLag, Gauges, Load, advise
from penstock.engines.stealing.chores import Chore, Chores
from penstock.engines.stealing.enlisting import (
    ASGIEnlister,
    WSGIEnlister,
    enlist_after_commit,
    enlist_on_hit,
    make_slice,
)
from penstock.engines.stealing.job_threads import time_left_s, when_idle
from penstock.engines.stealing.recruiter import Recruiter
from penstock.engines.stealing.sampler import JobCounters, Outcome

__all__ = [
    "ASGIEnlister",
    "Advice",
    "Advisor",
    "Chore",
    "Chores",
    "ConsumerLag",
    "Gauges",
    "JobCounters",
    "Load",
    "Outcome",
    "Recruiter",
    "WSGIEnlister",
    "advise",
    "enlist_after_commit",
    "enlist_on_hit",
    "make_slice",
    "time_left_s",
    "when_idle",
]
