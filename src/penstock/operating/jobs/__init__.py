"""The jobs of a queue that are not done: found by whose they are, shown, and cancelled.

browsing      which there are, and what each waits for
cancellation  many at once, as an operator does
"""

from penstock.operating.jobs.browsing import JobFilter, JobState, QueuedJob, list_jobs, read_job
from penstock.operating.jobs.cancellation import Cancellation, JobCount, cancel_jobs, count_jobs, jobs_command, move_due

__all__ = [
    "Cancellation",
    "JobCount",
    "JobFilter",
    "JobState",
    "QueuedJob",
    "cancel_jobs",
    "count_jobs",
    "jobs_command",
    "list_jobs",
    "move_due",
    "read_job",
]
