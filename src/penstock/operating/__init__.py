"""Questions and decisions of operators.

A question changes nothing; a decision is a plan until ``apply`` carries it out.

    status      how far records are staged, sequenced, published and applied
    doctor      checks of servers, tables and keys, each with its remedy
    tracing     the story of a record, and the cause that holds it back
    channels    registered channels: list, reshard, retire, adopt
    consumers   registered consumers: list, rename, retire
    letters     dead letters: list, retry, drop
    replay      copies of records in another channel
    reset       checkpoints, epochs, a source's history, a damaged Ick

All take a connection in autocommit mode and the pipeline's scope.  A decision locks what it needs,
returns the plan with ``applied``, and writes what was done to the log ``penstock.operator``.
"""
