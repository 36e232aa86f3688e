"""``penstock.ick``: the dirty members of an Ick as a DataFrame.

A micro-batch is a fenced reservation of each shard that has members, and Spark's offset is the identity of these
reservations.  Spark stores an offset before the batch runs, and asks for the next one only when the batch is done.
Therefore:

    asking for the next offset      commits the reservation that the previous offset names
    repeating a batch               reads the members that its reservation still holds
    a reservation that was lost     to another query, or with its Redis, returns and commits nothing; its members come again

Nothing depends on Spark's checkpoint directory.  Without it, a query takes over the previous query's reservation, as from any
stale holder.

    options                 the options
    columns                 the columns of a member
    reservation_sequence    the order of reservations, in the driver; heartbeats while a batch runs
    reading                 the readers
    writing                 the writers, which mark members
    source                  the data source
"""

from penstock.spark.sources.ick.source import IckSource

__all__ = ["IckSource"]
