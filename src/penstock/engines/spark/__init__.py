"""The Spark engine: the streamer and the consumers as tasks of one Spark application.

A micro-batch is an epoch of a minute: each of its tasks runs the loop of the inline engine, so that
no record passes through Spark, which places the tasks, restarts those that die, and reports their
counts.

    application       the run: session, query, set-based consumers, stop
    assignment        which slot runs the streamer, and which shards of which consumer
    epoch_query       the query whose micro-batches are the epochs, restarted when it ends; when the
                      work is divided anew
    epochs            an epoch's tasks; control_channel: their plan, their end and their counts
    dataframes        set-based consumers, in threads of the driver; frame_rows: their records
    spark_errors      the meaning of Spark's errors
"""

import penstock.spark  # noqa: F401  refuses a release that is too old
