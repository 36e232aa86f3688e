"""Postgres, for every part of Penstock.

    connections   how workers connect, and what an error of the server means
    statements    named blocks of SQL, from the ``statements.sql`` beside the code that runs them; names inside of SQL
    tables        Penstock's tables for SQLAlchemy Core, on the application's own session
    registry      what is registered: ``registered_channels`` is the one answer to what a channel is

Import the module you need: an application that only stages imports ``tables`` and ``statements``, and no driver.
"""
