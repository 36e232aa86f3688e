"""Verbs that carry out what an operator has decided: dead-letters, consumers, reset."""
