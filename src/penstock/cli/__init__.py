"""The command line: ``penstock VERB``.

    running    init, run, stream, consume        what does the work
    looking    status, tail, doctor              what people ask; each with ``--json``
    mending    dead-letters, consumers, reset    what an operator decides; a plan first, ``--yes`` carries it out

Data goes to stdout, talk to stderr; progress is shown on a terminal only.  Exit codes:

    0  ok                        3  Postgres or Redis cannot be reached
    1  failed                    4  differences or a loss found
    2  used or set up wrongly    5  refused for safety

``verbs`` is what all verbs share: options made from the settings, errors as one line with a page, the log.
"""
