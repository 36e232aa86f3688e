"""An Ick without a pipeline: a set of dirty members.

dirty_list     ``DirtyList``: the six operations of Redis::Ick, on its keys
reservations   ``Reservations``: for consumers that must not forget a member that becomes dirty while they work on it
ick_repair     repairs a damaged Ick
"""
