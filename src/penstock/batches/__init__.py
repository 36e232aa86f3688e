"""Batches of consecutive records, in columns: as Postgres writes them, a log keeps them, and a consumer reads them."""
