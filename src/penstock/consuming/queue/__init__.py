"""Runs workers of queues: one effect per job.

    reader: a lease  →  inbox  →  slot

    slot: handler(session, job)  →  finish_records, effects, COMMIT  →  outbox  →  acknowledger
    slot: handler(job)  →  finisher: finish_records of many, COMMIT  →  outbox  →  acknowledger

The staged row is the truth about a job: once it is gone, the job is done.  The transaction of the
effect deletes it, as its first statement: a second worker with the same job waits for the first
one's end, and finds nothing left to do.

    queue_worker       reads, hands jobs to slots, and counts
    inbox              where a job waits for its slot
    worker_slots       threads, or tasks of one event loop; those that hang
    prefetch           how many jobs are read ahead, and how long an end waits for others
    job_deliverer      attempts at one job, by the decisions that all consumers share
    job_transaction    finishes the record, calls the handler, checks the lease, commits
    finisher           ends the jobs of handlers that take no session, many in one transaction
    job_dead_letters   dead letters, halts and counts, written in Postgres
    outbox             ended jobs, errors of all threads, and what wakes the one that reads
    acknowledger       reports ended leases to the queue, in batches
    job_notes          notes of failed attempts and progress, and counts, until they are written
"""
