"""Consumers of an Ick: ``ick_worker`` reserves members, ``reserved_members`` are due whenever they are reserved."""
