"""The log channel: records in order, at offsets that never change.

``append_together`` appends batches and may be repeated, by any publisher; ``append_ahead`` appends
batch after batch without waiting for each reply.  ``read`` returns the records after an offset, a
``Follower`` waits for them, and ``evict`` removes entries that every consumer has passed.

``LogReader`` (``log_reader``, ``log_slices``) reads by offset, without a pipeline; its
``arguments`` are those of writers and groups in ``penstock.structures`` too.
"""
