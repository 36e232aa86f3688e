"""Channels: the destinations of records in Redis.

Each kind of channel can be used without a pipeline too.  ``log`` keeps records in order in Redis streams; ``ick`` keeps a
set of dirty members.  ``routing`` names the keys, ``scripts`` calls the Lua scripts, ``server`` connects and translates
errors.  All keys of a shard share a hash tag; no key has a time to live.
"""
