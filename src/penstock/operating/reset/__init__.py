"""Operator decisions: move a checkpoint, open a new epoch after history has diverged, accept a source's, repair an Ick.

Each function returns a plan, and carries it out only with ``apply``.  What was done is written to the log.
"""
