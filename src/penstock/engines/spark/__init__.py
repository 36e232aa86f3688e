"""The Spark engine: the streamer and the consumers as tasks of one Spark application."""
