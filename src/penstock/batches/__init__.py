"""Batches of consecutive records, in columns.

As Postgres writes them, a log keeps them, and a consumer reads them.
"""
