"""Structures in Redis for applications without a pipeline: no other part of Penstock imports them.

    log_writer     ``LogWriter``: a log that has no pipeline
    log_group      ``LogGroup``: readers that share a log, each record to one of them.
                   ``group_options`` are theirs, ``turns`` is how they take turns, and
                   ``group_results`` what they are given
    fair_queue     ``FairQueue``: a queue that has no pipeline
    volatile_hash  ``VolatileHash``: a hash whose fields have times to live of their own
    pinned_keys, locks, pins    ``PinnedKeys``: values and locks that live until their time is over,
                                not evicted before
    queue_tracker  ``QueueTracker``: the ids that have queued work, kept true against a query of the
                   application's database

``calls`` serves the last three.  Each of these keeps its keys in one slot, gives none of them a
time to live, and changes them in one script call.  What is over is not returned, and is deleted in
slices: ``VolatileHash.gc``, ``PinnedKeys.reap`` and ``QueueTracker.sync`` are callables without
arguments, for recruits, cron, or a thread.
"""
