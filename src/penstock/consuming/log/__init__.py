"""Delivers the records of a log to its consumers.

log_worker         waits for records, and delivers them
log_plans          the records that are due of a delivery, and the writes that go with their effects
journal_follower   records from Redis, and from the journal once Redis has evicted them
"""
