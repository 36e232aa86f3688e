"""Verbs that answer questions: status, tail, doctor."""
