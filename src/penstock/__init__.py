"""Penstock moves records from an application's Postgres transaction into a log in Redis and on to consumers.

Data flows one way, and the folders show it:

    staging      in the application's transaction: a change and its record, or neither
    streaming    the worker: staged records → journal → Redis
    channels     where records go: the log in Redis, lists of what is dirty
    consuming    effects and checkpoint in one Postgres transaction
    reconciling  what consumers hold against the tables, at one cut
    verifying    staged records, journal, log and checkpoints against one another
    engines      who turns the wheel: one Python process, or Spark
    operating    what people ask it: status, doctor, dead letters
    cli          the command line

Beside them: ``declarations`` and ``pipeline`` (what an application declares), ``records`` (what the parts hand each
other), ``errors``.  Importing ``penstock`` imports SQLAlchemy and nothing heavier.
"""

from penstock.declarations import Ick, Log
from penstock.errors import PenstockError, TryAgain
from penstock.pipeline import Pipeline
from penstock.records import Record
from penstock.staging.explicit import Staging, mark_dirty, stage, stage_async, stage_many

__all__ = [
    "Ick",
    "Log",
    "PenstockError",
    "Pipeline",
    "Record",
    "Staging",
    "TryAgain",
    "mark_dirty",
    "stage",
    "stage_async",
    "stage_many",
]
