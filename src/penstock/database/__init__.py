"""Postgres, for every part of Penstock.

    connections   how workers connect, and what an error of the server means
    statements    named blocks of SQL, read from the ``statements.sql`` beside the step that uses them
    tables        Penstock's tables for SQLAlchemy Core, on the application's own session
    registry      channels and consumers as the database knows them
    initialise    creates and upgrades the tables
    resources     where ``lua/`` and ``migrations/`` are

Import the module you need: an application that only stages imports ``tables`` and ``statements``, and no driver.
"""
