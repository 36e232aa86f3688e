"""Consumers of an Ick: ``ick_worker`` reserves members, ``ick_members`` are due whenever they are reserved."""
