"""Who turns the wheel: one Python process, or Spark.  The steps are the same functions of the core."""
