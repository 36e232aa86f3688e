"""Staging, in the application's transaction.

A change and its record are committed together, or neither is.

    session.flush() ──▶ the flush's own writes ──▶ one INSERT into staged_records ──▶ … ──▶
    session.commit()
                        (row locks are taken)      (ids are drawn, after the locks)

This package works inside the application's transaction, on its session or connection.  It opens no
connection, commits nothing, starts no thread, and needs only the INSERT privilege, and for jobs
that of reading their ids.  As a result:

* A rollback, also to a savepoint, removes the records.  Nothing is kept in memory until commit.
* Records of one key are ordered as their transactions took the lock on the key's row.
* A record that cannot be staged fails the flush.

Three ways to stage, and a guard:

    hooks      changes of mapped objects, by rule            ``Pipeline.stages``,
               ``Pipeline.attach``
    explicit   records that the application writes itself    ``stage``, ``stage_many``,
               ``mark_dirty``, each with ``_async``
    triggers   writers outside the ORM                       ``penstock init``,
               ``trigger_migration``
    guard      refuses a bulk or Core statement that would bypass the rules, before it writes
               anything

``log_calls`` and ``job_calls`` stage what a log or a worker was declared with: ``Log.stage``,
``DeclaredWorker.stage``.  ``job_reports`` reads what has become of jobs.  ``payload`` defines which
values a record may hold and how they are encoded.  ``trace_headers`` adds the current trace.
``nudge`` wakes the streamer after a commit.
"""
