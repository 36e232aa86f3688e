"""The jobs of a queue that are not done: found by whose they are, shown, cancelled, and tried again.

browsing      which there are, and what each waits for
changes       many at once, as an operator does: cancelled, retried with dead letters, or due at another time
queue_limits  limits of tenants and keys, as an operator sets them
"""
