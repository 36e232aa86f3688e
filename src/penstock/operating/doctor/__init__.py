"""Checks that servers, tables and records are safe.  Each check is a small function that reads and changes nothing.

A result says what was found and, unless all is well, what to type.  ``error``: records can be lost, or do not move.
``warning``: worth knowing, recovers by itself, or is about to become an error.
"""

from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose, worst
from penstock.operating.doctor.pipeline_checks import judge_status

__all__ = ["CheckResult", "diagnose", "judge_status", "worst"]
