"""A queue of many tenants without a pipeline: writing, reading under leases, and what operators ask.

fair_queue     ``FairQueue``
queue_reader   ``QueueReader`` and its ``Lease``: rounds and waits
rounds         what a reader remembers between two rounds
leases         what a reader holds, and its heartbeat
adoption       moves a plain stream into a queue
"""
