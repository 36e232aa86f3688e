"""Workers of queues: one effect per job.

    reader: a lease  →  lane: handler(session, job)  →  finish_records, effects, COMMIT  →  settler: the lease

What says that a job is done is that its staged row is gone.  The transaction of the effect deletes it, as its first
statement: a second worker with the same job waits for the first one's end, and finds nothing left to do.

    worker        reads, hands jobs to lanes, and counts
    lanes         threads, or tasks of one event loop
    deliverer     attempts at one job, by the decisions that all consumers share
    transaction   finishes the record, calls the handler, checks the lease, commits
    letters       dead letters, halts and counts, written in Postgres
    settler       tells the queue how leases have ended, in batches
"""

from penstock.consuming.queue.worker import QueueWorker

__all__ = ["QueueWorker"]
