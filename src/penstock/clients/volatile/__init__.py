"""The volatile hash: fields with times to live of their own.

A field's deadline is kept in one of two places: by the server, if it has ``HSETEX``, or as the field's score in a sorted
set.  Every script asks both, so that each client reads what any other has written.  A field whose deadline is in neither
is not returned: it was lost, and the field could be over.
"""

from penstock.clients.volatile.aio import AsyncVolatileHash
from penstock.clients.volatile.hash import VolatileHash

__all__ = ["AsyncVolatileHash", "VolatileHash"]
