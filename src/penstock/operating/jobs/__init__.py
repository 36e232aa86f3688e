"""The jobs of a queue that are not done: found by whose they are, shown, cancelled, and tried again.

browsing      which there are, and what each waits for
cancellation  many at once, as an operator does; or due at another time
retrying      many at once, with dead letters
queue_limits  limits of tenants and keys, as an operator sets them
"""
