"""The jobs of a queue that are not done: found by whose they are, shown, and cancelled.

browsing    which there are, and what each waits for
"""

from penstock.operating.jobs.browsing import JobFilter, JobState, QueuedJob, find_jobs, list_jobs, read_job

__all__ = ["JobFilter", "JobState", "QueuedJob", "find_jobs", "list_jobs", "read_job"]
