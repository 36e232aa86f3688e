"""Rocket Rides: the pipeline under faults, and an audit at the end.

An HTTP API changes rides in SERIALIZABLE transactions, and clients call it over real HTTP.  Two
consumers of a log maintain a total and a copy; a consumer of an Ick maintains an index.  Batches
are sent twice, consumers crash between effect and checkpoint, and a process is killed.  At the end
the audit compares every consumer's total with the canonical one, to the cent, and every record with
its effects.

    rides          the application, and its faults       drift          rows changed behind
                   Penstock's back, and their repair
    api            its HTTP side, and its recruits       audit          what was committed against
                   what took effect
    supervision    the processes                         demonstration  the clients, and everything
                   together
"""
