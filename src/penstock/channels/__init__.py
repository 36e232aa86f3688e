"""Channels: the destinations of records in Redis, for pipelines and for applications without one.

    log         records in order, in Redis streams
    ick         a set of dirty members
    queue       messages of many tenants, under leases
    channel_kinds  the three as objects, for callers that need not know the kind
    batch_outcomes  a publisher's batches and the replies of scripts, alike for the three
    routing     names of keys, shards and streams
    scripts     calls of the Lua scripts; ``driving`` runs operations, for threads and for asyncio
    server      connections, translation of errors; ``redis_urls``; ``commands``: the clients' types
    isolation   unusable shards; ``refusals``: why a server takes no writes
    acl         the users of Redis and their rights

All keys of a shard share a hash tag; no key has a time to live.  ``penstock.structures`` is built
on these.
"""
