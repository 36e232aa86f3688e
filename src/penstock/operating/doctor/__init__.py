"""Is everything safe?  A list of checks, each of them a small function that looks and changes nothing.

A finding says what was found and, if that is not well, what to type.  ``error``: records can be lost, or do not move.
``warning``: worth knowing, healed by itself, or about to become an error.
"""

from penstock.operating.doctor.examination import examine, worst
from penstock.operating.doctor.finding import Examined, Finding, Grade

__all__ = ["Examined", "Finding", "Grade", "examine", "worst"]
