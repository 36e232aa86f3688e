"""Work stealing: the processes of an application do the pipeline's chores, in small slices between their own work.

    request ──▶ response ──▶ enlist ──▶ one random number: no job, or one ──▶ the recruiter's thread ──▶ counters

The third driver of the pipeline, beside ``inline`` and ``spark``.  Its rules:

* A job never runs in the caller's thread.  What it does, also hanging, exiting and forking, costs the request nothing.
* At most one job for each call of ``enlist``; one job at a time in a process.
* No retries.  A job that gives up or fails is counted, and drawn again some time.
* Importing this package imports neither Redis nor Postgres drivers; jobs import what they need, in their thread.

    recruiter   the jobs, and ``enlist``
    lottery     which job a random number draws
    recruit     the thread
    running     one job: called or awaited, its failure logged
    budget      what a running job may ask: how much time is left
    counting    what happened to each job
    chores      the pipeline's own jobs
    tools       the streamer and the workers that they use, and their connections
    gauges      how far the pipeline is behind; read by ``measuring``
    advice      which rates keep up
"""

from penstock.stealing.advice import Advice, Advisor, Load, advise
from penstock.stealing.budget import time_left_s, when_idle
from penstock.stealing.chores import Chore, Chores
from penstock.stealing.counting import JobCounters, Outcome
from penstock.stealing.gauges import Gauges, Lag
from penstock.stealing.recruiter import Recruiter

__all__ = [
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
    "advise",
    "time_left_s",
    "when_idle",
]
