"""Spark as the engine: the same steps in long tasks, and data sources for DataFrame work."""
