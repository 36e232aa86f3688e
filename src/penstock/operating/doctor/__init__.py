"""Checks that servers, tables and records are safe; each check is a function that changes nothing.

A result says what was found and, unless all is well, what to type.  ``error``: records can be lost,
or do not move.  ``warning``: worth knowing, recovers by itself, or is about to become an error.
"""
