"""Progress of records: staged, sequenced, published, applied.

Postgres is read in one transaction, so that its numbers are consistent.  Redis is read before it,
so that the log of a running pipeline never appears ahead of its journal.
"""
