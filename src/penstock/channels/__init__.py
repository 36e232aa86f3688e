"""Channels: the destinations of records in Redis, as a pipeline writes and reads them, and an application by itself.

    log         records in order, in Redis streams
    ick         a set of dirty members
    queue       messages of many tenants, under leases
    channel_kinds  the three as objects: what each does with its keys, for all who need not know which it is
    batch_outcomes  a publisher's batches, and how a script replies to them, alike for the three
    routing     names of the keys, and the shards and streams that hold what
    scripts     calls of the Lua scripts; ``driving`` runs operations, for threads and for asyncio
    server      connections and the translation of errors; ``redis_urls``, and ``commands``, the types of the clients
    isolation   shards that cannot be used, so that the others go on; ``refusals``, why a server takes no writes
    acl         the users of Redis and their rights

All keys of a shard share a hash tag; no key has a time to live.  ``penstock.structures`` is built on these.
"""
