"""Declarations of an application, and the values that the parts pass to each other.

    kinds          the kinds of channel: ``LogChannel``, ``Ick``, ``Queue``; their traits
    declarations   rules, consumers and workers, as they were declared
    handlers       which functions a consumer may be declared with
    outcomes       what a worker of jobs gets, and how it may answer
    schedules      when jobs are staged by themselves
    cron_times     what time a cron expression is, also when the clocks change
    unique         what a message of a queue may have: a unique name, times, limits of its tenant

Import the module you need: an application that only stages imports nothing heavier than SQLAlchemy.
"""
