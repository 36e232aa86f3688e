"""Consumers of a log.

log_worker      reads the shards, and hands records on
log_source      the records of a log, backfilled from the journal
offset_source   what of a delivery is due, and what is written with it
following       waits for records in Redis; evicted: what Redis no longer has
"""
