"""Work stealing: the processes of an application do the pipeline's chores, in small slices between their own work.

    request ──▶ response ──▶ enlist ──▶ one random number: no job, or one ──▶ the recruiter's thread ──▶ counters

The third driver of the pipeline, beside ``inline`` and ``spark``.

A job never runs in the caller's thread: if it hangs, raises, forks or calls ``sys.exit``, the request does not notice.
A call of ``enlist`` draws one job at most, and a process does one job at a time.  Nothing is retried: a job that gives up
or fails is counted, and is drawn again some time.

Importing this package imports no driver of Redis or Postgres; jobs import what they need, in the recruiter's thread.

    recruiter   the jobs, and ``enlist``
    lottery     which job a random number draws
    crew        hands a job to the thread in charge, replaces one that hangs
    recruit     one thread
    running     one job: called or awaited, its failure logged
    budget      what a running job may ask: how much time is left
    counting    what happened to each job
    chores      the pipeline's own jobs
    tools       the streamer and the workers that they use, and their connections
    gauges      how far the pipeline is behind; read by ``measuring``
    slices      slices of structures in Redis as jobs
    advice      which rates keep up
    places      where an application enlists: middleware, sessions, caches
"""

from penstock.engines.stealing.advice import Advice, Advisor, Load, advise
from penstock.engines.stealing.budget import time_left_s, when_idle
from penstock.engines.stealing.chores import Chore, Chores
from penstock.engines.stealing.counting import JobCounters, Outcome
from penstock.engines.stealing.gauges import Gauges, Lag
from penstock.engines.stealing.places import ASGIEnlister, WSGIEnlister, enlist_after_commit, enlist_on_hit
from penstock.engines.stealing.recruiter import Recruiter
from penstock.engines.stealing.slices import make_slice

__all__ = [
    "ASGIEnlister",
    "Advice",
    "Advisor",
    "Chore",
    "Chores",
    "Gauges",
    "JobCounters",
    "Lag",
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
