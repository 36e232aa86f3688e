"""Finds jobs of a queue that are not done, shows and cancels them, and tries them again.

browsing      which there are, and what each waits for
changes       many at once: cancelled, retried with dead letters, or due at another time
queue_limits  limits of tenants and keys, as an operator sets them
"""
