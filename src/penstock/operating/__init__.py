"""What operators ask of a pipeline: status, doctor, dead letters, consumers, resets."""
