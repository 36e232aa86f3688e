"""Questions and decisions of operators: status, doctor, dead letters, consumers, resets."""
