"""The command line: ``penstock COMMAND``.

    Run      demo, init, run, stream, consume
    Inspect  status, tail, doctor, verify               each with ``--json``
    Repair   reconcile, dead-letters, consumers, channels, reset  a plan first; ``--apply`` carries
             it out

Data goes to stdout, messages to stderr; progress is shown on a terminal only.  Exit codes:

    0  ok                              3  Postgres or Redis cannot be reached
    1  failed                          4  differences or a loss found
    2  wrong usage or configuration    5  refused for safety

``command`` is what all commands share: options made from the settings, error handling, the
application's pipeline. ``app`` lists the commands and imports only the one that is run.
"""
