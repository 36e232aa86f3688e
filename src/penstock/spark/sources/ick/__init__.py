"""``penstock.ick``: what is dirty, as a DataFrame.

A micro-batch is a fenced reservation of each shard that has members, and Spark's offset is its identity.  Spark writes an
offset down before the batch runs, and asks what comes after it only when the batch is done; so

    what comes after an offset    ends the reservation that the offset names: its members are done
    a batch that is run again     reads what its reservation still holds
    a reservation that has gone   to another query, or with its Redis, gives and ends nothing: its members come again

Nothing leans on Spark's checkpoint directory: without it the last query's reservation is taken over, as from any consumer
that gives no sign of life.

    options     what can be chosen
    columns     the columns of a member
    turns       which reservation comes after which, in the driver
    pulse       signs of life while a batch runs
    reading     the readers
    writing     members of a DataFrame are marked
    source      the data source
"""

from penstock.spark.sources.ick.source import IckSource

__all__ = ["IckSource"]
