"""The Ick: a set of members that are dirty, in Redis.

Producers mark a member dirty; it is listed once, however often it is marked, at the time of its
first mark.  Consumers take the oldest members, bring their copy up to date, and commit the members
that are done.

``mark`` and ``update_progress`` serve a pipeline, whose records mark members in the order of their
offsets. ``inspect_shards`` and ``oldest`` show what an Ick holds.

    dirty_list     ``DirtyList``: the six operations of Redis::Ick, on its keys
    reservations   ``Reservations``: for consumers that must not forget a member marked meanwhile
    ick_repair     repairs a damaged Ick
"""
