"""Penstock moves records from an application's Postgres transaction through Redis to consumers.

Data flows one way, and the folders show it:

    staging      in the application's transaction: a change and its record, or neither
    streaming    the worker: staged records → journal → Redis
    journal      which record has which offset: written by the sequencer, read by every part
    batches      consecutive records in columns: what the streamer reads, a log stores and a
                 consumer gets
    channels     the destinations in Redis: logs, Icks and queues
    consuming    effects and checkpoint in one Postgres transaction
    reconciling  a consumer's state compared with the canonical tables, at one cut
    verifying    staged records, journal, log and checkpoints compared with one another
    engines      what runs these steps: threads (inline), tasks of Spark, the application's own
                 processes (stealing)

What an application declares, and what the parts pass to each other:

    pipeline      where it declares, and how it is loaded
    declaring     the declarations: channels, rules, consumers, workers
    records       the values that the parts pass to each other
    errors        every error that is raised on purpose
    observer      events of rounds and batches, for metrics, probes and alarms: ``pipeline.observe``
    crash_points  the places between two writes, by name, where tests end a process
    parsing       texts that somebody else may have written: JSON, and numbers

Around them:

    database     Postgres: connections, errors, statements, tables
    schema       what ``penstock init`` puts into a database: tables, roles, triggers
    clients      Redis without a pipeline: the public names
    structures   of these, what an application uses alone: writers, groups, hashes, locks, trackers
    spark        Spark's data sources, and comparison of tables
    operating    what operators ask: status, doctor, resets, dead letters
    console      the web page: the pipeline in a browser
    observing    what the world outside sees of a process: metrics and probes
    cli          the command line; settings: a command's settings; logs, display: its log, and text
                 for a terminal
    embedded     Postgres and Valkey from wheels
    testing      what an application's own tests need
    django       an app of Django's: rules for models, handlers with the ORM, migrations, the admin
    demo         an application that shows it all, with faults
    parallel     loops side by side in one process

An application imports what it uses from ``penstock``, ``penstock.clients``, ``penstock.testing``,
``penstock.django``, ``penstock.spark``: these are the public names; beside them
``penstock.engines.stealing`` for processes that do the work themselves,
``penstock.journal.journal_records`` for readers of what has left Redis, ``penstock.observer`` for
events, and ``penstock.schema`` for migrations.  Nothing else is promised.  ``penstock.errors`` has
every error.

A public name is imported at its first use, with SQLAlchemy and nothing heavier: Spark plans in
processes that use none of them, and each would spend half a second of processor time on it.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batches.record_batch import Records
    from penstock.declaring.kinds import Ick, Queue
    from penstock.declaring.outcomes import Cancel, DeadLetter, Job, Snooze
    from penstock.declaring.unique import KeyLimits, TenantLimits, Unique
    from penstock.errors import PenstockError
    from penstock.pipeline import Pipeline
    from penstock.records import Record
    from penstock.staging.cancelling import CancelledJobs, cancel, cancel_async, retry, retry_async
    from penstock.staging.explicit import (
        Staging,
        mark_dirty,
        mark_dirty_async,
        stage,
        stage_async,
        stage_many,
        stage_many_async,
    )
    from penstock.staging.job_reports import (
        GroupReport,
        JobReport,
        find_group,
        find_group_async,
        find_job,
        find_job_async,
    )
    from penstock.staging.limiting import limit, limit_async
    from penstock.staging.log_calls import Log

__all__ = [
    "Cancel",
    "CancelledJobs",
    "DeadLetter",
    "GroupReport",
    "Ick",
    "Job",
    "JobReport",
    "KeyLimits",
    "Log",
    "PenstockError",
    "Pipeline",
    "Queue",
    "Record",
    "Records",
    "Snooze",
    "Staging",
    "TenantLimits",
    "Unique",
    "cancel",
    "cancel_async",
    "find_group",
    "find_group_async",
    "find_job",
    "find_job_async",
    "limit",
    "limit_async",
    "mark_dirty",
    "mark_dirty_async",
    "retry",
    "retry_async",
    "stage",
    "stage_async",
    "stage_many",
    "stage_many_async",
]

_MODULES = {
    **dict.fromkeys(("Ick", "Queue"), "declaring.kinds"),
    "Log": "staging.log_calls",
    **dict.fromkeys(
        ("CancelledJobs", "cancel", "cancel_async", "retry", "retry_async"), "staging.cancelling"
    ),
    "PenstockError": "errors",
    **dict.fromkeys(("limit", "limit_async"), "staging.limiting"),
    **dict.fromkeys(("Cancel", "DeadLetter", "Job", "Snooze"), "declaring.outcomes"),
    **dict.fromkeys(("KeyLimits", "TenantLimits", "Unique"), "declaring.unique"),
    **dict.fromkeys(
        (
            "GroupReport",
            "JobReport",
            "find_group",
            "find_group_async",
            "find_job",
            "find_job_async",
        ),
        "staging.job_reports",
    ),
    "Pipeline": "pipeline",
    "Record": "records",
    "Records": "batches.record_batch",
}
"""Home of a public name; the others are in ``staging.explicit``."""


def _refuse_another_distribution() -> None:
    """Raises ImportError if PyPI's ``penstock``, another project, has written into this folder."""
    home = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120  pathlib would double the time of this import
    if not os.path.isdir(home):  # noqa: PTH112  an archive, on Spark's executors
        return
    for name in os.listdir(home):  # noqa: PTH208
        if name.startswith("penstock-") and name.endswith(".dist-info"):
            raise ImportError(
                f"{home} holds the distribution 'penstock', another project's, whose files "
                "replace those of 'penstock-outbox'. Uninstall both, then type: pip install "
                "penstock-outbox"
            )


_refuse_another_distribution()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package, at its first use."""
        from importlib import import_module  # noqa: PLC0415  not a name of this package

        if name in __all__:
            home = import_module(f"penstock.{_MODULES.get(name, 'staging.explicit')}")
            return globals().setdefault(name, getattr(home, name))
        try:
            return import_module(f"penstock.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"penstock.{name}":
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
