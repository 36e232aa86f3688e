"""Where records go.

A channel is a library of its own and a destination of the pipeline.  ``log`` keeps records in order in Redis streams.
Names of keys come from ``routing``, scripts from ``scripts``, the connection and the meaning of its errors from
``server``.  All keys of a shard share a hash tag; no key carries a time to live.
"""
