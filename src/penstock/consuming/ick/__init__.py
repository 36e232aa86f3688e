"""Consumers of an Ick: ``ick_worker`` reserves members, ``ick_source`` says what of a delivery is due."""
