"""Has an operator move checkpoints, open epochs, accept a source's history, or repair an Ick.

Each function returns a plan, and carries it out only with ``apply``.  What was done is written to
the log.
"""
