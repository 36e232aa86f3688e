"""Postgres, for every part of Penstock.

    connections    how workers connect; transactions: their settings; executor: on a session's
    driver_errors  what an error of the server means
    statements     named blocks of SQL, from the ``.sql`` files beside their code; quoting of names
    store          runs them: a connection and the pipeline whose tables it is for
    tables         the table that applications stage into, for SQLAlchemy Core, and the names of all
    registry       what is registered, by ``registered_channels``, and what is paused
    registration   whether a channel fits it

Import the module you need: an application that only stages imports ``tables`` and ``statements``,
and no driver.
"""
