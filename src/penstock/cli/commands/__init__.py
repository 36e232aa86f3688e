"""Verbs that do the work: init, run, stream, consume."""
