"""Engines: they run the steps of a pipeline.

    inline     threads of one Python process
    spark      tasks of one Spark application
    stealing   the application's own processes, in small slices between their requests

Nothing here decides what is correct: locks, comparisons and offsets belong to the steps.
"""
