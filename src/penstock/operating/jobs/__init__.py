"""The jobs of a queue that are not done: found by whose they are, shown, cancelled, and tried again.

browsing      which there are, and what each waits for
cancellation  many at once, as an operator does; or due at another time
retrying      many at once, with dead letters
queue_limits  limits of tenants and keys, as an operator sets them
"""

from penstock.operating.jobs.browsing import (
    JobFilter,
    JobState,
    QueuedJob,
    ReportedJob,
    check_queue,
    list_jobs,
    read_job,
)
from penstock.operating.jobs.cancellation import Cancellation, JobCount, cancel_jobs, count_jobs, jobs_command, move_due
from penstock.operating.jobs.retrying import RetriedJobs, retry_jobs

__all__ = [
    "Cancellation",
    "JobCount",
    "JobFilter",
    "JobState",
    "QueuedJob",
    "ReportedJob",
    "RetriedJobs",
    "cancel_jobs",
    "check_queue",
    "count_jobs",
    "jobs_command",
    "list_jobs",
    "move_due",
    "read_job",
    "retry_jobs",
]
